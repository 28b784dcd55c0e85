"""Gates of ``make preconditions``: checks that a method's mechanism can work, before reinforcement learning starts.

The bounds are ours (docs/preconditions.md); no paper reports them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from callbacks.evaluation.continuations import CLEAN, DRIFTED, PREFIX
from callbacks.evaluation.fork_outcomes import PREFIX as FORKS
from callbacks.evaluation.turn_scores import TurnScore, wrong_before
from experiments.reports.markdown import markdown_table

SOME = 0.99  # of groups without success, at most, so that some are rewarded
FEWEST = 20  # prefixes or tool results, at least, for a measurement
SHUFFLED_TOLERANCE = 0.1  # of success rate, between shuffled skills and none

Test = Mapping[str, Any]  # "test" of an evaluation.json: metric -> {mean, low, high, n}


@dataclass(frozen=True, slots=True)
class Gate:
    """A precondition of training: a measurement and its bounds. ``found`` is None if it could not be measured; the gate
    then fails."""

    name: str  # for ALLOW=NAME
    title: str
    found: float | None
    least: float | None  # one or both bounds
    most: float | None
    advice: str  # what to change if it fails

    @property
    def passed(self) -> bool:
        low, high = (-math.inf if self.least is None else self.least), (math.inf if self.most is None else self.most)
        return self.found is not None and low <= self.found <= high

    @property
    def shown(self) -> str:
        return "not measured" if self.found is None else f"{self.found:.3f}"

    @property
    def expected(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        return f"at least {self.least:.3g}" if self.least is not None else f"at most {self.most:.3g}"


def groups_gate(start: Test, size: int, least: float) -> Gate:
    """Return the gate on the share of groups (``size`` trajectories each) without any success."""
    found = measured(start, f"pass/{size}")
    return Gate(
        "no_success",
        f"groups of {size} without any success",
        None if found is None else 1.0 - found,
        least,
        SOME,
        "if too few, outcome rewards alone teach enough: take harder tasks, fewer turns, or an earlier cold start; "
        "if all, no trajectory is ever rewarded: take a longer cold start",
    )


def distillation_gates(start: Test, turns: Sequence[Sequence[TurnScore]], teacher: Test, size: int) -> list[Gate]:
    """Return the gates (preconditions) of the algorithm SOD, which distils from a teacher.

    Args:
        start: test of the student.
        turns: its turns with the teacher's scores (``by_trajectory``).
        teacher: test of the teacher with ``Continuations`` of the student's trajectories.
    """
    placed = place(turns)
    first = [rows[0].divergence for rows in turns if rows]
    return [
        groups_gate(start, size, 0.8),
        Gate(
            "teacher_clean", "teacher succeeds from clean prefixes", measured(teacher, PREFIX + CLEAN, FEWEST),
            0.8, None, "the teacher cannot do the task: train it longer, or take a larger one",
        ),
        Gate(
            "teacher_drifted", "teacher succeeds from drifted prefixes", measured(teacher, PREFIX + DRIFTED, FEWEST),
            None, 0.3,
            "the teacher recovers from errors, so its advice after an error is good: no turn needs a lower weight",
        ),
        Gate(
            "auc_clean", "AUC of a turn's mean T - S for its verdict, clean", auc_of(placed, drifted=False), 0.8, None,
            "the teacher's log-ratio does not separate good turns from bad ones: take a more certain teacher",
        ),
        Gate(
            "auc_drifted", "the same after an error", auc_of(placed, drifted=True), None, 0.6,
            "the teacher's log-ratio is as good after an error as before: no turn needs a lower weight",
        ),
        Gate(
            "weight_ratio", "weight of drifted over clean turns, from the second", weight_ratio(placed), None, 0.5,
            "the divergence does not rise after an error: take a teacher that has never seen a recovery",
        ),
        Gate(
            "first_turn", "coefficient of variation of d_1", variation(first), None, 1.0,
            "the reference of all weights is noise: make first turns longer",
        ),
    ]  # fmt: skip


def skill_gates(plain: Test, skilled: Test, shuffled: Test, size: int) -> list[Gate]:
    """Check whether SDAR can work: return its gates (measured value and required range). They come from three tests of
    the initial student: without skills (advice texts), with skills, and with other tasks' skills."""
    without, given, others = (measured(test, f"average/{size}") for test in (plain, skilled, shuffled))
    return [
        groups_gate(plain, size, 0.7),
        Gate(
            "without_skills", "success without skills", without, None, 0.05,
            "the student can do it without advice: take harder tasks or an earlier cold start",
        ),
        Gate(
            "with_skills", "success with skills", given, 0.8, None,
            "the self-teacher cannot follow its skills: show skills in more of the cold start's demonstrations",
        ),
        Gate(
            "shuffled_skills", "success with other tasks' skills", others, None,
            SHUFFLED_TOLERANCE + (without or 0.0),
            "the form or length of skills helps, not their content: inspect the bank and its retriever",
        ),
    ]  # fmt: skip


def fork_gates(start: Test) -> list[Gate]:
    """Return the gates (preconditions) of the algorithm ARPO, from a test of the student with the callback
    ``ForkOutcomes``."""
    return [
        Gate(
            "open", "tool results after which outcomes differ", measured(start, f"{FORKS}open", FEWEST), 0.2, None,
            "outcomes are decided before the fork: take harder or easier tasks, or tool results that matter more",
        ),
        Gate(
            "entropy_tells", "correlation of dH with the outcome's variance",
            measured(start, f"{FORKS}correlation", FEWEST), 0.2, None,
            "entropy does not show where outcomes are open: random branches would do as well",
        ),
    ]  # fmt: skip


def measured(test: Test, metric: str, least: int = 0) -> float | None:
    """Return the mean of a test metric, or None if it has fewer than ``least`` measurements."""
    return float(test[metric]["mean"]) if metric in test and test[metric]["n"] >= least else None


def place(turns: Sequence[Sequence[TurnScore]]) -> list[tuple[TurnScore, bool]]:
    """Return every turn of all trajectories, paired with whether an earlier turn of its trajectory went wrong."""
    return [
        (row, drifted)
        for rows in turns
        for row, drifted in zip(rows, wrong_before((row.outcome, row.verdict) for row in rows), strict=True)
    ]


def auc_of(placed: Sequence[tuple[TurnScore, bool]], *, drifted: bool) -> float | None:
    """Return the AUC with which the teacher's log-ratio predicts whether a turn is correct, by the environment's
    verdict, or without a verdict by the trajectory's success."""
    scores: dict[bool | None, list[float]] = {True: [], False: [], None: []}
    for row, after_error in placed:
        if after_error is drifted:
            good = row.acc >= 1.0 if row.verdict is None and row.acc is not None else row.verdict
            scores[good].append(row.signed)
    return auc(scores[True], scores[False])


def auc(good: Sequence[float], bad: Sequence[float]) -> float | None:
    """Return the probability that a good score exceeds a bad one (ties: half), or None if either list is empty."""
    if not good or not bad:
        return None
    above = np.subtract.outer(good, bad)
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


def weight_ratio(placed: Sequence[tuple[TurnScore, bool]]) -> float | None:
    clean, after = (weight_of(placed, drifted=drifted) for drifted in (False, True))
    return after / clean if clean and after is not None else None


def weight_of(placed: Sequence[tuple[TurnScore, bool]], *, drifted: bool) -> float | None:
    """Return the mean weight (in SOD's loss) over the clean or drifted turns (before or after an error). First turns
    are left out: their weight is 1 by definition."""
    weights = [row.weight for row, after_error in placed if after_error is drifted and row.turn > 1]
    return statistics.fmean(weights) if weights else None


def variation(values: Sequence[float]) -> float | None:
    """Return the coefficient of variation (standard deviation over mean); None for fewer than two values or a mean of
    0."""
    if len(values) < 2 or not statistics.fmean(values):
        return None
    return statistics.stdev(values) / statistics.fmean(values)


def gates_of_seeds(of: Mapping[int, Sequence[Gate]]) -> str:
    """Return the gates of all seeds as a Markdown table: a row per gate, a column per seed, failed gates bold."""
    first, *_ = of.values()
    rows = [
        [gate.name, gate.title, gate.expected, *(g.shown if g.passed else f"**{g.shown}**" for g in seeds)]
        for gate, *seeds in zip(first, *of.values(), strict=True)
    ]
    return (
        "Measured on each seed's initial model before training ([preconditions](../preconditions.md)). Failed gates are"
        f" bold.\n\n{markdown_table(['gate', '', 'expected', *(f'seed {seed}' for seed in of)], rows)}"
    )


def gates_table(gates: Sequence[Gate], title: str) -> str:
    from rich.table import Table

    from experiments.reports.compare import table_text

    table = Table(title=title)
    for column in ("gate", "", "found", "expected", ""):
        table.add_column(column)
    for gate in gates:
        table.add_row(gate.name, gate.title, gate.shown, gate.expected, "pass" if gate.passed else "FAIL")
    return table_text(table)
