"""The results page of ``make reproduce``: its tables, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from callbacks.evaluation.statistics import bootstrap_interval
from callbacks.tracking.run_info import duration
from experiments.registry.columns import DEFAULT, Column, Score
from experiments.reports.markdown import markdown_table
from experiments.reports.results import Run, mean_metric, paired, pooled_cell, pooled_scores, read_evaluation

SAMPLED_NOTE = (
    "{0} at T = 1: the same models with answers sampled at temperature 1, as the released code of DGPO does it.\n"
)
TRAINING_NOTE = (
    "Metrics of the training: calls are executed ones, those that a forked trajectory inherits counted once; distinct "
    "is the share of different responses within a group; forked, of trajectories that began as a copy of another.\n"
)


def number_text(value: float) -> str:
    """Three decimals for shares and scores, fewer the larger: ``0.412``, ``265.1``, ``15,360``."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def metric_text(metric: dict[str, Any] | None, with_interval: bool) -> str:
    """``0.412 [0.371, 0.453]``, or without the interval if there is none; "-" for one that was not measured."""
    if metric is None or not metric["n"]:
        return "-"
    text = number_text(metric["mean"])
    if not with_interval or "low" not in metric:
        return text
    return f"{text} [{number_text(metric['low'])}, {number_text(metric['high'])}]"


def results_page(
    main: Run,
    runs: Sequence[Run],
    columns: Mapping[str, Column],
    score: Score,
    objects: Sequence[dict[str, Any]],
    command: str,
    notes: str,
    has_curves: bool,
) -> str:
    """The page about ``main`` and what it is compared with.

    Args:
        main: a run of the experiment the page is about.
        runs: all finished stages, its own among them.
        columns, score: what the tables show.
        objects: ``results_json`` of the runs.
        command: what makes the page again.
        notes: Markdown that goes under the title.
        has_curves: whether ``<experiment>_curves.png`` was drawn.
    """
    of: dict[str, list[Run]] = {}
    for run in runs:
        of.setdefault(run.method, []).append(run)
    total = duration(sum(run.seconds for run in runs))
    sections = [
        f"# {main.experiment}\n",
        f"{notes.strip()}\n" if notes else "",
        f"Made by `{command}` at commit `{main.commit}`. The {len(runs)} stages below took {total} together. "
        f"[{main.experiment}.json]({main.experiment}.json) holds the same metrics, an object for each method and seed: "
        "n questions, attempts at each, k right ones of all trials, mean, interval, seconds, command, commit.\n",
        "## Test set\n\nMeans over seeds. Intervals are 95 % percentile bootstraps over questions (of each question's "
        "mean over the seeds): they do not hold the variation between seeds, which the next table shows.\n",
        _method_table(of, columns, score),
        f"{score.meaning}\n" if score.meaning else "",
        SAMPLED_NOTE.format(score.title) if _any_sampled(of) else "",
        "" if not any(c.training for c in columns.values()) else TRAINING_NOTE,
        f"## By kind of question\n\n{score.title}, mean over seeds.\n",
        _source_table(of, score),
        f"## Every seed\n\n{score.title} [95 % interval], n questions, wall-clock time of the stage itself.\n",
        _seed_table(objects, columns, score),
        f"## {main.method} against the others\n\nDifference in {score.title} over the questions that both answered, "
        "with 95 % interval and two-sided p of a paired bootstrap (10,000 resamples).\n",
        _difference_table(of, main.method, score),
        "## Curves\n",
        "Lines: means over seeds. Bands: from the lowest to the highest seed.\n\n"
        f"![curves]({main.experiment}_curves.png)\n"
        if has_curves
        else "These runs logged no curves.\n",
    ]
    return "\n".join(section for section in sections if section)


def _any_sampled(of: Mapping[str, Sequence[Run]]) -> bool:
    return any(run.sampled for runs in of.values() for run in runs)


def _method_table(of: dict[str, list[Run]], columns: Mapping[str, Column], score: Score) -> str:
    head, rows = ["method", "seeds"], []
    sampled_after = score.column if _any_sampled(of) else None
    for name, column in columns.items():
        head += [column.title, f"{score.title} at T = 1"] if name == sampled_after else [column.title]
    for method, runs in of.items():
        cells = []
        for name, column in columns.items():
            cells.append(metric_text(pooled_cell(runs, column), column.interval))
            if name == sampled_after:
                sampled = list(pooled_scores(runs, score.rows, sampled=True).values())
                cells.append(metric_text(bootstrap_interval(sampled).as_json(), True) if sampled else "-")
        rows.append([method, str(len(runs)), *cells])
    return markdown_table(head, rows)


def _source_table(of: dict[str, list[Run]], score: Score) -> str:
    """The score by data set; a method's cell is "-" where a seed was not tested on that data set."""
    tests = {method: [read_evaluation(run.folder)["test"] for run in runs] for method, runs in of.items()}
    prefix = f"{score.column}/"
    keys = sorted({key for ts in tests.values() for t in ts for key in t if key.startswith(prefix)})
    rows = [
        [method, *(metric_text(mean_metric([t.get(key) for t in ts]), False) for key in keys)]
        for method, ts in tests.items()
    ]
    return markdown_table(["method", *(key.removeprefix(prefix) for key in keys)], rows)


def _seed_table(objects: Sequence[dict[str, Any]], columns: Mapping[str, Column], score: Score) -> str:
    """The score, and what else was chosen instead of the default columns: how far the seeds differ."""
    others = {name: c for name, c in columns.items() if name not in (*DEFAULT, score.column)}
    sampled = any(o["sampled"] for o in objects)
    rows = [
        [
            o["method"], str(o["seed"]), metric_text(o, True),
            *([metric_text(o["sampled"], True)] if sampled else []), str(o["n"]),
            *(metric_text(o["metrics"].get(name), column.interval) for name, column in others.items()),
            duration(o["seconds"]),
        ]
        for o in objects
    ]  # fmt: skip
    titles = [column.title for column in others.values()]
    scores = [score.title, *([f"{score.title} at T = 1"] if sampled else [])]
    return markdown_table(["method", "seed", *scores, "n", *titles, "time"], rows)


def _difference_table(of: dict[str, list[Run]], main: str, score: Score) -> str:
    rows = []
    kinds = (False, True) if _any_sampled(of) else (False,)
    for method, others in of.items():
        if method == main:
            continue
        same = all(o.fixed_seed for o in others)  # one model, such as the cold start of all seeds: a pair with each
        pairs = [(str(run.seed), [run], [o for o in others if same or o.seed == run.seed]) for run in of[main]]
        shared = {run.seed for run in of[main]} & {o.seed for o in others}
        if same or not shared:  # without a seed in common nothing can be paired by seed: all there is on both sides
            pairs.append(("all", of[main], others))
        else:  # a seed that only one side has proves nothing
            pairs.append(("all", [r for r in of[main] if r.seed in shared], [r for r in others if r.seed in shared]))
        name = f"{main} - {method}"
        rows += [[name, seed, *_difference(mine, theirs, score, kinds)] for seed, mine, theirs in pairs if theirs]
    titles = [word for sampled in kinds for word in (f"{score.title} at T = 1" if sampled else score.title, "p")]
    return markdown_table(["difference", "seed", *titles, "n"], rows)


def _difference(mine: Sequence[Run], others: Sequence[Run], score: Score, kinds: Sequence[bool]) -> list[str]:
    """Cells of a row: difference and p of the test, and of the test at temperature 1 if ``kinds`` has True; n."""
    cells: list[str] = []
    n = 0
    for sampled in kinds:
        a, b = (pooled_scores(runs, score.rows, sampled=sampled) for runs in (mine, others))
        if not (a.keys() & b.keys()):
            cells += ["-", "-"]
            continue
        result = paired(a, b)
        n = n or result.n
        cells += [
            f"{result.difference:+.3f} [{result.low:+.3f}, {result.high:+.3f}]",
            f"{result.p:.4f}" if result.p >= 1e-3 else "< 0.001",
        ]
    return [*cells, str(n)]
