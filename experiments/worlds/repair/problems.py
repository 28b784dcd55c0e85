"""Ledgers: a stock and its changes by month. All numbers have two digits, one token each."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from rollout.trajectory import Task

WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
# The ranges do not overlap, so that a tiny model can distinguish them: a total that a change overwrote never occurs in
# a careful ledger.
TOTALS = range(40, 100)
CHANGES = range(11, 40)


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem about a ledger: amounts and their changes, to be added up in a notebook.

    ``months`` are those of the changes, ``changes`` have their signs, as a formula writes them ("+ 12"), and ``totals``
    run from the start to the answer.
    """

    question: str
    months: tuple[str, ...]
    changes: tuple[str, ...]
    totals: tuple[int, ...]


def make_problem(rng: random.Random, changes: int) -> Problem:
    """Draw a random ledger problem with ``changes`` changes (1 to 12), each in a different month.

    The first month is random, so its position says nothing about its name: a model must read to find a change.
    """
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
    """Return a change such as "+ 12" in the words of a ledger, "12 in". The number comes first, so that one word before
    it tells where to continue copying.

    >>> moved("+ 12"), moved("- 30")
    ('12 in', '30 out')
    """
    sign, number = change.split()
    return f"{number} {'in' if sign == '+' else 'out'}"


def draw_problems(count: int, sizes: range, rng: random.Random, taken: set[str]) -> list[Problem]:
    """Draw ``count`` problems whose questions are not in ``taken``, and add their questions. Each has a number of
    changes from ``sizes``.
    """
    problems: list[Problem] = []
    while len(problems) < count:
        problem = make_problem(rng, rng.choice(sizes))
        if problem.question not in taken:
            taken.add(problem.question)
            problems.append(problem)
    return problems


def as_task(problem: Problem, task_id: str) -> Task:
    """Return a ledger problem as a task. Its metadata are ``months``, ``changes`` and ``totals`` of ``Problem``."""
    return Task(
        id=task_id,
        question=problem.question,
        golden_answers=(str(problem.totals[-1]),),
        data_source=f"ledger_{len(problem.changes)}",
        metadata={name: list(getattr(problem, name)) for name in ("months", "changes", "totals")},
    )
