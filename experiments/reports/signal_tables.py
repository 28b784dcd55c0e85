"""Writes the sections "Turns" and "Gates" of a results page: tables of distillation's signals by turn."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from callbacks.evaluation.trajectory_kinds import Bounds, Kind, sort_by_kind
from callbacks.evaluation.turn_scores import (
    SHOWN,
    SHOWN_TURNS,
    TURNS_PREFIX,
    TurnScore,
    by_trajectory,
    load_scores,
    score_metrics,
)
from experiments.reports.compare import history_frame
from experiments.reports.markdown import markdown_table
from experiments.reports.preconditions import auc_of, place, weight_of, weight_ratio
from experiments.reports.results import Run

TITLES = {"divergence": "d", "weight": "w", "teacher_entropy": "teacher entropy"}
ACTIVE, GAP = "train/gate_active", "train/gap"
PLACES = {  # column title -> end of the metric's name in lightning_modules.maths.gates.gate_metrics
    **{f"part {k}": f"/part{k}" for k in range(1, 4)},
    **{f"turn {k}": f"/turn{k}" for k in range(1, 9)},
    "later": "/later",
}
TAIL = 10  # iterations averaged at the start and at the end of training
BOUNDS = Bounds()
TURNS_WORDS = (
    "Divergence of teacher and model on the model's own test trajectories, by turn (a turn is one message of the "
    "model; all seeds together). d: mean |log p_student - log p_teacher| over the turn's tokens, in nats. w: the "
    "turn's weight in SOD, 1 at the first turn. Teacher entropy: at the same tokens, in nats. "
    "Means are over the trajectories that have the turn. After an error: turns after one whose call failed, timed"
    " out, was refused or could not be read.\n"
)
DRIFT_WORDS = (
    "The same turns before an error in their trajectory (clean) and after it (drifted), by the world's verdict on"
    " a turn, or by its outcome if there is no verdict; turns after an error stay drifted, repaired or not. AUC: "
    "the probability that the teacher's log-ratio to the model, averaged over the turn's tokens, is higher at a "
    "right turn than at a wrong one (0.5: no information); a turn without a verdict counts as right if its "
    "trajectory succeeded. w excludes first turns. Each method has its own teacher.\n"
)
KINDS_WORDS = (
    f"Kinds of trajectories. A weight below {BOUNDS.low:g} is low. *Stable*: at least two turns, no error, no low "
    "weight. *Erroneous*: after some erroneous turn all weights are low, to the end. *Recovering*: an erroneous "
    f"turn, low weights at or after it, then no further error and a last weight of at least {BOUNDS.recovered:g}. "
    "*Other*: all others, such as single turns.\n"
)
GATES_WORDS = (
    "The self-teacher is the student with skills in its prompt. Gap: mean log p_teacher - log p_student over the "
    "sampled tokens, in nats. Endorsed: the share of tokens with a gate above one half (for the gap gate: tokens "
    'that are likelier under the teacher); "-" if all gates are equal, as without a gate (1) or at beta 0 (one '
    f"half). Means over seeds and over the first and the last {TAIL} iterations; by third of a turn and by turn "
    f"number over the last {TAIL}.\n"
)


def turns_section(runs: Sequence[Run]) -> str:
    """Return Markdown tables of divergence, weight and teacher entropy by turn; "" if no run has recorded them.

    Args:
        runs: in the order of the page; all seeds of a method are pooled.
    """
    of: dict[str, list[list[TurnScore]]] = {}
    for run in runs:
        if (rows := load_scores(run.folder)) is not None:
            of.setdefault(run.method, []).extend(by_trajectory(rows))
    if not of:
        return ""
    columns = [*map(str, range(1, SHOWN_TURNS + 1)), "after_error"]
    head = ["method", "", *(f"turn {k}" for k in columns[:-1]), "after an error"]
    by_turn: list[list[str]] = []
    by_drift: list[list[str]] = []
    by_kind: list[list[str]] = []
    for method, trajectories in of.items():
        found = score_metrics(trajectories, resamples=1)  # intervals are not shown
        for name in SHOWN:
            cells = [found.get(f"{TURNS_PREFIX}{name}/{at}") for at in columns]
            by_turn.append([method, TITLES[name], *(_text(cell and cell.mean) for cell in cells)])
        counts = [found.get(f"{TURNS_PREFIX}weight/{at}") for at in columns]
        by_turn.append([method, "n", *(str(cell.n if cell else 0) for cell in counts)])
        placed = place(trajectories)
        drifted = sum(after_error for _, after_error in placed)
        weights, aucs = ([f(placed, drifted=at) for at in (False, True)] for f in (weight_of, auc_of))
        by_drift.append(
            [method, *map(_text, [*weights, weight_ratio(placed), *aucs]), str(len(placed) - drifted), str(drifted)]
        )
        kinds = sort_by_kind(trajectories, BOUNDS)
        shares = [f"{len(kinds[kind])} ({len(kinds[kind]) / max(len(trajectories), 1):.0%})" for kind in Kind]
        by_kind.append([method, str(len(trajectories)), *shares])
    ends = ("clean", "drifted")
    return "\n".join(
        [
            "\n## Turns\n",
            TURNS_WORDS,
            markdown_table(head, by_turn),
            DRIFT_WORDS,
            markdown_table(
                ["method", *(f"w, {e}" for e in ends), "ratio", *(f"{x}, {e}" for x in ("AUC", "turns") for e in ends)],
                by_drift,
            ),
            KINDS_WORDS,
            markdown_table(["method", "trajectories", *(kind.value for kind in Kind)], by_kind),
        ]
    )


def gates_section(runs: Sequence[Run]) -> str:
    """Return Markdown tables of the gap (teacher's minus student's log-probs) and of the share of tokens that a
    self-teacher endorsed. Returns "" if no run has logged gates.

    Args:
        runs: in the order of the page; metrics are means over the seeds of a method.
    """
    methods = {run.folder: run.method for run in runs}
    history = history_frame(methods, [name + at for name in (ACTIVE, GAP) for at in ("", *PLACES.values())])
    means = history.group_by("run", "metric", "step").agg(pl.col("value").mean()).sort("step")
    value = pl.col("value")
    both = means.group_by("run", "metric").agg(
        first=value.head(TAIL).mean(), last=value.tail(TAIL).mean(), differs=((value > 0) & (value < 1)).any()
    )
    found = {(row["run"], row["metric"]): row for row in both.iter_rows(named=True)}
    gated = [method for method in dict.fromkeys(methods.values()) if (method, ACTIVE) in found]
    if not gated:
        return ""
    endorsing = [method for method in gated if found[method, ACTIVE]["differs"]]
    found |= {(method, ACTIVE): {} for method in gated if method not in endorsing}  # without a gate, all are equal
    ends = [(metric, end) for metric in (GAP, ACTIVE) for end in ("first", "last")]
    tables = (
        (gated, ["method", "gap, first", "gap, last", "endorsed, first", "endorsed, last"], ends),
        (endorsing, ["endorsed", *PLACES], [(ACTIVE + place, "last") for place in PLACES.values()]),
        (gated, ["gap", *PLACES], [(GAP + place, "last") for place in PLACES.values()]),
    )
    texts = []
    for shown, head, cells in tables:
        rows = [[m, *(_text(found.get((m, metric), {}).get(end)) for metric, end in cells)] for m in shown]
        texts += [markdown_table(head, rows)] if rows else []
    return "\n".join(["\n## Gates\n", GATES_WORDS, *texts])


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
