"""The passages of the corpus: some facts of one place each, worded always in the same way."""

from __future__ import annotations

from experiments.worlds.atlas.facts import Atlas, City, Country
from experiments.worlds.corpus import Passage


def alias_fact(city: City) -> str:
    return f"{city.alias} is another name of the city {city.name}."


def country_fact(city: City, atlas: Atlas) -> str:
    return f"The city {city.name} lies in the country {atlas.countries[city.country].name}."


def time_zone_fact(city: City) -> str:
    return f"Clocks in {city.name} follow the time zone {city.time_zone}."


def capital_fact(country: Country) -> str:
    return f"The capital of {country.name} is {country.capital}."


def currency_fact(country: Country) -> str:
    return f"The currency of {country.name} is the {country.currency} ({country.currency_code})."


def domain_fact(country: Country) -> str:
    return f"Web addresses in {country.name} end in {country.domain}."


def calling_code_fact(country: Country) -> str:
    return f"The calling code of {country.name} is {country.calling_code}."


def neighbour_fact(country: Country, atlas: Atlas) -> str:
    return f"The most populous neighbour of {country.name} is {atlas.countries[country.neighbours[0]].name}."


def country_passages(country: Country, atlas: Atlas) -> list[Passage]:
    """Return the passages about a country: government, money, communication and geography."""
    near = [atlas.countries[code].name for code in country.neighbours]
    borders = f" It borders {_listed(near)}. {neighbour_fact(country, atlas)}" if near else ""
    texts = {
        "government": f"{country.name} is a country in {country.continent}. {capital_fact(country)}",
        "money": currency_fact(country),
        "communication": f"{domain_fact(country)} {calling_code_fact(country)}",
        "geography": f"{country.name} covers {country.area:,} square kilometres and has {country.inhabitants:,} "
        f"inhabitants.{borders}",
    }
    return [Passage(f"{country.code}-{part}", country.name, text) for part, text in texts.items()]


def city_passages(city: City, atlas: Atlas) -> list[Passage]:
    """Return the passages about a city: its place, its figures and, if it has an alias, its names."""
    passages = [
        Passage(f"{city.id}-place", city.name, country_fact(city, atlas)),
        Passage(
            f"{city.id}-figures", city.name, f"{city.name} has {city.inhabitants:,} inhabitants. {time_zone_fact(city)}"
        ),
    ]
    if city.alias:
        passages.append(Passage(f"{city.id}-names", city.alias, alias_fact(city)))
    return passages


def all_passages(atlas: Atlas) -> list[Passage]:
    """Return all passages of the corpus: about countries, cities, then cities with similar names."""
    found = [passage for country in atlas.countries.values() for passage in country_passages(country, atlas)]
    for city in (*atlas.cities, *atlas.namesakes):
        found += city_passages(city, atlas)
    return found


def _listed(names: list[str]) -> str:
    """Return names as a list in words.

    >>> _listed(["Chad", "Niger", "Libya"])
    'Chad, Niger and Libya'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
