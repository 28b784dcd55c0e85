"""Words to spell backward as a taskset of verifiers. The module's name is the taskset's id."""

# pyright: reportMissingImports=false

import random
import re
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Words"]

BOX = re.compile(r"\\boxed\{(\w+)\}")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class WordData(vf.TaskData):
    answer: str


class Word(vf.Task[WordData]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        """The share of letters that are right."""
        found = BOX.findall(trace.last_reply)
        said, answer = found[-1] if found else "", self.data.answer
        return sum(a == b for a, b in zip(said, answer, strict=False)) / max(len(said), len(answer))


class Words(vf.Taskset[Word, vf.TasksetConfig]):
    def load(self) -> Iterable[Word]:
        draw = random.Random(0)
        for _ in range(1000):
            word = "".join(draw.choices(LETTERS, k=draw.choice([3, 4])))
            prompt = f"Spell this word backward (example: sun -> nus): {word}"
            yield Word(WordData(prompt=prompt, answer=word[::-1]), self.config.task)
