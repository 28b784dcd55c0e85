"""A scripted expert of household games, for demonstrations. It knows the task and sees what an agent sees.

It searches the receptacles that may hold the object, opens closed ones, and remembers what it saw. It reads only the
engine's sentences, so it plays on either engine, also after commands that were not its own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from experiments.worlds.household.alfworld_tables import CAN_HOLD, LAMP, LAMP_PLACES
from experiments.worlds.household.games import LOOK, TWO, Game, Goal
from experiments.worlds.household.simulator import Observation, Simulator
from rollout.protocols.episodes import ACTION
from rollout.tags import between
from rollout.trajectory import Task

_NAME = r"[a-z]+ \d+"
_LISTED = re.compile(rf"\ba ({_NAME})")
_ROOM = re.compile(r"Looking quickly around you, you see (.*)\.")
_ARRIVED = re.compile(rf"You arrive at ({_NAME})\.")
_SHOWN = re.compile(rf"(?:On the|The) ({_NAME})(?: is open\. In it)?, you see (.*)\.")
_TOOK = re.compile(rf"You pick up the ({_NAME}) from the ({_NAME})\.")
_MOVED = re.compile(rf"You move the ({_NAME}) to the ({_NAME})\.")
_TREATED = re.compile(rf"You (clean|heat|cool) the ({_NAME}) using")


def kind_of(name: str) -> str:
    """Return the type of a numbered object name: "countertop" for "countertop 2"."""
    return name.rpartition(" ")[0]


class Expert:
    """A scripted expert that plays one episode of a household game. ``act`` needs every observation, including the
    first.

    Args:
        goal: the goal of the game.
    """

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self._target = goal.target.lower()
        self._held: str | None = None
        self._at: str | None = None
        self._seen: dict[str, list[str]] = {}  # receptacle -> its content when last seen
        self._treated: set[tuple[str, str]] = set()  # ("heat", "apple 1")
        self._rooms: list[str] = []  # names of the receptacles, in the order of the first observation

    def act(self, observation: Observation) -> str:
        """Return the expert's next text command, one of the admissible ones.

        Raises:
            LookupError: nothing is left to try (not in a game of `generate.py`).
        """
        self._read(observation.text)
        return self._next(set(observation.admissible))

    def _read(self, text: str) -> None:
        """Update what the expert knows about the room from the text of an observation."""
        if not self._rooms and (room := _ROOM.search(text)):
            self._rooms = _LISTED.findall(room[1])
        if arrived := _ARRIVED.search(text):
            self._at = arrived[1]
        if shown := _SHOWN.search(text):
            self._seen[shown[1]] = _LISTED.findall(shown[2])
        if took := _TOOK.search(text):
            self._held = took[1]
            self._seen.setdefault(took[2], [took[1]]).remove(took[1])
        if moved := _MOVED.search(text):
            self._held = None
            self._seen.setdefault(moved[2], []).append(moved[1])
        if treated := _TREATED.search(text):
            self._treated.add((treated[1], treated[2]))
            self._treated.discard(({"heat": "cool", "cool": "heat"}.get(treated[1], ""), treated[2]))

    def _next(self, possible: set[str]) -> str:
        held = self._held
        if held is not None and kind_of(held) != self._target:
            return self._put_away(held, possible)
        if held is None:
            receptacle, wanted = self._find(self._target, self._not_from())
            take = f"take {wanted} from {receptacle}"
            return take if take in possible else self._reach(receptacle, possible)
        if self.goal.task_type == LOOK:
            receptacle, lamp = self._find((self.goal.toggle or "").lower(), ())
            return f"use {lamp}" if lamp and self._at == receptacle else self._reach(receptacle, possible)
        if self.goal.treatment is not None and (self.goal.treatment[0], held) not in self._treated:
            verb, kind = self.goal.treatment
            receptacle = self._receptacles(kind.lower())[0]
            return f"{verb} {held} with {receptacle}" if self._at == receptacle else f"go to {receptacle}"
        receptacle = self._destination()
        return (
            f"move {held} to {receptacle}"
            if f"move {held} to {receptacle}" in possible
            else self._reach(receptacle, possible)
        )

    def _reach(self, receptacle: str, possible: set[str]) -> str:
        """Return the next command that helps to see a receptacle's content: go there, or open it."""
        return f"go to {receptacle}" if f"go to {receptacle}" in possible else f"open {receptacle}"

    def _find(self, kind: str, leave: tuple[str, ...]) -> tuple[str, str | None]:
        """Return the receptacle where an object of type ``kind`` was seen, and the object's name. Without one,
        return the next receptacle to look at, and None.

        Args:
            leave: receptacles whose objects are not taken.
        """
        for receptacle, things in self._seen.items():
            for thing in things:
                if kind_of(thing) == kind and receptacle not in leave:
                    return receptacle, thing
        unknown = [receptacle for receptacle in self._rooms if receptacle not in self._seen]
        if not unknown:
            raise LookupError(f"every receptacle was searched and no {kind} found")
        fits = LAMP_PLACES if kind == LAMP.lower() else [p for p in CAN_HOLD if self.goal.target in CAN_HOLD[p]]
        likely = [receptacle for receptacle in unknown if kind_of(receptacle) in {p.lower() for p in fits}] or unknown
        return (self._at if self._at in likely else likely[0]), None

    def _receptacles(self, kind: str) -> list[str]:
        return [receptacle for receptacle in self._rooms if kind_of(receptacle) == kind]

    def _destination(self) -> str:
        """Return the receptacle to put the object in. It prefers the one that holds another target, because two targets
        must be together.
        """
        receptacles = self._receptacles((self.goal.destination or "").lower())
        return max(
            receptacles, key=lambda receptacle: sum(kind_of(t) == self._target for t in self._seen.get(receptacle, ()))
        )

    def _not_from(self) -> tuple[str, ...]:
        """Return the receptacles where no target object is taken: the first of two targets stays at the
        destination.
        """
        return (self._destination(),) if self.goal.task_type == TWO else ()

    def _put_away(self, held: str, possible: set[str]) -> str:
        """Return the next command to put down an object that the task does not need, anywhere it is allowed."""
        here = f"move {held} to {self._at}"
        if here in possible:
            return here
        if f"open {self._at}" in possible:
            return f"open {self._at}"
        allowed = {
            receptacle.lower() for receptacle, kinds in CAN_HOLD.items() if kind_of(held) in {k.lower() for k in kinds}
        }
        for receptacle in self._rooms:
            if kind_of(receptacle) in allowed and receptacle != self._at:
                return f"go to {receptacle}"
        raise LookupError(f"no receptacle for {held}")


IDLE = ("look", "inventory")
IDLES = 0.2  # share of the careless actions that look around; the others go to a random receptacle


class HouseholdExpertPolicy(CarelessPolicy):
    """A scripted expert of household games that writes its next command between action tags, as text.

    The transcript of the whole conversation (``window: null``) shows the commands so far, and the policy replays the
    game of the task's metadata up to there. With probability ``error_rate`` an action is useless: it goes to a random
    receptacle or looks around. The expert keeps its knowledge.
    """

    def next_turn(self, task: Task, transcript: str) -> str:
        """Return the text of the expert's next turn, without its end token. ``transcript`` is everything since the
        prompt.
        """
        game = Game.from_json(task.metadata["household"]["game"])
        simulator, expert = Simulator(game), Expert(game.goal)
        observation = simulator.reset()
        careful = expert.act(observation)
        said = between(transcript, *ACTION)
        for command in said:
            observation = simulator.step(command)
            careful = expert.act(observation)
        rng = self.slips(task, len(said))
        return f"<action>{careful if rng is None else careless(observation, careful, rng)}</action>"

    def fits(self, task: Task, transcript: str) -> bool:
        """Return whether the transcript belongs to this task's game: its commands lead to the observations that it
        shows.
        """
        simulator = Simulator(Game.from_json(task.metadata["household"]["game"]))
        simulator.reset()
        end = 0
        for command in between(transcript, *ACTION):
            said = command.join(ACTION)
            end = transcript.index(said, end) + len(said)
            seen = simulator.step(command).text.strip()
            if seen not in transcript[end : end + 199 + len(seen)]:
                return False
        return True


def careless(observation: Observation, careful: str, rng: random.Random) -> str:
    """Return a random command that changes nothing in the room and, if possible, differs from the careful command."""
    away = [c for c in observation.admissible if c.startswith("go to ") and c != careful]
    return rng.choice(away) if away and rng.random() >= IDLES else rng.choice(IDLE)


class HouseholdExpertEngine(WorldExpert):
    """Inference engine that answers with ``HouseholdExpertPolicy``, a scripted expert. Turns end with the tokenizer's
    EOS. ``error_rate`` is the probability of a useless action.
    """

    QUESTION = re.compile(r"(-= Welcome to TextWorld.*?Your task is to: [^\n<]*)", re.DOTALL)
    Policy = HouseholdExpertPolicy
    ends_turns = True

    def _choose(self, tasks: Sequence[Task], transcript: str) -> Task:
        """Return the first game (task) whose observations match the transcript, because small rooms may open alike. The
        expert acts on what it has seen, so any match leads to the same action.
        """
        return next((task for task in tasks if self._policy.fits(task, transcript)), tasks[0])
