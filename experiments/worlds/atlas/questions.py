"""Questions of one to three hops. A hop is a passage that the answer needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.worlds.atlas import passages
from experiments.worlds.atlas.facts import Atlas, City, Country, folded, without_accents
from experiments.worlds.corpus import Passage
from rollout.trajectory import Task

Place = City | Country
WRAPPERS = ("What is {x}?", "Name {x}.", "Tell me {x}.")


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation that a question can follow from a place to another place or to a text.

    Args:
        keyword: words of the passage that find it, with the place's name.
        all_words: more words of the passage, for a second attempt.
        phrases: wordings in a question; ``{x}`` is the place.
        part: the passage that tells it, the end of the passage's id.
        follow: returns the place, or the text of the answer; None if it is unknown.
        fact: returns the sentence that tells it.
    """

    keyword: str
    all_words: str
    phrases: tuple[str, ...]
    part: str
    follow: Callable[[Any, Atlas], Place | str | None]
    fact: Callable[[Any, Atlas], str]


def _neighbour(country: Country, atlas: Atlas) -> Country | None:
    return atlas.countries[country.neighbours[0]] if country.neighbours else None


COUNTRY: Relation = Relation(
    "country",
    "city lies in the country",
    ("the country in which {x} lies", "the country of the city {x}"),
    "place",
    lambda city, atlas: atlas.countries[city.country],
    passages.country_fact,
)
NEIGHBOUR = Relation(
    "most populous neighbour",
    "covers square kilometres borders most populous neighbour",
    ("the most populous neighbour of {x}", "the most populous country that borders {x}"),
    "geography",
    _neighbour,
    passages.neighbour_fact,
)
CAPITAL = Relation(
    "capital",
    "country the capital of",
    ("the capital of {x}", "the capital city of {x}"),
    "government",
    lambda country, atlas: atlas.capitals.get(country.code, country.capital),
    lambda country, atlas: passages.capital_fact(country),
)
TIME_ZONE = Relation(
    "time zone",
    "inhabitants clocks follow the time zone",
    ("the time zone of {x}", "the time zone that is used in {x}"),
    "figures",
    lambda city, atlas: city.time_zone,
    lambda city, atlas: passages.time_zone_fact(city),
)
CURRENCY = Relation(
    "currency",
    "the currency of",
    ("the currency of {x}", "the money that people use in {x}"),
    "money",
    lambda country, atlas: country.currency,
    lambda country, atlas: passages.currency_fact(country),
)
DOMAIN = Relation(
    "web addresses",
    "web addresses end in",
    ("the internet domain of {x}", "the ending of web addresses in {x}"),
    "communication",
    lambda country, atlas: country.domain,
    lambda country, atlas: passages.domain_fact(country),
)
CALLING_CODE = Relation(
    "calling code",
    "the calling code of",
    ("the calling code of {x}", "the number that one dials before calling {x}"),
    "communication",
    lambda country, atlas: country.calling_code,
    lambda country, atlas: passages.calling_code_fact(country),
)
OF_CITY = (COUNTRY, TIME_ZONE)
OF_COUNTRY = (CAPITAL, CURRENCY, DOMAIN, CALLING_CODE, NEIGHBOUR)


@dataclass(frozen=True, slots=True)
class Chain:
    """The meaning of a multi-hop question: start at ``subject`` (a place), known by its alias or name, and follow
    ``relations``.
    """

    subject: Place
    alias: bool
    relations: tuple[Relation, ...]
    places: tuple[Place, ...]  # those that the relations start at; the first is the subject
    answer: str

    @property
    def hops(self) -> int:
        return len(self.relations) + self.alias

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """The identity of a chain: the name of its first place and the keywords of its relations. Alias and wording do
        not count.
        """
        return self.places[0].name, tuple(relation.keyword for relation in self.relations)

    def countries(self) -> set[str]:
        """Return the codes of the countries that a multi-hop question passes through."""
        return {place.country if isinstance(place, City) else place.code for place in self.places}


def draw_chain(atlas: Atlas, subject: Place, hops: int, rng: random.Random) -> Chain | None:
    """Draw a random multi-hop question that starts at ``subject``. Return None if this attempt ends early or repeats a
    place or relation.
    """
    alias = isinstance(subject, City) and bool(subject.alias) and hops > 1 and rng.random() < 0.5
    here: Place | str | None = subject
    relations, places = [], []
    for _ in range(hops - alias):
        if not isinstance(here, City | Country) or here in places:
            return None
        relation = rng.choice(OF_CITY if isinstance(here, City) else OF_COUNTRY)
        if relation in relations:
            return None
        relations.append(relation)
        places.append(here)
        here = relation.follow(here, atlas)
    if here is None or here in places:
        return None
    answer = here if isinstance(here, str) else here.name
    if folded(answer) in {folded(place.name) for place in places}:  # the capital of Djibouti
        return None
    return Chain(subject, alias, tuple(relations), tuple(places), answer)


def phrase(chain: Chain, rng: random.Random) -> str:
    """Return the text of a question for the chain (a place and the relations to follow)."""
    subject = chain.subject
    text = subject.alias if isinstance(subject, City) and chain.alias else subject.name
    for relation in chain.relations:
        text = rng.choice(relation.phrases).format(x=text)
    return rng.choice(WRAPPERS).format(x=text)


def as_task(atlas: Atlas, chain: Chain, question: str, task_id: str, corpus: Mapping[str, Passage]) -> Task:
    """Return a multi-hop question as a task. For each hop its metadata holds the place's name, the words of a careful
    query, and the fact that it finds.
    """
    needed = []
    if isinstance(chain.subject, City) and chain.alias:
        words = ("another name", "is another name of the city")
        needed.append((chain.subject.alias, words, passages.alias_fact(chain.subject), "names", chain.subject))
    for place, relation in zip(chain.places, chain.relations, strict=True):
        words = (relation.keyword, relation.all_words)
        needed.append((place.name, words, relation.fact(place, atlas), relation.part, place))
    gold = [corpus[f"{place.id if isinstance(place, City) else place.code}-{part}"] for *_, part, place in needed]
    return Task(
        id=task_id,
        question=question,
        golden_answers=tuple(dict.fromkeys((chain.answer, without_accents(chain.answer)))),
        data_source=f"atlas_{chain.hops}hop",
        gold_passages=tuple((passage.title, passage.text) for passage in gold),
        metadata={
            "hops": chain.hops,
            "names": [name for name, *_ in needed],
            "keywords": [list(words) for _, words, *_ in needed],
            "facts": [fact for _, _, fact, *_ in needed],
        },
    )


def draw_chains(
    atlas: Atlas, subjects: list[Place], shares: tuple[float, ...], count: int, rng: random.Random, avoid: set[str],
    taken: set[object],
) -> Iterator[Chain]:  # fmt: skip
    """Yield ``count`` new random multi-hop questions, and add their keys to ``taken``.

    Args:
        subjects: where chains start; cities and countries are drawn equally often.
        shares: weights of one, two and three hops.
        avoid: codes of countries that no chain passes through.

    Raises:
        ValueError: too few different chains.
    """
    kinds = [[s for s in subjects if isinstance(s, City)], [s for s in subjects if isinstance(s, Country)]]
    made = tries = 0
    hops = 1
    while made < count:
        if tries == 0:
            hops = rng.choices((1, 2, 3), weights=shares)[0]
        tries += 1
        if tries > 10_000:
            raise ValueError(
                f"{count} questions were wanted, and after {made} no other of {hops} hops was found; ask for fewer"
            )
        chain = draw_chain(atlas, rng.choice(rng.choice(kinds)), hops, rng)
        if chain is None or chain.key in taken or chain.countries() & avoid:
            continue
        taken.add(chain.key)
        made, tries = made + 1, 0
        yield chain
