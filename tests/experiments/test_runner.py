"""Whole runs over small real stages, through the command line."""

import json
import os
import signal
import time

import pytest

from experiments.store import StageFolder


def runs(journal):
    return [line.split()[1] for line in journal.read_text().splitlines()] if journal.exists() else []


@pytest.fixture
def chain(workshop):
    """a -> b, and both write a line into the journal when they run."""
    workshop.task("a", "text: A")
    workshop.task("b", "text: B, source: '${stage:a}'")
    return workshop, workshop.journal


def test_stages_are_made_once_and_reused(chain):
    workshop, journal = chain
    first = workshop.run("train", "b", "--resume", "last")
    assert first.returncode == 0, first.stderr
    assert "RESUME=last: nothing to continue" in first.stdout
    assert runs(journal) == ["a", "b"]
    stage = workshop.graph("b").target()
    assert (stage.folder / "note.txt").read_text() == "AB"
    result = StageFolder(stage.folder).result()
    assert result["summary"] == {"characters": 2}
    assert result["upstream"] == {"a": stage.upstream[0].key}
    assert result["seconds"] > 0 and result["sessions"] == 1 and result["command"] == "make train EXP=b"
    assert (stage.folder / "log").read_text() == "writing B\n"

    again = workshop.run("train", "b")
    assert again.returncode == 0 and "2 done, 0 to make" in again.stdout
    assert runs(journal) == ["a", "b"]

    assert workshop.run("train", "b", "--task.text", "C").returncode == 0
    assert runs(journal) == ["a", "b", "b"]  # a is reused, b is another b

    assert workshop.run("train", "b", "--fresh").returncode == 0
    assert runs(journal) == ["a", "b", "b", "b"]


def test_two_runs_at_once_make_a_stage_once(chain):
    workshop, journal = chain
    workshop.task("a", "text: A, seconds: 1.0")
    both = [workshop.start("train", "b") for _ in range(2)]
    outputs = [p.communicate(timeout=120) for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert sorted(runs(journal)) == ["a", "b"]


def test_a_stage_killed_in_the_middle_is_made_again(chain):
    workshop, journal = chain
    workshop.task("a", "text: A, seconds: 30")
    process = workshop.start("train", "a")
    deadline = time.monotonic() + 120
    while not runs(journal) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    stage = workshop.graph("a").target()
    assert StageFolder(stage.folder).state() == "unfinished"
    assert StageFolder(stage.folder).owner() is None  # the lock died with the run
    assert workshop.run("train", "b", "--stages.a.task.seconds", "0").returncode == 0


def test_ctrl_c_says_how_to_continue(chain):
    workshop, journal = chain
    workshop.task("a", "text: A, seconds: 30")
    process = workshop.start("train", "a", "--seed", "3")
    deadline = time.monotonic() + 120
    while not runs(journal) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Ctrl-C again ends it at once" in out
    assert "To continue: make train EXP=a SEED=3 RESUME=last" in err


@pytest.mark.parametrize(
    ("fault", "words", "traceback"),
    [
        ("value", "error: ValueError: the corpus is empty", False),
        ("disk", "error: no space left on the disk", False),
        ("port", "error: a port is in use", False),
        ("bug", "TypeError: unsupported operand", True),
    ],
)
def test_failures_are_one_message_and_defects_a_traceback(workshop, fault, words, traceback):
    workshop.task("a", f"fault: {fault}")
    run = workshop.run("train", "a")
    assert run.returncode == 1
    assert words in run.stdout
    assert ("Traceback" in run.stdout) is traceback
    assert "a failed: exit code 1. Its log:" in run.stderr
    assert StageFolder(workshop.graph("a").target().folder).result() is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "bb"], "no experiment 'bb'"),
        (["train", "a", "--task.txt", "x"], "unknown key 'task.txt': tests.experiments.toys.Note has no such argument"),
        (["train", "a", "--task.txt", "x"], "did you mean 'text'"),
        (["train", "a", "--task.seconds", "soon"], "'seconds': Expected a <class 'float'>. Got value: soon"),
        (["train", "a", "--task.text", "nowhere/file.parquet"], "task.init_args.text: no file 'nowhere/file.parquet'"),
        (["train", "a", "--taks.text", "x"], "unknown section 'taks'; did you mean 'task'"),
        (["dry-run", "a", "--task.class_path", "tests.experiments.toys.Noet"], "Noet"),
    ],
)
def test_mistakes_cost_one_message_and_no_run(chain, words, message):
    workshop, journal = chain
    run = workshop.run(*words)
    assert run.returncode == 2
    everything = run.stdout + run.stderr  # a stage's process speaks through its parent's stdout
    assert message in everything and "Traceback" not in everything
    assert everything.count("error:") == 1
    assert runs(journal) == [] and not list(workshop.project.outputs.glob("*/*/"))


def test_missing_needs_stop_before_anything_runs(chain, tmp_path):
    workshop, journal = chain
    workshop.task("c", "source: '${stage:a}'", f"needs: {{weights: {{path: {tmp_path}/weights, how: ask the owner}}}}")
    run = workshop.run("train", "c")
    assert run.returncode == 2 and f"needs: {tmp_path}/weights (ask the owner)" in run.stderr
    assert runs(journal) == []
    dry = workshop.run("dry-run", "c")
    assert dry.returncode == 0 and f"needs: {tmp_path}/weights -- not there yet (ask the owner)" in dry.stdout
    (tmp_path / "weights").mkdir()
    assert workshop.run("train", "c").returncode == 0


def test_clean_removes_what_is_unfinished(chain):
    workshop, journal = chain
    assert workshop.run("train", "a").returncode == 0
    workshop.task("c", "fault: value")
    workshop.run("train", "c")
    run = workshop.run("clean")
    left = [p.parent.parent.name for p in workshop.project.outputs.glob("*/*/config.yaml")]
    assert run.returncode == 0 and left == ["a"]


def test_the_stage_process_is_seeded(workshop):
    workshop.write("a", "experiment: {kind: task}\ntask: {class_path: tests.experiments.toys.Draw}\n")
    drawn = []
    for words in (["--seed", "6"], ["--seed", "6", "--fresh"], []):
        assert workshop.run("train", "a", *words).returncode == 0
        stage = workshop.graph("a", seed=6 if words else None).target()
        drawn.append(json.loads((stage.folder / "drawn.json").read_text()))
    assert drawn[0] == drawn[1] and drawn[0]["random"] != drawn[2]["random"]
    assert (drawn[0]["variable"], drawn[2]["variable"]) == ("6", "0")


def test_listing_needs_no_torch(workshop):
    import subprocess
    import sys

    from experiments.project import ROOT

    code = (
        "import sys; from experiments.cli import main; from experiments.runner import make; "
        "code = main(['list']); heavy = {'torch', 'lightning', 'transformers', 'mlflow', 'vllm'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "dgpo_tiny" in done.stdout and "dgpo_qwen2.5_0.5b" in done.stdout
    assert time.monotonic() - began < 10  # 0.6 s on a quiet machine
