"""The callback over real tests: real student and teacher, which trajectories it takes, what it writes, two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import torch

from callbacks.evaluation.arcap import ARCap
from callbacks.evaluation.evaluation import Evaluation
from callbacks.evaluation.turn_divergence import TurnDivergence, choice_key
from callbacks.evaluation.turn_scores import SCORES_FILE, TRAJECTORIES_FILE, by_trajectory, load_scores
from lightning_modules.training.policy_module import EvaluateOnly
from rollout.storage import load_trajectories
from rollout.trajectory import ActionKind, CallOutcome, StopReason
from tests.callbacks.helpers import EvaluationData, Hands, make_call, make_trajectory

CALL, ANSWER = ActionKind.CALL, ActionKind.ANSWER
WORKER = Path(__file__).with_name("turn_ranks_worker.py")


def attempts(questions, count, **options):
    return [make_trajectory(f"q{i}", index=a, **options) for i in range(questions) for a in range(count)]


def slow_scores(student_dir, teacher_dir, trajectory):
    """d, w, mean T - S and teacher entropy of each turn, token by token from the logits of transformers."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
    logs = []
    for folder in (student_dir, teacher_dir):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logs.append(model(input_ids=ids).logits[0].double().log_softmax(-1))
    student, teacher = logs
    start, found = len(trajectory.prompt_ids), {"divergence": [], "signed": [], "teacher_entropy": []}
    for turn in trajectory.turns:
        places = [start + i for i in range(turn.start, turn.end)]
        ratios = [float(teacher[p - 1, ids[0, p]] - student[p - 1, ids[0, p]]) for p in places]
        entropies = [float(-(teacher[p - 1].exp() * teacher[p - 1]).sum()) for p in places]
        found["divergence"].append(sum(map(abs, ratios)) / len(places))
        found["signed"].append(sum(ratios) / len(places))
        found["teacher_entropy"].append(sum(entropies) / len(places))
    d = found["divergence"]
    found["weight"] = [1.0, *(min((d[0] + 1e-6) / (x + 1e-6), 1.2) for x in d[1:])]
    return found


def test_a_real_test_is_scored_turn_by_turn(trainer_for, tmp_path, model_dir, teacher_dir):
    error = (make_call(0, "q", (), CallOutcome.ERROR),)
    first = make_trajectory("q1", kinds=(CALL, CALL, ANSWER), calls=error)
    second = make_trajectory("q2", kinds=(ANSWER,), tokens=7, index=1)
    probe = make_trajectory("q3")
    data = EvaluationData({"agent": [[first], [second]], "closed_book": [[probe]]})
    callbacks = [TurnDivergence(str(teacher_dir)), Evaluation(200), ARCap(200)]
    trainer = trainer_for(callbacks)
    (metrics, *_) = trainer.test(EvaluateOnly(str(model_dir)), datamodule=data, verbose=False)

    turns = by_trajectory(load_scores(tmp_path / "stage"))
    assert [[row.outcome for row in rows] for rows in turns] == [["error", "none", "answer"], ["answer"]]
    assert [(rows[0].id, rows[0].attempt, rows[0].tokens) for rows in turns] == [("q1", 0, 4), ("q2", 1, 7)]
    for trajectory, rows in zip((first, second), turns, strict=True):
        for name, values in slow_scores(model_dir, teacher_dir, trajectory).items():
            assert [getattr(row, name) for row in rows] == pytest.approx(values, rel=1e-3, abs=1e-5), name
    assert load_trajectories(tmp_path / "stage" / TRAJECTORIES_FILE) == [first, second]

    report = json.loads((tmp_path / "stage" / "evaluation.json").read_text())["test"]
    d, w = ([getattr(row, name) for row in turns[0]] for name in ("divergence", "weight"))
    assert report["turns/divergence/1"]["mean"] == pytest.approx((d[0] + turns[1][0].divergence) / 2)
    assert report["turns/divergence/1"]["n"] == 2 and report["turns/weight/2"]["n"] == 1
    assert report["turns/weight/after_error"]["mean"] == pytest.approx(w[1]) == metrics["test/turns/weight/after_error"]
    assert metrics["test/turns/teacher_entropy/2"] == pytest.approx(turns[0][1].teacher_entropy)
    assert "turns/weight/4" not in report and "em" in report and "arcap/closed_book" in report


def test_callbacks_keep_each_others_figures_in_any_order(trainer_for, tmp_path, model_dir, teacher_dir):
    for order in ((0, 1), (1, 0)):
        callbacks = [TurnDivergence(str(teacher_dir)), Evaluation(200)]
        data = EvaluationData({"agent": [attempts(1, 1)]})
        trainer = trainer_for([callbacks[i] for i in order])
        trainer.test(EvaluateOnly(str(model_dir)), datamodule=data, verbose=False)
        report = json.loads((tmp_path / "stage" / "evaluation.json").read_text())["test"]
        assert {"em", "turns/divergence/2"} <= report.keys()


class Recorder(Hands):
    """Gives every turn the figures (1, ...) and keeps what it was asked about."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def turn_divergences(self, trajectories, teacher):
        self.asked.append([(t.task.id, t.index) for t in trajectories])
        ones = [[1.0] * len(t.turns) for t in trajectories]
        return [dict.fromkeys(("divergence", "weight", "signed", "teacher_entropy"), values) for values in ones]


def asked(trainer_for, teacher_dir, trajectories, batch=7, **options):
    batches = [trajectories[i : i + batch] for i in range(0, len(trajectories), batch)]
    module = Recorder()
    trainer = trainer_for([TurnDivergence(str(teacher_dir), **options)])
    trainer.test(module, datamodule=EvaluationData({"agent": batches}), verbose=False)
    (chosen,) = module.asked
    return chosen


def test_as_many_of_every_question_and_the_same_for_every_method(trainer_for, teacher_dir):
    made = attempts(10, 4)
    chosen = asked(trainer_for, teacher_dir, made, max_trajectories=24)
    counts = {f"q{i}": sum(q == f"q{i}" for q, _ in chosen) for i in range(10)}
    assert sorted(counts.values()) == [2] * 6 + [3] * 4 and {a for _, a in chosen} == {0, 1, 2}
    # another method: other trajectories in another order and other batches
    other = list(reversed(attempts(10, 4, kinds=(ANSWER,), answer="x")))
    assert sorted(asked(trainer_for, teacher_dir, other, batch=3, max_trajectories=24)) == sorted(chosen)
    few = asked(trainer_for, teacher_dir, made, max_trajectories=3)
    assert {a for _, a in few} == {0} and len({q for q, _ in few}) == 3
    assert {q for q, _ in few} != {"q0", "q1", "q2"}, "by chance, not the first of the file"
    assert len(asked(trainer_for, teacher_dir, made)) == 40
    assert choice_key(made[0]) < choice_key(made[1])


def test_failures_are_left_out_and_nobody_takes_their_place(trainer_for, tmp_path, teacher_dir):
    made = attempts(4, 1)
    spoiled = [t.replace(stop_reason=StopReason.INFRASTRUCTURE) if t.task.id == "q2" else t for t in made]
    silent = make_trajectory("q9", kinds=(), answer=None, stop=StopReason.LENGTH)
    for limit in (400, 4):
        chosen = asked(trainer_for, teacher_dir, spoiled, max_trajectories=limit)
        assert {q for q, _ in chosen} == {"q0", "q1", "q3"}
    assert asked(trainer_for, teacher_dir, [silent]) == []
    assert load_scores(tmp_path / "stage") == []
    assert pl.read_parquet(tmp_path / "stage" / SCORES_FILE).schema["acc"] == pl.Float64


def test_what_is_met_twice_counts_once(trainer_for, teacher_dir):
    assert len(asked(trainer_for, teacher_dir, attempts(3, 1) + attempts(3, 1))) == 3


def test_validations_are_not_scored(trainer_for, tmp_path, teacher_dir):
    module = Recorder()
    trainer = trainer_for([TurnDivergence(str(teacher_dir))])
    trainer.validate(module, datamodule=EvaluationData({"agent": [attempts(2, 1)]}), verbose=False)
    assert not module.asked and not (tmp_path / "stage" / SCORES_FILE).exists()


def test_what_cannot_work_is_refused_before_anything_is_loaded(trainer_for, model_dir):
    data = EvaluationData({"agent": [attempts(1, 1)]})
    with pytest.raises(TypeError, match=r"turn_divergences\(trajectories, teacher\).*Hands has none"):
        trainer_for([TurnDivergence(str(model_dir))]).test(Hands(), datamodule=data, verbose=False)
    with pytest.raises(FileNotFoundError, match="no teacher at '/nowhere'"):
        trainer_for([TurnDivergence("/nowhere")]).test(Recorder(), datamodule=data, verbose=False)


@pytest.mark.slow
def test_two_ranks_score_together(tmp_path, model_dir, teacher_dir):
    """The choice is over both, also where one of them has nothing to score; the same files as from one rank."""
    command = [sys.executable, str(WORKER), str(tmp_path), str(model_dir), str(teacher_dir)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    one = load_scores(tmp_path / "one")
    assert sorted({row.id for row in one}) == ["q0", "q3", "q4", "q5"] and len(one) == 8
    for name in ("shared", "lonely"):
        two = load_scores(tmp_path / name)
        assert [(r.id, r.attempt, r.turn) for r in two] == [(r.id, r.attempt, r.turn) for r in one]
        assert [r.divergence for r in two] == pytest.approx([r.divergence for r in one], rel=1e-4)
        assert [r.weight for r in two] == pytest.approx([r.weight for r in one], rel=1e-4)
        files = [load_trajectories(tmp_path / folder / TRAJECTORIES_FILE) for folder in (name, "one")]
        assert files[0] == files[1]
