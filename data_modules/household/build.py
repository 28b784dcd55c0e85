"""The first stage of the household experiments: games, a tokenizer, and text to learn from."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Optional

from data_modules.datasets.questions import write_tasks
from data_modules.world_language import mixed_text, write_language
from rollout.environments.household.expert import Expert
from rollout.environments.household.games import TASK_TYPES, Game
from rollout.environments.household.generate import generate_game
from rollout.environments.household.simulator import Simulator
from rollout.environments.household.tables import OBJECTS, OPENABLE
from rollout.skills.bank import SkillBank
from rollout.skills.reading import read_bank
from rollout.trajectory import Task

STRAYING = 0.5  # probability that a step of the games in the texts is a random one
STEPS = 14
TRIES = 200  # draws of a game that is like no other


class BuildHousehold:
    """Write household games, a tokenizer for them, and plain text about other games. Deterministic.

    No game is in two splits, or twice in one; two may open with the same text, and hold other things in other places.
    Task types come in equal numbers.

    Args:
        seed: of everything.
        size: of the rooms: small, or full as ALFWorld has them.
        train: training games.
        val: validation games.
        test: test games.
        demonstrations: games for the expert.
        bank: skills whose words the tokenizer and the texts shall hold: name or file.
        vocab_size: of the tokenizer.
        articles: sequences of plain text, to teach a model the language.
        article_tokens: length of each.
    """

    def __init__(
        self,
        seed: int = 0,
        size: Literal["small", "full"] = "small",
        train: int = 4000,
        val: int = 96,
        test: int = 192,
        demonstrations: int = 4000,
        bank: str = "household_tiny",
        vocab_size: int = 1024,
        articles: int = 8000,
        article_tokens: int = 192,
    ) -> None:
        self.seed, self.size, self.vocab_size = seed, size, vocab_size
        self.sizes = {"demonstrations": demonstrations, "train": train, "val": val, "test": test}
        for name, n in self.sizes.items():
            if n < 1:
                raise ValueError(f"{name} is {n}; expected at least one game")
        self.bank: SkillBank = read_bank(bank)
        self.articles, self.article_tokens = articles, article_tokens

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write ``{demonstrations,train,val,test}.parquet``, ``tokenizer/``, ``articles.parquet``."""
        rng = random.Random(f"games:{self.seed}")
        taken: set[str] = set()
        splits = {name: self._games(name, n, rng, taken) for name, n in self.sizes.items()}
        for name, tasks in splits.items():
            write_tasks(output_dir / f"{name}.parquet", tasks, render=lambda task: task.question)
        vocabulary = write_language(
            output_dir, self._text, self.seed, self.vocab_size, self.articles, self.article_tokens,
            further=["<action>look</action>"] * 50,
        )  # fmt: skip
        types = Counter(task.data_source for task in splits["train"])
        return {"vocabulary": vocabulary} | {name: len(tasks) for name, tasks in splits.items()} | dict(types)

    def _games(self, split: str, n: int, rng: random.Random, taken: set[str]) -> list[Task]:
        tasks = []
        for i in range(n):
            kind = TASK_TYPES[i % len(TASK_TYPES)]
            game, opening = self._new_game(kind, rng, taken)
            metadata = {"household": {"game": game.to_json()}, "split": split}
            tasks.append(Task(f"{split}-{i}", opening, (), kind, metadata=metadata))
        return tasks

    def _new_game(self, kind: str, rng: random.Random, taken: Optional[set[str]] = None) -> tuple[Game, str]:
        for _ in range(TRIES):
            game = generate_game(kind, rng.randrange(2**31), size=self.size)
            name = json.dumps(game.to_json(), sort_keys=True)
            if taken is None or name not in taken:
                (set() if taken is None else taken).add(name)
                return game, Simulator(game).reset().text.strip()
        raise ValueError(f"{TRIES} games of type {kind} in a row were drawn before; ask for fewer games, or size: full")

    def _text(self, rng: random.Random) -> str:
        return mixed_text(rng, self.bank, thing, self._transcript)

    def _transcript(self, rng: random.Random) -> str:
        return played(self._new_game(rng.choice(TASK_TYPES), rng)[0], rng)


def thing(rng: random.Random) -> str:
    return f"{rng.choice([*OBJECTS, *OPENABLE]).lower()} {rng.randint(1, 4)}"


def played(game: Game, rng: random.Random) -> str:
    """A game as a transcript, ">" before each command, half of the steps taken at random: what commands look like and
    what comes of them, and not how to win."""
    simulator, expert = Simulator(game), Expert(game.goal)
    observation = simulator.reset()
    lines = [observation.text.strip()]
    for _ in range(STEPS):
        command = expert.act(observation)
        if rng.random() < STRAYING:
            command = rng.choice(observation.admissible)
        observation = simulator.step(command)
        lines.append(f"> {command}\n{observation.text.strip()}")
        if observation.won:
            break
    return "\n".join(lines) + "\n"
