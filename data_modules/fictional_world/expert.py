"""An expert that searches by knowing the answer's chain: the source of the teacher's demonstrations.

It is an `Engine`: the ordinary agent loop drives it against the real retriever, so its demonstrations are ordinary
trajectories, with real search results, and nothing but the sampling of tokens is special.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from data_modules.datasets.questions import load_tasks
from rollout.engines.base import Generation, SamplingParams
from rollout.tokenizer import load_tokenizer
from rollout.trajectory import Task

if TYPE_CHECKING:
    import torch

_INFORMATION = re.compile(r"<information>(.*?)</information>", re.DOTALL)


class CarelessPolicy:
    """An expert with habits that cost calls: with probability ``slip`` a step is taken carelessly at first."""

    def __init__(self, slip: float = 0.15, seed: int = 0) -> None:
        if not 0 <= slip < 1:
            raise ValueError(f"slip is a probability below 1, got {slip}")
        self.slip, self.seed = slip, seed

    def slips(self, task: Task, step: int) -> random.Random | None:
        """What a careless step goes on to draw from, the same whenever it is asked; None for a careful one."""
        rng = random.Random(f"{self.seed}:{task.id}:{step}")
        return rng if rng.random() < self.slip else None


class ExpertPolicy(CarelessPolicy):
    """Text in, text out: what the expert writes next in one trajectory.

    The chain comes from the task's metadata: ``mentions`` (subject, then the entity each hop reaches) and
    ``relations`` (keywords). With probability ``slip`` a hop starts with a broad query, mostly the name alone; when
    its results do not hold the fact, the expert says so and searches again, now for the relation, too.
    """

    def next_turn(self, task: Task, transcript: str) -> str:
        """The expert's next turn, tags included, after ``transcript`` (everything since the prompt)."""
        mentions, relations = task.metadata["mentions"], task.metadata["relations"]
        facts = [f"The {r} of {mentions[h]} is {mentions[h + 1]}." for h, r in enumerate(relations)]
        blocks = _INFORMATION.findall(transcript)
        known = 0  # hops whose fact has been read, in order
        while known < len(facts) and any(facts[known] in block for block in blocks):
            known += 1
        if transcript.endswith("<answer>"):  # ARCap's probe without thinking
            return f" {mentions[-1]} </answer>"
        if known == len(facts):
            return f"<think>It is {mentions[-1]}.</think>\n<answer> {mentions[-1]} </answer>"
        query = f"{mentions[known]} {relations[known]}"
        if not blocks:
            thought = f"First {', then '.join(relations)}."
        elif known and facts[known - 1] in blocks[-1]:
            thought = f"It is {mentions[known]}. Next {relations[known]}."
        else:  # the last search brought nothing new: it was careless
            return self._turn(f"Not found. Search {relations[known]}.", query)
        return self._turn(thought, self._careless(task, mentions[known], known) or query)

    def _careless(self, task: Task, mention: str, hop: int) -> str | None:
        rng = self.slips(task, hop)
        if rng is None:
            return None
        return rng.choices((mention, f"the {mention} found", f"what is {mention}"), weights=(5, 1, 1))[0]

    @staticmethod
    def _turn(thought: str, query: str) -> str:
        return f"<think>{thought}</think>\n<search> {query} </search>"


class ExpertEngine:
    """`Engine` over `ExpertPolicy`.

    Args:
        tokenizer: Hugging Face folder of the tokenizer in which to write.
        files: question files of the fictional world (their metadata hold the chains).
        slip: probability that a hop starts with a broad query.
        seed: of the slips.
    """

    QUESTION: ClassVar[re.Pattern[str]] = re.compile(r"Question: (.*?)<\|im_end\|>", re.DOTALL)
    Policy: ClassVar[Any] = ExpertPolicy  # (slip, seed) -> an object with next_turn(task, transcript)
    ends_turns: ClassVar[bool] = False  # with the tokenizer's EOS, as chats do

    def __init__(self, tokenizer: str, files: list[str], slip: float = 0.15, seed: int = 0) -> None:
        self._tokenizer_path, self._files = tokenizer, files
        self._policy = self.Policy(slip, seed)
        self._tokenizer: Any = None
        self._tasks: dict[str, list[Task]] = {}  # by question

    async def start(self) -> None:
        if self._tokenizer is not None:
            return
        self._tokenizer = load_tokenizer(self._tokenizer_path)
        for file in self._files:
            for task in load_tasks(file):
                self._tasks.setdefault(task.question, []).append(task)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        match = self.QUESTION.search(text)
        tasks = self._tasks.get(match.group(1).strip()) if match else None
        if not tasks:
            raise ValueError(f"the expert knows only the questions of {self._files}; it was asked: {text[:200]!r}")
        transcript = text[match.end() :]
        turn = self._policy.next_turn(self._choose(tasks, transcript), transcript)
        ids = self._tokenizer(turn, add_special_tokens=False).input_ids
        if self.ends_turns:
            ids = [*ids, self._tokenizer.eos_token_id]
        stop = next((s for s in sampling.stop if turn.endswith(s)), None)
        return Generation(tuple(ids), (0.0,) * len(ids), "stop" if stop else "eos", 0, stop_string=stop)

    def _choose(self, tasks: Sequence[Task], transcript: str) -> Task:
        """Of several tasks that ask the same, which one it is."""
        return tasks[-1]

    async def load_weights(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        checksum: bool = False,
        between_steps: bool = False,
    ) -> None:
        raise ValueError("the expert has no weights; it cannot be the engine of a training run")

    async def close(self) -> None:
        return None
