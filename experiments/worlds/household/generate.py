"""A seeded generator of solvable household games, without a download."""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

from experiments.worlds.household.alfworld_tables import (
    CAN_HOLD,
    LAMP,
    LAMP_PLACES,
    OPENABLE,
    PROPERTIES,
    ROOMS,
    ROOMS_FOR,
    SENTENCES,
)
from experiments.worlds.household.games import (
    LOOK,
    TASK_TYPES,
    TREATABLE,
    TREATMENTS,
    TWO,
    Game,
    Goal,
    Item,
    Receptacle,
)

Size = Literal["full", "small"]
SIZES: tuple[Size, ...] = ("full", "small")
EXTRAS = {"full": (16, 30), "small": (3, 5)}  # further objects, besides those of the task


def generate_game(task_type: str, seed: int, *, size: Size = "full") -> Game:
    """Draw a random, solvable household game. The same arguments give the same game.

    Args:
        task_type: one of ``games.TASK_TYPES``.
        size: "full" is a room as in ALFWorld (7 to 34 receptacles, 17 to 33 objects); "small" is one for tiny models (4
            to 7 receptacles, 4 to 8 objects).

    Raises:
        ValueError: unknown task type or size.
    """
    if task_type not in TASK_TYPES or size not in SIZES:
        raise ValueError(
            f"task type {task_type!r}, size {size!r}; expected one of {', '.join(TASK_TYPES)}, and one of {SIZES}"
        )
    draw = random.Random(f"household {task_type} {size} {seed}")
    room = ROOMS[draw.choice(ROOMS_FOR.get(task_type, tuple(ROOMS)))]
    counts = {kind: draw.randint(*span) for kind, span in (room.full if size == "full" else room.small).items()}
    receptacles = tuple(
        Receptacle(kind, number, kind in OPENABLE) for kind, n in counts.items() for number in range(1, n + 1)
    )
    kinds = sorted({receptacle.type for receptacle in receptacles})
    goal = _draw_goal(draw, task_type, kinds, room.objects)
    counted: Counter[str] = Counter()
    items = [
        _item(draw, kind, receptacles, counted, goal)
        for kind in _draw_objects(draw, goal, kinds, room.objects, draw.randint(*EXTRAS[size]))
    ]
    words = {"obj": goal.target, "recep": goal.destination or "", "toggle": goal.toggle or ""}
    sentence = draw.choice(SENTENCES[task_type]).format(**{name: word.lower() for name, word in words.items()})
    return Game(goal, sentence, receptacles, tuple(items))


def _draw_goal(draw: random.Random, task_type: str, kinds: list[str], objects: tuple[str, ...]) -> Goal:
    """Draw the goal of a household game. The target allows the task's treatment, and the destination is not its only
    possible receptacle.
    """
    if task_type == LOOK:
        found = [kind for kind in objects if any(kind in CAN_HOLD[receptacle] for receptacle in kinds)]
        return Goal(task_type, draw.choice(found), None, LAMP)
    verb, appliance = TREATMENTS.get(task_type, (None, None))
    choices: dict[str, list[str]] = {}
    for kind in objects:
        fits = [receptacle for receptacle in kinds if kind in CAN_HOLD[receptacle]]
        if len(fits) > 1 and (verb is None or kind in PROPERTIES[TREATABLE[verb]]):
            choices[kind] = [receptacle for receptacle in fits if receptacle != appliance]
    target = draw.choice([kind for kind, fits in choices.items() if fits])
    return Goal(task_type, target, draw.choice(choices[target]), None)


def _draw_objects(
    draw: random.Random, goal: Goal, kinds: list[str], objects: tuple[str, ...], extras: int
) -> list[str]:
    """Draw the types of all objects in a household game, those of the task first."""
    wanted = [goal.target] * (2 if goal.task_type == TWO else 1)
    lamps = [LAMP] if goal.toggle or (draw.random() < 0.5 and set(kinds) & set(LAMP_PLACES)) else []
    found = [kind for kind in objects if any(kind in CAN_HOLD[receptacle] for receptacle in kinds)]
    return wanted + lamps + draw.choices(found, k=extras)


def _item(
    draw: random.Random, kind: str, receptacles: tuple[Receptacle, ...], counted: Counter[str], goal: Goal
) -> Item:
    """Return a new object of type ``kind`` at a random place. An object of the target's type never starts at the
    destination.
    """
    fits = [r for r in receptacles if (r.type in LAMP_PLACES if kind == LAMP else kind in CAN_HOLD[r.type])]
    if kind == goal.target:
        fits = [receptacle for receptacle in fits if receptacle.type != goal.destination]
    counted[kind] += 1
    properties = tuple(word for word, having in sorted(PROPERTIES.items()) if kind in having)
    receptacle = draw.choice(fits)
    return Item(kind, counted[kind], receptacle.name, properties)
