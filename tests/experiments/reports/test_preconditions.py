"""Gates by hand, and what is measured for which experiment."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from data_modules.datasets.splits import Splits
from experiments.commands.command import make_graph
from experiments.commands.preconditions import advised, find_skills, find_teacher, measured, require_gates, shuffled
from experiments.registry.errors import ExperimentError
from experiments.registry.project import Project
from experiments.reports.preconditions import Gate, auc, distillation_gates, fork_gates, place, skill_gates
from experiments.stages.context import RunContext, StageFailed
from rollout.trajectory import Task
from tests.callbacks.evaluation.turn_score_helpers import make_scores


def metric(**values):
    return {name.replace("__", "/"): {"mean": value, "n": 20} for name, value in values.items()}


def judged(signed, verdicts, **options):
    outcomes = ["ok"] * len(signed)
    rows = make_scores([1.0] * len(signed), outcomes, **options)
    pairs = zip(rows, signed, verdicts, strict=True)
    return [dataclasses.replace(row, signed=value, verdict=good) for row, value, good in pairs]


def test_auc_counts_pairs():
    assert auc([3.0, 1.0], [2.0, 1.0]) == pytest.approx((2 + 0.5) / 4)
    assert auc([1.0], [2.0]) == 0.0 and auc([], [1.0]) is None and auc([1.0], []) is None


def test_a_step_is_drifted_after_a_wrong_one_by_verdict_or_else_by_outcome():
    assert drift(judged([0.0] * 4, [True, False, True, None])) == [False, False, True, True]
    assert drift(make_scores([1.0] * 3, ["ok", "error", "answer"])) == [False, False, True]
    overruled = [dataclasses.replace(row, verdict=True) for row in make_scores([1.0] * 2, ["error", "ok"])]
    assert drift(overruled) == [False, False]


def drift(rows):
    return [drifted for _, drifted in place([rows])]


def test_the_gates_of_distillation_by_hand():
    first = judged([0.0, -4.0, -1.0, 2.0], [True, False, True, False], weights=[1.0, 0.8, 0.2, 0.4])
    second = judged([-1.0, -2.0, 0.5], [True, False, None], name="q2", weights=[1.0, 1.0, 0.3], acc=1.0)
    second = [dataclasses.replace(row, divergence=3.0) for row in second]
    start, teacher = metric(pass__8=0.1), metric(continues__clean=0.9, continues__drifted=0.4)
    gates = {gate.name: gate for gate in distillation_gates(start, [first, second], teacher, 8)}
    assert gates["no_success"].found == pytest.approx(0.9)
    assert (gates["teacher_clean"].found, gates["teacher_clean"].passed) == (0.9, True)
    assert (gates["teacher_drifted"].found, gates["teacher_drifted"].passed) == (0.4, False)
    # clean: 0 and -1 are good, -4 and -2 bad; drifted: -1 good, 2 bad, and 0.5 good by the trajectory's success
    assert gates["auc_clean"].found == 1.0 and gates["auc_drifted"].found == 0.0
    assert gates["weight_ratio"].found == pytest.approx(((0.2 + 0.4 + 0.3) / 3) / ((0.8 + 1.0) / 2))
    assert gates["first_turn"].found == pytest.approx(2**0.5 / 2)  # d_1 is 1 and 3
    few = {name: {**found, "n": 19} for name, found in teacher.items()}
    assert [gate.found for gate in distillation_gates(start, [first], few, 8)[1:3]] == [None, None]
    unmeasured = distillation_gates({}, [], {}, 8)
    assert len(unmeasured) == 7 and not any(gate.passed for gate in unmeasured), "not measured is not passed"


def test_the_gates_of_skills_by_hand():
    plain, skilled = metric(pass__8=0.2, average__8=0.04), metric(average__8=0.85)
    gates = skill_gates(plain, skilled, metric(average__8=0.15), 8)
    assert [gate.found for gate in gates] == pytest.approx([0.8, 0.04, 0.85, 0.15])
    assert [gate.passed for gate in gates] == [True, True, True, False], "0.15 is more than 0.1 above 0.04"
    nothing = skill_gates(metric(pass__8=0.0, average__8=0.0), skilled, metric(average__8=0.0), 8)[0]
    assert not nothing.passed and nothing.expected == "0.7 to 0.99", "a start that never succeeds"


def test_the_gates_of_branches():
    start = metric(forks__open=0.5, forks__correlation=0.1)
    assert [(gate.found, gate.passed) for gate in fork_gates(start)] == [(0.5, True), (0.1, False)]
    assert not any(gate.passed for gate in fork_gates({})), "not measured is not passed"


@pytest.fixture
def context():
    return RunContext(Project(), "sod_tiny", (), None)


def test_start_and_training_are_measured_alike(context):
    target = make_graph(context).target()
    config, size = measured(target, 16)
    data, before = config["data"]["init_args"], target.config["data"]["init_args"]
    assert size == 8 == data["attempts"] and data["max_test"] == 16
    assert data["test_files"] == before["train_files"] and data["eval_sampling"] == before["train_sampling"]
    classes = [c["class_path"].rpartition(".")[2] for c in config["trainer"]["callbacks"]]
    assert "Evaluation" in classes and not {"TurnDivergence", "IterationCheckpoint", "ARCap"} & {*classes}
    assert find_teacher(target) == target.config["model"]["init_args"]["teacher"] and find_skills(target) is None


def test_gates_see_training_questions_where_one_file_is_split(context, tmp_path):
    tasks = [Task(f"q{i}", f"question {i}?", ("a",), "mine") for i in range(50)]
    given = ("--paths.questions", str(tmp_path / "q.parquet"), "--paths.model", str(tmp_path))
    target = make_graph(dataclasses.replace(context, target="my_arpo", arguments=given)).target()
    splits = [Splits(**c["data"]["init_args"]["splits"]) for c in (target.config, measured(target, 16)[0])]
    assert splits[1].part(tasks, "test") == splits[0].part(tasks, "train")
    assert not {*map(id, splits[1].part(tasks, "test"))} & {*map(id, splits[0].part(tasks, "test"))}


def test_gates_need_folders(context, tmp_path, monkeypatch):
    given = ("--paths.questions", str(tmp_path / "q.parquet"), "--paths.model", "owner/model")
    asked = dataclasses.replace(context, target="my_arpo", arguments=given)
    monkeypatch.setattr("experiments.launch.runner.make", None)
    with pytest.raises(ExperimentError, match="policy is owner/model, a name on the hub, and gates need a folder"):
        require_gates(make_graph(asked), asked, "")


def test_skills_go_into_the_students_prompt(context):
    graph = make_graph(dataclasses.replace(context, target="sdar_beta_10_qwen2.5_7b_alfworld"))
    target = graph.target()
    skills = find_skills(target)
    config, _ = measured(target, 16)
    given = advised(config, shuffled(skills), 32768)["data"]["init_args"]
    found = given["rollouts"]["init_args"]["skills"]
    assert found["bank"] == skills["bank"] and found["retriever"]["init_args"]["retriever"] == skills["retriever"]
    assert found["place"] == "user_turn" and given["eval_skills"]
    longer, before = (
        d["rollouts"]["init_args"]["engine"]["init_args"]["max_length"] for d in (given, config["data"]["init_args"])
    )
    assert longer == before + skills["max_tokens"], "what the student reads besides"
    assert advised(config, None, 32768)["data"]["init_args"]["rollouts"]["init_args"]["skills"] is None


@pytest.mark.parametrize("name", ["arpo_tiny", "aepo_tiny"])
def test_dh_is_recorded_as_the_sampler_looks_at_it(context, name):
    target = make_graph(dataclasses.replace(context, target=name)).target()
    rollouts = measured(target, 16)[0]["data"]["init_args"]["rollouts"]["init_args"]
    assert rollouts["entropy_tokens"] == 8 == rollouts["sampler"]["init_args"]["first_tokens"]


@pytest.mark.parametrize(
    ("name", "overrides", "error"),
    [
        ("grpo_words_tiny", (), "has no gates: no teacher"),
        ("sod_tiny", ("--data.group_size", "1"), "samples no groups"),
    ],
)
def test_what_has_no_gates_is_refused(context, name, overrides, error):
    asked = dataclasses.replace(context, target=name, arguments=overrides)
    with pytest.raises(ExperimentError, match=error):
        measured(make_graph(asked).target(), 16)


def test_a_failed_gate_stops_unless_it_is_allowed_by_name(context, monkeypatch, capsys):
    from experiments.commands import preconditions

    gates = [Gate("a", "A", 0.5, 0.8, None, "train it longer"), Gate("b", "B", None, None, 0.3, "-")]
    monkeypatch.setattr(preconditions, "measure", lambda *_: gates)
    monkeypatch.setattr(preconditions.runner, "make", lambda *_, **__: None)
    graph = make_graph(context)
    with pytest.raises(StageFailed, match=r"2 of 2 gates failed: a, b.*: make train EXP=\S+ ALLOW=a,b$"):
        require_gates(graph, context, "")
    said = capsys.readouterr().out
    assert (
        "train it longer" in said and "try more questions: make preconditions EXP=" in said and "QUESTIONS=128" in said
    )
    with pytest.raises(StageFailed, match=r"1 of 2 gates failed: b\..*ALLOW=a,b$"):
        require_gates(graph, context, "a")
    shown = dataclasses.replace(context, verb="reproduce", variables=("SEEDS=0,1",))
    with pytest.raises(StageFailed, match=r"continue anyway: make reproduce EXP=\S+ SEEDS=0,1 ALLOW=a,b$"):
        require_gates(graph, context, "", shown=shown)
    require_gates(graph, context, "a, b")
    with pytest.raises(ExperimentError, match="unknown gate c; expected some of a, b"):
        require_gates(graph, context, "c")


def test_train_measures_first_where_the_experiment_says_so(context, tmp_path, monkeypatch):
    from experiments.commands import train as command

    text = "inherits: [sod_tiny]\nexperiment: {preconditions: true, compare: [], ablations: [], ablations_once: []}\n"
    (tmp_path / "guarded.yaml").write_text(text)
    project = dataclasses.replace(context.project, experiment_dirs=(tmp_path, *context.project.experiment_dirs))
    done: list[str] = []
    monkeypatch.setattr(command, "require_gates", lambda graph, _, allow: done.append(f"{graph.target_name} {allow}"))
    monkeypatch.setattr(command.runner, "make", lambda graph, _: (done.append("made"), (graph.target(), []))[1])
    args = argparse.Namespace(launch=None, nodes=None, processes=None, node_rank=None, master_addr=None, allow="a",
                              master_port=None, sbatch=None)  # fmt: skip
    for name, expected in (("guarded", ["guarded a", "made"]), ("sod_tiny", ["made"])):
        done.clear()
        command.train(args, RunContext(project, name, (), None))
        assert done == expected
