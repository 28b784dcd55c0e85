"""Engines that write demonstrations of any environment: random turns, and answers that are sometimes wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common.ranges import NonNegativeInt
from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from rollout.engines.base import Generation, SamplingParams
from rollout.tokenizer import load_tokenizer
from rollout.trajectory import Task

if TYPE_CHECKING:
    from rollout.engines.weights.files import WeightFiles


class RandomTurns:
    """Engine that draws each turn from a list. A model that is trained on its turns acts at random, and can learn from
    rewards.

    Args:
        tokenizer: Hugging Face folder of the tokenizer.
        turns: the texts to draw from.
        seed: of the draws.
    """

    def __init__(self, tokenizer: str, turns: Sequence[str], seed: NonNegativeInt = 0) -> None:
        self._tokenizer_path, self._turns, self._seed = tokenizer, turns, seed
        self._ids: list[tuple[int, ...]] = []

    async def start(self) -> None:
        tokenizer: Any = load_tokenizer(self._tokenizer_path)
        end = tokenizer.eos_token_id
        self._ids = [(*tokenizer(turn, add_special_tokens=False).input_ids, end) for turn in self._turns]

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        ids = random.Random(f"{self._seed}:{sampling.seed}").choice(self._ids)  # in whatever order requests come
        return Generation(ids, (0.0,) * len(ids), "eos", 0)

    async def load_files(self, files: WeightFiles, version: int, between_steps: bool = False) -> None:
        raise ValueError("random turns have no weights; they cannot be the engine of a training run")

    async def close(self) -> None: ...


class AnswerPolicy(CarelessPolicy):
    """Writes a task's gold answer."""

    def next_turn(self, task: Task, transcript: str) -> str:
        return f"\\boxed{{{task.golden_answers[0]}}}"


class AnswerExpert(WorldExpert):
    """Writes the gold answer, or with probability ``error_rate`` the one of another task."""

    QUESTION = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
    Policy = AnswerPolicy
    ends_turns = True

    def _choose(self, tasks: Sequence[Task], transcript: str) -> Task:
        draw = self._policy.slips(tasks[-1], 0)
        if draw is None:
            return tasks[-1]
        return draw.choice([task for others in self._tasks.values() for task in others])
