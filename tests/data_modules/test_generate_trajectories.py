import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_modules.datasets.files import DatasetError, expand
from data_modules.demonstrations.generate_trajectories import GenerateTrajectories
from data_modules.loading.decoding import Decoding
from data_modules.loading.failure_guard import TooManyFailuresError
from rollout.storage import load_trajectories
from rollout.trajectory import InfrastructureError

KINDS = ["right", "right", "wrong", "wrong", "wrong", "right", "right"]


def generated(folder):
    return [t for path in expand([str(folder / "trajectories")]) for t in load_trajectories(path)]


def test_keeps_what_is_correct_and_reports(make_system, question_file, tmp_path):
    system = make_system()
    task = GenerateTrajectories(
        system, [question_file("train", KINDS)], samples_per_question=2, seed=3, chunk_questions=2,
        sampling=Decoding(temperature=0.8),
    )  # fmt: skip
    summary = task.run(tmp_path / "out")
    kept = generated(tmp_path / "out")
    assert [(t.group, t.index) for t in kept] == [(f"q{i}", j) for i in (0, 1, 5, 6) for j in (0, 1)]
    assert {r.sampling.temperature for r in system.engine.requests} == {0.8}
    assert len({r.sampling.seed for r in system.engine.requests}) == 14, "every request has a seed of its own"
    sampled = sum(sum(t.loss_mask) for t in kept)
    assert summary.pop("seconds") > 0
    total = summary.pop("tokens_generated")
    assert total > sampled
    assert summary == {
        "questions": 7, "generated": 14, "failed": 0, "lost": [], "correct": 8, "kept": 8, "tokens_kept": sampled,
        "correct_share": 8 / 14, "mean_response_tokens": total / 14, "mean_response_tokens_kept": sampled / 8,
        "kept/made_up": 8,
    }  # fmt: skip
    # chunk 1 (questions 2 and 3, all wrong) is done without a file of trajectories
    assert sorted(p.name for p in (tmp_path / "out" / "trajectories").iterdir()) == [
        f"chunk-{i:05d}.parquet" for i in (0, 2, 3)
    ]
    assert not system.running, "the rollout system was not closed"


def test_keep_all_keeps_wrong_answers_but_no_failures(make_system, question_file, tmp_path):
    files = [question_file("train", ["right", "wrong", "right", "right", "right", "broken"])]
    system = make_system()
    summary = GenerateTrajectories(system, files, keep="all", seed=0).run(tmp_path / "out")
    assert [t.group for t in generated(tmp_path / "out")] == ["q0", "q1", "q2", "q3", "q4"]
    assert (summary["failed"], summary["correct"], summary["kept"], summary["lost"]) == (1, 4, 5, ["q5"])
    assert sorted(system.engine.asked(r.token_ids)[0] for r in system.engine.requests) == [0, 1, 2, 3, 4, 5, 5, 5]


def test_what_a_hiccup_failed_is_tried_again(make_system, question_file, tmp_path):
    files = [question_file("train", ["right", "right", "wrong"])]
    untroubled, troubled = make_system(), make_system()
    inner, failed = troubled.engine._script, set()

    def hiccup(ids, sampling):
        """The first three requests with an odd seed fail, once."""
        if sampling.seed not in failed and len(failed) < 3 and sampling.seed % 2:
            failed.add(sampling.seed)
            raise InfrastructureError("the retriever at http://nowhere does not answer")
        return inner(ids, sampling)

    troubled.engine._script = hiccup
    summaries = [
        GenerateTrajectories(system, files, samples_per_question=4, keep="all", seed=1).run(tmp_path / name)
        for name, system in (("untroubled", untroubled), ("troubled", troubled))
    ]
    assert failed and [s.pop("seconds") > 0 for s in summaries] == [True, True]
    assert summaries[0] == summaries[1] and summaries[1]["failed"] == 0
    expected, found = (
        [t.replace(seconds=0.0) for t in generated(tmp_path / name)] for name in ("untroubled", "troubled")
    )
    assert found == expected


def test_chunks_do_not_change_what_is_sampled(make_system, question_file, tmp_path):
    seeds = []
    for size in (2, 100):
        system = make_system()
        task = GenerateTrajectories(system, [question_file("train", KINDS)], seed=3, chunk_questions=size)
        task.run(tmp_path / str(size))
        seeds.append(sorted(r.sampling.seed for r in system.engine.requests))
    assert seeds[0] == seeds[1]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from data_modules.demonstrations.generate_trajectories import GenerateTrajectories
from tests.data_modules.toys import scripted_system

model, questions, folder = sys.argv[1:]
asked = []
def script(ids, sampling):
    asked.append(ids)
    if len(asked) == 6:  # in the third chunk
        os.kill(os.getpid(), signal.SIGKILL)
    return "<answer> answer " + str(len(asked) - 1) + " </answer>"
system = scripted_system(model, script, concurrency=1)
GenerateTrajectories(system, [questions], seed=3, chunk_questions=2).run(Path(folder))
"""


@pytest.mark.slow
def test_run_after_kill_9_reuses_finished_chunks(make_system, question_file, model_dir, tmp_path):
    files, out = [question_file("train", ["right"] * 9)], tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(model_dir), files[0], str(out)]
    child = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=400)
    assert child.returncode == -signal.SIGKILL, child.stderr[-2000:]
    system = make_system()
    summary = GenerateTrajectories(system, files, seed=3, chunk_questions=2).run(out)
    assert sorted(system.engine.asked(r.token_ids)[0] for r in system.engine.requests) == [4, 5, 6, 7, 8]
    assert [t.group for t in generated(out)] == [f"q{i}" for i in range(9)]
    assert (summary["questions"], summary["kept"]) == (9, 9)
    again = make_system()
    assert GenerateTrajectories(again, files, seed=3, chunk_questions=2).run(out) == summary
    assert again.engine.requests == []


def test_failures_stop_it_and_finished_chunks_stay(make_system, question_file, tmp_path):
    files = [question_file("train", ["right", "right", "broken", "right"])]
    with pytest.raises(TooManyFailuresError, match=r"chunk 2: 1 of 2 .* 20% .*http://nowhere"):
        GenerateTrajectories(make_system(), files, seed=0, chunk_questions=2).run(tmp_path / "out")
    assert [t.group for t in generated(tmp_path / "out")] == ["q0", "q1"]
    patient = GenerateTrajectories(make_system(), files, seed=0, chunk_questions=2, max_consecutive_failures=2)
    assert patient.run(tmp_path / "out")["failed"] == 1


def test_a_model_that_gets_nothing_right_is_an_error(make_system, question_file, tmp_path):
    with pytest.raises(DatasetError, match="none of 2 trajectories over 2 questions was kept"):
        GenerateTrajectories(make_system(), [question_file("train", ["wrong"] * 2)], seed=0).run(tmp_path / "out")


def test_seed_is_the_runs_own_unless_given(make_system, question_file, tmp_path, monkeypatch):
    seeds = []
    for environment, given in (("5", None), ("6", None), ("6", 5)):
        monkeypatch.setenv("PL_GLOBAL_SEED", environment)
        system = make_system()
        task = GenerateTrajectories(system, [question_file("train", ["right"])], seed=given)
        task.run(tmp_path / f"{environment}{given}")
        seeds.append(system.engine.requests[0].sampling.seed)
    assert seeds[0] == seeds[2] != seeds[1]
