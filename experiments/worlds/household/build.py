"""Stage that writes generated household games, a tokenizer, and text to learn from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from experiments.worlds.household.alfworld_tables import OBJECTS, OPENABLE
from experiments.worlds.household.expert import Expert
from experiments.worlds.household.games import TASK_TYPES, Game
from experiments.worlds.household.generate import Size, generate_game
from experiments.worlds.household.simulator import Simulator
from experiments.worlds.language import mixed_text, write_language
from experiments.worlds.world_task import WorldTask
from rollout.skills.bank import SkillBank
from rollout.skills.reading import read_bank
from rollout.trajectory import Task

RANDOM_ACTIONS = 0.5  # probability of a random action in the games of the texts
ACTIONS = 14
TRIES = 200  # attempts to draw a new game


class BuildHousehold(WorldTask):
    """Writes question files of household games, a tokenizer for them, and plain text about other games. Deterministic.

    No game occurs twice, in one split or in two. Two games may have the same first observation and differ in where
    objects are. All task types are equally frequent.

    Args:
        size: size of the rooms: small, or full as in ALFWorld.
        bank: skill bank whose words the tokenizer and the texts must contain: name or file.
        world: see ``WorldTask``.
    """

    def __init__(self, size: Size = "small", bank: str = "household_tiny", **world: Any) -> None:
        super().__init__(**world)
        self.size: Size = size
        self.bank: SkillBank = read_bank(bank)

    def _splits(self) -> dict[str, list[Task]]:
        rng = random.Random(f"games:{self.seed}")
        taken: set[str] = set()
        return {name: self._games(name, n, rng, taken) for name, n in self.sizes.items()}

    def _write_language(self, folder: Path, demonstrations: list[Task]) -> int:
        return write_language(
            folder, self._text, self.seed, self.vocab_size, self.articles, self.article_tokens,
            further=["<action>look</action>"] * 50,
        )  # fmt: skip

    def _games(self, split: str, n: int, rng: random.Random, taken: set[str]) -> list[Task]:
        tasks = []
        for i in range(n):
            kind = TASK_TYPES[i % len(TASK_TYPES)]
            game, first_observation = self._new_game(kind, rng, taken)
            metadata = {"household": {"game": game.to_json()}, "split": split}
            tasks.append(Task(f"{split}-{i}", first_observation, (), kind, metadata=metadata))
        return tasks

    def _new_game(self, kind: str, rng: random.Random, taken: set[str] | None = None) -> tuple[Game, str]:
        """Draw a household game that is not in ``taken``, add it there, and return it with its first observation."""
        for _ in range(TRIES):
            game = generate_game(kind, rng.randrange(2**31), size=self.size)
            name = json.dumps(game.to_json(), sort_keys=True)
            if taken is None or name not in taken:
                (set() if taken is None else taken).add(name)
                return game, Simulator(game).reset().text.strip()
        raise ValueError(f"found no new game of type {kind} in {TRIES} tries; ask for fewer games, or take size: full")

    def _text(self, rng: random.Random) -> str:
        return mixed_text(rng, self.bank, numbered_name, self._transcript)

    def _transcript(self, rng: random.Random) -> str:
        return transcript(self._new_game(rng.choice(TASK_TYPES), rng)[0], rng)


def numbered_name(rng: random.Random) -> str:
    return f"{rng.choice([*OBJECTS, *OPENABLE]).lower()} {rng.randint(1, 4)}"


def transcript(game: Game, rng: random.Random) -> str:
    """Return the text of one played household game, with ">" before each command. Half of the actions are random, so
    the text shows commands and their effects but not how to win.
    """
    simulator, expert = Simulator(game), Expert(game.goal)
    observation = simulator.reset()
    lines = [observation.text.strip()]
    for _ in range(ACTIONS):
        command = expert.act(observation)
        if rng.random() < RANDOM_ACTIONS:
            command = rng.choice(observation.admissible)
        observation = simulator.step(command)
        lines.append(f"> {command}\n{observation.text.strip()}")
        if observation.won:
            break
    return "\n".join(lines) + "\n"
