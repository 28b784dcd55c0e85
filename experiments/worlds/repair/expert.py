"""An expert that keeps a ledger in a notebook, one cell per change, in ARPO's format."""

from __future__ import annotations

import random
import re

from common.ranges import BelowOne, NonNegativeInt, UnitInterval
from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from experiments.worlds.repair.environment import TOTAL, shown_total
from experiments.worlds.repair.problems import WORDS, moved
from rollout.trajectory import Task

_CELL = re.compile(r"<python> (.*?) </python> <result>\n(.*?)\n</result>", re.DOTALL)
# matches an error; without the second half, the start or a repair
_OVERWRITES = re.compile(rf"{TOTAL} = (-?\d+)(; .*)?")


class LedgerPolicy(CarelessPolicy):
    """A scripted expert that keeps a running total in a notebook, and writes its turns as text.

    The first cell is ``t = 57``; each later cell enters a change, ``t = t + 12``. Each turn repeats the last total and
    the change, which a tiny model copies from beside the cell. With probability ``error_rate`` a change goes wrong: ``t
    = 12; t += s`` fails half-way, and the result shows that the total is lost. With probability ``repair`` the next
    cell sets ``t`` to the value shown before, and then the change is entered again. Otherwise the expert continues and
    never repairs it. While the total is wrong, its turns begin with other words, which a teacher without errors has
    never used.

    Args:
        error_rate: probability that a change goes wrong.
        seed: seed of all draws.
        repair: probability that the next cell repairs an error.
        backwards: prefer the last words of each list instead of the first, so that two experts speak differently.
    """

    def __init__(self, error_rate: float = 0.15, seed: int = 0, repair: float = 1.0, backwards: bool = False) -> None:
        super().__init__(error_rate, seed)
        if not 0 <= repair <= 1:
            raise ValueError(f"repair is a probability, got {repair}")
        self.repair, self.backwards = repair, backwards

    def next_turn(self, task: Task, transcript: str) -> str:
        """Return the text of the expert's next turn, tags included. ``transcript`` is everything since the prompt."""
        cells = _CELL.findall(transcript)
        changes, start = task.metadata["changes"], task.metadata["totals"][0]
        overwritten = [_OVERWRITES.fullmatch(code) for code, _ in cells]
        slips = [match is not None and match[2] is not None for match in overwritten]
        repairs = sum(match is not None and match[2] is None for match in overwritten[1:])
        rng = random.Random(f"words:{self.seed}:{task.id}:{len(cells)}")
        lead, verb = self._word(rng, "worried_leads" if sum(slips) > repairs else "leads"), self._word(rng, "verbs")
        if not cells:
            return f" {lead} {verb} stock {_cell(f'{TOTAL} = {start}')}"
        total = shown_total(cells[-1][1])
        words = f"{lead} {total} {verb}"
        if slips[-1] and random.Random(f"repair:{self.seed}:{task.id}:{len(cells)}").random() < self.repair:
            return f" {words} back {_cell(f'{TOTAL} = {shown_total(cells[-2][1])}')}"
        entered = len(cells) - 1 - 2 * repairs  # a repair removes its error
        if entered == len(changes):
            return f" {words} total <answer> {total} </answer>"
        sign, change = changes[entered].split()
        wrong = self.slips(task, len(cells)) is not None
        code = f"{TOTAL} = {change}; {TOTAL} {sign}= s" if wrong else f"{TOTAL} = {TOTAL} {sign} {change}"
        return f" {words} {task.metadata['months'][entered]} {moved(changes[entered])} {_cell(code)}"

    def _word(self, rng: random.Random, kind: str) -> str:
        words = WORDS[kind][::-1] if self.backwards else WORDS[kind]
        return rng.choices(words, weights=range(len(words), 0, -1))[0]


def _cell(code: str) -> str:
    return f"<python> {code} </python>"


class LedgerExpertEngine(WorldExpert):
    """Inference engine that answers with ``LedgerPolicy``, a scripted expert that keeps a running total.

    Args:
        tokenizer: see ``WorldExpert``.
        files: see ``WorldExpert``.
        error_rate: probability that a change goes wrong.
        seed: seed of all draws.
        repair: probability that an error is repaired.
        backwards: see ``LedgerPolicy``.
    """

    QUESTION = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
    Policy = LedgerPolicy

    def __init__(
        self,
        tokenizer: str,
        files: list[str],
        error_rate: BelowOne = 0.15,
        seed: NonNegativeInt = 0,
        repair: UnitInterval = 1.0,
        backwards: bool = False,
    ) -> None:
        super().__init__(tokenizer, files, error_rate, seed)
        self._policy = LedgerPolicy(error_rate, seed, repair, backwards)
