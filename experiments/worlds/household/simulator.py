"""A simulator of ALFWorld's text games in plain Python: the sentences of alfworld 0.4.2, thousands of steps a second.

Preconditions and effects follow the package's ``alfred.pddl`` (every receptacle has its own location; the agent starts
at none), and sentences its ``alfred.twl2``, with their oddities. The microwave heats while closed and heats what the
hand holds, a lamp stays on, a mug is "normal" however hot, an object is examined only in the hand, and an object in a
closed fridge can be sliced. Tests compare both, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.worlds.household.alfworld_tables import CAN_HOLD, KNIVES
from experiments.worlds.household.games import LOOK, TREATABLE, TREATMENTS, TWO, Game, Item, Receptacle, order_of

NOTHING = "Nothing happens."
HELP = Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
_ADJECTIVES = {"clean": "clean", "heat": "hot", "cool": "cool"}
_UNDOES = {"heat": "cool", "cool": "heat"}
Execute = Callable[[], str]


@dataclass(frozen=True, slots=True)
class Observation:
    """The observation after a command in a household game. All three fields are as ALFWorld returns them."""

    text: str
    admissible: tuple[str, ...]  # sorted as the engine sorts them
    won: bool


class Simulator:
    """Simulates one household game of ALFWorld in plain Python. ``reset`` restarts it any number of times.

    As in the engine, reaching the goal does not end the game: ``won`` says whether the goal holds now.
    """

    def __init__(self, game: Game) -> None:
        self.game = game
        self._receptacles = {r.name: r for r in sorted(game.receptacles, key=order_of)}
        self._items = {item.name: item for item in sorted(game.items, key=order_of)}
        self._go_to = {f"go to {name}": partial(self._go, name) for name in self._receptacles}
        self.reset()

    def reset(self) -> Observation:
        self._at: Receptacle | None = None
        self._held: Item | None = None
        # for all objects but the one in the hand
        self._location_of = {item.name: item.place for item in self._items.values()}
        self._opened: set[str] = set()
        self._state: set[tuple[str, str]] = set()  # treatment of each object: ("heat", "apple 1")
        room = _listed([f"a {name}" for name in self._receptacles])
        return self._observation(
            "-= Welcome to TextWorld, ALFRED! =-\n\n"
            f"You are in the middle of a room. Looking quickly around you, you see {room}.\n\n"
            f"Your task is to: {self.game.sentence}."
        )

    def step(self, command: str) -> Observation:
        """Execute a text command and return the observation. A command that is not admissible has no effect;
        surrounding space is ignored.
        """
        execute = self._commands.get(command.strip())
        return self._observation(NOTHING if execute is None else execute())

    def _observation(self, text: str) -> Observation:
        self._commands = self._possible()
        return Observation(text, tuple(sorted(self._commands)), self._won())

    # Admissible commands -> the method that executes the command and returns its sentence

    def _possible(self) -> dict[str, Execute]:
        commands: dict[str, Execute] = {"look": self._look, "inventory": self._inventory, "help": lambda: HELP}
        commands |= self._go_to
        if self._held is not None:
            commands[f"examine {self._held.name}"] = partial(self._examine, self._held.name)
        if self._at is not None:
            here = self._at.name
            del commands[f"go to {here}"]
            commands[f"examine {here}"] = partial(self._survey, here)
            if self._at.openable:
                if here in self._opened:
                    commands[f"close {here}"] = partial(self._close, here)
                else:
                    commands[f"open {here}"] = partial(self._open, here)
            self._add_things_here(commands, here)
            if self._held is not None:
                self._add_uses_of_held(commands, self._held, self._at)
        return commands

    def _add_things_here(self, commands: dict[str, Execute], here: str) -> None:
        for item in self._items_at(here):
            if self._held is None and self._reachable(here) and "pickupable" in item.properties:
                commands[f"take {item.name} from {here}"] = partial(self._take, item.name, here)
            if "toggleable" in item.properties:
                commands[f"use {item.name}"] = partial(self._use, item.name)
            if "sliceable" in item.properties and self._held is not None and self._held.type in KNIVES:
                commands[f"slice {item.name} with {self._held.name}"] = partial(self._slice, item.name, self._held.name)

    def _add_uses_of_held(self, commands: dict[str, Execute], held: Item, at: Receptacle) -> None:
        if self._reachable(at.name) and held.type in CAN_HOLD[at.type]:
            commands[f"move {held.name} to {at.name}"] = partial(self._move, held.name, at.name)
        for verb, appliance in TREATMENTS.values():
            if at.type == appliance and TREATABLE[verb] in held.properties:
                commands[f"{verb} {held.name} with {at.name}"] = partial(self._treat, verb, held.name, at.name)

    def _reachable(self, receptacle: str) -> bool:
        return not self._receptacles[receptacle].openable or receptacle in self._opened

    def _items_at(self, receptacle: str) -> list[Item]:
        return [item for name, item in self._items.items() if self._location_of.get(name) == receptacle]

    # Effects: new state and sentence

    def _look(self) -> str:
        if self._at is None:  # the engine asks for receptacles at the agent's location, which has none
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        return f"You are facing the {self._at.name}. Next to it, you see nothing."

    def _inventory(self) -> str:
        return f"You are carrying: a {self._held.name}." if self._held else "You are not carrying anything."

    def _go(self, name: str) -> str:
        self._at = self._receptacles[name]
        return f"You arrive at {name}. {self._survey(name)}"

    def _open(self, name: str) -> str:
        self._opened.add(name)
        return f"You open the {name}. {self._survey(name)}"

    def _close(self, name: str) -> str:
        self._opened.remove(name)
        return f"You close the {name}."

    def _survey(self, name: str) -> str:
        if not self._reachable(name):
            return f"The {name} is closed."
        seen = _listed([f"a {item.name}" for item in self._items_at(name)])
        if self._receptacles[name].openable:
            return f"The {name} is open. In it, you see {seen}."
        return f"On the {name}, you see {seen}."

    def _take(self, name: str, receptacle: str) -> str:
        self._held = self._items[name]
        del self._location_of[name]
        return f"You pick up the {name} from the {receptacle}."

    def _move(self, name: str, receptacle: str) -> str:
        self._held = None
        self._location_of[name] = receptacle
        return f"You move the {name} to the {receptacle}."

    def _treat(self, verb: str, name: str, receptacle: str) -> str:
        self._state.add((verb, name))
        self._state.discard((_UNDOES.get(verb, ""), name))
        return f"You {verb} the {name} using the {receptacle}."

    def _use(self, name: str) -> str:
        self._state.add(("use", name))
        return f"You turn on the {name}."

    def _slice(self, name: str, knife: str) -> str:
        self._state.add(("slice", name))
        return f"You sliced the {name} with the {knife}."

    def _examine(self, name: str) -> str:
        if "container" in self._items[name].properties:
            return f"This is a normal {name}. In it, you see nothing."
        done = {verb for verb, item in self._state if item == name}
        words = [_ADJECTIVES[verb] for verb in ("heat", "cool", "clean") if verb in done]
        if words == ["cool"] and "slice" not in done:
            words = ["cold"]
        if words:
            return f"This is a {' and '.join(words)} {'sliced ' if 'slice' in done else ''}{name}."
        if "use" in done:
            return f"This {name} is on."
        if "slice" in done:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    # The test of the goal (alfworld.gen.goal_library)

    def _won(self) -> bool:
        goal = self.game.goal
        if goal.task_type == LOOK:
            lit = any(
                verb == "use" and self._items[name].type == goal.toggle and self._is_at(self._location_of.get(name))
                for verb, name in self._state
            )
            return lit and self._held is not None and self._held.type == goal.target
        there: dict[str, int] = {}
        for name, receptacle in self._location_of.items():
            if self._items[name].type == goal.target and self._receptacles[receptacle].type == goal.destination:
                if goal.treatment is None or (goal.treatment[0], name) in self._state:
                    there[receptacle] = there.get(receptacle, 0) + 1
        return max(there.values(), default=0) >= (2 if goal.task_type == TWO else 1)

    def _is_at(self, receptacle: str | None) -> bool:
        return self._at is not None and self._at.name == receptacle


def _listed(names: Sequence[str]) -> str:
    """Return a list of names in words, as ALFWorld writes it: "nothing", "a cup 1", "a cup 2, and a cup 1"."""
    if len(names) < 2:
        return names[0] if names else "nothing"
    return f"{', '.join(names[:-1])}, and {names[-1]}"
