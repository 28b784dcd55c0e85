"""Metrics over several attempts at each question: average@k, pass@k, maj@k, and bootstrap forms as released.

All metrics are means over questions of one number per question; intervals resample questions. The caller leaves out
infrastructure failures; attempts without a judgement are left out here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from callbacks.evaluation.statistics import Interval, bootstrap_interval, bootstrap_strata, pass_at_k
from callbacks.evaluation_rows import EvaluationRow

DRAWS, DRAW_SEED = 1000, 42  # of the released bootstrap (docs/algorithms/sod.md)
PROGRAMS = "code"  # the ability whose answers are programs: no two are equal, so votes make no sense
OF_SETS = "average_of_sets"
NUMBER = re.compile(r"[-+]?\d{1,30}(\.\d{1,30})?")
FIELDS = ("id", "data_source", "attempt", "answer", "accuracy", "ability")  # all that metrics here need of a row

Vote = tuple[str, float]  # (answer, "" for none; whether it is right)
Values = dict[str, float]  # question id -> number


def attempts_of(rows: Iterable[EvaluationRow]) -> dict[str, list[EvaluationRow]]:
    """Group evaluation rows by question id. Questions keep the order of first appearance; the rows of each are sorted
    by attempt."""
    questions: dict[str, list[EvaluationRow]] = {}
    for row in rows:
        questions.setdefault(row.id, []).append(row)
    return {name: sorted(attempts, key=lambda row: row.attempt) for name, attempts in questions.items()}


@dataclass(frozen=True, slots=True)
class Question:
    """The judged attempts at one question, in order. Answers are stripped; "" means that an attempt has no answer."""

    id: str
    data_source: str
    ability: str | None
    votes: tuple[Vote, ...]

    @property
    def right(self) -> list[bool]:
        return [value == 1.0 for _, value in self.votes]


def questions_of(records: Iterable[Sequence[Any]]) -> list[Question]:
    """Build a ``Question`` for each question id in the evaluation records, in order of first appearance. ``records``
    has the ``FIELDS`` of each row; attempts without accuracy are left out."""
    found: dict[str, list[Sequence[Any]]] = {}
    for record in records:
        if record[4] is not None:
            found.setdefault(record[0], []).append(record)
    return [
        Question(name, part[0][1], part[0][5], tuple(((r[3] or "").strip(), r[4]) for r in sorted(part, key=_attempt)))
        for name, part in found.items()
    ]


def _attempt(record: Sequence[Any]) -> int:
    return record[2]


def sampling_metrics(rows: Sequence[EvaluationRow], *, resamples: int = 10_000) -> dict[str, Interval]:
    """Return the metrics over several attempts at each question, by name: average@k, pass@k, maj@k and their bootstrap
    forms. The largest k is the largest number of judged attempts at a question.

    - ``average/<k>``: share of right attempts, mean over all questions, at the largest k;
    - ``average_of_sets/<k>``: mean over data sources of their averages, as in SOD's tables (average@32), with several
      data sources only; its interval resamples each source's questions. With one attempt, this is the only metric;
    - ``pass/<k>``: one of k attempts is right, the unbiased estimator over all n attempts (``statistics.pass_at_k``);
      ``pass_first/<k>``: one of the first k (the published definition); k in powers of two and the largest;
    - ``maj/<k>``: the majority vote of k attempts is right (``majority``) after ``united``; the same k without 1;
    - ``best_bootstrap/<k>``, ``maj_bootstrap/<k>``: best@k and maj@k of the released code, k in powers of two from 2.
      best@k is biased: its expectation is ``1 - (1 - c / n)^k``.

    A question with fewer than k judged attempts counts with all its attempts: leaving it out would change the set of
    questions with k. With several data sources each metric also exists by source, at the largest k:
    ``pass/32/<data source>``. Votes skip questions whose answers are programs, and need an attempt with an answer.
    """
    questions = questions_of([getattr(row, name) for name in FIELDS] for row in rows)
    largest = max((len(question.votes) for question in questions), default=0)
    parts = {"": questions} | by_source(questions)
    metrics: dict[str, Interval] = {}
    if len(parts) > 1:
        (values,) = question_values("average", questions, [largest]).values()
        metrics[f"{OF_SETS}/{largest}"] = mean_of_sets(values, questions, resamples=resamples)
    if largest < 2:
        return metrics
    for source, part in parts.items():
        for family in PER_QUESTION:
            sizes = [k for k in sizes_of(family, largest) if not source or k == largest]
            for k, values in question_values(family, part, sizes).items():
                if values:
                    name = f"{family}/{k}/{source}" if source else f"{family}/{k}"
                    metrics[name] = bootstrap_interval(list(values.values()), resamples=resamples)
    return metrics


def metric_values(name: str, questions: Sequence[Question]) -> Values:
    """Return every question's value of one metric, as {question id: value}. A metric is named as in
    ``sampling_metrics``; a name with a data source covers that source only."""
    family, size, *sources = name.split("/", 2)
    part = [question for question in questions if not sources or question.data_source == sources[0]]
    return question_values("average" if family == OF_SETS else family, part, [int(size)])[int(size)]


def by_source(questions: Sequence[Question]) -> dict[str, list[Question]]:
    """Group questions by data source, sorted by the source's name. The result is empty if there is only one source."""
    sources = sorted({question.data_source for question in questions})
    parts = {source: [q for q in questions if q.data_source == source] for source in sources}
    return parts if len(parts) > 1 else {}


def mean_of_sets(values: Mapping[str, float], questions: Sequence[Question], *, resamples: int = 10_000) -> Interval:
    """Average the questions' values within each data source, then average these means, with a bootstrap interval.
    Questions without a value are left out."""
    sets: dict[str, list[float]] = {}
    for question in questions:
        if question.id in values:
            sets.setdefault(question.data_source, []).append(values[question.id])
    return bootstrap_strata(list(sets.values()), resamples=resamples)


def sizes_of(family: str, largest: int) -> list[int]:
    """Return the k for which a family of metrics (average@k, pass@k, maj@k) is computed, ascending."""
    powers = [2**i for i in range(largest.bit_length())]
    if family.endswith("_bootstrap"):
        return powers[1:]
    if family == "average":
        return [largest]
    return sorted({*(powers if family.startswith("pass") else powers[1:]), largest})


def question_values(family: str, questions: Sequence[Question], sizes: Sequence[int]) -> dict[int, Values]:
    """Return the values of one family of metrics (such as pass@k) as {k: {question id: value}}. Majority votes skip
    questions whose answers are programs."""
    if family.startswith("maj"):
        questions = [question for question in questions if question.ability != PROGRAMS]
        if not any(answer for question in questions for answer, _ in question.votes):
            return {k: {} for k in sizes}
    values: dict[int, Values] = {k: {} for k in sizes}
    for question in questions:
        has = len(question.votes)
        by_k = PER_QUESTION[family](question, sorted({min(k, has) for k in sizes}))
        for k in sizes:
            values[k][question.id] = by_k[min(k, has)]
    return values


def united(votes: Sequence[Vote]) -> list[Vote]:
    """Rewrite equal answers with the spelling of the first one, so that majority votes count them together. All right
    answers are equal, and numbers are compared by value. Other equalities would need the task's judge for each pair.

    >>> united([("33", 0.0), ("033", 0.0), ("1/2", 1.0), ("0.5", 1.0)])
    [('33', 0.0), ('33', 0.0), ('1/2', 1.0), ('1/2', 1.0)]
    """
    spelling: dict[Any, str] = {}

    def value(answer: str, correct: float) -> Any:
        return "gold" if correct == 1.0 else Fraction(answer) if NUMBER.fullmatch(answer) else (answer,)

    return [(spelling.setdefault(value(a, correct), a) if a else a, correct) for a, correct in votes]


def majority(votes: Sequence[Vote], sizes: Sequence[int]) -> dict[int, float]:
    """Return the expected correctness of the most frequent answer among k attempts, for each k in ``sizes``. The k
    attempts are chosen without replacement.

    "" abstains: it counts as one of the k and never wins; if all k abstain, the result is wrong. Ties are broken
    uniformly. The correctness of an answer is the mean over its attempts. The computation is exact: for each answer and
    each number t of its votes, it counts the choices in which no other answer gets more than t votes, by the number of
    ties at t. Cost: about n^2 small array operations per question. Counts are float64, which suffices up to n = 1000.

    >>> majority([("4", 1.0), ("4", 1.0), ("5", 0.0), ("", 0.0)], [1, 4])
    {1: 0.5, 4: 1.0}
    """
    n, abstained = len(votes), sum(not answer for answer, _ in votes)
    right: dict[str, list[float]] = {}
    for answer, correct in votes:
        if answer:
            right.setdefault(answer, []).append(correct)
    counts = Counter(len(values) for values in right.values())
    totals = dict.fromkeys(sizes, 0.0)
    for count in counts:  # answers with as many votes win with the same probability
        value = sum(float(np.mean(values)) for values in right.values() if len(values) == count)
        others = [c for c, number in (counts - Counter([count])).items() for _ in range(number)]
        for t in range(1, count + 1):
            ways_DS = _ways(others, abstained, t, n)
            shares_D = ways_DS @ (1.0 / (1.0 + np.arange(ways_DS.shape[1])))
            for k in sizes:
                if k >= t:
                    totals[k] += value * math.comb(count, t) * float(shares_D[k - t]) / math.comb(n, k)
    return totals


def _ways(others: Sequence[int], abstained: int, t: int, n: int) -> np.ndarray:
    """Count the ways to choose d votes from the other answers and abstentions, with no answer chosen more than t times
    and s answers exactly t times. Returns a table [D, S] with D = n + 1 and S = number of answers with t votes + 1."""
    ways = np.zeros((n + 1, sum(c >= t for c in others) + 1))
    ways[: abstained + 1, 0] = [math.comb(abstained, x) for x in range(abstained + 1)]
    for count in others:
        grown = ways.copy()  # none of this answer's votes is drawn
        for x in range(1, min(count, t) + 1):
            tied = int(x == t)
            grown[x:, tied:] += math.comb(count, x) * ways[: n + 1 - x, : ways.shape[1] - tied]
        ways = grown
    return ways


@lru_cache(maxsize=64)
def _draws(n: int, k: int) -> np.ndarray:
    """Return 1000 samples of ``k`` indices below ``n``, with replacement, shape [1000, k]. The released code seeds
    numpy with 42 at every call."""
    return np.random.RandomState(DRAW_SEED).choice(n, size=(DRAWS, k), replace=True)


def best_bootstrap(right: Sequence[float], k: int) -> float:
    """Return the bootstrap estimate of best@k: the mean of the best of k attempts over 1000 samples with replacement
    (released ``best@k/mean``)."""
    return float(np.asarray(right)[_draws(len(right), k)].max(axis=1).mean())


def maj_bootstrap(votes: Sequence[Vote], k: int) -> float:
    """Return the bootstrap estimate of maj@k: the mean correctness of the most frequent of k answers over 1000 samples
    with replacement (released ``maj@k/mean``). "" is an ordinary answer. Ties go to the answer sampled first, whose
    first vote gives the correctness."""
    correct = np.asarray([value for _, value in votes])
    codes = np.unique([answer for answer, _ in votes], return_inverse=True)[1]
    drawn_DK = _draws(len(votes), k)
    answers_DK = codes[drawn_DK]
    frequency_DK = (answers_DK[:, :, None] == answers_DK[:, None, :]).sum(axis=2)
    winner_D = frequency_DK.argmax(axis=1)  # the first place of the highest frequency: first seen, and its first vote
    return float(correct[drawn_DK[np.arange(DRAWS), winner_D]].mean())


def _average(question: Question, sizes: Sequence[int]) -> dict[int, float]:
    return dict.fromkeys(sizes, float(np.mean([value for _, value in question.votes])))


def _pass(question: Question, sizes: Sequence[int]) -> dict[int, float]:
    return {k: pass_at_k(len(question.right), sum(question.right), k) for k in sizes}


# By k, the number of a question that has k attempts or more.
PER_QUESTION: dict[str, Callable[[Question, Sequence[int]], dict[int, float]]] = {
    "average": _average,
    "pass": _pass,
    "pass_first": lambda question, sizes: {k: float(any(question.right[:k])) for k in sizes},
    "best_bootstrap": lambda question, sizes: {k: best_bootstrap(question.right, k) for k in sizes},
    "maj": lambda question, sizes: majority(united(question.votes), sizes),
    "maj_bootstrap": lambda question, sizes: {k: maj_bootstrap(question.votes, k) for k in sizes},
}
