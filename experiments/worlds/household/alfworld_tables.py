"""Tables of ALFWorld's household: places of objects, possible treatments, rooms. Words: ``alfworld_tables.json``.

The first two are facts of ``alfworld.gen.constants`` (0.4.2: VAL_RECEPTACLE_OBJECTS, VAL_ACTION_OBJECTS,
OPENABLE_CLASS_LIST, MOVABLE_RECEPTACLES). Slices and objects that hold others are left out, because the text games do
not use them. A test compares them with the package. The rooms are this project's, modelled on ALFWorld's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Room:
    """A kind of room, such as a kitchen. ``full`` and ``small`` map a receptacle type to its least and greatest number;
    ``objects`` are the types of objects in it.
    """

    full: dict[str, tuple[int, int]]
    small: dict[str, tuple[int, int]]
    objects: tuple[str, ...]


_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

# Receptacle type -> types of the objects that it can hold.
CAN_HOLD: dict[str, frozenset[str]] = {kind: frozenset(held) for kind, held in _TABLES["can_hold"].items()}
OBJECTS = frozenset().union(*CAN_HOLD.values())  # types that can be carried
LAMP = "DeskLamp"  # cannot be carried; the only thing that can be used
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
ROOMS_FOR: dict[str, list[str]] = _TABLES["rooms_for"]  # for task types that some rooms do not allow
SENTENCES: dict[str, list[str]] = _TABLES[
    "sentences"
]  # wordings of a task type (alfworld.gen.goal_library, "templates")
