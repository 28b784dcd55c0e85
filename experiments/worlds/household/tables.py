"""Tables of ALFWorld's household: where objects may lie, what can be done with them, what rooms hold. The words are
in ``tables.json``.

The first two are facts of ``alfworld.gen.constants`` (0.4.2: VAL_RECEPTACLE_OBJECTS, VAL_ACTION_OBJECTS,
OPENABLE_CLASS_LIST, MOVABLE_RECEPTACLES), without slices and without objects that hold others, which its text games do
not use; a test compares them with the package. The rooms are this project's, after ALFWorld's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Room:
    """``full`` and ``small``: receptacle type -> least and greatest number of them. ``objects``: types found there."""

    full: dict[str, tuple[int, int]]
    small: dict[str, tuple[int, int]]
    objects: tuple[str, ...]


_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

# Receptacle type -> types of the objects that it can hold.
CAN_HOLD: dict[str, frozenset[str]] = {kind: frozenset(held) for kind, held in _TABLES["can_hold"].items()}
OBJECTS = frozenset().union(*CAN_HOLD.values())  # types that can be carried
LAMP = "DeskLamp"  # is never carried; the one thing that is used
LAMP_PLACES = ("Desk", "Dresser", "Shelf", "SideTable")
OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})
KNIVES = frozenset({"ButterKnife", "Knife"})

# Property -> object types that have it. Nothing is ever put into a "container".
PROPERTIES: dict[str, frozenset[str]] = {
    **{name: frozenset(kinds) for name, kinds in _TABLES["properties"].items()},
    "pickupable": OBJECTS,
    "toggleable": frozenset({LAMP}),
}
ROOMS = {name: Room(**room) for name, room in _TABLES["rooms"].items()}
ROOMS_FOR: dict[str, list[str]] = _TABLES["rooms_for"]  # of a task type, where it cannot be in every room
SENTENCES: dict[str, list[str]] = _TABLES[
    "sentences"
]  # wordings of a task type (alfworld.gen.goal_library, "templates")
