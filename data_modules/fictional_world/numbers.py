"""The invented world with numbers: quantities of its entities, beside their relations."""

from __future__ import annotations

import random
from dataclasses import dataclass

from data_modules.fictional_world.schema import Kind
from data_modules.fictional_world.world import Entity, Passage, World, build_world


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number that every entity of a kind has. As with relations, no phrase contains the keyword."""

    keyword: str
    kind: Kind
    phrases: tuple[str, ...]  # noun phrases with {x} for the entity


def _quantities() -> tuple[Quantity, ...]:
    table = (
        (Kind.PERSON, "salary", "what {x} earns", "the monthly pay of {x}"),
        (Kind.PERSON, "library", "the number of books {x} owns", "how many books {x} has"),
        (Kind.TOWN, "population", "the number of people in {x}", "how many people live in {x}"),
        (Kind.TOWN, "altitude", "how high {x} lies", "the height of {x}"),
        (Kind.COMPANY, "workforce", "the number of people {x} employs", "how many people work at {x}"),
        (Kind.COMPANY, "revenue", "what {x} takes in", "the income of {x}"),
        (Kind.BOOK, "pages", "the length of {x}", "how long {x} is"),
        (Kind.BOOK, "price", "what {x} costs", "the cost of {x}"),
        (Kind.FESTIVAL, "attendance", "the number of guests of {x}", "how many people come to {x}"),
        (Kind.FESTIVAL, "fee", "what entry to {x} costs", "the charge for entering {x}"),
    )
    return tuple(Quantity(keyword, kind, tuple(phrases)) for kind, keyword, *phrases in table)


QUANTITIES: tuple[Quantity, ...] = _quantities()
QUANTITIES_OF: dict[Kind, tuple[Quantity, ...]] = {
    kind: tuple(q for q in QUANTITIES if q.kind is kind) for kind in Kind
}


@dataclass(frozen=True, slots=True)
class NumberWorld:
    """A world, its numbers, and one passage for each fact of either sort."""

    world: World
    numbers: dict[tuple[int, str], int]  # (entity id, keyword) -> 11 .. 99
    passages: tuple[Passage, ...]  # ids 0 .. N-1 in order
    passage_of: dict[tuple[int, str], int]  # fact -> index into passages

    @property
    def entities(self) -> tuple[Entity, ...]:
        return self.world.entities

    @property
    def facts(self) -> dict[tuple[int, str], int]:
        """The relations: (subject id, keyword) -> object id."""
        return self.world.facts

    def told(self, entity: Entity, keyword: str) -> str:
        """What the passage about this fact says: a number, or the mention of an entity."""
        if (entity.id, keyword) in self.numbers:
            return str(self.numbers[entity.id, keyword])
        return self.world.entities[self.world.facts[entity.id, keyword]].mention


def build_number_world(entities: int, seed: int) -> NumberWorld:
    """Draw a world with numbers. The same arguments give the same world on every machine.

    Args:
        entities: how many; each has one passage per relation of its kind (five) and one per quantity (two).
        seed: of the world and its numbers.
    """
    world = build_world(entities, seed)
    rng = random.Random(f"numbers:{seed}")
    numbers = {
        (entity.id, quantity.keyword): rng.randint(11, 99)
        for entity in world.entities
        for quantity in QUANTITIES_OF[entity.kind]
    }
    order = [*world.facts, *numbers]
    rng.shuffle(order)
    bare = NumberWorld(world, numbers, (), {})
    passages = []
    for position, (entity_id, keyword) in enumerate(order):
        entity = world.entities[entity_id]
        text = f"The {keyword} of {entity.mention} is {bare.told(entity, keyword)}."
        passages.append(Passage(str(position), entity.title, text))
    return NumberWorld(world, numbers, tuple(passages), {fact: i for i, fact in enumerate(order)})
