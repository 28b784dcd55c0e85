"""Every page in docs/results follows from the JSON file beside it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from experiments.registry.columns import columns_of, score_of
from experiments.registry.listing import load
from experiments.registry.project import Project
from experiments.reports.results_page import notes_of, number_text, results_page
from tests.experiments.reports.pages import table_of

RESULTS = Path(__file__).parents[3] / "docs" / "results"
PAGES = sorted(path.stem for path in RESULTS.glob("*.json"))
NOT_KEPT = "The values of single questions were not kept"


def page_of(name):
    return (RESULTS / f"{name}.md").read_text(), json.loads((RESULTS / f"{name}.json").read_text())


def number(cell):
    return float(cell.split()[0].replace(",", ""))


def by_method(objects):
    of = {}
    for o in objects:
        of.setdefault(o["method"], []).append(o)
    return of


def main_of(text):
    return re.search(r"\| ([^|]*) minus method \|", text)[1]


@pytest.mark.parametrize("name", PAGES)
def test_scores_and_metrics_follow(name):
    text, objects = page_of(name)
    of, title = by_method(objects), score_of(objects[0]["metric"]).title
    rows = {row["method"]: row for row in table_of(text, "## Results")}
    assert list(rows) == list(of)
    for method, row in rows.items():
        means = [o["mean"] for o in of[method]]
        assert number(row[title]) == pytest.approx(np.mean(means), abs=6e-4), method
        spread = f"{number_text(min(means))} to {number_text(max(means))}" if len(means) > 1 else "-"
        assert (row["seeds"], row["lowest to highest seed"]) == (str(len(means)), spread), method
    names = dict.fromkeys(name for o in objects for name in o.get("metrics", ()))
    keys = {column.title: name for name, column in columns_of(list(names)).items() if len(column.rows) < 2}
    for row in table_of(text, "## Other metrics"):
        for shown in set(row) & set(keys):
            values = [o["metrics"].get(keys[shown], {}).get("mean") for o in of[row["method"]]]
            assert None in values or number(row[shown]) == pytest.approx(np.mean(values), rel=1e-3, abs=6e-4), shown


@pytest.mark.parametrize("name", PAGES)
def test_differences_follow(name):
    text, objects = page_of(name)
    main, compared = main_of(text), 0
    means = {method: {o["seed"]: o["mean"] for o in same} for method, same in by_method(objects).items()}
    for row in table_of(text, "## Results"):
        method, cell = row["method"], row[f"{main} minus method"]
        grouped = [m for m in means if m.startswith(f"{main}, ") and method.endswith(m[len(main) :])]
        own = main if main in means else min(grouped, key=len)  # the main method in the row's group
        if cell == "-":
            assert method == own
            continue
        mine, theirs = means[own], means[method]
        same = np.mean([mine[seed] - theirs[seed] for seed in mine if seed in theirs])
        allowed = [same, np.mean(list(mine.values())) - theirs[0]] if len(theirs) == 1 else [same]  # one for all seeds
        assert any(number(cell) == pytest.approx(value, abs=6e-4) for value in allowed), row
        compared += 1
    assert compared >= len(means) - 2, "each method but the main one of its group"


@pytest.mark.parametrize("name", PAGES)
def test_tables_with_intervals_and_p_values_follow_where_the_values_were_kept(name):
    text, objects = page_of(name)
    if NOT_KEPT in text:
        assert not any("questions" in o for o in objects)
        return
    about = load(name, Project())["experiment"]
    columns, score = columns_of(about.get("columns")), score_of(about.get("score"))
    main = next(o["method"] for o in objects if o["method"].removesuffix(f", {o['group']}") == main_of(text))
    again = results_page(name, main, objects, columns, score, "")
    assert again.partition("## Results")[2].partition("## Reproduce")[0] in text


@pytest.mark.parametrize("name", PAGES)
def test_written_parts_are_kept(name):
    """A new page has the findings above its tables, and the appendix, if there is one, at its end."""
    text, objects = page_of(name)
    for o in objects:  # as a run of today stores it
        o |= {"group": None, "fixed_seed": False, "questions": {}, "attempts": o.get("attempts", 1)}
        o["metrics"] = o.get("metrics", {})
    main = main_of(text)
    method = next(o["method"] for o in objects if o["method"].startswith(main))
    again = results_page(name, method, objects, {}, score_of(objects[0]["metric"]), "x", notes=notes_of(text))
    assert notes_of(again) == notes_of(text) and "**Findings**" in notes_of(text)
    assert again.startswith(text.partition("## Results")[0])
    assert again.endswith("".join(text.partition("\n## Appendix")[1:]))
