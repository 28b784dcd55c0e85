"""Household games as data: the objects of one room, their places and the goal, with conversion to and from JSON.

Names are ALFWorld's: a type in lower case and a number, "countertop 2". Types are those of `alfworld_tables.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, with_config

from common.validation import validated
from experiments.worlds.household.alfworld_tables import CAN_HOLD, LAMP, OBJECTS, PROPERTIES

LOOK, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"
# The treatment that a task requires before the object is placed: the command's verb, and the receptacle that does it.
TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge"),
}
TREATABLE = {"clean": "cleanable", "heat": "heatable", "cool": "coolable"}  # verb -> property
TASK_TYPES = ("pick_and_place_simple", LOOK, *TREATMENTS, TWO)

# Wording of the task (alfworld.gen.goal_library), without characters that ALFWorld's grammar interprets.
SENTENCE = re.compile(r"[A-Za-z0-9 ,.:'!?()-]{1,200}")


def name_of(kind: str, number: int) -> str:
    return f"{kind.lower()} {number}"


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Receptacle:
    """A piece of furniture or appliance that holds objects. It is closed at first if it can be opened."""

    type: str  # "CounterTop"
    number: int  # from 1, without gaps within its type
    openable: bool

    @property
    def name(self) -> str:
        return name_of(self.type, self.number)


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Item:
    """An object in a household game, such as an apple."""

    type: str  # "Apple"
    number: int
    place: str  # name of the receptacle that holds it at first: "countertop 2"
    properties: tuple[str, ...]  # of tables.PROPERTIES, sorted

    @property
    def name(self) -> str:
        return name_of(self.type, self.number)


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a household game, in types of objects and receptacles.

    Args:
        task_type: one of TASK_TYPES.
        target: type of the object to find.
        destination: type of the receptacle to put it in; None for LOOK.
        toggle: type of the lamp, for LOOK alone.
    """

    task_type: str
    target: str
    destination: str | None
    toggle: str | None

    @property
    def treatment(self) -> tuple[str, str] | None:
        """The action that the goal requires as verb and receptacle type, such as ("heat", "Microwave"), or None."""
        return TREATMENTS.get(self.task_type)


@dataclass(frozen=True, slots=True)
class Game:
    """A household game: one room with its objects, and one task.

    Raises:
        ValueError: the game is invalid: numbers with gaps, an unknown receptacle, type or property, or a goal that
            names missing things. The message says what and where.
    """

    goal: Goal
    sentence: str  # the task in words, without the full stop: "put a hot apple in fridge"
    receptacles: tuple[Receptacle, ...]
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        if not self.receptacles:
            raise ValueError("a game needs at least one receptacle")
        if not SENTENCE.fullmatch(self.sentence):
            raise ValueError(f"sentence is {self.sentence!r}; expected up to 200 letters, digits and plain punctuation")
        _check_types("receptacle", (r.type for r in self.receptacles), set(CAN_HOLD))
        _check_types("object", (i.type for i in self.items), OBJECTS | {LAMP})
        _check_numbers(self.receptacles)
        _check_numbers(self.items)
        places = {r.name for r in self.receptacles}
        for item in self.items:
            if item.place not in places:
                raise ValueError(f"{item.name} is in {item.place!r}, which is no receptacle of this game")
            if unknown := sorted(set(item.properties) - set(PROPERTIES)):
                raise ValueError(f"{item.name} has the properties {unknown}; expected some of {sorted(PROPERTIES)}")
        self._check_goal()

    def _check_goal(self) -> None:
        goal = self.goal
        if goal.task_type not in TASK_TYPES:
            raise ValueError(f"task_type is {goal.task_type!r}; expected one of {', '.join(TASK_TYPES)}")
        needed, there = (2 if goal.task_type == TWO else 1), sum(i.type == goal.target for i in self.items)
        if there < needed:
            raise ValueError(f"the task {goal.task_type} needs {needed} objects of type {goal.target!r}, found {there}")
        if goal.task_type == LOOK:
            if goal.destination is not None or goal.toggle not in {i.type for i in self.items}:
                raise ValueError(
                    f"the task {LOOK} has the destination {goal.destination!r} and the toggle {goal.toggle!r}; "
                    "expected none, and the type of a lamp that is there"
                )
        elif goal.toggle is not None or goal.destination not in {r.type for r in self.receptacles}:
            raise ValueError(
                f"the task {goal.task_type} has the destination {goal.destination!r} and the toggle {goal.toggle!r}; "
                "expected the type of a receptacle that is there, and none"
            )
        elif goal.target not in CAN_HOLD[goal.destination]:
            raise ValueError(f"no {goal.target} can be put into a {goal.destination}")

    def to_json(self) -> dict[str, Any]:
        """Return the game as plain JSON data; ``from_json`` makes an equal game of it."""
        receptacles = [asdict(receptacle) for receptacle in self.receptacles]
        items = [asdict(item) | {"properties": list(item.properties)} for item in self.items]
        return asdict(self.goal) | {"sentence": self.sentence, "receptacles": receptacles, "objects": items}

    @classmethod
    def from_json(cls, data: Any) -> Game:
        """Return a game read from JSON data. The ValueError names the found and the expected value."""
        found = validated(_GAME, data, "game")
        goal = Goal(found.task_type, found.target, found.destination, found.toggle)
        return cls(goal, found.sentence, found.receptacles, found.objects)


class _GameJson(BaseModel):
    """The JSON form of a household game."""

    model_config = ConfigDict(extra="forbid")

    task_type: str
    target: str
    destination: str | None
    toggle: str | None
    sentence: str
    receptacles: tuple[Receptacle, ...]
    objects: tuple[Item, ...]


_GAME = TypeAdapter(_GameJson)


def order_of(thing: Receptacle | Item) -> tuple[str, int]:
    """Return the sort key of an object or receptacle in ALFWorld's lists, which are sorted by identifier
    ("cup_bar_.."), numbered from the end.
    """
    kind = thing.type.lower().removesuffix("basin")  # a sink basin's identifier is sink_bar_.._bar_sinkbasin
    return f"{kind}_", -thing.number


def _check_types(what: str, types: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted(set(types) - set(known)):
        raise ValueError(f"unknown {what} types: {', '.join(unknown)}; expected some of {', '.join(sorted(known))}")


def _check_numbers(things: Sequence[Receptacle | Item]) -> None:
    found = Counter((thing.type, thing.number) for thing in things)
    counts = Counter(thing.type for thing in things)
    expected = Counter((kind, number) for kind, count in counts.items() for number in range(1, count + 1))
    if found != expected:
        kind = next(iter((found - expected) | (expected - found)))[0]
        numbers = sorted(thing.number for thing in things if thing.type == kind)
        raise ValueError(f"the {counts[kind]} things of type {kind} have the numbers {numbers}; expected 1, 2, ...")
