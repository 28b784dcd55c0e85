"""The section about steps: curves, tables, kinds and readable trajectories, over real files of small stages."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from callbacks.evaluation.evaluation import update_evaluation_file
from callbacks.evaluation.step_kinds import examples, sort_by_kind
from callbacks.evaluation.step_rows import STEPS_FILE, TRAJECTORIES_FILE, outcome_of, save_steps, step_metrics
from callbacks.evaluation.summary import summarize
from callbacks.evaluation_rows import row_of, save_rows
from experiments.reports.markdown import fenced, inline
from experiments.reports.report import write_results
from experiments.reports.step_examples import example_text, shortened
from experiments.reports.step_plots import curve, steps_figure
from rollout.storage import save_trajectories
from tests.callbacks.evaluation.step_helpers import CASE_A, CASE_B, CASE_C, make_steps, write_trajectory
from tests.callbacks.helpers import make_trajectory

CASES = {"stable": CASE_A, "erroneous": CASE_B, "recovering": CASE_C}


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


def turns_of(name, outcomes):
    return [
        (f"```python\nprint({name}{k})\n```", "" if outcome == "answer" else f"\nout of {name}{k}: {outcome}\n")
        for k, outcome in enumerate(outcomes)
    ]


def stage(folder, tokenizer, model_dir, cases, scale=1.0):
    """A tested stage with steps: of each case three trajectories, of which the last diverges twice as much."""
    rows = [row_of(make_trajectory(f"q{i}")) for i in range(4)]
    save_rows(folder / "evaluation" / "test.parquet", rows)
    steps, trajectories = [], []
    for (name, (divergences, outcomes)), attempt in itertools.product(cases.items(), (0, 1, 2)):
        d = [scale * (1 + attempt // 2) * value for value in divergences]
        steps.append(make_steps(d, outcomes, name=name, attempt=attempt, acc=float(attempt < 2)))
        turns = turns_of(name, outcomes)
        trajectories.append(write_trajectory(tokenizer, turns, outcomes, name=name, index=attempt))
        assert [outcome_of(trajectories[-1], k) for k in range(len(d))] == list(outcomes)
    save_steps(folder / STEPS_FILE, [row for trajectory in steps for row in trajectory])
    save_trajectories(folder / TRAJECTORIES_FILE, trajectories)
    update_evaluation_file(
        folder / "evaluation.json", "test", summarize(rows, resamples=100) | step_metrics(steps, resamples=100),
        lambda name: True, {},
    )  # fmt: skip
    (folder / "model").symlink_to(model_dir)


@pytest.fixture(scope="module")
def stages(tmp_path_factory, tokenizer, model_dir):
    outputs = tmp_path_factory.mktemp("outputs")
    for seed in (0, 1):
        stage(outputs / "sod" / f"key{seed}", tokenizer, model_dir, CASES)
        stage(outputs / "sft" / f"key{seed}", tokenizer, model_dir, {"erroneous": CASE_B}, scale=2.0)
    bare = outputs / "grpo" / "key0"
    save_rows(bare / "evaluation" / "test.parquet", [row_of(make_trajectory("q0"))])
    figures = summarize([row_of(make_trajectory("q0"))], resamples=100)
    update_evaluation_file(bare / "evaluation.json", "test", figures, lambda name: True, {})
    return outputs


def rows_of(stages, methods=("sod", "sft")):
    return [
        {"name": name, "label": name.upper(), "seed": seed, "folder": stages / name / f"key{seed}", "seconds": 60.0,
         "command": f"make train EXP={name}", "commit": "abc"}
        for name in methods for seed in (0, 1) if (stages / name / f"key{seed}").exists()
    ]  # fmt: skip


# --- curves ---------------------------------------------------------------------------------------------------------


def test_curves_are_means_and_middle_halves_of_those_that_have_the_step():
    made = [make_steps(d, ["ok"] * len(d)) for d in ((0.1, 0.2), (0.3, 0.4, 0.5), (0.5, 0.9, 0.7), (0.7, 1.3, 0.9, 1))]
    found = curve(made, "divergence")
    assert found.n.tolist() == [4, 4, 3], "one alone makes no mean"
    assert found.mean == pytest.approx([0.4, 0.7, 0.7])
    assert found.low == pytest.approx([0.25, 0.35, 0.6]) and found.high == pytest.approx([0.55, 1.0, 0.8])
    assert curve(made, "divergence", fewest=1).n.tolist() == [4, 4, 3, 1]
    assert curve([], "weight").mean.size == 0


def test_the_picture_draws_every_method_and_kind():
    twice = [make_steps(*case, name=f"{name}{i}") for name, case in CASES.items() for i in (0, 1)]
    kinds = sort_by_kind(twice)
    only_b = sort_by_kind(twice[2:4])
    chosen = examples(kinds)
    figure = steps_figure({"SOD": kinds, "SFT": only_b}, {"SOD": chosen})
    panels = np.array(figure.axes).reshape(3, 2)
    assert [axis.get_title() for axis in panels[0]] == ["SOD", "SFT"]
    drawn = {line.get_label(): line.get_ydata() for line in panels[1, 0].lines}
    assert drawn["erroneous"] == pytest.approx([1.0, 0.363, 0.170], abs=5e-4)
    assert drawn["example, recovering"] == pytest.approx(drawn["recovering"])
    assert set(drawn) == {f"{e}{k}" for e in ("", "example, ") for k in ("stable", "erroneous", "recovering")}
    assert [line.get_label() for line in panels[0, 1].lines] == ["erroneous"]
    assert panels[0, 0].get_ylim() == panels[0, 1].get_ylim(), "one scale a measure"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["stable", "erroneous", "recovering", "an example"]


def test_more_methods_than_fit_side_by_side_go_on_below():
    kinds = sort_by_kind([make_steps(*CASE_B, name=f"q{i}") for i in (0, 1)])
    figure = steps_figure({f"m{i}": kinds for i in range(4)} | {"empty": sort_by_kind([])}, {})
    panels = np.array(figure.axes).reshape(6, 3)
    assert [axis.get_title() for axis in panels[3]][:2] == ["m3", "empty"]
    assert [axis.get_visible() for axis in panels[4]] == [True, True, False]
    assert [text.get_text() for text in panels[3, 1].texts] == ["no trajectory of these kinds"]
    with pytest.raises(ValueError, match="no method"):
        steps_figure({}, {})


# --- readable trajectories ------------------------------------------------------------------------------------------


def test_an_example_reads_as_it_was_written(tokenizer):
    outcomes = ("error", "invalid", "answer")
    turns = [("print(1/0)", "\nZeroDivisionError\n"), ("<tool_call> {", "\nnot JSON\n"), ("So ````42````", "")]
    trajectory = write_trajectory(tokenizer, turns, outcomes)
    text = example_text(trajectory, make_steps((0.218, 0.6, 1.284), outcomes), tokenizer)
    assert text.startswith("question q1, attempt 0, expected `42`, answered `42`, right.\n")
    assert "```text\nWhat is 6 * 7, asked as q1?\n```" in text
    assert "**Step 2 of 3**: w = 0.363, d = 0.600, teacher entropy 0.300 nats, 5 tokens, invalid." in text
    blocks = re.findall(r"^(`{3,})text\n(.*?)\n\1$", text, flags=re.DOTALL | re.MULTILINE)
    assert [block for _, block in blocks][1:] == [
        "print(1/0)", "ZeroDivisionError", "<tool_call> {", "not JSON", "So ````42````",
    ]  # fmt: skip
    assert tokenizer.eos_token not in text
    with pytest.raises(ValueError, match="do not belong to the trajectory"):
        example_text(trajectory, make_steps((0.2, 0.3), ("ok", "answer")), tokenizer)


def test_long_texts_lose_their_middle(tokenizer):
    trajectory = write_trajectory(tokenizer, [("a" * 50 + "b" * 50, "")], ("answer",))
    wrong = [dataclasses.replace(row, acc=0.0) for row in make_steps((0.2,), ("answer",))]
    text = example_text(trajectory, wrong, tokenizer, most=20)
    assert "a" * 10 + "\n[... 80 characters left out ...]\n" + "b" * 10 + "\n```" in text and ", wrong." in text
    assert shortened("abc", 3) == "abc"


def test_markdown_holds_any_text():
    assert fenced("a ```` b") == "`````text\na ```` b\n`````\n"
    assert inline("a\n b") == "`a b`" and inline("`x`") == "`` `x` ``" and inline("") == "`  `"
    assert len(inline("y" * 200)) == 82


# --- the page -------------------------------------------------------------------------------------------------------


def table_after(text, start):
    lines = itertools.dropwhile(lambda line: not line.startswith(start), text.splitlines())
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in itertools.takewhile(str.strip, lines)]
    return cells[0], cells[2:]


def test_the_page_has_a_section_about_steps(stages, tmp_path):
    page, data, picture = write_results("sod", rows_of(stages), tmp_path, "make reproduce EXP=sod")
    assert picture.name == "sod_steps.png" and picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "![divergence, weight and teacher entropy by step](sod_steps.png)" in text
    head, rows = table_after(text, "| method |  | step 1")
    assert head == ["method", "", *(f"step {k}" for k in range(1, 7)), "after an error"]
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
    # SFT errs at its first step. A third of the trajectories end wrong, at twice the divergence: after the error
    # d = 1.2 and 2.57 against 0.6 and 1.28, of which pairs one in four is the wrong way round
    assert rows[1] == ["SFT", "-", "0.267", "-", "1.000", "0.750", "6", "12"]
    head, rows = table_after(text, "| method | trajectories |")
    assert head[2:] == ["stable", "erroneous", "recovering", "other"]
    assert rows == [
        ["SOD", "18", "6 (33%)", "6 (33%)", "6 (33%)", "0 (0%)"],
        ["SFT", "6", "0 (0%)", "6 (100%)", "0 (0%)", "0 (0%)"],
    ]  # fmt: skip
    stable, erroneous, recovering = re.split(r"^### .*$", text, flags=re.MULTILINE)[1:]
    assert re.findall(r"^### (.*)$", text, flags=re.MULTILINE) == ["Stable", "Erroneous", "Recovering"]
    assert "question erroneous, attempt 0" in erroneous and "w = 0.170, d = 1.284" in erroneous
    assert "print(stable0)" in stable and "out of erroneous1: error" in erroneous
    assert "**Step 7 of 7**" in recovering and "w = 0.411" in recovering
    assert "(SOD, seed 0" in text


def test_without_steps_the_page_is_as_before(stages, tmp_path):
    """The whole section is added at the end: what stands before it is the page of runs without steps."""
    rows = rows_of(stages, ("sod", "sft", "grpo"))
    with_steps, *_ = write_results("sod", rows, tmp_path / "a", "x")
    for row in rows:
        path = row["folder"] / STEPS_FILE
        path.rename(path.with_suffix(".away")) if path.exists() else None
    try:
        without, data = write_results("sod", rows, tmp_path / "b", "x")
    finally:
        for row in rows:
            path = row["folder"] / STEPS_FILE
            path.with_suffix(".away").rename(path) if path.with_suffix(".away").exists() else None
    assert "Steps" not in without.read_text() and not list((tmp_path / "b").glob("*.png"))
    before, after = with_steps.read_text().split("\n## Steps\n")
    assert before == without.read_text() and "GRPO" in before and "GRPO" not in after


def test_steps_of_the_others_only(stages, tmp_path):
    """A method of the page without steps of its own (an older run): tables, but no readable trajectories."""
    page, _, picture = write_results("grpo", rows_of(stages, ("grpo", "sft")), tmp_path, "x")
    text = page.read_text()
    assert picture.exists() and "| SFT | w |" in text and "###" not in text and "nearest to" not in text


def test_files_of_different_tests_are_refused(stages, tmp_path):
    (row, *_) = rows_of(stages, ("sft",))
    path = row["folder"] / TRAJECTORIES_FILE
    away = path.rename(path.with_suffix(".away"))
    before = (row["folder"] / STEPS_FILE).stat().st_mtime - 60
    try:
        save_trajectories(path, [make_trajectory("another")])
        os.utime(path, (before, before))
        with pytest.raises(ValueError, match=r"no attempt 0 at question 'erroneous") as refused:
            write_results("sft", [row], tmp_path, "x")
        assert f"{TRAJECTORIES_FILE} is older than {STEPS_FILE}" in str(refused.value)
        assert f"remove {row['folder']} and run again: make train EXP=sft" in str(refused.value)
        assert not list(tmp_path.glob("*.md"))
    finally:
        away.rename(path)


def test_the_tokenizer_may_lie_elsewhere(stages, tmp_path, model_dir):
    """A stage of kind test has no model of its own; the row says where it is."""
    (row, *_) = rows_of(stages, ("sft",))
    link = row["folder"] / "model"
    link.unlink()
    try:
        page, *_ = write_results("sft", [row | {"model": model_dir}], tmp_path, "x")
        assert "print(erroneous0)" in page.read_text() and page.read_text().count("There is none.") == 2
        with pytest.raises(ValueError, match="no usable tokenizer in"):
            write_results("sft", [row], tmp_path, "x")
    finally:
        link.symlink_to(model_dir)
