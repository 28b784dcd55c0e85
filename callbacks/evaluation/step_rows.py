"""The rows of ``evaluation/steps.parquet``: divergence of teacher and student, weight and outcome of each turn.

Only turns that hold a token have a row (SOD calls them steps, docs/papers/sod.md 1.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import polars as pl

from callbacks.evaluation.statistics import Interval, bootstrap_function
from common.files import replacing
from rollout.trajectory import Trajectory
from rollout.trajectory_metrics import ERRONEOUS, outcome_of

STEPS_PREFIX = "steps/"  # of these metrics in evaluation.json
STEPS_FILE = "evaluation/steps.parquet"  # in a stage's folder
TRAJECTORIES_FILE = "evaluation/steps_trajectories.parquet"  # the trajectories behind them

MEASURES = ("divergence", "weight", "signed", "teacher_entropy")  # a module returns these for each turn
SHOWN_STEPS = 6  # the first turns that have separate metrics
SHOWN = ("divergence", "weight", "teacher_entropy")  # the measures that have a metric for each step


@dataclass(frozen=True, slots=True)
class StepRow:
    """One turn of one trajectory. The fields are the columns of ``evaluation/steps.parquet``."""

    id: str  # of the question
    attempt: int
    data_source: str
    step: int  # k, from 1
    steps: int  # K: how many the trajectory has
    tokens: int  # sampled in the step
    divergence: float  # d_k = mean |S - T| over the step's tokens: log-probs of student and teacher, nats (eq. 6)
    weight: float  # w_k, 1 at the first step (eq. 7)
    signed: float  # mean T - S, nats: above 0 where the teacher likes the tokens more
    teacher_entropy: float  # mean entropy of the teacher's distributions at the step's tokens, nats
    outcome: str  # see ``rollout.trajectory_metrics.outcome_of``
    acc: float | None  # correctness of the trajectory, or None if its reward has no part `acc`
    verdict: bool | None = None  # the environment's (``verdicts_of``), or None if it cannot tell


def turns_with_tokens(trajectory: Trajectory) -> list[int]:
    """Return the indices of the turns that hold a token."""
    return [i for i, turn in enumerate(trajectory.turns) if turn.end > turn.start]


def verdicts_of(environment: object, trajectory: Trajectory) -> Sequence[bool | None]:
    """Return whether each turn was right, by the environment's ``verdicts``, or None if it cannot tell."""
    judge = getattr(environment, "verdicts", None)
    return [None] * len(trajectory.turns) if judge is None else judge(trajectory)


def step_rows(
    trajectory: Trajectory, metrics: Mapping[str, Sequence[float]], verdicts: Sequence[bool | None] | None = None
) -> list[StepRow]:
    """Return the rows of one trajectory.

    ``metrics`` has each of ``MEASURES`` with one value per turn that holds a token; ``verdicts`` has one per turn.

    Raises:
        ValueError: a measure is missing, or has another number of values, or values that are not finite.
    """
    turns = turns_with_tokens(trajectory)
    where, count = f"trajectory {trajectory.group}/{trajectory.index}", len(turns)
    for name in MEASURES:
        found = metrics.get(name)
        if found is None or len(found) != count or not all(map(math.isfinite, found)):
            raise ValueError(
                f"{where}: turn_divergences gave {found!r} as '{name}', expected one finite number for each of the "
                f"{count} turns that hold a token"
            )
    acc = None if trajectory.reward is None else trajectory.reward.parts.get("acc")
    return [
        StepRow(
            id=trajectory.task.id,
            attempt=trajectory.index,
            data_source=trajectory.task.data_source,
            step=k + 1,
            steps=count,
            tokens=trajectory.turns[turn].end - trajectory.turns[turn].start,
            outcome=outcome_of(trajectory, turn),
            acc=acc,
            verdict=None if verdicts is None else verdicts[turn],
            **{name: float(metrics[name][k]) for name in MEASURES},
        )
        for k, turn in enumerate(turns)
    ]


def by_trajectory(rows: Iterable[StepRow]) -> list[list[StepRow]]:
    """Group rows by trajectory, sorted by question, attempt and turn."""
    of: dict[tuple[str, int], list[StepRow]] = {}
    for row in sorted(rows, key=lambda row: (row.id, row.attempt, row.step)):
        of.setdefault((row.id, row.attempt), []).append(row)
    return list(of.values())


def is_wrong(outcome: str, verdict: bool | None) -> bool:
    """Return whether a turn went wrong, by the verdict if there is one, else by its outcome."""
    return outcome in ERRONEOUS if verdict is None else not verdict


def wrong_before(steps: Iterable[tuple[str, bool | None]]) -> list[bool]:
    """Return for each turn, given by outcome and verdict, whether an earlier turn went wrong.

    >>> wrong_before([("ok", None), ("error", None), ("ok", None)])
    [False, False, True]
    """
    found, wrong = [], False
    for outcome, verdict in steps:
        found.append(wrong)
        wrong = wrong or is_wrong(outcome, verdict)
    return found


def after_error(trajectory: Sequence[StepRow]) -> list[StepRow]:
    """Return the turns that directly follow an erroneous one."""
    return [row for before, row in pairwise(trajectory) if before.outcome in ERRONEOUS]


def step_metrics(trajectories: Sequence[Sequence[StepRow]], *, resamples: int = 10_000) -> dict[str, Interval]:
    """Return means over turns with a 95 % interval that resamples questions; n counts turns.

    ``steps/divergence/<k>``, ``steps/weight/<k>`` and ``steps/teacher_entropy/<k>`` for the first ``SHOWN_STEPS``
    turns, over the trajectories that have turn k; ``steps/divergence/after_error`` and ``steps/weight/after_error``
    over all turns that follow an erroneous one. Means without a turn are absent.
    """
    metrics: dict[str, Interval] = {}
    for k in range(1, SHOWN_STEPS + 1):
        part = [row for steps in trajectories for row in steps if row.step == k]
        metrics |= {f"{STEPS_PREFIX}{name}/{k}": _mean(part, name, resamples) for name in SHOWN if part}
    part = [row for steps in trajectories for row in after_error(steps)]
    for name in ("divergence", "weight"):
        metrics |= {f"{STEPS_PREFIX}{name}/after_error": _mean(part, name, resamples)} if part else {}
    return metrics


def _mean(rows: Sequence[StepRow], name: str, resamples: int) -> Interval:
    """Return the mean over rows; the interval resamples questions, because their trajectories are not independent."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        total = sums.setdefault(row.id, [0.0, 0.0])
        total[0] += getattr(row, name)
        total[1] += 1.0
    interval = bootstrap_function(list(zip(*sums.values(), strict=True)), lambda m: m[0] / m[1], resamples=resamples)
    return dataclasses.replace(interval, n=len(rows))


def save_steps(path: Path, rows: Sequence[StepRow]) -> None:
    types = {
        "str": pl.String,
        "int": pl.Int64,
        "float": pl.Float64,
        "float | None": pl.Float64,
        "bool | None": pl.Boolean,
    }
    schema = {field.name: types[str(field.type)] for field in dataclasses.fields(StepRow)}
    with replacing(path) as temporary:
        pl.DataFrame([asdict(row) for row in rows], schema=schema).write_parquet(temporary)


def load_steps(folder: Path) -> list[StepRow] | None:
    """Read the rows of a stage's test, or None if ``StepDivergence`` did not run."""
    path = Path(folder) / STEPS_FILE
    return [StepRow(**row) for row in pl.read_parquet(path).iter_rows(named=True)] if path.is_file() else None
