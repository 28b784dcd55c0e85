"""Word problems with two to five calculations on two-digit numbers, too hard for a tiny model without a tool.

A problem is a story told in order. Every sentence that matters adds one or two operations to the running value. One
irrelevant sentence, with its own number, may stand between them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout.trajectory import Task

# Names, things and their holders, and the wordings of each sort of sentence.
WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Problem:
    """One word problem: a question, its calculations and their results.

    ``calculations`` are formulas of two operands, in which "{0}" and "{1}" are earlier results. ``told`` are the
    sentences that ask for them.
    """

    family: str  # by the number of calculations: "2", "3", ...
    question: str
    told: tuple[str, ...]
    calculations: tuple[str, ...]
    results: tuple[int, ...]

    @property
    def answer(self) -> str:
        return str(self.results[-1])

    def formula(self, index: int) -> str:
        """Return calculation ``index`` as a formula with the earlier results filled in."""
        return self.calculations[index].format(*self.results)


class _Story:
    """Collects the sentences and calculations of a word problem while it is written."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        name, other = rng.sample(WORDS["names"], 2)
        things, holders = rng.choice(WORDS["things"]), rng.choice(WORDS["holders"])
        self.words = {"name": name, "other": other, "things": things, "holders": holders}
        self.sentences: list[str] = []
        self.told: list[str] = []
        self.calculations: list[str] = []
        self.results: list[int] = []

    def tell(self, sort: str, **numbers: int) -> None:
        """Add a sentence to the story, from the list ``sort`` of ``WORDS``."""
        self.sentences.append(self.rng.choice(WORDS[sort]).format(**self.words, **numbers))

    def calculate(self, formula: str, told: str | None = None) -> None:
        self.told.append(told or self.sentences[-1].split(". ")[0].rstrip(".") + ".")
        self.calculations.append(formula)
        # a formula and numbers of this module
        self.results.append(eval(formula.format(*self.results), {"__builtins__": {}}))

    @property
    def value(self) -> str:
        """The running value of the story, as a formula writes it: a reference to the last result."""
        return f"{{{len(self.results) - 1}}}"

    def number(self, low: int = 11, high: int = 99) -> int:
        return self.rng.randint(low, high)


def _more(story: _Story) -> None:
    c = story.number()
    story.tell("more", c=c)
    story.calculate(f"{story.value} + {c}")


def _fewer(story: _Story) -> None:
    c = story.number()
    story.tell("fewer", c=c)
    story.calculate(f"{story.value} - {c}")


def _more_packed(story: _Story) -> None:
    c, d = story.number(), story.number()
    before = story.value
    story.tell("more_packed", c=c, d=d)
    story.calculate(f"{c} * {d}")
    story.calculate(f"{before} + {story.value}", told="Together.")


MIDDLES: tuple[tuple[Callable[[_Story], None], int, int], ...] = (  # (operation, its calculations, its weight)
    (_more, 1, 2),
    (_fewer, 1, 2),
    (_more_packed, 2, 1),
)
IDLE_SHARE = 0.3  # share of problems with an irrelevant sentence


def make_problem(rng: random.Random, calculations: int) -> Problem:
    """Draw a random word problem with this number of calculations (at least 2)."""
    if calculations < 2:
        raise ValueError(f"a problem has at least 2 calculations, not {calculations}")
    story = _Story(rng)
    a, b = story.number(), story.number()
    story.tell("openings", a=a, b=b)
    story.calculate(f"{a} * {b}")
    ending = rng.choice(("count", "value", "share"))
    left = calculations - 1 - (ending != "count")
    idle_before = rng.randrange(left + 1) if rng.random() < IDLE_SHARE else None
    while left > 0:
        if idle_before == left:
            story.tell("idle", c=story.number())
        fitting = [m for m in MIDDLES if m[1] <= left]
        middle, size, _ = rng.choices(fitting, weights=[m[2] for m in fitting])[0]
        middle(story)
        left -= size
    if idle_before == 0:
        story.tell("idle", c=story.number())
    c = story.number()
    story.tell(ending, c=c)
    if ending != "count":
        story.calculate(f"{story.value} {'*' if ending == 'value' else '%'} {c}")
    question = " ".join(story.sentences)
    return Problem(str(calculations), question, tuple(story.told), tuple(story.calculations), tuple(story.results))


def draw_problem(rng: random.Random, shares: dict[int, float]) -> Problem:
    """Draw a random word problem. ``shares`` weights the numbers of calculations."""
    return make_problem(rng, rng.choices(list(shares), weights=list(shares.values()))[0])


def draw_problems(count: int, shares: dict[int, float], rng: random.Random, taken: set[str]) -> list[Problem]:
    """Draw ``count`` word problems whose questions are not in ``taken``, and add their questions. ``shares`` weights
    the numbers of calculations.
    """
    problems: list[Problem] = []
    while len(problems) < count:
        problem = draw_problem(rng, shares)
        if problem.question not in taken:
            taken.add(problem.question)
            problems.append(problem)
    return problems


def as_task(problem: Problem, task_id: str, split: str) -> Task:
    return Task(
        id=task_id,
        question=problem.question,
        golden_answers=(problem.answer,),
        data_source=f"words_{problem.family}",
        metadata={
            "split": split,
            "ability": "math",
            "told": list(problem.told),
            "formulas": [problem.formula(i) for i in range(len(problem.calculations))],
            "results": [str(result) for result in problem.results],
            "hint": hint(problem),
        },
    )


def hint(problem: Problem) -> str:
    """Return a hint that describes the solution without a result: the formulas, with names for unknown values."""
    names = tuple("ABCDEFGH")
    parts = [f"{names[i]} = {formula.format(*names)}" for i, formula in enumerate(problem.calculations)]
    return "; ".join(parts)
