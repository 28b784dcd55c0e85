"""Entities, facts and passages of the fictional world, drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from experiments.worlds.corpus import Passage
from experiments.worlds.fictional_world.schema import QUANTITIES_OF, RELATIONS, WORDS, Kind

# Shares of the kinds among the entities. Most are persons, as in encyclopaedias.
SHARES = {Kind.PERSON: 0.40, Kind.TOWN: 0.15, Kind.COMPANY: 0.15, Kind.BOOK: 0.20, Kind.FESTIVAL: 0.10}


@dataclass(frozen=True, slots=True)
class Entity:
    id: int
    kind: Kind
    name: str  # "Mira Voss"; not unique: another person, or a book and a town, may share it
    qualifier: str = ""  # persons only: their profession, which distinguishes namesakes

    @property
    def mention(self) -> str:
        """The entity's name as passages write it: "potter Mira Voss", "Grey Harbor"."""
        return f"{self.qualifier} {self.name}" if self.qualifier else self.name

    @property
    def title(self) -> str:
        return f"{self.name} ({self.qualifier})" if self.qualifier else self.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """The accepted answers for this entity, the plain name first."""
        if self.kind is Kind.PERSON:
            return (self.name, self.mention)
        return (self.name, f"the {self.kind} {self.name}", f"the {self.kind} of {self.name}")


@dataclass(frozen=True, slots=True)
class World:
    entities: tuple[Entity, ...]
    facts: dict[tuple[int, str], int]  # (subject id, keyword) -> object id
    passages: tuple[Passage, ...]  # one per fact and number, ids 0..N-1 in order
    passage_of: dict[tuple[int, str], int]  # fact or number -> index into passages
    numbers: dict[tuple[int, str], int] = field(default_factory=dict)  # (entity id, keyword) -> 11 .. 99

    def told(self, entity: Entity, keyword: str) -> str:
        """Return the content of a fact's passage as text: a number, or the name of an entity as passages write it."""
        if (entity.id, keyword) in self.numbers:
            return str(self.numbers[entity.id, keyword])
        return self.entities[self.facts[entity.id, keyword]].mention


def _name(kind: Kind, rng: random.Random) -> tuple[str, str]:
    if kind is Kind.PERSON:
        name = f"{rng.choice(WORDS['first_names'])} {rng.choice(WORDS['last_names'])}"
        return name, rng.choice(WORDS["professions"])
    first = WORDS["last_names" if kind is Kind.COMPANY else "adjectives"]
    return f"{rng.choice(first)} {rng.choice(WORDS[f'{kind}_nouns'])}", ""


def _entities(count: int, rng: random.Random) -> tuple[Entity, ...]:
    """Draw ``count`` random entities that differ in kind, name or qualifier."""
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
                f"fictional world: {count} entities ask for {wanted} different names of kind {kind}, and the word "
                "pools hold too few; ask for fewer entities"
            )
    return tuple(entities)


def build_world(entities: int, seed: int) -> World:
    """Draw a random world: entities, facts and passages. The same arguments give the same world on every machine.

    Args:
        entities: number of entities; each has one passage per relation of its kind (five).
        seed: seed of the world.
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
    return _with_passages(World(everyone, facts, (), {}), order)


def build_number_world(entities: int, seed: int) -> World:
    """Draw a random world as ``build_world`` does, and add two numbers and their passages for each entity."""
    world = build_world(entities, seed)
    rng = random.Random(f"numbers:{seed}")
    numbers = {
        (entity.id, quantity.keyword): rng.randint(11, 99)
        for entity in world.entities
        for quantity in QUANTITIES_OF[entity.kind]
    }
    order = [*world.facts, *numbers]
    rng.shuffle(order)
    return _with_passages(replace(world, numbers=numbers), order)


def _with_passages(world: World, order: Sequence[tuple[int, str]]) -> World:
    passages = []
    for position, (entity_id, keyword) in enumerate(order):
        entity = world.entities[entity_id]
        text = f"The {keyword} of {entity.mention} is {world.told(entity, keyword)}."
        passages.append(Passage(str(position), entity.title, text))
    return replace(world, passages=tuple(passages), passage_of={fact: i for i, fact in enumerate(order)})
