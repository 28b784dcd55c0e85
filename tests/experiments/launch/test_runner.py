"""Whole runs over small real stages, through the command line."""

import errno
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experiments.launch.runner import require_needs, require_writable
from experiments.registry.errors import ExperimentError
from experiments.stages.context import StageFailed
from experiments.stages.stage import REFUSED, explain, is_for_user
from experiments.stages.store import StageFolder


def runs(journal):
    return [line.split()[1] for line in journal.read_text().splitlines()] if journal.exists() else []


@pytest.fixture
def chain(workshop):
    """a -> b, and both write a line into the journal when they run."""
    workshop.task("a", "text: A")
    workshop.task("b", "text: B, source: '${stage:a}'")
    return workshop, workshop.journal


def test_stages_are_made_once_and_reused(chain, run_here):
    workshop, journal = chain
    first = run_here("train", "b", "--resume", "last")
    assert first.returncode == 0, first.stderr
    assert "RESUME=last: no stage was interrupted" in first.stdout
    assert runs(journal) == ["a", "b"]
    stage = workshop.graph("b").target()
    assert (stage.folder / "note.txt").read_text() == "AB"
    result = StageFolder(stage.folder).result()
    assert result["summary"] == {"characters": 2}
    assert result["upstream"] == {"a": stage.upstream[0].key}
    assert result["seconds"] > 0 and result["sessions"] == 1 and result["command"] == "make train EXP=b"
    assert (stage.folder / "log").read_text() == "writing B\n"

    again = run_here("train", "b")
    assert again.returncode == 0 and "2 done, 0 to make" in again.stdout
    assert runs(journal) == ["a", "b"]

    assert run_here("train", "b", "--task.text", "C").returncode == 0
    assert runs(journal) == ["a", "b", "b"]  # a is reused, b is another b

    assert run_here("train", "b", "--fresh").returncode == 0
    assert runs(journal) == ["a", "b", "b", "b"]


@pytest.mark.slow
def test_what_it_is_compared_with_is_made_on_demand(chain, run_here, monkeypatch):
    workshop, journal = chain
    shown = []
    monkeypatch.setattr("experiments.commands.train.closing_table", lambda stages, _: shown.append([*stages]))
    workshop.task("other", "text: O, source: '${stage:a}'")
    workshop.task("third", "text: T")
    workshop.task("b", "text: B, source: '${stage:a}'", "compare: [a, other, third]")
    alone = run_here("train", "b")
    assert alone.returncode == 0, alone.stderr
    assert (
        "  compared experiments that are left out: other, third; to make them, too: make train EXP=b COMPARE=1\n"
        in alone.stdout
    )
    assert sorted(runs(journal)) == ["a", "b"] and [s.name for s in shown[-1]] == ["a", "b"]
    assert run_here("train", "other").returncode == 0
    again = run_here("train", "b")
    assert "that are left out: third; to make" in again.stdout
    assert [s.name for s in shown[-1]] == ["a", "other", "b"], "what is done is shown in any case"
    whole = run_here("train", "b", "--compare")
    assert whole.returncode == 0 and "left out" not in whole.stdout and sorted(runs(journal))[-1] == "third"
    assert [s.name for s in shown[-1]] == ["a", "other", "third", "b"]


def test_a_table_that_another_stage_made_is_not_read_once_it_was_altered(chain, run_here):
    workshop, journal = chain
    made = StageFolder(workshop.graph("a").target().folder)
    made.path.mkdir(parents=True)
    (made.path / "note.txt").write_text("A")
    (made.path / "rows.jsonl").write_text('{"question": "who?"}\n')
    made.finish({"kind": "task", "seconds": 1, "finished": 1})
    assert run_here("train", "b").returncode == 0 and runs(journal) == ["b"]
    (made.path / "rows.jsonl").write_text('{"question": "whom?"}\n')
    refused = run_here("train", "b", "--fresh")
    assert refused.returncode == 2 and runs(journal) == ["b"]
    [line] = refused.stderr.splitlines()
    assert "rows.jsonl has SHA-256" in line and "make train EXP=a FRESH=1" in line
    assert StageFolder(workshop.graph("b").target().folder).result() is not None, "what was made is still there"


def test_what_was_made_of_an_earlier_run_says_so(chain, run_here):
    workshop, _ = chain

    def make_a(row):
        made = StageFolder(workshop.graph("a").target().folder)
        made.path.mkdir(parents=True, exist_ok=True)
        (made.path / "rows.jsonl").write_text(row)
        (made.path / "note.txt").write_text("A")
        made.finish({"kind": "task", "seconds": 1, "finished": time.time()})

    make_a('{"question": "who?"}')
    assert run_here("train", "b").returncode == 0
    make_a('{"question": "who?"}')
    assert "with an earlier" not in run_here("train", "b").stdout, "the same rows again"
    make_a('{"question": "whom?"}')
    again = run_here("train", "b")
    assert again.returncode == 0 and ", with an earlier a; again: make train EXP=b FRESH=1\n" in again.stdout
    stage = workshop.graph("b").target()
    (stage.folder / "result.json").unlink()  # as if it had been stopped
    continued = run_here("train", "b")
    assert continued.returncode == 0 and "  it began with an earlier a, made again since\n" in continued.stdout
    assert run_here("train", "b", "--fresh").returncode == 0
    assert "with an earlier" not in run_here("train", "b").stdout


@pytest.mark.slow
def test_stages_go_on_when_their_reader_has_gone(chain):
    workshop, journal = chain
    workshop.task("a", "text: A, seconds: 1.0")
    process = workshop.start("train", "b", stderr=subprocess.STDOUT)
    while "] a: " not in process.stdout.readline():
        pass
    process.stdout.close()  # as `| head` does, or a `tee` that the same Ctrl-C ends
    assert process.wait(timeout=300) == 0 and runs(journal) == ["a", "b"]
    assert StageFolder(workshop.graph("b").target().folder).result() is not None


@pytest.mark.slow
def test_two_runs_at_once_make_a_stage_once(chain):
    workshop, journal = chain
    workshop.task("a", "text: A, seconds: 1.0")
    both = [workshop.start("train", "b") for _ in range(2)]
    outputs = [p.communicate(timeout=600) for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert sorted(runs(journal)) == ["a", "b"]


def test_a_refused_restart_keeps_what_an_interrupted_task_has_made(workshop, run_here, monkeypatch):
    workshop.task("a", "text: A")
    folder = workshop.graph("a").target().folder
    monkeypatch.setattr("experiments.launch.runner.require_valid", lambda context: None)

    def ends_with(code, made):
        def run_stage(stage, *_):
            if made:
                (stage.folder / made).touch()
            raise StageFailed("", code)

        monkeypatch.setattr("experiments.launch.runner.run_stage", run_stage)
        assert run_here("train", "a").returncode == code

    ends_with(REFUSED, None)
    assert not folder.exists()  # nothing was done
    ends_with(1, "chunk")
    ends_with(REFUSED, None)  # say a PYTHONPATH is missing now
    assert (folder / "chunk").exists()


FIT = """experiment: {kind: fit}
model: {class_path: tests.experiments.toy_modules.Walk}
data: {class_path: tests.experiments.toy_modules.Noise}
"""


def test_no_command_erases_a_checkpoint_that_it_has_not_replaced(workshop, run_here, monkeypatch):
    workshop.write("a", FIT)
    store = StageFolder(workshop.graph("a").target().folder)
    folder, seen = store.path / "checkpoints", []
    monkeypatch.setattr("experiments.launch.runner.require_needs", lambda *_: None)

    def train(code, *words, saves=None):
        def run_stage(stage, *_):
            seen.append(store.checkpoint and store.checkpoint.read_text())
            if saves:
                folder.mkdir(exist_ok=True)
                (folder / "iteration-00000001.ckpt").write_text(saves)
            if code:
                raise StageFailed("", code)

        monkeypatch.setattr("experiments.launch.runner.run_stage", run_stage)
        done = run_here("train", "a", *words)
        assert done.returncode == code, done
        return done

    train(1, saves="first")
    (folder / "iteration-00000001.ckpt").rename(folder / "mine.ckpt")
    assert "RESUME=last: no stage" not in train(2, "--resume", "last").stdout
    assert "(can be resumed)" in run_here("clean").stdout and (folder / "mine.ckpt").exists()
    (folder / "mine.ckpt").rename(folder / "iteration-00000001.ckpt")
    assert "continuing from" in train(1, "--resume", "last").stdout and seen[-1] == "first"
    assert ".replaced until the stage is done" in train(REFUSED, "--fresh").stdout and seen[-1] is None
    assert store.checkpoint.read_text() == "first", "refused before anything was made: as if it had not been asked for"
    train(1, "--fresh")
    train(1)
    assert seen[-1] is None, "FRESH=1 holds for the attempts after it"
    train(1, "--fresh", saves="second")
    [earlier] = store.path.parent.glob("*.replaced*")
    assert "(can be resumed)" in run_here("clean").stdout
    assert (earlier / "checkpoints" / "iteration-00000001.ckpt").read_text() == "first"
    train(0)
    assert seen[-1] == "second" and [path.name for path in store.path.parent.glob("*/")] == [store.path.name]


def test_ctrl_c_says_how_to_continue(chain):
    workshop, journal = chain
    workshop.task("a", "text: A, seconds: 3600")
    process = workshop.start("train", "a", "--seed", "3")
    deadline = time.monotonic() + 120
    while not runs(journal) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Ctrl-C again ends the stage at once" in out
    assert "To continue: make train EXP=a SEED=3 RESUME=last" in err


@pytest.mark.parametrize(
    ("fault", "words", "traceback"),
    [
        ("value", "error: ValueError: the corpus is empty", False),
        ("bug", "TypeError: unsupported operand", True),
        ("exit", "code of this stage called sys.exit() before the stage's end", True),
    ],
)
def test_failures_are_one_message_and_defects_a_traceback(workshop, run_here, fault, words, traceback):
    workshop.task("a", f"fault: {fault}")
    run = run_here("train", "a")
    assert run.returncode == 1
    assert words in run.stdout
    assert ("Traceback" in run.stdout) is traceback
    assert "a failed: exit code 1. Its log:" in run.stderr
    assert StageFolder(workshop.graph("a").target().folder).result() is None


def test_a_folder_that_is_deleted_meanwhile_is_told(workshop, run_here):
    workshop.task("a", "fault: gone")
    run = run_here("train", "a")
    assert run.returncode == 1
    assert "was deleted while a was being made in it. To try again: make train EXP=a" in run.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), "no space left on the disk"),
        (OSError(errno.EADDRINUSE, "Address already in use"), "a port is in use"),
        (RuntimeError("[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:13540."), "another rank has ended"),
    ],
)
def test_the_machine_s_own_troubles_are_for_the_user(error, words):
    assert explain(error).startswith(words) and is_for_user(error)
    assert not is_for_user(TypeError("a defect"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "bb"], "no experiment 'bb'"),
        (["dry-run", "a", "--task.retriever", "5"], "'task.retriever' is 5; expected class_path and init_args of"),
        (["dry-run", "a", "--task.text", "${no.x}"], "(at 'task.init_args.text': '${no.x}', in the command line)"),
        (["retriever", "a", "--port", "99999"], "port 99999: expected a number from 0 to 65535, as in make retr"),
        (["train", "a", "--task.text", "nowhere/file.parquet"], "task.init_args.text: no file 'nowhere/file.parquet'"),
        (["train", "a", "--taks.text", "x"], "unknown section 'taks'; did you mean 'task'"),
    ],
)
def test_mistakes_cost_one_message_and_no_run(chain, run_here, words, message):
    workshop, journal = chain
    run = run_here(*words)
    assert run.returncode == 2
    everything = run.stdout + run.stderr  # a stage's process speaks through its parent's stdout
    assert message in everything and "Traceback" not in everything
    assert everything.count("error:") == 1
    assert runs(journal) == [] and not list(workshop.project.outputs.glob("*/*/"))


def test_outputs_that_cannot_be_written_are_one_message(workshop, run_here, monkeypatch):
    workshop.task("a")
    monkeypatch.setattr(workshop, "project", replace(workshop.project, outputs=Path("/dev/null/x")))
    run = run_here("train", "a")
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert "error: cannot write outputs to /dev/null/x (Not a directory); choose another folder" in run.stderr
    assert run_here("status", "a").returncode == 0, "what only reads is not refused"

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(ExperimentError, match="Read-only file system"):
        require_writable(workshop.folder)


def test_missing_needs_stop_before_anything_runs(chain, run_here, tmp_path):
    workshop, journal = chain
    workshop.task("c", "source: '${stage:a}'", f"needs: {{weights: {{path: {tmp_path}/weights, how: ask the owner}}}}")
    run = run_here("train", "c")
    assert run.returncode == 2 and f"needs: {tmp_path}/weights (ask the owner)" in run.stderr
    assert runs(journal) == []
    dry = run_here("dry-run", "c")
    assert dry.returncode == 0 and f"needs: {tmp_path}/weights -- missing (ask the owner)" in dry.stderr
    assert yaml.safe_load(dry.stdout)["experiment"]["name"] == "c", "stdout is YAML alone"
    (tmp_path / "weights").mkdir()
    require_needs([workshop.graph("c").target()])


def test_clean_keeps_what_can_be_resumed_or_is_done_unless_forced(chain, run_here):
    workshop, _ = chain
    stores = {name: StageFolder(workshop.graph(name).target().folder) for name in ("a", "b")}
    for name, store in stores.items():
        store.prepare(workshop.graph(name).target(), {}, keep=False)
    stores["a"].finish({"seconds": 1})
    (stores["b"].path / "part-0").touch()
    said = run_here("clean").stdout
    assert "0 stage folders removed; 1 kept, remove them with: make clean FORCE=1\n" in said
    assert f"  kept    {stores['b'].path} (can be resumed)" in said
    said = run_here("clean", "--all").stdout
    assert (
        "2 kept, remove them with: make clean ALL=1 FORCE=1\n" in said
        and f"{stores['a'].path} (done)" in said
        and stores["a"].path.exists()
    )
    assert "1 stage folders removed\n" in run_here("clean", "--force").stdout and stores["a"].path.exists()
    assert run_here("clean", "--all", "--force").returncode == 0 and not stores["a"].path.exists()


def test_listing_needs_no_torch(workshop):
    import subprocess
    import sys

    from experiments.registry.project import ROOT

    code = (
        "import sys; from experiments.commands.cli import main; from experiments.launch.runner import make; "
        "code = main(['list']); heavy = {'torch', 'lightning', 'transformers', 'mlflow', 'vllm'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "dgpo" in done.stdout
