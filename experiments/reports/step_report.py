"""Results page, section "Steps": divergence of teacher and student by step, kinds of trajectories, and examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from callbacks.evaluation.step_kinds import NAMED, Bounds, Kind, examples, sort_by_kind
from callbacks.evaluation.step_rows import (
    SHOWN,
    SHOWN_STEPS,
    STEPS_FILE,
    STEPS_PREFIX,
    TRAJECTORIES_FILE,
    StepRow,
    by_trajectory,
    load_steps,
    step_metrics,
)
from experiments.reports.curves import DPI
from experiments.reports.markdown import markdown_table
from experiments.reports.preconditions import auc_of, place, weight_of, weight_ratio
from experiments.reports.results import Run
from experiments.reports.step_examples import example_text
from experiments.reports.step_plots import steps_figure
from rollout.files import replacing
from rollout.storage import load_trajectories
from rollout.tokenizer import load_tokenizer

TITLES = {"divergence": "d", "weight": "w", "teacher_entropy": "teacher entropy"}
Trajectories = list[list[StepRow]]


def write_steps(main: str, runs: Sequence[Run], picture: Path) -> tuple[str, list[Path]]:
    """The section as Markdown, with its picture written; ("", []) if no run has steps (``step_rows.load_steps``).

    Trajectories of all seeds of a method are put together. The readable ones are of the first seed of ``main`` that has
    steps, with their texts from the folder's ``evaluation/steps_trajectories.parquet``.

    Args:
        main: the method of the page.
        runs: in the order of the page.
        picture: the PNG to write; the section names it without its folder.

    Raises:
        FileNotFoundError: the examples' trajectories, or a tokenizer to read them with, are gone.
        ValueError: those trajectories are not of the test that the steps are of.
    """
    loaded = {run: steps for run in runs if (steps := load_steps(run.folder)) is not None}
    of: dict[str, Trajectories] = {}
    for run, rows in loaded.items():
        of.setdefault(run.method, []).extend(by_trajectory(rows))
    if not of:
        return "", []
    bounds = Bounds()
    kinds = {method: sort_by_kind(trajectories, bounds) for method, trajectories in of.items()}
    first = min((run for run in loaded if run.method == main), key=lambda run: run.seed, default=None)
    chosen = examples(sort_by_kind(by_trajectory(loaded[first]), bounds)) if first else {}
    sections = [
        "\n## Steps\n",
        "How far the teacher and each model are apart on the model's own trajectories of the test, by step (a step is "
        "one turn of the model; all seeds together). d: mean |log p_student - log p_teacher| over the tokens of the "
        "step, in nats; w: what step-wise distillation weighs the step by, 1 at the first; the entropy of the "
        "teacher's distributions at the same tokens, in nats. Each over the trajectories that have the step. After an "
        "error: over the steps that follow one whose call failed, timed out, was refused or could not be read.\n",
        _table_by_step(of),
        "The same steps before anything went wrong in their trajectory (clean) and after (drifted), by the world's "
        "verdict on a step, or where it has none by its outcome; what follows an error stays drifted, repaired or not. "
        "AUC: the probability that the teacher's log-ratio to the model, mean over its tokens, is higher at a right "
        "step than at a wrong one (0.5: it does not tell); a step without a verdict counts as its trajectory ended. w: "
        "without first steps. The teacher is each method's own.\n",
        _table_by_drift(of),
        _kinds_words(bounds),
        _table_of_kinds(kinds),
        f"![divergence, weight and teacher entropy by step]({picture.name})\n",
        "Lines: means over the trajectories of a kind, as far as two of them have the step; bands: their middle "
        "half.\n",
        *(_example_sections(first, chosen) if first else []),
    ]
    with replacing(picture) as temporary:
        steps_figure(kinds, {main: chosen}).savefig(temporary, format="png", dpi=DPI)
    return "\n".join(sections), [picture]


def _table_by_step(of: Mapping[str, Trajectories]) -> str:
    head = ["method", "", *(f"step {k}" for k in range(1, SHOWN_STEPS + 1)), "after an error"]
    rows = []
    for method, trajectories in of.items():
        found = step_metrics(trajectories, resamples=1)  # intervals are not shown
        for name in SHOWN:
            cells = [found.get(f"{STEPS_PREFIX}{name}/{at}") for at in (*range(1, SHOWN_STEPS + 1), "after_error")]
            rows.append([method, TITLES[name], *("-" if cell is None else f"{cell.mean:.3f}" for cell in cells)])
        counts = [found.get(f"{STEPS_PREFIX}weight/{at}") for at in (*range(1, SHOWN_STEPS + 1), "after_error")]
        rows.append([method, "n", *("0" if cell is None else str(cell.n) for cell in counts)])
    return markdown_table(head, rows)


def _table_by_drift(of: Mapping[str, Trajectories]) -> str:
    head = ["method", "w, clean", "w, drifted", "ratio", "AUC, clean", "AUC, drifted", "steps, clean", "steps, drifted"]
    rows = []
    for method, trajectories in of.items():
        placed = place(trajectories)
        drifted = sum(after_error for _, after_error in placed)
        measured = [
            *(weight_of(placed, drifted=at) for at in (False, True)),
            weight_ratio(placed),
            *(auc_of(placed, drifted=at) for at in (False, True)),
        ]
        cells = ["-" if value is None else f"{value:.3f}" for value in measured]
        rows.append([method, *cells, str(len(placed) - drifted), str(drifted)])
    return markdown_table(head, rows)


def _kinds_words(bounds: Bounds) -> str:
    return (
        f"Kinds of trajectories. A weight below {bounds.low:g} is low. *Stable*: at least two steps, none erroneous, "
        "no weight low. *Erroneous*: after some erroneous step the weights of all steps are low, to the end. "
        "*Recovering*: an erroneous step, at it or later low weights, and after the last low one no error and a last "
        f"weight of at least {bounds.recovered:g}. *Other*: what is left, single steps among it.\n"
    )


def _table_of_kinds(kinds: Mapping[str, Mapping[Kind, Sequence[Sequence[StepRow]]]]) -> str:
    rows = []
    for method, by_kind in kinds.items():
        total = sum(map(len, by_kind.values()))
        cells = [f"{len(by_kind[kind])} ({len(by_kind[kind]) / max(total, 1):.0%})" for kind in Kind]
        rows.append([method, str(total), *cells])
    return markdown_table(["method", "trajectories", *(kind.value for kind in Kind)], rows)


def _example_sections(run: Run, chosen: Mapping[Kind, Sequence[StepRow]]) -> list[str]:
    """Of each kind the trajectory nearest to the kind's medians, in words."""
    sections = [
        f"Of each kind the trajectory nearest to the kind's medians ({run.method}, seed {run.seed}; dashed above).\n"
    ]
    path = run.folder / TRAJECTORIES_FILE
    by_place = {(t.task.id, t.index): t for t in load_trajectories(path)} if chosen else {}
    tokenizer = load_tokenizer(str(run.model or run.folder / "model")) if chosen else None
    for kind in NAMED:
        sections.append(f"### {kind.value.capitalize()}\n")
        if kind not in chosen:
            sections.append("There is none.\n")
            continue
        rows = chosen[kind]
        if (rows[0].id, rows[0].attempt) not in by_place:
            raise ValueError(_different_tests(run, rows[0]))
        sections.append(example_text(by_place[rows[0].id, rows[0].attempt], rows, tokenizer))
    return sections


def _different_tests(run: Run, row: StepRow) -> str:
    names = [STEPS_FILE, TRAJECTORIES_FILE]
    older, newer = sorted(names, key=lambda name: (run.folder / name).stat().st_mtime)
    return (
        f"{run.folder / TRAJECTORIES_FILE} has no attempt {row.attempt} at question '{row.id}', of which {STEPS_FILE} "
        f"has steps; expected both of one test. {older} is older than {newer} and so the stale one: bring the two of "
        f"one test back, or remove {run.folder} and run again: {run.command}"
    )
