"""Base classes of a world's scripted expert, which writes demonstrations in place of a model.

The ordinary agent loop drives the expert with the real tools or environment, so demonstrations are ordinary
trajectories. A world subclasses ``WorldExpert`` with its policy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from common.ranges import BelowOne, NonNegativeInt
from data_modules.datasets.questions import load_tasks
from rollout.engines.base import Generation, SamplingParams
from rollout.tokenizer import load_tokenizer
from rollout.trajectory import Task

if TYPE_CHECKING:
    from rollout.engines.weights.files import WeightFiles


class CarelessPolicy:
    """Base class of scripted experts with costly habits: with probability ``error_rate`` the expert starts a turn
    carelessly.
    """

    def __init__(self, error_rate: float = 0.15, seed: int = 0) -> None:
        self.error_rate, self.seed = error_rate, seed

    def slips(self, task: Task, turn: int) -> random.Random | None:
        """Return a random generator if the expert takes this turn carelessly, else None. The same arguments give the
        same random numbers.
        """
        rng = random.Random(f"{self.seed}:{task.id}:{turn}")
        return rng if rng.random() < self.error_rate else None


class WorldExpert:
    """Inference engine whose answers come from a scripted expert that knows the answers. Subclasses set the class
    variables.

    Args:
        tokenizer: Hugging Face folder of the tokenizer.
        files: question files of the world, whose metadata hold the answers.
        error_rate: probability that a turn starts carelessly (see the policy).
        seed: seed of the careless turns.
    """

    QUESTION: ClassVar[re.Pattern[str]]  # finds the question in the prompt, as its first group
    Policy: ClassVar[Any]  # (error_rate, seed) -> an object with next_turn(task, transcript)
    ends_turns: ClassVar[bool] = False  # with the tokenizer's EOS, as in chats

    def __init__(self, tokenizer: str, files: list[str], error_rate: BelowOne = 0.15, seed: NonNegativeInt = 0) -> None:
        self._tokenizer_path, self._files = tokenizer, files
        self._policy = self.Policy(error_rate, seed)
        self._tokenizer: Any = None
        self._tasks: dict[str, list[Task]] = {}  # by question

    async def start(self) -> None:
        if self._tokenizer is not None:
            return
        self._tokenizer = load_tokenizer(self._tokenizer_path)
        for file in self._files:
            for task in load_tasks(file, answers=False):
                self._tasks.setdefault(task.question, []).append(task)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        match = self.QUESTION.search(text)
        tasks = self._tasks.get(match.group(1).strip()) if match else None
        if match is None or not tasks:
            raise ValueError(f"the expert knows only the questions of {self._files}; it was asked: {text[:200]!r}")
        transcript = text[match.end() :]
        turn = self._policy.next_turn(self._choose(tasks, transcript), transcript)
        ids = self._tokenizer(turn, add_special_tokens=False).input_ids
        if self.ends_turns:
            ids = [*ids, self._tokenizer.eos_token_id]
        stop = next((s for s in sampling.stop if turn.endswith(s)), None)
        return Generation(tuple(ids), (0.0,) * len(ids), "stop" if stop else "eos", 0, stop_string=stop)

    def _choose(self, tasks: Sequence[Task], transcript: str) -> Task:
        """Return the right one of several tasks that ask the same question."""
        return tasks[-1]

    async def load_files(self, files: WeightFiles, version: int, between_steps: bool = False) -> None:
        raise ValueError("the expert has no weights; it cannot be the engine of a training run")

    async def close(self) -> None:
        return None
