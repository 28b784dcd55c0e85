"""Formats the results page of ``make reproduce`` from the objects of its JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from callbacks.evaluation.statistics import PairedDifference, bootstrap_seeds, holm
from callbacks.tracking.run_info import duration
from experiments.registry.columns import Column, Score
from experiments.reports.markdown import fenced, markdown_table
from experiments.reports.question_values import common_tables
from experiments.reports.results import mean_metric, paired, pooled_cell, score_values
from experiments.stages.tested_on import differing

Result = Mapping[str, Any]  # an object of ``results.results_json``
ENOUGH_SEEDS = 5  # needed for a p-value
TABLE_NOTE = (
    "Scores ({title}) are means over seeds, with the 95 % bootstrap interval over seeds and questions (over questions "
    "for one seed). The last two columns: {main} minus the row's method, on the same seeds and questions, with its"
    " 95 % interval; p is two-sided and corrected by Holm, and needs {seeds} seeds.\n"
)
TRAINING_NOTE = (
    "In training: executed calls, with inherited calls of forked trajectories counted once; distinct: the share of "
    "different responses within a group; forked: the share of trajectories that began as a copy of another.\n"
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
    *,
    notes: str = "",
    gates: str = "",
    curves: bool = False,
) -> str:
    """Return the Markdown text of the results page about ``method`` and the methods that it is compared with.

    Args:
        experiment: name of the page and its files.
        method: as its objects name it.
        objects: ``results_json`` of all finished stages.
        columns: shown in the second table.
        score: compares the methods in the first table.
        command: the command that writes the page.
        notes: hand-written parts (``notes_of``): Markdown below the title, and "## Appendix", which closes the page.
        gates: Markdown table of the preconditions (``preconditions.gates_of_seeds``).
        curves: whether ``<experiment>_curves.png`` was drawn.
    """
    of: dict[str, list[Result]] = {}
    for result in objects:
        of.setdefault(result["method"], []).append(result)
    about = of[method][0]
    lead, appendix, closing = notes.partition("## Appendix\n")
    kept = all("questions" in o for o in objects)
    different = differing((o["method"], o.get("test_set")) for o in objects)
    sections = [
        f"# {experiment}\n",
        f"{lead.strip()}\n" if lead.strip() else "",
        "## Results\n",
        TABLE_NOTE.format(title=score.title, main=_ungrouped(about), seeds=ENOUGH_SEEDS),
        f"**{different}**\n" if different else "",
        _method_table(of, about, score),
        f"{score.meaning}\n" if score.meaning else "",
        _metric_table(of, columns, score),
        f"## Gates\n\n{gates.strip()}\n" if gates else "",
        f"## Curves\n\n![curves]({experiment}_curves.png)\n" if curves else "",
        f"## Reproduce\n\n{fenced(command)}",
        f"{len(objects)} stages, {duration(sum(result['seconds'] for result in objects))} together. "
        f"{provenance(objects)} Data: [{experiment}.json]({experiment}.json)"
        f"{'' if kept else '. The values of single questions were not kept'}.\n",
        f"{appendix}{closing.rstrip()}\n" if appendix else "",
    ]
    return "\n".join(section for section in sections if section)


def notes_of(page: str) -> str:
    """Return the hand-written parts of a results page, so that a new page can keep them: the text between the title and
    "## Results", and the part from "## Appendix" on. Returns "" for a text without "## Results"."""
    lead, heading, rest = page.partition("\n## Results\n")
    if not heading:
        return ""
    _, appendix, closing = rest.partition("\n## Appendix\n")
    return f"{lead.partition(chr(10))[2].strip()}\n{appendix}{closing}"


def _ungrouped(result: Result) -> str:
    return result["method"].removesuffix(f", {result['group']}")


def provenance(objects: Sequence[Result]) -> str:
    """Return a sentence that names the commits of the rows (``results_json``).

    >>> provenance([{"commit": "abc"}, {"commit": "abc+"}])
    'Commits: `abc`, `abc+` (+: with uncommitted changes).'
    """
    commits = dict.fromkeys(short_commit(o["commit"]) for o in objects)
    changed = " (+: with uncommitted changes)" if any("+" in commit for commit in commits) else ""
    return f"Commit{'s' if len(commits) > 1 else ''}: {', '.join(f'`{commit}`' for commit in commits)}{changed}."


def short_commit(commit: str) -> str:
    """Return a commit's short name, such as ``5577e62``, or ``5577e62+`` if the working tree had changes."""
    name, _, changes = commit.partition("+")
    return name[:7] + ("+" if changes else "")


def _method_table(of: Mapping[str, Sequence[Result]], about: Result, score: Score) -> str:
    """Return the main Markdown table: the score of each method, and its difference from the main method."""
    rows: list[list[str]] = []
    found: dict[int, PairedDifference | None] = {}  # of each row, without the main method's
    ranked: list[int] = []  # rows with enough seeds
    for i, (method, others) in enumerate(of.items()):
        means = [number_text(o["mean"]) for o in others if o["mean"] is not None]
        spread = f"{min(means)} to {max(means)}" if len(means) > 1 else "-"
        rows.append([method, str(len(others)), metric_text(_score_cell(others, score), True), spread])
        own = f"{_ungrouped(about)}, {others[0]['group']}"  # the main method in the other's group
        main = own if own in of else about["method"]
        if method != main:
            found[i], seeds = _difference(of[main], others, score)
            ranked += [i] if seeds >= ENOUGH_SEEDS else []
    p = {i: one.p for i in ranked if (one := found[i]) is not None}
    corrected = dict(zip(p, holm(list(p.values())), strict=True))
    for i, row in enumerate(rows):
        row += _difference_text(found.get(i), corrected.get(i))
    titles = ["method", "seeds", score.title, "lowest to highest seed", f"{_ungrouped(about)} minus method", "p"]
    return markdown_table(titles, rows)


def _score_cell(results: Sequence[Result], score: Score) -> Mapping[str, Any] | None:
    tables = common_tables(score_values(results, score))
    if tables and tables[0].size:
        return bootstrap_seeds(tables).as_json()
    return results[0] if len(results) == 1 else mean_metric(results)


def _difference(mine: Sequence[Result], others: Sequence[Result], score: Score) -> tuple[PairedDifference | None, int]:
    """Return the difference between two methods over their common seeds, or over all seeds if they have none in
    common, and the smaller number of seeds."""
    if all(other["fixed_seed"] for other in others):  # one model for all seeds, such as a cold start
        others = [{**others[0], "seed": run["seed"]} for run in mine]
    theirs = {run["seed"]: run for run in others}
    both = [(run, theirs[run["seed"]]) for run in mine if run["seed"] in theirs]
    if both:
        mine, others = [run for run, _ in both], [other for _, other in both]
    found = paired(score_values(mine, score), score_values(others, score), same_seeds=bool(both))
    return found, min(1 if all(r["fixed_seed"] for r in results) else len(results) for results in (mine, others))


def _difference_text(found: PairedDifference | None, p: float | None) -> list[str]:
    if found is None:
        return ["-", "-"]
    corrected = "-" if p is None else f"{p:.4f}" if p >= 1e-3 else "< 0.001"
    return [f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]", corrected]


def _metric_table(of: Mapping[str, Sequence[Result]], columns: Mapping[str, Column], score: Score) -> str:
    """Return a Markdown section of the other metrics, as means over seeds; "" if there are none."""
    shown = {score.column}
    if score.column == "acc":  # the mean of all attempts is the score
        shown |= {f"average/{result['attempts']}" for results in of.values() for result in results}
    others = {name: column for name, column in columns.items() if name not in shown}
    rows = [
        [method, *(metric_text(pooled_cell(results, name, column), False) for name, column in others.items())]
        for method, results in of.items()
    ]
    if not others:
        return ""
    table = markdown_table(["method", *(column.title for column in others.values())], rows)
    note = f"\n{TRAINING_NOTE}" if any(column.training for column in others.values()) else ""
    return f"## Other metrics\n\nMeans over seeds.\n\n{table}{note}"
