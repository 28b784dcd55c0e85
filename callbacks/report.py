"""The closing table of ``make train`` and the results page of ``make reproduce``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from callbacks.compare import compare, curves_figure, history_frame, open_store, table_text
from callbacks.mlflow_logger import RUN_ID_FILE
from callbacks.records import default_tracking_uri, duration
from callbacks.rows import AGENT
from callbacks.statistics import Interval, PairedDifference, bootstrap_interval, paired_bootstrap
from rollout.files import write_atomically

__all__ = ["Run", "closing_table", "compare", "write_results"]

# column of the tables -> key in evaluation.json, whether its interval is shown
COLUMNS = {
    "EM": ("em", True),
    "F1": ("f1", True),
    "source ref.": ("arcap/source_referencing", False),
    "thinking": ("arcap/thinking", False),
    "hit first": ("arcap/hit_first", False),
    "hit any": ("arcap/hit_any", False),
    "closed book": ("arcap/closed_book", False),
    "searches": ("searches", False),
}
RESULT_CURVES = ("train/em", "val/em", "train/kl_teacher", "train/entropy")


@dataclass(frozen=True, slots=True)
class Run:
    """One finished stage as the results page needs it."""

    experiment: str
    method: str  # what it is called in tables
    seed: int
    folder: Path
    seconds: float
    command: str
    commit: str
    sampled: Path | None = None  # folder of the same model's test at temperature 1, if there is one

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Run:
        """From a mapping with name, label, seed, folder, seconds, command, commit and perhaps sampled."""
        return cls(
            row["name"], row["label"], row["seed"], Path(row["folder"]), row["seconds"], row["command"], row["commit"],
            Path(row["sampled"]) if row.get("sampled") else None,
        )  # fmt: skip


def read_evaluation(path: Path) -> dict[str, Any]:
    """``evaluation.json`` of a stage that was tested; ``path`` is the file or the stage's folder.

    Raises:
        FileNotFoundError: no such file. ValueError: it holds no test.
    """
    path = Path(path)
    path = path if path.suffix == ".json" else path / "evaluation.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected the evaluation of a stage that was tested")
    content = json.loads(path.read_text())
    if "test" not in content:
        raise ValueError(f"{path} holds {sorted(content)} but no 'test'; was the stage stopped before its test?")
    return content


def figure_text(figure: dict[str, Any] | None, with_interval: bool) -> str:
    """``0.412 [0.371, 0.453]``; "-" for a figure that was not measured."""
    if figure is None or not figure["n"]:
        return "-"
    text = f"{figure['mean']:.3f}"
    return f"{text} [{figure['low']:.3f}, {figure['high']:.3f}]" if with_interval else text


def closing_table(rows: Sequence[tuple[str, Path]]) -> str:
    """One line per stage as text: n, EM and F1 with 95 % bootstrap intervals, ARCap's components, executed searches
    per question.

    Args:
        rows: (label, stage folder or its evaluation.json), in the order to show.

    Raises:
        FileNotFoundError, ValueError: a stage has no test (see ``read_evaluation``).
    """
    from rich.table import Table

    table = Table(title="test set (EM and F1 with 95 % bootstrap interval; searches: executed, per question)")
    table.add_column("")
    for name in ("n", *COLUMNS):
        table.add_column(name, justify="right")
    for label, path in rows:
        test = read_evaluation(path)["test"]
        cells = [figure_text(test.get(key), interval) for key, interval in COLUMNS.values()]
        table.add_row(label, str(test["em"]["n"]), *cells)
    return table_text(table)


def question_scores(folder: Path, column: str = "em") -> dict[str, float]:
    """Question id -> score in the normal search loop; rows that infrastructure spoiled are left out."""
    frame = pl.read_parquet(Path(folder) / "evaluation" / "test.parquet")
    frame = frame.filter((pl.col("probe") == AGENT) & ~pl.col("failed"))
    means = frame.group_by("id").agg(pl.col(column).mean()).sort("id")
    return dict(zip(means["id"], means[column], strict=True))


def pooled_scores(runs: Sequence[Run], column: str = "em", *, sampled: bool = False) -> dict[str, float]:
    """Question id -> mean score over the runs (seeds) of one method, for questions that every run answered; empty
    if ``sampled`` and a run was not tested at temperature 1."""
    folders = [run.sampled if sampled else run.folder for run in runs]
    if None in folders:
        return {}
    scores = [question_scores(folder, column) for folder in folders if folder is not None]
    common = sorted(set.intersection(*(set(s) for s in scores)))
    return {q: float(np.mean([s[q] for s in scores])) for q in common}


def paired(a: dict[str, float], b: dict[str, float]) -> PairedDifference:
    """Paired bootstrap of a minus b over the questions that both hold."""
    common = sorted(a.keys() & b.keys())
    return paired_bootstrap([a[q] for q in common], [b[q] for q in common])


def results_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One object per method and seed: EM as n, k (correct), mean, low, high, then seconds, command, commit; under
    ``sampled`` the same figures at temperature 1, under ``f1`` and ``searches`` the means."""
    objects = []
    for run in runs:
        test = read_evaluation(run.folder)["test"]
        objects.append(
            {
                "method": run.method,
                "seed": run.seed,
                "metric": "em",
                **em_figures(test),
                "sampled": em_figures(read_evaluation(run.sampled)["test"]) if run.sampled else None,
                "f1": test["f1"]["mean"],
                "searches": test["searches"]["mean"],
                "seconds": run.seconds,
                "command": run.command,
                "commit": run.commit,
            }
        )
    return objects


def em_figures(test: Mapping[str, Any]) -> dict[str, Any]:
    em = test["em"]
    return {"n": em["n"], "k": round(em["mean"] * em["n"]), **{key: em[key] for key in ("mean", "low", "high")}}


def write_results(
    experiment: str,
    rows: Sequence[Mapping[str, Any]],
    out_dir: Path,
    command: str,
    *,
    tracking_uri: str | None = None,
    notes: str = "",
) -> list[Path]:
    """Write ``<experiment>.md`` (table, per-seed EM, paired bootstrap of ``experiment`` against every other method,
    curves, command, time), ``<experiment>.json`` (``results_json``) and, when the runs have curves,
    ``<experiment>_curves.png``; return their paths.

    Args:
        experiment: the experiment that the others are compared with; also the name of the files.
        rows: finished stages as ``Run.of`` reads them; a stage named twice (a teacher shared by all seeds) counts once.
        out_dir: normally docs/results.
        command: what makes the page again.
        tracking_uri: MLflow store with the curves (found by the run id kept in each stage folder); default:
            ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the folder that holds the stages.
        notes: Markdown that goes under the title.

    Raises:
        ValueError: no row belongs to ``experiment``.
    """
    runs = list({Path(row["folder"]): Run.of(row) for row in rows}.values())
    mine = [run for run in runs if run.experiment == experiment]
    if not mine:
        raise ValueError(f"none of the rows is a run of '{experiment}', only {sorted({r.experiment for r in runs})}")
    out_dir = Path(out_dir)
    curves = out_dir / f"{experiment}_curves.png"
    uri = tracking_uri or default_tracking_uri(mine[0].folder.resolve().parent.parent)
    has_curves = _write_curves(curves, runs, uri)
    objects = results_json(runs)
    data, page = out_dir / f"{experiment}.json", out_dir / f"{experiment}.md"
    write_atomically(data, json.dumps(objects, indent=2, allow_nan=False) + "\n")
    write_atomically(page, _results_page(experiment, runs, mine[0], objects, command, notes, has_curves))
    return [page, data, *([curves] if has_curves else [])]


def _results_page(
    experiment: str,
    runs: Sequence[Run],
    main: Run,
    objects: Sequence[dict[str, Any]],
    command: str,
    notes: str,
    has_curves: bool,
) -> str:
    of: dict[str, list[Run]] = {}
    for run in runs:
        of.setdefault(run.method, []).append(run)
    total = duration(sum(run.seconds for run in runs))
    sections = [
        f"# {experiment}\n",
        f"{notes.strip()}\n" if notes else "",
        f"Made by `{command}` at commit `{main.commit}`. The {len(runs)} stages below took {total} together.\n",
        "## Test set\n\nMeans over seeds. Intervals are 95 % percentile bootstraps over questions (of each question's "
        "mean over the seeds): they do not hold the variation between seeds, which the next table shows.\n",
        _method_table(of),
        "EM at T = 1: the same models with sampled instead of greedy answers, as the released code of DGPO tests.\n",
        "## By kind of question\n\nEM, mean over seeds, greedy.\n",
        _source_table(of),
        "## Every seed\n\nEM [95 % interval], n questions, wall-clock time of the stage itself.\n",
        _seed_table(objects),
        f"## {main.method} against the others\n\nDifference in EM over the questions that both answered, with 95 % "
        "interval and two-sided p of a paired bootstrap (10,000 resamples).\n",
        _difference_table(of, main.method),
        "## Curves\n",
        f"![curves]({experiment}_curves.png)\n" if has_curves else "These runs logged no curves.\n",
    ]
    return "\n".join(section for section in sections if section)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _method_table(of: dict[str, list[Run]]) -> str:
    rows = []
    for method, runs in of.items():
        tests = [read_evaluation(run.folder)["test"] for run in runs]
        cells = []
        for key, with_interval in COLUMNS.values():
            if with_interval:
                interval = bootstrap_interval(list(pooled_scores(runs, key).values()))
                cells.append(figure_text(interval.as_json(), True))
            else:
                cells.append(figure_text(_mean_figure([t.get(key) for t in tests]), False))
        sampled = list(pooled_scores(runs, sampled=True).values())
        cells.insert(1, figure_text(bootstrap_interval(sampled).as_json(), True) if sampled else "-")
        rows.append([method, str(len(runs)), *cells])
    first, *rest = COLUMNS
    return _markdown(["method", "seeds", first, f"{first} at T = 1", *rest], rows)


def _source_table(of: dict[str, list[Run]]) -> str:
    """EM by data set; a method's cell is "-" where a seed was not tested on that data set."""
    tests = {method: [read_evaluation(run.folder)["test"] for run in runs] for method, runs in of.items()}
    keys = sorted({key for ts in tests.values() for t in ts for key in t if key.startswith("em/")})
    rows = [
        [method, *(figure_text(_mean_figure([t.get(key) for t in ts]), False) for key in keys)]
        for method, ts in tests.items()
    ]
    return _markdown(["method", *(key.removeprefix("em/") for key in keys)], rows)


def _mean_figure(figures: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Mean over seeds of the means; None unless every seed has it."""
    present = [f for f in figures if f is not None and f["n"]]
    if len(present) < len(figures):
        return None
    mean = float(np.mean([f["mean"] for f in present]))
    return Interval(mean, mean, mean, sum(f["n"] for f in present)).as_json()


def _seed_table(objects: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            o["method"], str(o["seed"]), figure_text(o, True), figure_text(o["sampled"], True), str(o["n"]),
            duration(o["seconds"]),
        ]
        for o in objects
    ]  # fmt: skip
    return _markdown(["method", "seed", "EM", "EM at T = 1", "n", "time"], rows)


def _difference_table(of: dict[str, list[Run]], main: str) -> str:
    rows = []
    for method, others in of.items():
        if method == main:
            continue
        pairs = [(str(run.seed), [run], [o for o in others if o.seed == run.seed]) for run in of[main]]
        seeds = {run.seed for run in of[main]} & {o.seed for o in others}  # what only one side has proves nothing
        if seeds:
            pairs.append(("all", *([run for run in side if run.seed in seeds] for side in (of[main], others))))
        else:  # another seed alone, such as a teacher's
            pairs.append(("all", of[main], others))
        rows += [_difference(f"{main} - {method}", seed, mine, same) for seed, mine, same in pairs if same]
    return _markdown(["difference", "seed", "EM", "p", "EM at T = 1", "p", "n"], rows)


def _difference(name: str, seed: str, mine: Sequence[Run], others: Sequence[Run]) -> list[str]:
    cells: list[str] = []
    n = 0
    for sampled in (False, True):
        a, b = pooled_scores(mine, sampled=sampled), pooled_scores(others, sampled=sampled)
        if not (a.keys() & b.keys()):
            cells += ["-", "-"]
            continue
        result = paired(a, b)
        n = n or result.n
        cells += [
            f"{result.difference:+.3f} [{result.low:+.3f}, {result.high:+.3f}]",
            f"{result.p:.4f}" if result.p >= 1e-3 else "< 0.001",
        ]
    return [name, seed, *cells, str(n)]


def _write_curves(path: Path, runs: Sequence[Run], tracking_uri: str) -> bool:
    """Draw the runs that were logged; False (and no file) when none was or none has any of the metrics."""
    files = {run: run.folder / RUN_ID_FILE for run in runs}
    ids = {f.read_text().strip(): f"{run.method}, seed {run.seed}" for run, f in files.items() if f.exists()}
    history = history_frame(open_store(tracking_uri), ids, RESULT_CURVES) if ids else pl.DataFrame()
    if not len(history):
        return False
    learning = history.filter(pl.col("metric") == "train/em")["run_id"].unique()
    if len(learning):  # iterations of supervised learning are another measure of time
        history = history.filter(pl.col("run_id").is_in(learning.implode()))
    path.parent.mkdir(parents=True, exist_ok=True)
    curves_figure(history, RESULT_CURVES).savefig(path, dpi=110)
    return True
