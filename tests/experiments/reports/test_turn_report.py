"""The section about turns, over real files of small stages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from callbacks.evaluation.evaluation import update_evaluation_file
from callbacks.evaluation.summary import summarize
from callbacks.evaluation.turn_scores import SCORES_FILE, save_scores, score_metrics
from callbacks.evaluation_rows import row_of, save_rows
from experiments.reports.markdown import fenced, inline
from experiments.reports.report import write_results
from tests.callbacks.evaluation.turn_score_helpers import CASE_A, CASE_B, CASE_C, make_scores
from tests.callbacks.helpers import make_trajectory
from tests.experiments.reports.pages import rows_of

CASES = {"stable": CASE_A, "erroneous": CASE_B, "recovering": CASE_C}


def stage(folder, cases, scale=1.0):
    """A tested stage with turns: of each case three trajectories, of which the last diverges twice as much."""
    rows = [row_of(make_trajectory(f"q{i}")) for i in range(4)]
    save_rows(folder / "evaluation" / "test.parquet", rows)
    turns = []
    for (name, (divergences, outcomes)), attempt in itertools.product(cases.items(), (0, 1, 2)):
        d = [scale * (1 + attempt // 2) * value for value in divergences]
        turns.append(make_scores(d, outcomes, name=name, attempt=attempt, acc=float(attempt < 2)))
    save_scores(folder / SCORES_FILE, [row for trajectory in turns for row in trajectory])
    update_evaluation_file(
        folder / "evaluation.json", "test", summarize(rows, resamples=100) | score_metrics(turns, resamples=100),
        lambda name: True, {},
    )  # fmt: skip


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("outputs")
    for seed in (0, 1):
        stage(outputs / "sod" / f"key{seed}", CASES)
        stage(outputs / "sft" / f"key{seed}", {"erroneous": CASE_B}, scale=2.0)
    bare = outputs / "grpo" / "key0"
    save_rows(bare / "evaluation" / "test.parquet", [row_of(make_trajectory("q0"))])
    figures = summarize([row_of(make_trajectory("q0"))], resamples=100)
    update_evaluation_file(bare / "evaluation.json", "test", figures, lambda name: True, {})
    return outputs


def test_markdown_holds_any_text():
    assert fenced("a ```` b") == "`````text\na ```` b\n`````\n"
    assert inline("a\n b") == "`a b`" and inline("`x`") == "`` `x` ``" and inline("") == "`  `"
    assert len(inline("y" * 200)) == 82


# --- the page -------------------------------------------------------------------------------------------------------


def table_after(text, start):
    lines = itertools.dropwhile(lambda line: not line.startswith(start), text.splitlines())
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in itertools.takewhile(str.strip, lines)]
    return cells[0], cells[2:]


def test_the_page_has_a_section_about_turns(stages, tmp_path):
    page, _ = write_results("sod", rows_of(stages, ("sod", "sft")), tmp_path, "make reproduce EXP=sod")
    text = page.read_text()
    head, rows = table_after(text, "| method |  | turn 1")
    assert head == ["method", "", *(f"turn {k}" for k in range(1, 7)), "after an error"]
    assert [row[:2] for row in rows] == [
        [m, what] for m in ("SOD", "SFT") for what in ("d", "w", "teacher entropy", "n")
    ]  # fmt: skip
    # SFT: case B at two, two and four times its divergences, both seeds: weights are the case's
    assert rows[4][2:5] == [f"{d * 8 / 3:.3f}" for d in CASE_B[0]]
    assert rows[5][2:] == ["1.000", "0.363", "0.170", "-", "-", "-", "0.267"]
    assert rows[7][2:] == ["6", "6", "6", "0", "0", "0", "12"]
    assert rows[0][2] == f"{np.mean([0.5, 0.218, 0.3]) * 4 / 3:.3f}" and rows[3][2:6] == ["18", "18", "18", "6"]
    head, rows = table_after(text, "| method | w, clean |")
    assert head[3:6] == ["ratio", "AUC, clean", "AUC, drifted"]
    # SFT errs at its first turn. A third of the trajectories end wrong, at twice the divergence: after the error
    # d = 1.2 and 2.57 against 0.6 and 1.28, of which pairs one in four is the wrong way round
    assert rows[1] == ["SFT", "-", "0.267", "-", "1.000", "0.750", "6", "12"]
    head, rows = table_after(text, "| method | trajectories |")
    assert head[2:] == ["stable", "erroneous", "recovering", "other"]
    assert rows == [
        ["SOD", "18", "6 (33%)", "6 (33%)", "6 (33%)", "0 (0%)"],
        ["SFT", "6", "0 (0%)", "6 (100%)", "0 (0%)", "0 (0%)"],
    ]  # fmt: skip


def test_without_steps_the_page_is_as_before(stages, tmp_path):
    """The whole section is added at the end: what stands before it is the page of runs without turns."""
    rows = rows_of(stages, ("sod", "sft", "grpo"))
    with_turns, *_ = write_results("sod", rows, tmp_path / "a", "x")
    for row in rows:
        path = row["folder"] / SCORES_FILE
        path.rename(path.with_suffix(".away")) if path.exists() else None
    try:
        without, data = write_results("sod", rows, tmp_path / "b", "x")
    finally:
        for row in rows:
            path = row["folder"] / SCORES_FILE
            path.with_suffix(".away").rename(path) if path.with_suffix(".away").exists() else None
    assert "Turns" not in without.read_text()
    before, after = with_turns.read_text().split("\n## Turns\n")
    assert before == without.read_text() and "GRPO" in before and "GRPO" not in after


def test_steps_of_the_others_only(stages, tmp_path):
    """A method of the page without turns of its own (an older run)."""
    page, _ = write_results("grpo", rows_of(stages, ("grpo", "sft")), tmp_path, "x")
    assert "| SFT | w |" in page.read_text() and "| GRPO | w |" not in page.read_text()
