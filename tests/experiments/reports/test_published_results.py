"""Every page in docs/results follows from the JSON file beside it."""

import json
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from experiments.registry.columns import columns_of, score_of
from experiments.registry.listing import load
from experiments.registry.project import Project
from experiments.reports.compare import HISTORY_SCHEMA
from experiments.reports.results_page import metric_text, results_page
from tests.experiments.reports.pages import table_of

RESULTS = Path(__file__).parents[3] / "docs" / "results"
PAGES = sorted(path.stem for path in RESULTS.glob("*.json"))
NOT_KEPT = "The values of single questions were not kept"


def page_of(name):
    return (RESULTS / f"{name}.md").read_text(), json.loads((RESULTS / f"{name}.json").read_text())


def number(cell):
    return float(cell.split()[0].replace(",", ""))


@pytest.mark.parametrize("name", PAGES)
def test_scores_of_seeds_and_methods_follow(name):
    text, objects = page_of(name)
    title = score_of(objects[0]["metric"]).title
    seeds = {(row["method"], row["seed"]): row for row in table_of(text, "## Every seed")}
    assert {key: row[title] for key, row in seeds.items()} == {
        (o["method"], str(o["seed"])): metric_text(o, True) for o in objects
    }
    names = dict.fromkeys(name for o in objects for name in o.get("metrics", ()))
    means = {column.title: name for name, column in columns_of(list(names)).items() if len(column.rows) < 2}
    for row in table_of(text, "## Test set"):
        own = [o for o in objects if o["method"] == row["method"]]
        assert row["seeds"] == str(len(own))
        for shown in set(row) & {title, *means}:
            values = [o["mean"] if shown == title else o["metrics"].get(means[shown], {}).get("mean") for o in own]
            assert None in values or number(row[shown]) == pytest.approx(np.mean(values), rel=1e-3, abs=6e-4), shown


@pytest.mark.parametrize("name", PAGES)
def test_differences_follow(name):
    text, objects = page_of(name)
    title = score_of(objects[0]["metric"]).title
    means = {}
    for o in objects:
        means.setdefault(o["method"], {})[str(o["seed"])] = o["mean"]
    for row in table_of(text, " against the others"):
        mine, theirs = (means[method] for method in row["difference"].split(" - "))
        theirs = theirs if len(theirs) > 1 else dict.fromkeys(mine, *theirs.values())  # one model for all seeds
        both = [seed for seed in mine if seed in theirs and row["seed"] in (seed, "all")]
        expected = np.mean([mine[seed] - theirs[seed] for seed in both])
        assert number(row[title]) == pytest.approx(expected, abs=6e-4), row


@pytest.mark.parametrize("name", PAGES)
def test_tables_with_intervals_and_p_values_follow_where_the_values_were_kept(name):
    text, objects = page_of(name)
    if NOT_KEPT in text:
        assert not any("questions" in o for o in objects)
        return
    about = load(name, Project())["experiment"]
    columns, score = columns_of(about.get("columns")), score_of(about.get("score"))
    [heading] = re.findall(r"\n## (.*) against the others\n", text)
    main = next(o["method"] for o in objects if o["method"].removesuffix(f", {o['group']}") == heading)
    again = results_page(name, main, objects, columns, score, "", "", pl.DataFrame(schema=HISTORY_SCHEMA))
    assert again.partition("## Test set")[2].partition("## Curves")[0] in text
