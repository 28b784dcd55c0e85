"""Entities, facts and passages, all drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from data_modules.fictional_world.schema import (
    ADJECTIVES,
    BOOK_NOUNS,
    COMPANY_NOUNS,
    FESTIVAL_NOUNS,
    FIRST_NAMES,
    LAST_NAMES,
    PROFESSIONS,
    RELATIONS,
    TOWN_NOUNS,
    Kind,
)

# Shares of the kinds among the entities. Persons are most, as in encyclopaedias.
SHARES = {Kind.PERSON: 0.40, Kind.TOWN: 0.15, Kind.COMPANY: 0.15, Kind.BOOK: 0.20, Kind.FESTIVAL: 0.10}


@dataclass(frozen=True, slots=True)
class Entity:
    id: int
    kind: Kind
    name: str  # "Mira Voss"; not unique: another person, or a book and a town, may share it
    qualifier: str = ""  # persons only: their profession, which tells namesakes apart

    @property
    def mention(self) -> str:
        """How text refers to it: "potter Mira Voss", "Grey Harbor"."""
        return f"{self.qualifier} {self.name}" if self.qualifier else self.name

    @property
    def title(self) -> str:
        return f"{self.name} ({self.qualifier})" if self.qualifier else self.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """Accepted answers, the plain name first."""
        if self.kind is Kind.PERSON:
            return (self.name, self.mention)
        return (self.name, f"the {self.kind} {self.name}", f"the {self.kind} of {self.name}")


@dataclass(frozen=True, slots=True)
class Passage:
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Search-R1's corpus format: quoted title, line break, text."""
        return f'"{self.title}"\n{self.text}'


@dataclass(frozen=True, slots=True)
class World:
    entities: tuple[Entity, ...]
    facts: dict[tuple[int, str], int]  # (subject id, keyword) -> object id
    passages: tuple[Passage, ...]  # one per fact, ids 0..N-1 in order
    passage_of: dict[tuple[int, str], int]  # fact -> index into passages


def _name(kind: Kind, rng: random.Random) -> tuple[str, str]:
    if kind is Kind.PERSON:
        return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}", rng.choice(PROFESSIONS)
    if kind is Kind.COMPANY:
        return f"{rng.choice(LAST_NAMES)} {rng.choice(COMPANY_NOUNS)}", ""
    nouns = {Kind.TOWN: TOWN_NOUNS, Kind.BOOK: BOOK_NOUNS, Kind.FESTIVAL: FESTIVAL_NOUNS}[kind]
    return f"{rng.choice(ADJECTIVES)} {rng.choice(nouns)}", ""


def _entities(count: int, rng: random.Random) -> tuple[Entity, ...]:
    """``count`` entities, unique by (kind, name, qualifier)."""
    seen: set[tuple[Kind, str, str]] = set()
    entities: list[Entity] = []
    for kind, share in SHARES.items():
        wanted = round(count * share)
        made = 0
        for _ in range(100 * wanted + 1000):
            if made == wanted:
                break
            name, qualifier = _name(kind, rng)
            if (kind, name, qualifier) in seen:
                continue
            seen.add((kind, name, qualifier))
            entities.append(Entity(len(entities), kind, name, qualifier))
            made += 1
        else:
            raise ValueError(
                f"fictional world: {count} entities ask for {wanted} different names of kind {kind}, and the word pools "
                "hold too few; ask for fewer entities"
            )
    return tuple(entities)


def build_world(entities: int, seed: int) -> World:
    """Draw a world. The same arguments give the same world on every machine.

    Args:
        entities: how many entities; each has one passage per relation of its kind (five).
        seed: of the world.
    """
    rng = random.Random(f"world:{seed}")
    everyone = _entities(entities, rng)
    by_kind = {kind: [e for e in everyone if e.kind is kind] for kind in Kind}
    facts: dict[tuple[int, str], int] = {}
    order: list[tuple[int, str]] = []
    for relation in RELATIONS:
        for subject in by_kind[relation.subject]:
            choice = rng.choice(by_kind[relation.object])
            while choice.id == subject.id:
                choice = rng.choice(by_kind[relation.object])
            facts[subject.id, relation.keyword] = choice.id
            order.append((subject.id, relation.keyword))
    rng.shuffle(order)
    passages, passage_of = [], {}
    for position, (subject_id, keyword) in enumerate(order):
        subject, other = everyone[subject_id], everyone[facts[subject_id, keyword]]
        text = f"The {keyword} of {subject.mention} is {other.mention}."
        passages.append(Passage(str(position), subject.title, text))
        passage_of[subject_id, keyword] = position
    return World(everyone, facts, tuple(passages), passage_of)
