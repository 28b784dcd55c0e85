"""An expert that plays household games, with careless steps on request."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from data_modules.worlds.expert_engine import CarelessPolicy, WorldExpert
from rollout.environments.household.expert import Expert
from rollout.environments.household.games import Game
from rollout.environments.household.simulator import Observation, Simulator
from rollout.protocols.episodes import ACTION
from rollout.tags import between
from rollout.trajectory import Task

IDLE = ("look", "inventory")
IDLES = 0.2  # share of the careless steps that look around; in the others it goes somewhere


class HouseholdExpertPolicy(CarelessPolicy):
    """Text in, text out: the expert's next command between action tags.

    The transcript of a whole conversation (``window: null``) says what it has done; the game, in the task's metadata,
    is played again up to there. With probability ``slip`` a step leads it nowhere: it goes to some other receptacle, or
    looks around. What it knows it does not forget.
    """

    def next_turn(self, task: Task, transcript: str) -> str:
        """The next turn, without the token that ends it, after ``transcript``: everything since the prompt."""
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
        """Whether the commands of the transcript lead, in this game, to what it shows."""
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
    """A step that changes nothing in the room, other than the careful one where there is another."""
    away = [c for c in observation.admissible if c.startswith("go to ") and c != careful]
    return rng.choice(away) if away and rng.random() >= IDLES else rng.choice(IDLE)


class HouseholdExpertEngine(WorldExpert):
    """Engine over ``HouseholdExpertPolicy``; turns end with the tokenizer's EOS; ``slip``: probability that a step
    leads nowhere."""

    QUESTION = re.compile(r"(-= Welcome to TextWorld.*?Your task is to: [^\n<]*)", re.DOTALL)
    Policy = HouseholdExpertPolicy
    ends_turns = True

    def _choose(self, tasks: Sequence[Task], transcript: str) -> Task:
        """Small rooms open alike: the first game in which the commands so far lead to what was seen. The expert plays
        by what it has seen, so that it makes no difference which of several."""
        return next((task for task in tasks if self._policy.fits(task, transcript)), tasks[0])
