"""Stage that writes ledgers and a tokenizer. A model learns their language from demonstrations."""

from __future__ import annotations

import random
from pathlib import Path

from common.ranges import NonNegativeInt, PositiveInt
from experiments.worlds.repair.environment import TOTAL
from experiments.worlds.repair.expert import LedgerPolicy
from experiments.worlds.repair.problems import TOTALS, as_task, draw_problems
from experiments.worlds.tokenizer_training import train_tokenizer
from experiments.worlds.world_task import WorldTask
from rollout.trajectory import Task

SIZES = range(6, 9)  # changes of a problem
DEMONSTRATED = range(2, 9)  # changes of an expert's problem: short ones teach copying
DIGITS = 2  # digits of a number in one token
EXPERT_TEXTS = 1000
UNDEFINED = "NameError: name 's' is not defined\n"


class BuildLedgers(WorldTask):
    """Writes question files of ledgers (running totals to keep in a notebook), and a tokenizer for them. Deterministic.

    Args:
        seed: see ``WorldTask``, as for all arguments.
        train: training tasks.
        val: validation tasks.
        test: test tasks.
        demonstrations: tasks for the expert.
        vocab_size: vocabulary size of the tokenizer.
    """

    def __init__(
        self,
        seed: NonNegativeInt = 0,
        train: PositiveInt = 2000,
        val: PositiveInt = 50,
        test: PositiveInt = 50,
        demonstrations: PositiveInt = 2000,
        vocab_size: PositiveInt = 1024,
    ) -> None:
        super().__init__(seed, train, val, test, demonstrations, vocab_size)

    def _splits(self) -> dict[str, list[Task]]:
        rng = random.Random(f"ledgers:{self.seed}")
        taken: set[str] = set()
        splits: dict[str, list[Task]] = {}
        for name, n in self.sizes.items():
            problems = draw_problems(n, DEMONSTRATED if name == "demonstrations" else SIZES, rng, taken)
            splits[name] = [as_task(problem, f"{name}-{i}") for i, problem in enumerate(problems)]
        return splits

    def _write_language(self, folder: Path, demonstrations: list[Task]) -> int:
        tokenizer = train_tokenizer(texts(demonstrations, self.seed), self.vocab_size, DIGITS, spaced_numbers=True)
        tokenizer.save_pretrained(folder / "tokenizer")
        return len(tokenizer)


def texts(tasks: list[Task], seed: int) -> list[str]:
    """Return the tokenizer's training texts: ledgers, and turns of the expert and the notebook with random totals."""
    rng, expert = random.Random(f"texts:{seed}"), LedgerPolicy(error_rate=0.4, seed=seed, repair=0.5)
    numbers = " ".join(map(str, range(11, 100)))
    found: list[str] = [numbers, numbers]  # also for a few ledgers
    for task in tasks[:EXPERT_TEXTS]:
        transcript = turn = ""
        while not turn.endswith("</answer>"):
            turn = expert.next_turn(task, transcript)
            transcript += f"{turn} <result>\n{UNDEFINED * (';' in turn)}{TOTAL} = {rng.choice(TOTALS)}\n</result>"
        found += [task.question, transcript]
    return found
