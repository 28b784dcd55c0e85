"""The rows of ``evaluation/turns.parquet``: divergence of teacher and student, weight and outcome of each turn.

Only turns that hold a token have a row (SOD's paper calls a turn a step, docs/algorithms/sod.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import polars as pl

from callbacks.evaluation.statistics import Interval, bootstrap_pooled
from common.files import replacing
from rollout.trajectory import Trajectory
from rollout.trajectory_metrics import ERRONEOUS, outcome_of

TURNS_PREFIX = "turns/"  # of these metrics in evaluation.json
SCORES_FILE = "evaluation/turns.parquet"  # in a stage's folder
TRAJECTORIES_FILE = "evaluation/scored_trajectories.parquet"  # the trajectories behind them

MEASURES = ("divergence", "weight", "signed", "teacher_entropy")  # a module returns these for each turn
SHOWN_TURNS = 6  # the first turns that have separate metrics
SHOWN = ("divergence", "weight", "teacher_entropy")  # the measures that have a metric for each turn


@dataclass(frozen=True, slots=True)
class TurnScore:
    """Scores and outcome of one turn of one trajectory. The fields are the columns of ``evaluation/turns.parquet``."""

    id: str  # of the question
    attempt: int
    data_source: str
    turn: int  # k, from 1
    turns: int  # K: how many the trajectory has
    tokens: int  # sampled in the turn
    divergence: float  # d_k = mean |S - T| over the turn's tokens: log-probs of student and teacher, nats (eq. 6)
    weight: float  # w_k, 1 at the first turn (eq. 7)
    signed: float  # mean T - S, nats: above 0 where the teacher likes the tokens more
    teacher_entropy: float  # mean entropy of the teacher's distributions at the turn's tokens, nats
    outcome: str  # see ``rollout.trajectory_metrics.outcome_of``
    acc: float | None  # correctness of the trajectory, or None if its reward has no part `acc`
    verdict: bool | None = None  # the environment's (``verdicts_of``), or None if it cannot tell


def turns_with_tokens(trajectory: Trajectory) -> list[int]:
    """Return the indices of a trajectory's turns that contain at least one sampled token."""
    return [i for i, turn in enumerate(trajectory.turns) if turn.end > turn.start]


def verdicts_of(environment: object, trajectory: Trajectory) -> Sequence[bool | None]:
    """Return for each turn whether the environment calls it right (its ``verdicts``): True, False, or None if it cannot
    tell."""
    judge = getattr(environment, "verdicts", None)
    return [None] * len(trajectory.turns) if judge is None else judge(trajectory)


def turn_scores(
    trajectory: Trajectory, metrics: Mapping[str, Sequence[float]], verdicts: Sequence[bool | None] | None = None
) -> list[TurnScore]:
    """Build the ``TurnScore`` of each turn of a trajectory from its metrics and verdicts.

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
        TurnScore(
            id=trajectory.task.id,
            attempt=trajectory.index,
            data_source=trajectory.task.data_source,
            turn=k + 1,
            turns=count,
            tokens=trajectory.turns[turn].end - trajectory.turns[turn].start,
            outcome=outcome_of(trajectory, turn),
            acc=acc,
            verdict=None if verdicts is None else verdicts[turn],
            **{name: float(metrics[name][k]) for name in MEASURES},
        )
        for k, turn in enumerate(turns)
    ]


def by_trajectory(rows: Iterable[TurnScore]) -> list[list[TurnScore]]:
    """Group turn scores by trajectory, sorted by question, attempt and turn."""
    of: dict[tuple[str, int], list[TurnScore]] = {}
    for row in sorted(rows, key=lambda row: (row.id, row.attempt, row.turn)):
        of.setdefault((row.id, row.attempt), []).append(row)
    return list(of.values())


def is_wrong(outcome: str, verdict: bool | None) -> bool:
    """Return whether a turn was wrong: by the environment's verdict if there is one, else by its outcome (error,
    timeout, ...)."""
    return outcome in ERRONEOUS if verdict is None else not verdict


def wrong_before(turns: Iterable[tuple[str, bool | None]]) -> list[bool]:
    """Return for each turn whether an earlier turn was wrong. Turns are given as (outcome, verdict).

    >>> wrong_before([("ok", None), ("error", None), ("ok", None)])
    [False, False, True]
    """
    found, wrong = [], False
    for outcome, verdict in turns:
        found.append(wrong)
        wrong = wrong or is_wrong(outcome, verdict)
    return found


def after_error(trajectory: Sequence[TurnScore]) -> list[TurnScore]:
    """Return the scores of the turns that directly follow a turn with an error."""
    return [row for before, row in pairwise(trajectory) if before.outcome in ERRONEOUS]


def score_metrics(trajectories: Sequence[Sequence[TurnScore]], *, resamples: int = 10_000) -> dict[str, Interval]:
    """Average divergence, weight and teacher entropy over turns, with 95 % intervals that resample questions. n counts
    turns.

    ``turns/divergence/<k>``, ``turns/weight/<k>`` and ``turns/teacher_entropy/<k>`` for the first ``SHOWN_TURNS``
    turns, over the trajectories that have turn k; ``turns/divergence/after_error`` and ``turns/weight/after_error``
    over all turns that follow an erroneous one. Means without a turn are absent.
    """
    metrics: dict[str, Interval] = {}
    for k in range(1, SHOWN_TURNS + 1):
        part = [row for rows in trajectories for row in rows if row.turn == k]
        metrics |= {f"{TURNS_PREFIX}{name}/{k}": _mean(part, name, resamples) for name in SHOWN if part}
    part = [row for rows in trajectories for row in after_error(rows)]
    for name in ("divergence", "weight"):
        metrics |= {f"{TURNS_PREFIX}{name}/after_error": _mean(part, name, resamples)} if part else {}
    return metrics


def _mean(rows: Sequence[TurnScore], name: str, resamples: int) -> Interval:
    """Return the mean of one measure over turns, with a bootstrap interval over questions."""
    return bootstrap_pooled([(row.id, [getattr(row, name)]) for row in rows], resamples=resamples)


def save_scores(path: Path, rows: Sequence[TurnScore]) -> None:
    types = {
        "str": pl.String,
        "int": pl.Int64,
        "float": pl.Float64,
        "float | None": pl.Float64,
        "bool | None": pl.Boolean,
    }
    schema = {field.name: types[str(field.type)] for field in dataclasses.fields(TurnScore)}
    with replacing(path) as temporary:
        pl.DataFrame([asdict(row) for row in rows], schema=schema).write_parquet(temporary)


def load_scores(folder: Path) -> list[TurnScore] | None:
    """Read the turn scores (``TurnScore``) of a stage's test from its output folder. Returns None if ``TurnDivergence``
    did not run."""
    path = Path(folder) / SCORES_FILE
    return [TurnScore(**row) for row in pl.read_parquet(path).iter_rows(named=True)] if path.is_file() else None
