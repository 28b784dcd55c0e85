"""Formats the results page of ``make reproduce`` from the objects of its JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from callbacks.evaluation.statistics import PairedDifference, bootstrap_seeds, holm
from callbacks.tracking.run_info import duration
from experiments.registry.columns import DEFAULT, Column, Score
from experiments.reports.markdown import markdown_table
from experiments.reports.question_values import common_tables
from experiments.reports.results import mean_metric, paired, pooled_cell, score_values
from experiments.reports.tested_on import differing

Result = Mapping[str, Any]  # an object of ``results.results_json``
ENOUGH_SEEDS = 5  # needed to rank two methods
SAMPLED_NOTE = "{0} at T = 1: the same models with answers sampled at temperature 1, as in DGPO's released code.\n"
TRAINING_NOTE = (
    "Metrics of training: executed calls, with inherited calls of forked trajectories counted once; distinct: the"
    " share of different responses within a group; forked: the share of trajectories that began as a copy of "
    "another.\n"
)
DIFFERENCE_NOTE = (
    "Difference in {} over the questions that both answered, with the 95 % interval of a paired bootstrap (10,000"
    " resamples): over questions for one seed, over seeds and questions for all common seeds. p is two-sided, "
    "corrected by Holm for the comparisons in its column, and given if both have at least 5 seeds."
)


def number_text(value: float) -> str:
    """Return a number as text with three decimals, or fewer if it is large: ``0.412``, ``265.1``, ``15,360``."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def metric_text(metric: Mapping[str, Any] | None, with_interval: bool) -> str:
    """Return a metric as text, such as ``0.412 [0.371, 0.453]``, without interval if it has none; "-" if it was not
    measured."""
    if metric is None or not metric["n"]:
        return "-"
    text = number_text(metric["mean"])
    if not with_interval or "low" not in metric:
        return text
    return f"{text} [{number_text(metric['low'])}, {number_text(metric['high'])}]"


def results_page(
    experiment: str,
    method: str,
    objects: Sequence[Result],
    columns: Mapping[str, Column],
    score: Score,
    command: str,
    notes: str,
    history: pl.DataFrame,
) -> str:
    """Return the Markdown text of the results page about ``method`` and the methods that it is compared with.

    Args:
        experiment: name of the page and its files.
        method: as its objects name it.
        objects: ``results_json`` of all finished stages.
        columns, score: shown in the tables.
        command: the command that writes the page.
        notes: Markdown below the title.
        history: ``compare.history_frame`` of ``<experiment>_curves.png``; empty if it was not drawn.
    """
    of: dict[str, list[Result]] = {}
    for result in objects:
        of.setdefault(result["method"], []).append(result)
    total, about = duration(sum(result["seconds"] for result in objects)), of[method][0]
    sections = [
        f"# {experiment}\n",
        f"{notes.strip()}\n" if notes else "",
        f"Made by `{command}`. The {len(objects)} stages below took {total} together. "
        f"[{experiment}.json]({experiment}.json) has an object for each method and seed: n questions, attempts at "
        "each, k correct ones of all trials, mean, interval, seconds, command, commit. Its `questions` hold the values "
        "behind scores and differences: the distinct numbers, a bar, and each question's index into them in base 62.\n",
        f"{provenance(objects)} {seeds_note({method: len(same) for method, same in of.items()})}\n",
        "## Test set\n\nMeans over seeds. Intervals are 95 % percentile bootstraps over seeds and questions, or over "
        "questions alone for a method with one seed and for metrics over several attempts (such as pass@k).\n",
        f"**{said}**\n" if (said := differing((o["method"], o.get("test_set")) for o in objects)) else "",
        _method_table(of, columns, score),
        f"{score.meaning}\n" if score.meaning else "",
        SAMPLED_NOTE.format(score.title) if _any_sampled(of) else "",
        "" if not any(c.training for c in columns.values()) else TRAINING_NOTE,
        f"## By kind of question\n\n{score.title}, mean over seeds.\n",
        _source_table(of),
        f"## Every seed\n\n{score.title} [95 % interval over questions], n questions, the stage's wall-clock time, "
        "commit (+: with uncommitted changes).\n",
        _seed_table(objects, columns, score),
        f"## {_ungrouped(about)} against the others\n\n{DIFFERENCE_NOTE.format(score.title)}\n",
        _difference_table(of, about, score),
        "## Curves\n",
        f"Lines: means over seeds. Bands: from the lowest to the highest seed.\n\n![curves]({experiment}_curves.png)\n"
        if len(history)
        else "These runs logged no curves.\n",
        _speed_table(of, history, score.curves[1]),
    ]
    return "\n".join(section for section in sections if section)


def _ungrouped(result: Result) -> str:
    return result["method"].removesuffix(f", {result['group']}")


def provenance(objects: Sequence[Result]) -> str:
    """Return a sentence that says which commits the rows (``results_json``) come from.

    >>> provenance([{"commit": "abc"}, {"commit": "abc"}])
    'All rows come from commit `abc`.'
    """
    commits = {o["commit"] for o in objects}
    if len(commits) == 1:
        (commit,) = commits
        clean, _, changes = commit.partition("+")
        return f"All rows come from commit `{clean}`{', with changes that were not committed' if changes else ''}."
    dirty = sum("+" in o["commit"] for o in objects)
    return (
        f"**The rows come from {len({c.partition('+')[0] for c in commits})} commits**, {dirty or 'none'} of the "
        f"{len(objects)} with changes that were not committed: the last column of the table of seeds."
    )


def seeds_note(seeds: Mapping[str, int]) -> str:
    """Return a sentence that names the methods with too few seeds to be ranked; "" if all have enough.

    >>> seeds_note({"DGPO": 5, "KD": 3})
    '**Fewer than 5 seeds: KD (3). Nothing here ranks them.**'
    """
    few = [f"{method} ({n})" for method, n in seeds.items() if n < ENOUGH_SEEDS]
    if not few:
        return ""
    which = "**No method has 5 seeds" if len(few) == len(seeds) else "**Fewer than 5 seeds"
    return f"{which}: {', '.join(few)}. Nothing here ranks them.**"


def _any_sampled(of: Mapping[str, Sequence[Result]]) -> bool:
    return any(result["sampled"] for results in of.values() for result in results)


def _method_table(of: Mapping[str, Sequence[Result]], columns: Mapping[str, Column], score: Score) -> str:
    head, rows = ["method", "seeds"], []
    sampled_after = score.column if _any_sampled(of) else None
    for name, column in columns.items():
        head += [column.title, f"{score.title} at T = 1"] if name == sampled_after else [column.title]
    for method, results in of.items():
        cells = []
        for name, column in columns.items():
            cells.append(metric_text(pooled_cell(results, name, column), column.interval))
            if name == sampled_after:
                tables = common_tables(score_values(results, score, sampled=True))
                cells.append(metric_text(bootstrap_seeds(tables).as_json(), True) if tables else "-")
        rows.append([method, str(len(results)), *cells])
    return markdown_table(head, rows)


def _source_table(of: Mapping[str, Sequence[Result]]) -> str:
    """Return a Markdown table of the score by method and data set; "-" if a seed was not tested on it."""
    sources = sorted({source for results in of.values() for result in results for source in result["sources"]})
    rows = [
        [method, *(metric_text(mean_metric([r["sources"].get(source) for r in results]), False) for source in sources)]
        for method, results in of.items()
    ]
    return markdown_table(["method", *sources], rows)


def _seed_table(objects: Sequence[Result], columns: Mapping[str, Column], score: Score) -> str:
    """Return a Markdown table with a row for every method and seed: its score, and the columns that are not default
    ones."""
    others = {name: c for name, c in columns.items() if name not in (*DEFAULT, score.column)}
    sampled = any(o["sampled"] for o in objects)
    rows = [
        [
            o["method"], str(o["seed"]), metric_text(o, True),
            *([metric_text(o["sampled"], True)] if sampled else []), str(o["n"]),
            *(metric_text(o["metrics"].get(name), column.interval) for name, column in others.items()),
            duration(o["seconds"]), short_commit(o["commit"]),
        ]
        for o in objects
    ]  # fmt: skip
    titles = [column.title for column in others.values()]
    scores = [score.title, *([f"{score.title} at T = 1"] if sampled else [])]
    return markdown_table(["method", "seed", *scores, "n", *titles, "time", "commit"], rows)


def short_commit(commit: str) -> str:
    """Return a commit's short name, such as ``5577e62``, or ``5577e62+`` if the working tree had changes."""
    name, _, changes = commit.partition("+")
    return name[:7] + ("+" if changes else "")


def _speed_table(methods: Iterable[str], history: pl.DataFrame, metric: str) -> str:
    """Return a Markdown table of the area under each method's validation curve; "" if no method was validated twice."""
    value = pl.col("value")
    seeds = history.filter(pl.col("metric") == metric).group_by("run", "run_id").agg(value.mean(), pl.len())
    rows = []
    for method in methods:
        found = seeds.filter((pl.col("run") == method) & (pl.col("len") > 1))
        if len(found):
            mean, low, high = found.select(value.mean(), low=value.min(), high=value.max()).row(0)
            rows.append([method, str(len(found)), f"{mean:.3f}", f"{low:.3f} to {high:.3f}"])
    if not rows:
        return ""
    words = f"How early: the mean of {metric} over a training's validations (the area under its curve).\n"
    return "\n".join([words, markdown_table(["method", "seeds", "mean", "lowest to highest seed"], rows)])


def _difference_table(of: Mapping[str, Sequence[Result]], about: Result, score: Score) -> str:
    kinds = (False, True) if _any_sampled(of) else (False,)
    rows: list[list[str]] = []
    found: list[list[PairedDifference | None]] = []  # of each row, by kind
    ranked: list[int] = []  # rows with enough seeds
    for method, others in of.items():
        own = f"{_ungrouped(about)}, {others[0]['group']}"  # the same method in the other's group
        main = own if own in of else about["method"]
        for seed, mine, theirs, same_seeds in _pairs(of[main], others) if method != main else ():
            scores = [[score_values(results, score, sampled=kind) for results in (mine, theirs)] for kind in kinds]
            found.append([paired(a, b, same_seeds=same_seeds) for a, b in scores])
            seeds = [1 if all(r["fixed_seed"] for r in results) else len(results) for results in (mine, theirs)]
            if seed == "all" and min(seeds) >= ENOUGH_SEEDS:
                ranked.append(len(rows))
            rows.append([f"{main} - {method}", seed])
    for k in range(len(kinds)):
        p = {i: result.p for i in ranked if (result := found[i][k]) is not None}
        corrected = dict(zip(p, holm(list(p.values())), strict=True))
        for i, row in enumerate(rows):
            row += _difference(found[i][k], corrected.get(i))
    for row, results in zip(rows, found, strict=True):
        row.append(str(next((result.n for result in results if result is not None), 0)))
    titles = [word for sampled in kinds for word in (f"{score.title} at T = 1" if sampled else score.title, "p")]
    return markdown_table(["difference", "seed", *titles, "n"], rows)


def _pairs(
    mine: Sequence[Result], others: Sequence[Result]
) -> Iterator[tuple[str, Sequence[Result], Sequence[Result], bool]]:
    """Yield the runs of two methods to compare: for each common seed, then for all together. Each item is (seed, runs,
    the other method's runs, whether runs are paired by seed)."""
    if all(other["fixed_seed"] for other in others):  # one model for all seeds, such as a cold start
        others = [{**others[0], "seed": run["seed"]} for run in mine]
    theirs = {run["seed"]: run for run in others}
    both = [(run, theirs[run["seed"]]) for run in mine if run["seed"] in theirs]
    yield from ((str(run["seed"]), [run], [other], True) for run, other in both)
    if len(both) > 1:
        yield "all", [run for run, _ in both], [other for _, other in both], True
    elif not both:  # no common seed: compare all runs
        yield "all", mine, others, False


def _difference(result: PairedDifference | None, p: float | None) -> list[str]:
    if result is None:
        return ["-", "-"]
    corrected = "-" if p is None else f"{p:.4f}" if p >= 1e-3 else "< 0.001"
    return [f"{result.difference:+.3f} [{result.low:+.3f}, {result.high:+.3f}]", corrected]
