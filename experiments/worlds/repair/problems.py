"""Ledgers: a stock and its changes by month, all of them numbers of two digits, which are one token each."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from rollout.trajectory import Task

WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
# Apart, so that a tiny model can tell them apart: a total that was overwritten by a change is one that no careful
# ledger has held.
TOTALS = range(40, 100)
CHANGES = range(11, 40)


@dataclass(frozen=True, slots=True)
class Problem:
    """``months``: of the changes; ``changes``: with their signs, as a formula writes them ("+ 12"); ``totals``: from
    the start to the answer."""

    question: str
    months: tuple[str, ...]
    changes: tuple[str, ...]
    totals: tuple[int, ...]


def make_problem(rng: random.Random, changes: int) -> Problem:
    """One problem with so many changes (1 to 12), no two alike: a month each. The first is any month, so that where a
    month stands says nothing of its name: a change is found by reading."""
    year = WORDS["months"]
    if not 1 <= changes <= len(year):
        raise ValueError(f"a problem has 1 to {len(year)} changes, not {changes}")
    first = rng.randrange(len(year))
    months = (year * 2)[first : first + changes]
    words = {"place": rng.choice(WORDS["places"]), "things": rng.choice(WORDS["things"])}
    total = rng.choice(TOTALS)
    sentences = [rng.choice(WORDS["openings"]).format(start=total, **words)]
    signed, totals, left = [], [total], list(CHANGES)
    for month in months:
        sign, change = rng.choice([(s, c) for c in left for s in (1, -1) if total + s * c in TOTALS])
        left.remove(change)
        total += sign * change
        signed.append(f"{'+' if sign > 0 else '-'} {change}")
        totals.append(total)
        sentences.append(f"{month} {moved(signed[-1])}.")
    question = " ".join([*sentences, rng.choice(WORDS["endings"])])
    return Problem(question, tuple(months), tuple(signed), tuple(totals))


def moved(change: str) -> str:
    """A change as a ledger says it. The number comes first, so that one word before tells where to go on copying.

    >>> moved("+ 12"), moved("- 30")
    ('12 in', '30 out')
    """
    sign, number = change.split()
    return f"{number} {'in' if sign == '+' else 'out'}"


def draw_problems(count: int, sizes: range, rng: random.Random, taken: set[str]) -> list[Problem]:
    """``count`` problems, their numbers of changes drawn from ``sizes``, none whose question is in ``taken`` (which
    grows)."""
    problems: list[Problem] = []
    while len(problems) < count:
        problem = make_problem(rng, rng.choice(sizes))
        if problem.question not in taken:
            taken.add(problem.question)
            problems.append(problem)
    return problems


def as_task(problem: Problem, task_id: str) -> Task:
    """Its metadata: ``months``, ``changes`` and ``totals``, see ``Problem``."""
    return Task(
        id=task_id,
        question=problem.question,
        golden_answers=(str(problem.totals[-1]),),
        data_source=f"ledger_{len(problem.changes)}",
        metadata={name: list(getattr(problem, name)) for name in ("months", "changes", "totals")},
    )
