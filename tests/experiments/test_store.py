"""Stage folders: the done marker, sessions, and a lock that survives neither its owner nor a race."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments.registry.project import ROOT
from experiments.stages.store import StageFolder

HOLD = """
import sys, time
from pathlib import Path
from experiments.stages.store import StageFolder
with StageFolder(Path(sys.argv[1])).lock.held():
    print("locked", flush=True)
    time.sleep(60)
"""


def hold_lock(folder):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "locked\n"
    return holder


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    store = StageFolder(tmp_path / "stage" / "key")
    store.path.parent.mkdir(parents=True)
    holder = hold_lock(store.path)
    try:
        assert store.lock.owner()["pid"] == holder.pid
        waited_for = []
        holder_gone = threading.Timer(0.3, lambda: os.kill(holder.pid, signal.SIGKILL))
        holder_gone.start()
        with store.lock.held(waited_for.append, poll=0.05):
            assert [owner["pid"] for owner in waited_for] == [holder.pid]
            assert json.loads((tmp_path / "stage" / "key.lock").read_text())["pid"] == os.getpid()
        assert store.lock.owner() is None
    finally:
        holder.kill()
        holder.wait()


def test_states(workshop):
    workshop.task("x")
    stage = workshop.graph("x").target()
    store = StageFolder(stage.folder)
    assert store.state() == "missing"
    store.prepare(stage, {"arguments": []}, keep=False)
    assert store.state() == "unfinished"
    for name in (".iteration-00000001.ckpt.tmp", "iteration-00000001.ckpt.sha256"):
        write(store.path / "checkpoints" / name)
    assert store.state() == "unfinished"
    write(store.path / "checkpoints" / "renamed.ckpt")
    assert store.state() == "interrupted" and store.checkpoint is None
    assert write(store.path / "checkpoints" / "iteration-00000001.ckpt") == store.checkpoint
    assert store.state() == "interrupted"
    holder = hold_lock(stage.folder)
    try:
        assert store.state() == "running"
    finally:
        holder.kill()
        holder.wait()
    store.finish({"seconds": 1})
    assert store.state() == "done" and store.result() == {"seconds": 1}


def test_sessions_add_up_and_a_killed_one_counts_to_its_last_checkpoint(workshop):
    workshop.task("x")
    stage = workshop.graph("x").target()
    store = StageFolder(stage.folder)
    store.prepare(stage, {}, keep=False)
    write(store.path / "checkpoints" / "iteration-00000001.ckpt")
    began = store.metadata()["sessions"][0]["started"]
    os.utime(store.checkpoint, (began + 100, began + 100))
    store.prepare(stage, {}, keep=True)  # the first session never ended
    time.sleep(0.05)
    seconds = store.end_session()
    assert 100.04 < seconds < 1000
    assert len(store.metadata()["sessions"]) == 2


@pytest.mark.parametrize(
    "weights", ["checkpoints/iteration-00000001.ckpt", "checkpoints/a.ckpt.bad", "model/x.safetensors"]
)
def test_a_folder_with_weights_stays_until_the_next_is_done(workshop, weights):
    workshop.task("x")
    stage = workshop.graph("x").target()
    store = StageFolder(stage.folder)
    mine = write(stage.folder.with_name(f"{stage.key}.replaced-by-me"))
    for text in ("first", "second"):
        assert store.prepare(stage, {}, keep=False) == (
            stage.folder.with_name(f"{stage.key}.replaced") if text == "second" else None
        )
        write(stage.folder / weights, text)
    renamed = store.prepare(stage, {}, keep=False)
    assert renamed == stage.folder.with_name(f"{stage.key}.replaced2")
    assert not (stage.folder / weights).exists()
    store.undo_prepare(renamed)
    assert (stage.folder / weights).read_text() == "second"
    assert store.prepare(stage, {}, keep=False) is not None and (again := store.prepare(stage, {}, keep=False)) is None
    store.undo_prepare(again)
    assert not stage.folder.exists(), "what an earlier run has renamed does not come back as a finished stage"
    assert store.prepare(stage, {}, keep=False) is None
    store.finish({"seconds": 1})
    assert sorted(path.name for path in stage.folder.parent.iterdir()) == [stage.key, mine.name]


def test_files_of_a_stage_obey_the_umask_whoever_wrote_them(workshop, tmp_path):
    workshop.task("x")
    stage = workshop.graph("x").target()
    store = StageFolder(stage.folder)
    before = os.umask(0o027)
    try:
        store.prepare(stage, {}, keep=False)
        modes = {"data/rows.jsonl": 0o600, "model/x.safetensors": 0o600, "run.sh": 0o777, "adopted": 0o600}
        for name, mode in modes.items():
            write(stage.folder / name).chmod(mode)
        os.link(stage.folder / "adopted", tmp_path / "mine")
        store.finish({})
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in stage.folder.rglob("*") if path.is_file()}
    assert found.pop(stage.folder / "run.sh") == 0o750 and found.pop(stage.folder / "adopted") == 0o600
    assert set(found.values()) == {0o640} and len(found) == 6, found


def test_preparing_afresh_empties_the_folder(workshop):
    workshop.task("x")
    stage = workshop.graph("x").target()
    store = StageFolder(stage.folder)
    store.prepare(stage, {}, keep=False)
    (stage.folder / "leftover").touch()
    store.prepare(stage, {}, keep=True)
    assert (stage.folder / "leftover").exists()
    store.prepare(stage, {}, keep=False)
    assert not (stage.folder / "leftover").exists()


def test_an_index_that_was_built_again_is_the_same_index(tmp_path):
    store = StageFolder(tmp_path / "index" / "key")
    (store.path / "index").mkdir(parents=True)
    assert store.identity() is None, "not done"
    found = []
    for about in ({"seconds": 1.0}, {"seconds": 2.0, "versions": {"faiss": "9"}}, {"corpus_sha256": "other"}):
        described = {"kind": "bm25", "corpus_sha256": "a", "passages": 3, **about}
        (store.path / "index" / "metadata.json").write_text(json.dumps(described))
        (store.path / "result.json").write_text("{}")
        found.append(store.identity())
    assert found[0] == found[1] != found[2]
