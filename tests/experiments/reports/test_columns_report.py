"""Tables and pages with the columns an experiment has chosen, over real files of small stages."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from callbacks.evaluation.evaluation import Evaluation
from callbacks.evaluation.statistics import bootstrap_interval
from callbacks.training.training_totals import TrainingTotals
from experiments.commands.train import closing_table as closing_table_of_train
from experiments.registry.columns import COLUMNS, DEFAULT, SCORES, columns_of, known_columns
from experiments.reports.question_values import DIGITS, packed, unpacked
from experiments.reports.report import closing_table, write_results
from experiments.reports.results import Run, pooled_cell, results_json
from experiments.reports.results_page import results_page
from rollout.trajectory import Reward
from tests.callbacks.helpers import EvaluationData, Hands, make_call, make_trajectory
from tests.callbacks.training.test_training_totals import Batches, batch
from tests.experiments.reports.pages import rows_of, table_of

ARPO = [
    "em", "f1", "tool_calls", "em_per_1000_calls", "math", "pass/2", "train_tool_calls", "train_forked",
    "train_tokens_computed",
]  # fmt: skip
QUESTIONS = 20
# method -> (right answers of 20 on each of two attempts, calls per attempt, training iterations)
METHODS = {"arpo": (15, 1, 3), "grpo": (10, 2, 2)}


def questions(right, calls, seed):
    made = [
        make_trajectory(
            f"q{i}", answer="grey harbor" if i < right - seed else "x", index=attempt,
            calls=tuple(make_call(0, "q", ("x",)) for _ in range(calls)),
        ).replace(reward=Reward(1.0, {"math": float(i < right)}))
        for i in range(QUESTIONS)
        for attempt in range(2)
    ]  # fmt: skip
    return made


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Two methods, two seeds each, trained on hand-made rollouts and tested with two attempts at each question."""
    import lightning as L

    outputs = tmp_path_factory.mktemp("outputs")
    for method, (right, calls, iterations) in METHODS.items():
        for seed in (0, 1):
            trainer = L.Trainer(
                default_root_dir=outputs / method / f"key{seed}", callbacks=[Evaluation(200), TrainingTotals()],
                max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            )  # fmt: skip
            trainer.fit(Batches([batch(1.0, calls=2)] * iterations))
            data = EvaluationData({"agent": [questions(right, calls, seed)]})
            trainer.test(Hands(), datamodule=data, verbose=False)
    return outputs


def test_unknown_columns_are_refused_with_the_known_ones():
    assert tuple(columns_of(None)) == DEFAULT
    assert [c.title for c in columns_of(["calls/python", "em"]).values()] == ["calls/python", "EM"]
    with pytest.raises(ValueError, match="unknown column 'emm'; expected some of em, .*train_tool_calls.*calls/<...>"):
        columns_of(["em", "emm"])
    for wrong in ("calls/", 3):
        with pytest.raises(ValueError, match="unknown column"):
            columns_of([wrong])
    assert set(COLUMNS) < set(known_columns())


def test_closing_table_shows_what_was_chosen(stages):
    folders = [("ARPO", stages / "arpo" / "key0"), ("GRPO", stages / "grpo" / "key0")]
    text = closing_table(folders, ARPO)
    arpo, grpo = (next(line for line in text.splitlines() if name in line) for name in ("ARPO", "GRPO"))
    assert "750.0 [" in arpo and "250.0 [" in grpo  # 15 of 20 with one call each; 10 of 20 with two
    assert " 6 " not in arpo and "6.000" in arpo and "4.000" in grpo, "calls of the whole training"
    with pytest.raises(ValueError, match="unknown column 'nothing'"):
        closing_table([("ARPO", stages / "arpo" / "key0")], ["nothing"])


def test_a_run_without_a_test_has_no_row(stages, tmp_path, capsys):
    """``--trainer.limit_test_batches 0`` validates and does not test."""
    (tmp_path / "evaluation.json").write_text('{"val": {"em": {"mean": 0.5}}}')
    ends = [SimpleNamespace(label=name, folder=folder, name=name, config={"experiment": {}}) for name, folder in
            (("ARPO", stages / "arpo" / "key0"), ("SFT", tmp_path), ("index", tmp_path / "none"))]  # fmt: skip
    closing_table_of_train(ends[1:], ARPO)
    assert not capsys.readouterr().out
    closing_table_of_train(ends, ARPO)
    shown = capsys.readouterr().out
    assert "ARPO" in shown and "SFT" not in shown


def test_rows_of_different_test_sets_are_named(stages, tmp_path):
    """Other questions; and others by the same ids, as a world of another seed has them."""
    arpo, grpo = stages / "arpo" / "key0", stages / "grpo" / "key0"
    same = closing_table([("ARPO", arpo), ("GRPO", grpo)], ARPO)
    assert "test sets" not in same and "test sets" not in closing_table([("ARPO", arpo)], ARPO)
    for name, files in {"a": ["a.jsonl"], "b": ["b.jsonl"], "fewer": []}.items():
        made = tmp_path / "outputs" / "grpo" / name
        shutil.copytree(grpo, made)
        (made / "config.yaml").write_text(json.dumps({"data": {"init_args": {"test_files": files}}}))
    table = tmp_path / "outputs" / "grpo" / "fewer" / "evaluation" / "test.parquet"
    pl.read_parquet(table).filter(pl.col("id") != "q3").write_parquet(table)
    made = {name: tmp_path / "outputs" / "grpo" / name for name in ("a", "b", "fewer")}
    for one, other in (("a", "b"), ("a", "fewer"), ("b", "fewer")):
        said = closing_table([(one, made[one]), (other, made[other])], ARPO).splitlines()[-1]
        assert said.startswith("The rows have 2 ") and f"{one}: " in said and f"; {other}: " in said, said
    assert "(20 questions, " in said and "fewer: one_hop (19 questions, " in said
    rows = [*rows_of(stages, METHODS)[:1], rows_of(stages, METHODS)[2] | {"folder": made["fewer"]}]
    page, _ = write_results("arpo", rows, tmp_path, "make reproduce EXP=arpo", columns=ARPO)
    assert "**The rows have 2 different test sets; " in page.read_text()
    page, _ = write_results("arpo", rows_of(stages, METHODS), tmp_path, "make reproduce EXP=arpo", columns=ARPO)
    assert "test sets" not in page.read_text()


def test_page_and_json_hold_the_chosen_columns(stages, tmp_path):
    page, data = write_results("arpo", rows_of(stages, METHODS), tmp_path, "make reproduce EXP=arpo", columns=ARPO)
    objects = json.loads(data.read_text())
    assert [(o["method"], o["seed"]) for o in objects] == [("ARPO", 0), ("ARPO", 1), ("GRPO", 0), ("GRPO", 1)]
    first = objects[1]
    named = ("metric", "n", "attempts", "trials", "k", "mean", "seconds", "command", "commit")
    assert {key: first[key] for key in named} == {
        "metric": "em", "n": 20, "attempts": 2, "trials": 40, "k": 28, "mean": 0.7, "seconds": 60.0,
        "command": "make train EXP=arpo", "commit": "abc",
    }  # fmt: skip
    assert first["low"] < 0.7 < first["high"]
    assert list(first["metrics"]) == ARPO
    assert first["metrics"]["train_tool_calls"] == {"mean": 6, "n": 1}
    assert first["metrics"]["pass/2"]["mean"] == 0.75 and first["metrics"]["tool_calls"]["n"] == 20

    text = page.read_text()
    arpo, grpo = table_of(text, "## Results")
    assert (arpo["method"], arpo["seeds"]) == ("ARPO", "2")
    assert arpo["EM"].startswith("0.725 [") and grpo["EM"].startswith("0.475 [")
    assert [row["lowest to highest seed"] for row in (arpo, grpo)] == ["0.700 to 0.750", "0.450 to 0.500"]
    assert (
        grpo["ARPO minus method"].startswith("+0.250 [")
        and [arpo["ARPO minus method"], arpo["p"], grpo["p"]] == ["-"] * 3
    )
    arpo, grpo = table_of(text, "## Other metrics")
    assert arpo["EM per 1000 calls"] == "725.0" and grpo["EM per 1000 calls"] == "237.5" and "EM" not in arpo
    assert arpo["math equality"] == "0.750" and arpo["tool calls"] == "1.000" and arpo["pass@2"] == "0.750"
    assert (arpo["forked"], arpo["tokens computed / trajectory"]) == ("0.500", "20.000")
    assert (arpo["tool calls in training"], grpo["tool calls in training"]) == ("6.000", "4.000")
    assert "forked: the share of trajectories" in text


def test_the_page_follows_from_its_json(stages, tmp_path):
    """With enough seeds for p-values: the file gives all of the page, and other values give another page."""
    names = ["em", "em_per_1000_calls", "maj/2", "tool_calls", "train_forked"]
    rows = [
        row | {"seed": seed, "folder": tmp_path / str(seed) / row["experiment"] / "key0"}
        for row in rows_of(stages, METHODS) if row["seed"] for seed in range(5)
    ]  # fmt: skip
    for seed in range(5):
        (tmp_path / str(seed)).symlink_to(stages)
    page, data = write_results("arpo", rows, tmp_path, "make", columns=names, notes="Why.")

    def again(objects):
        return results_page("arpo", "ARPO", objects, columns_of(names), SCORES["em"], "make", notes="Why.")

    objects, text = json.loads(data.read_text()), page.read_text()
    assert again(objects) == text
    assert re.search(r"\| GRPO \| 5 \| .*\| \+0\.250 \[.*\| 0\.0\d+ \|", text)
    values = unpacked(objects[0]["questions"]["em"][0])
    assert objects[0]["mean"] == pytest.approx(values.mean()) and len(data.read_text()) < 10 * 5000
    objects[0]["questions"]["em"] = [packed([1.0 - value for value in values])]
    assert again(objects) != text


@pytest.mark.parametrize("count", [1, 63])
def test_packed_values_come_back_exactly(count):
    values = [None, *(i / 7 for i in range(count)), 0.0, None, (count - 1) / 7]
    text = packed(values)
    assert [None if np.isnan(value) else value for value in unpacked(text)] == values
    assert len(text.partition("|")[2]) == len(values) * (1 if count <= len(DIGITS) else 2 if count <= 3844 else 3)
    assert np.isnan(unpacked(packed([None, None]))).tolist() == [True, True] and len(unpacked(packed([]))) == 0


def test_methods_are_compared_within_their_group(stages, tmp_path):
    rows = [
        row | {"experiment": f"{row['experiment']}_{group}", "method": f"{row['method']}, {group}", "group": group,
               "folder": tmp_path / group / row["experiment"] / row["folder"].name}
        for row in rows_of(stages, METHODS) for group in ("easy", "hard")
    ]  # fmt: skip
    for group in ("easy", "hard"):
        (tmp_path / group).symlink_to(stages)
    [page, *_] = write_results("arpo_easy", rows, tmp_path / "results", "make")
    rows = table_of(page.read_text(), "## Results")
    methods = [row["method"] for row in rows]
    assert methods == sorted(methods, key=lambda method: method.endswith("hard")), "each group in one piece"
    compared = [row["method"] for row in rows if row["ARPO minus method"] != "-"]
    assert compared == ["GRPO, easy", "GRPO, hard"], "with ARPO of their group"


def test_stages_of_earlier_versions_fit_into_the_same_tables(stages, tmp_path):
    """A stage from before there were calls, attempts and training.json: its EM counts, the rest is not measured."""
    old = tmp_path / "old" / "key0"
    (old / "evaluation").mkdir(parents=True)
    new = stages / "grpo" / "key0"
    report = json.loads((new / "evaluation.json").read_text())
    keep = ("em", "f1", "searches", "stop/", "valid_actions", "response_tokens")
    old_names = [name for name in report["test"] if name.startswith(keep) and "per_1000" not in name]
    report["test"] = {name: report["test"][name] for name in old_names}
    (old / "evaluation.json").write_text(json.dumps(report))
    frame = pl.read_parquet(new / "evaluation" / "test.parquet").filter(pl.col("attempt") == 0)
    frame[:, : frame.columns.index("attempt")].write_parquet(old / "evaluation" / "test.parquet")
    rows = rows_of(stages, METHODS)[:1] + [rows_of(stages, METHODS)[2] | {"folder": old}]
    page, data = write_results("arpo", rows, tmp_path, "x", columns=ARPO)
    assert table_of(page.read_text(), "## Results")[1]["EM"].startswith("0.500 [")
    arpo, grpo = table_of(page.read_text(), "## Other metrics")
    assert arpo["tool calls"] == "1.000"
    assert all(grpo[title] == "-" for title in ("tool calls", "EM per 1000 calls", "pass@2", "forked", "math equality"))
    assert set(json.loads(data.read_text())[1]["metrics"]) == {"em", "f1"}
    assert table_of(page.read_text(), "## Results")[1]["ARPO minus method"].startswith("+0.250 [")


def test_average_as_the_main_score(stages, tmp_path):
    """Seeds differ in EM here and not in the reward's verdict; the comparison is one of verdicts."""
    columns = ["acc", "average/2", "maj/2", "pass/2", "tool_success", "tool_calls", "turns/weight/1"]
    page, data = write_results("arpo", rows_of(stages, METHODS), tmp_path, "x", columns=columns, score="average")
    objects = json.loads(data.read_text())
    assert {o["metric"] for o in objects} == {"average"}
    counts = [(o["mean"], o["k"], o["n"], o["attempts"]) for o in objects]
    assert counts == [(0.75, 30, 20, 2)] * 2 + [(0.5, 20, 20, 2)] * 2
    assert objects[0]["low"] < 0.75 < objects[0]["high"]
    assert set(objects[0]["metrics"]) == {*columns} - {"turns/weight/1"}
    assert objects[1]["metrics"]["maj/2"]["mean"] == 0.75, "both attempts give one answer, right by the reward"
    text = page.read_text()
    arpo, grpo = table_of(text, "## Results")
    assert arpo["accuracy"].startswith("0.750 [") and grpo["accuracy"].startswith("0.500 [")
    assert grpo["ARPO minus method"].startswith("+0.250 [") and "average@k" in text
    arpo, grpo = table_of(text, "## Other metrics")
    assert arpo["turns/weight/1"] == "-" and "avg@2" not in arpo, "the score itself"
    assert arpo["maj@2"] == arpo["pass@2"] == "0.750", "every question is all right or wrong"
    assert arpo["tool success"] == "1.000"


def pooled(runs, name):
    columns = columns_of([name])
    return pooled_cell(results_json(runs, columns), name, columns[name])


def test_figures_of_several_attempts_over_runs(stages):
    """Every question's number is its mean over the runs; intervals are of those, and a single run's are its own."""
    arpo, grpo = ([Run(**row) for row in rows_of(stages, METHODS)[i : i + 2]] for i in (0, 2))
    mixed = [arpo[0], grpo[0]]  # 15 and 10 of 20 right: 10 questions by both, 5 by one
    expected = bootstrap_interval([1.0] * 10 + [0.5] * 5 + [0.0] * 5).as_json()
    for name in ("average/2", "pass/2", "pass_first/2", "maj/2"):
        found = pooled(mixed, name)
        assert found["mean"] == expected["mean"] == 0.625 and found["n"] == 20
        assert [found[end] for end in ("low", "high")] == pytest.approx([expected["low"], expected["high"]], abs=0.03)
        own = json.loads((arpo[0].folder / "evaluation.json").read_text())["test"][name]
        assert pooled(arpo[:1], name) == own and own["low"] < own["mean"] < own["high"]
    assert pooled(mixed, "pass/64") is None
    calls = pooled(mixed, "accuracy_per_1000_calls")
    assert calls["mean"] == pytest.approx(1000 * (30 + 20) / (40 + 80)) and calls["low"] < calls["mean"] < calls["high"]
