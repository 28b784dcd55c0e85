"""``make reproduce`` over stages that are done: which are put together, and what the page and the file hold."""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest

from callbacks.evaluation.evaluation import update_evaluation_file
from callbacks.evaluation.summary import summarize
from callbacks.evaluation_rows import row_of, save_rows
from experiments.commands.command import make_graph
from experiments.commands.reproduce import reproduce
from experiments.registry.errors import ExperimentError
from experiments.registry.project import Project
from experiments.reports.preconditions import Gate
from experiments.stages.context import RunContext
from experiments.stages.store import StageFolder
from tests.callbacks.helpers import make_call, make_trajectory
from tests.experiments.reports.pages import table_of

FIT = """
experiment:
  {{kind: fit, label: {label}{more}}}
trainer: {{max_steps: 1}}
model: {{class_path: m.A, init_args: {{policy: "-", branch: {branch}}}}}
data: {{class_path: d.A, init_args: {{eval_sampling: {{temperature: 0.6}}, attempts: 2, diagnostic_prompts:
[closed_book]}}}}
"""
RIGHT = {"arpo": 7, "grpo": 4, "arpo_random": 5}  # of ten questions, at both attempts


@pytest.fixture
def done(workshop, model_dir):
    """A project in which two seeds of ARPO, and of what it is compared with, are trained and tested."""
    return make_done(workshop, model_dir)


def make_done(workshop, model_dir, about_grpo="", more=""):
    more += ", compare: [grpo], ablations: [arpo_random], columns: [em, tool_calls, pass/2, train_tool_calls]"
    workshop.write("arpo", FIT.format(label="ARPO", branch=1, more=more))
    workshop.write("grpo", FIT.format(label="GRPO", branch=0, more=about_grpo))
    workshop.write("arpo_random", FIT.format(label="random branches", branch=2, more=""))
    project = Project(root=workshop.folder, experiment_dirs=(workshop.files,), outputs=workshop.folder / "outputs")
    context = RunContext(project, "arpo", (), None)
    for seed in (0, 1):
        for name, right in RIGHT.items():
            asked = dataclasses.replace(context, target=name, seed=seed)
            stage = make_graph(asked).target()
            finish(stage, right - seed, asked.command())
            (stage.folder / "model").mkdir(exist_ok=True)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(model_dir / file, stage.folder / "model")
            (stage.folder / "training.json").write_text(json.dumps({"tool_calls": 100 * right}))
    return project, context


def finish(stage, right, command, change=None):
    call, answers = make_call(0, "q", ()), ["grey harbor"] * right + ["x"] * (10 - right)
    rows = [
        row_of(make_trajectory(f"q{i}", answer=answer, index=attempt, calls=(call,)))
        for i, answer in enumerate(answers)
        for attempt in range(2)
    ]
    rows = change(rows) if change else rows
    save_rows(stage.folder / "evaluation" / "test.parquet", rows)
    update_evaluation_file(stage.folder / "evaluation.json", "test", summarize(rows), lambda name: True, {})
    StageFolder(stage.folder).finish({"seconds": 30.0, "command": command, "commit": "abc"})


def answer_by_reward(rows):
    """The same rows under a reward that calls the first four questions right, whatever they answered."""
    return [dataclasses.replace(row, reward_parts={"acc": float(int(row.id[1:]) < 4)}) for row in rows]


def run(context, seeds="0,1", ablation_seeds=None, allow=""):
    reproduce(SimpleNamespace(seeds=seeds, ablation_seeds=ablation_seeds, allow=allow), context)


def test_an_ablation_seed_that_is_not_a_seed_is_refused_before_training(workshop):
    workshop.write("arpo", FIT.format(label="ARPO", branch=1, more=""))
    project = Project(root=workshop.folder, experiment_dirs=(workshop.files,), outputs=workshop.folder / "outputs")
    with pytest.raises(ExperimentError, match=r"--ablation-seeds: found \[3\], which are not in --seeds \[0, 1\]"):
        run(RunContext(project, "arpo", (), None), ablation_seeds="1,3")


def test_one_method_with_two_settings_is_refused_before_training(workshop, model_dir, monkeypatch):
    """An override reaches the experiment and its ablations, but not what these are compared with."""
    project, context = make_done(workshop, model_dir)
    monkeypatch.setattr("experiments.launch.runner.make", None)
    context = dataclasses.replace(context, arguments=("--trainer.max_steps=2",))
    text = FIT.format(label="random branches", branch=2, more=", compare: [arpo]")
    workshop.write("arpo_random", text)
    with pytest.raises(ExperimentError, match="the overrides reach 'arpo' where it is reproduced, but not where"):
        run(context)
    workshop.write("arpo_random", text.replace("max_steps: 1", 'max_steps: "${stage:none}"'))
    with pytest.raises(ExperimentError, match="none"):
        run(dataclasses.replace(context, arguments=()))


def test_one_object_per_method_and_seed_with_the_columns_of_the_experiment(done, capsys):
    project, context = done
    run(context)
    assert "to make" not in capsys.readouterr().out.replace("0 to make", ""), "everything was there"
    objects = json.loads((project.root / "docs" / "results" / "arpo.json").read_text())
    assert [(o["method"], o["seed"]) for o in objects] == [
        ("GRPO", 0), ("ARPO", 0), ("random branches", 0), ("GRPO", 1), ("ARPO", 1), ("random branches", 1),
    ]  # fmt: skip
    arpo = objects[1]
    assert (arpo["n"], arpo["attempts"], arpo["k"], arpo["mean"]) == (10, 2, 14, 0.7)
    assert arpo["low"] < 0.7 < arpo["high"]
    assert (arpo["seconds"], arpo["command"], arpo["commit"]) == (30.0, "make train EXP=arpo SEED=0", "abc")
    assert {name: figure["mean"] for name, figure in arpo["metrics"].items()} == {
        "em": 0.7, "tool_calls": 1.0, "pass/2": 0.7, "train_tool_calls": 700,
    }  # fmt: skip
    page = (project.root / "docs" / "results" / "arpo.md").read_text()
    assert "| method | seeds | EM | lowest to highest seed | ARPO minus method | p |" in page
    assert "| method | tool calls | pass@2 | tool calls in training |" in page
    found = {row["method"]: row for row in table_of(page, "## Results")}
    assert found["ARPO"]["EM"].startswith("0.650 [") and found["ARPO"]["lowest to highest seed"] == "0.600 to 0.700"
    assert found["GRPO"]["ARPO minus method"].startswith("+0.300 [")
    assert found["random branches"]["ARPO minus method"].startswith("+0.200 [")
    assert "\nmake reproduce EXP=arpo SEEDS=0,1\n" in page
    path = project.root / "docs" / "results" / "arpo.md"
    path.write_text(page.replace("# arpo\n", "# arpo\n\n**Findings**\n") + "\n## Appendix\n\nNotes.\n")
    run(context)
    assert path.read_text().startswith("# arpo\n\n**Findings**\n\n## Results\n"), "written parts stay"
    assert path.read_text().endswith("Data: [arpo.json](arpo.json).\n\n## Appendix\n\nNotes.\n")


def test_gates_of_all_seeds_are_measured_before_anything_trains(workshop, model_dir, monkeypatch):
    from experiments.commands import reproduce as module

    project, context = make_done(workshop, model_dir, more=", preconditions: true")
    done = []

    def gates(graph, context, allow, shown):
        assert shown.command() == "make reproduce EXP=arpo SEEDS=0,1 ALLOW=reads"
        done.append((context.seed, allow))
        return [Gate("reads", "reads", 0.5 + context.seed, 0.7, None, "-")]

    make = module.runner.make
    monkeypatch.setattr(module, "require_gates", gates)
    monkeypatch.setattr(module.runner, "make", lambda *given: (done.append("made"), make(*given))[1])
    run(context, allow="reads")
    assert done[:2] == [(0, "reads"), (1, "reads")] and {*done[2:]} == {"made"}
    page = (project.root / "docs" / "results" / "arpo.md").read_text()
    assert "| reads | reads | at least 0.7 | **0.500** | 1.500 |" in page and "SEEDS=0,1 ALLOW=reads\n" in page


def test_one_model_for_all_seeds_is_compared_with_each_of_them(workshop, model_dir):
    project, context = make_done(workshop, model_dir, about_grpo=", fixed_seed: true")  # 3 of 10 right
    run(context)
    objects = json.loads((project.root / "docs" / "results" / "arpo.json").read_text())
    assert [o["seed"] for o in objects if o["method"] == "GRPO"] == [0]
    page = (project.root / "docs" / "results" / "arpo.md").read_text()
    grpo = next(row for row in table_of(page, "## Results") if row["method"] == "GRPO")
    assert (grpo["seeds"], grpo["ARPO minus method"].split()[0], grpo["p"]) == ("1", "+0.350", "-")


def test_ablations_of_the_first_seed_alone(done, workshop):
    project, context = done
    path = workshop.files / "arpo.yaml"
    path.write_text(path.read_text().replace("ablations: [arpo_random]", "ablations_once: [arpo_random]"))
    run(context)
    objects = json.loads((project.root / "docs" / "results" / "arpo.json").read_text())
    assert [o["seed"] for o in objects if o["method"] == "random branches"] == [0]
    assert [o["seed"] for o in objects if o["method"] == "ARPO"] == [0, 1]


def test_an_experiment_is_compared_by_its_own_score(workshop, monkeypatch):
    more = ", compare: [grpo], columns: [acc, average/2], score: average"
    workshop.write("sod", FIT.format(label="SOD", branch=1, more=more))
    workshop.write("grpo", FIT.format(label="GRPO", branch=0, more=""))
    project = Project(root=workshop.folder, experiment_dirs=(workshop.files,), outputs=workshop.folder / "outputs")
    context = RunContext(project, "sod", (), None)
    for name, right in (("sod", 8), ("grpo", 6)):
        stage = make_graph(dataclasses.replace(context, target=name, seed=0)).target()
        finish(stage, right, "make", answer_by_reward if name == "grpo" else None)
    monkeypatch.setattr("experiments.launch.runner.make_stage", lambda *a, **k: pytest.fail("a stage was to be made"))
    run(context, seeds="0")
    objects = json.loads((project.root / "docs" / "results" / "sod.json").read_text())
    assert [(o["method"], o["metric"], o["mean"], o["k"]) for o in objects] == [
        ("GRPO", "average", 0.4, 8), ("SOD", "average", 0.8, 16),
    ]  # fmt: skip
    page = (project.root / "docs" / "results" / "sod.md").read_text()
    assert table_of(page, "## Results")[0]["SOD minus method"].startswith("+0.400 [")


def test_a_wrong_score_is_refused_when_the_file_is_read(workshop):
    workshop.task("x", about="score: averages")
    with pytest.raises(ExperimentError, match="unknown score 'averages'; expected one of em, average, success"):
        workshop.graph("x").target()
