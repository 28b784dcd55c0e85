"""Gates of ``make preconditions``: whether a mechanism has something to work on, before any reinforcement. Pure.

The bounds are ours (docs/preconditions.md); nothing published measures them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from callbacks.evaluation.continuations import CLEAN, DRIFTED, PREFIX
from callbacks.evaluation.fork_outcomes import PREFIX as FORKS
from callbacks.evaluation.step_rows import StepRow, wrong_before
from experiments.reports.markdown import markdown_table

SOME = 0.99  # of groups without success, so that a reward is met at all
FEWEST = 20  # prefixes or tool results; fewer measure nothing
SHUFFLED_TOLERANCE = 0.1  # of success, between shuffled skills and none

Test = Mapping[str, Any]  # "test" of an evaluation.json: metric -> {mean, low, high, n}


@dataclass(frozen=True, slots=True)
class Gate:
    """``found`` is None where nothing could be measured, which is no pass."""

    name: str  # by which it is overridden
    title: str
    found: float | None
    least: float | None  # one bound or both
    most: float | None
    advice: str  # what to change where it fails

    @property
    def passed(self) -> bool:
        if self.found is None:
            return False
        return (self.least is None or self.found >= self.least) and (self.most is None or self.found <= self.most)

    @property
    def expected(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        return f"at least {self.least:.3g}" if self.least is not None else f"at most {self.most:.3g}"


def groups_gate(start: Test, size: int, least: float) -> Gate:
    """``size``: trajectories in a group."""
    found = mean(start, f"pass/{size}")
    return Gate(
        "no_success",
        f"groups of {size} without any success",
        None if found is None else 1.0 - found,
        least,
        SOME,
        "too few, and outcome rewards alone teach enough: take harder tasks, fewer turns, or an earlier cold start; "
        "all, and nothing is ever rewarded: take a longer cold start",
    )


def distillation_gates(start: Test, steps: Sequence[Sequence[StepRow]], teacher: Test, size: int) -> list[Gate]:
    """SOD's: of the student's test, the steps of its trajectories as the teacher scored them (``by_trajectory``), and
    the teacher's test with ``Continuations`` of these."""
    placed = place(steps)
    first = [rows[0].divergence for rows in steps if rows]
    return [
        groups_gate(start, size, 0.8),
        Gate(
            "teacher_clean", "teacher continues right, clean prefixes", of_enough(teacher, PREFIX + CLEAN), 0.8, None,
            "the teacher cannot do the task: train it longer, or take a larger one",
        ),
        Gate(
            "teacher_drifted", "teacher continues right, drifted prefixes", of_enough(teacher, PREFIX + DRIFTED), None,
            0.3,
            "the teacher knows the way back, so that its advice after an error is good: there is nothing to weigh down",
        ),
        Gate(
            "auc_clean", "AUC of a step's mean T - S for the verdict, clean", auc_of(placed, drifted=False), 0.8, None,
            "the teacher's log-ratio does not tell good steps from bad ones: take a more certain teacher",
        ),
        Gate(
            "auc_drifted", "the same after an error", auc_of(placed, drifted=True), None, 0.6,
            "the teacher's log-ratio is as good after an error as before: there is nothing to weigh down",
        ),
        Gate(
            "weight_ratio", "weight of drifted over clean steps, from the second", weight_ratio(placed), None, 0.5,
            "the divergence does not rise after an error: take a teacher that has never seen a recovery",
        ),
        Gate(
            "first_step", "coefficient of variation of d_1", variation(first), None, 1.0,
            "the reference of all weights is noise: longer first steps",
        ),
    ]  # fmt: skip


def skill_gates(plain: Test, skilled: Test, shuffled: Test, size: int) -> list[Gate]:
    """SDAR's: of three tests of the student as it starts, without skills, with them, and with others in their place."""
    without, average = mean(plain, f"average/{size}"), f"average/{size}"
    return [
        groups_gate(plain, size, 0.7),
        Gate(
            "without_skills", "success without skills", without, None, 0.05,
            "the student can do it without advice: take harder tasks or an earlier cold start",
        ),
        Gate(
            "with_skills", "success with skills", mean(skilled, average), 0.8, None,
            "the self-teacher cannot follow its skills: show skills in more of the cold start's demonstrations",
        ),
        Gate(
            "shuffled_skills", "success with other tasks' skills", mean(shuffled, average), None,
            SHUFFLED_TOLERANCE + (without or 0.0),
            "what helps is not what the skills say (their form, their length): look at the bank and its retriever",
        ),
    ]  # fmt: skip


def fork_gates(start: Test) -> list[Gate]:
    """ARPO's: of the student's test with ``ForkOutcomes``."""
    return [
        Gate(
            "open", "tool results after which outcomes differ", of_enough(start, f"{FORKS}open"), 0.2, None,
            "what a fork would sample anew is decided before it: harder or easier tasks, or results that matter more",
        ),
        Gate(
            "entropy_tells", "correlation of dH with the outcome's variance", of_enough(start, f"{FORKS}correlation"),
            0.2, None, "entropy does not tell where outcomes are open: branches at random would do as well",
        ),
    ]  # fmt: skip


def mean(test: Test, metric: str) -> float | None:
    return None if metric not in test else float(test[metric]["mean"])


def of_enough(test: Test, metric: str) -> float | None:
    """The mean, if it is over ``FEWEST``."""
    return mean(test, metric) if metric in test and test[metric]["n"] >= FEWEST else None


def place(steps: Sequence[Sequence[StepRow]]) -> list[tuple[StepRow, bool]]:
    """Every step of every trajectory, with whether one before it went wrong."""
    return [
        (row, drifted)
        for rows in steps
        for row, drifted in zip(rows, wrong_before((row.outcome, row.verdict) for row in rows), strict=True)
    ]


def auc_of(placed: Sequence[tuple[StepRow, bool]], *, drifted: bool) -> float | None:
    """Of ``signed`` for the environment's verdict on the step, or where it has none for the trajectory's success."""
    part = [row for row, after_error in placed if after_error is drifted]
    judged = [(row.signed, _is_good(row)) for row in part]
    return auc([s for s, good in judged if good is True], [s for s, good in judged if good is False])


def _is_good(row: StepRow) -> bool | None:
    if row.verdict is not None or row.acc is None:
        return row.verdict
    return row.acc >= 1.0


def auc(good: Sequence[float], bad: Sequence[float]) -> float | None:
    """Probability that a good one scores above a bad one, ties by half; None without one of either."""
    if not good or not bad:
        return None
    above = np.subtract.outer(good, bad)
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


def weight_ratio(placed: Sequence[tuple[StepRow, bool]]) -> float | None:
    clean, after = (weight_of(placed, drifted=drifted) for drifted in (False, True))
    return after / clean if clean and after is not None else None


def weight_of(placed: Sequence[tuple[StepRow, bool]], *, drifted: bool) -> float | None:
    """Mean over steps; the first ones, which weigh 1 by definition, are left out."""
    weights = [row.weight for row, after_error in placed if after_error is drifted and row.step > 1]
    return statistics.fmean(weights) if weights else None


def variation(values: Sequence[float]) -> float | None:
    """Standard deviation over mean."""
    if len(values) < 2 or not statistics.fmean(values):
        return None
    return statistics.stdev(values) / statistics.fmean(values)


def gates_of_seeds(of: Mapping[int, Sequence[Gate]]) -> str:
    """The gates of every seed's start, as Markdown."""
    first, *_ = of.values()
    rows = [
        [gate.name, gate.title, gate.expected, *(_found(gates[k]) for gates in of.values())]
        for k, gate in enumerate(first)
    ]
    return (
        "**Gates**, measured on each seed's start before anything trained from it (docs/preconditions.md); in bold "
        f"what failed:\n\n{markdown_table(['gate', '', 'expected', *(f'seed {seed}' for seed in of)], rows)}"
    )


def _found(gate: Gate) -> str:
    found = "not measured" if gate.found is None else f"{gate.found:.3f}"
    return found if gate.passed else f"**{found}**"


def gates_table(gates: Sequence[Gate], title: str) -> str:
    from rich.table import Table

    from experiments.reports.compare import table_text

    table = Table(title=title)
    for column in ("gate", "", "found", "expected", ""):
        table.add_column(column)
    for gate in gates:
        found = "not measured" if gate.found is None else f"{gate.found:.3f}"
        table.add_row(gate.name, gate.title, found, gate.expected, "pass" if gate.passed else "FAIL")
    return table_text(table)
