"""Ranks by torchrun on two nodes, and by a Slurm job file that bash really runs. Over a toy module."""

import dataclasses
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from callbacks.tracking.run_info import commit
from callbacks.training.stop_request import STOPPED as STOPPED_FILE
from experiments.launch import nodes
from experiments.launch.nodes import run_other_node, watch_nodes
from experiments.launch.slurm import job_file
from experiments.registry.errors import ExperimentError
from experiments.registry.hardware import (
    Ranks,
    check_indices,
    check_shares,
    check_strategy,
    missing_devices,
    require_launcher,
)
from experiments.registry.project import ROOT
from experiments.stages.context import STOPPED, Node, RunContext, StageFailed
from experiments.stages.store import StageFolder
from tests.rollout.serving import free_port

FIT = """
experiment: {kind: fit, summary: a toy}
seed_everything: 4
trainer:
  accelerator: cpu
  strategy: ddp
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  use_distributed_sampler: false
  callbacks:
    resume: {class_path: callbacks.training.resume.IterationCheckpoint, init_args: {every_n_iterations: 100}}
model: {class_path: tests.experiments.toy_modules.Share, init_args: {note: "${stage:note}"}}
data: {class_path: tests.experiments.toy_modules.Noise, init_args: {batches: 8}}
"""
SBATCH = """#!/bin/bash
echo "$@" > "$FAKE/submitted"
echo 77
"""
# Starts the one task of each node as srun does, passes SIGUSR1 on, and ends with the worst of their codes.
SRUN = """#!/bin/bash
echo "$@" >> "$FAKE/srun"
shift # --kill-on-bad-exit=1
for node in 0 1; do
  SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_NNODES=2 SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 "$@" &
  tasks[$node]=$!
done
trap 'kill -USR1 "${tasks[@]}"' USR1
worst=0
for task in "${tasks[@]}"; do
  wait "$task"; code=$?
  while kill -0 "$task" 2>/dev/null; do wait "$task"; code=$?; done
  [ "$code" -gt "$worst" ] && worst=$code
done
exit "$worst"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; echo 127.0.0.2; else echo "$@" > "$FAKE/requeued"; fi
"""


@pytest.fixture
def house(workshop):
    workshop.task("note", "text: hello")
    workshop.write("toy", FIT)
    return workshop


def communicate(processes, timeout=400):
    """What each has said; all are killed when time is up."""
    timer = threading.Timer(timeout, lambda: [os.killpg(p.pid, signal.SIGKILL) for p in processes if p.poll() is None])
    timer.start()
    try:
        return [p.communicate()[0] for p in processes]
    finally:
        timer.cancel()


def launch(workshop, *words, **variables):
    environment = workshop.environment() | {"OMP_NUM_THREADS": "1", "LAUNCH_TIMEOUT": "300"} | variables
    return workshop.start("train", "toy", *words, env=environment, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for(path, processes, seconds=400):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert all(p.poll() is None for p in processes) and time.monotonic() < deadline, communicate(processes, 1)
        time.sleep(0.05)


@pytest.mark.slow
def test_two_nodes_by_torchrun(house):
    """Two nodes on 127.0.0.1 with one rank each; when one is killed, the other ends within a minute and says why."""
    port = str(free_port())
    words = ["--launch", "torchrun", "--nodes", "2", "--processes", "1", "--master-port", port]
    address = {"MASTER_ADDR": "127.0.0.1"}
    stage = house.graph("toy", "--trainer.num_nodes", "2", "--trainer.devices", "1").target()
    store = StageFolder(stage.folder)

    started = [launch(house, *words, NODE_RANK=str(r), TOY_PAUSE="5", TOY_PAUSE_RANK="1", **address) for r in (1, 0)]
    wait_for(store.path / "paused-5", started)
    os.kill(started[0].pid, signal.SIGKILL)
    killed = time.monotonic()
    other, leader = communicate(started)
    assert time.monotonic() - killed < 300
    assert started[1].returncode == 1 and "node 1 (" in leader and "is gone: see log-node1" in leader, leader
    assert f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} ARGS=" in leader  # no checkpoint yet
    assert "(and with NODE_RANK=1 on the other node)" in leader and "Traceback" not in leader, leader
    assert re.search("node 0 (makes|has made) note", other) and "toy: node 1 of 2" in other, other
    assert store.result() is None


@pytest.mark.slow
def test_a_slurm_job_stops_before_its_limit_and_goes_on(house, tmp_path):
    """sbatch, srun and scontrol are small programs; the job file and all that it starts are the real ones."""
    fake = tmp_path / "bin"
    fake.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (fake / name).write_text(text)
        (fake / name).chmod(stat.S_IRWXU)
    path = {"PATH": f"{fake}:{os.environ['PATH']}", "FAKE": str(fake)}
    words = ["--launch", "slurm", "--nodes", "2", "--processes", "1", "--sbatch", "--partition=small --time=1:00"]
    submitted = launch(house, *words, **path)
    said = communicate([submitted])[0]
    assert submitted.returncode == 0 and "submitted as job 77" in said and "scancel 77" in said, said
    job = Path((fake / "submitted").read_text().split()[-1])
    text = job.read_text()
    for line in ("--nodes=2", "--ntasks-per-node=1", "--requeue", "--signal=B:USR1@600", "--partition=small"):
        assert f"#SBATCH {line}\n" in text
    assert "--gpus-per-node" not in text

    store = StageFolder(house.graph("toy", "--trainer.num_nodes=2", "--trainer.devices=1").target().folder)
    environment = os.environ | path | {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NTASKS": "2"}
    environment |= {"TOY_JOURNAL": str(house.journal), "OMP_NUM_THREADS": "1", "TOY_SLOW": "0.5"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    first = subprocess.Popen(["bash", str(job)], env=environment, **options)
    wait_for(store.path / "rank-0-of-2", [first])
    first.send_signal(signal.SIGUSR1)
    said = communicate([first])[0]
    assert "stopping after this iteration" in said and "stopped on request after iteration" in said, said
    assert first.returncode == 75 and (fake / "requeued").read_text() == "requeue 77\n", said
    assert store.state() == "interrupted" and store.result() is None
    again = 'make train EXP=toy LAUNCH=slurm SBATCH="--partition=small --time=1:00" RESUME=last'
    assert f'To continue: {again} ARGS="--trainer.num_nodes=2 --trainer.devices=1"' in said, said

    (fake / "requeued").unlink()
    second = subprocess.Popen(["bash", str(job)], env=environment | {"TOY_SLOW": "0"}, **options)
    said = communicate([second])[0]
    assert second.returncode == 0 and "continuing from" in said and not (fake / "requeued").exists(), said
    steps = [int(line) for line in (store.path / "rank-1-of-2").read_text().split()]
    assert steps == list(range(1, 9)), "every iteration once, over both jobs"
    assert torch.equal(*(torch.load(store.path / f"walk-{rank}.pt") for rank in (0, 1)))
    assert len(house.journal.read_text().splitlines()) == 1, "the stage under it was made on one node"
    assert store.result()["test"]["em"]["n"] == 1 and store.result()["sessions"] == 2
    assert said.count("  evaluation ") == 1 and "toy is done" in said, "node 0 alone shows the results"

    late = launch(house, "--launch", "torchrun", *words[2:6], MASTER_ADDR="127.0.0.1", NODE_RANK="1")
    assert "toy is done" in communicate([late])[0] and late.returncode == 0


@pytest.mark.slow
def test_a_job_is_written_where_there_is_no_sbatch(house, run_here):
    run = run_here("train", "note", "--launch", "slurm")
    said = run.stderr
    assert run.returncode == 2
    assert "no sbatch on the PATH" in said, said
    job = Path(said.split("with: sbatch ")[1].strip())
    assert subprocess.run(["/bin/bash", "-n", str(job)], check=False).returncode == 0


SRUN_SAYS = """#!/bin/bash
shift 3 # --kill-on-bad-exit=1 bash -c
SLURM_NODEID=0 exec bash -c "${1/exec/echo}"
"""


@pytest.mark.parametrize(("restarts", "expected"), [(None, True), ("0", True), ("1", False)])
def test_a_job_that_is_queued_again_does_not_begin_afresh(workshop, tmp_path, restarts, expected):
    workshop.task("note", "text: hello")
    context = RunContext(workshop.project, "note", (), None, fresh=True)
    text = job_file(workshop.graph("note").target(), context, Ranks(1, 2), tmp_path / "log", None)
    for name, content in (("srun", SRUN_SAYS), ("scontrol", "#!/bin/bash\necho host\n")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(stat.S_IRWXU)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[-2:] == ["--node-rank", "0"] and ("--fresh" in words) is expected, done.stdout


def test_directives_are_words_whatever_they_contain(workshop, tmp_path):
    workshop.task("note", "text: hello")
    context = RunContext(workshop.project, "note", (), None)
    log = tmp_path / "my outputs" / "%j.log"
    text = job_file(workshop.graph("note").target(), context, Ranks(1, 2), log, "--comment='two words'")
    directives = re.findall("^#SBATCH (.*)$", text, re.MULTILINE)
    assert all(len(shlex.split(line)) == 1 for line in directives), directives
    assert {f"--output={log}", "--comment=two words"} <= {shlex.split(line)[0] for line in directives}


# -- what a node does while it waits ----------------------------------------------------------------------------------


@pytest.fixture
def waiting(workshop, monkeypatch):
    """A node other than the first, and the only stage of its plan."""
    monkeypatch.setattr(nodes, "POLL_S", 0.02)
    monkeypatch.setattr(nodes, "VISIBLE_S", 0.1)
    workshop.task("note", "text: hello")
    stage = workshop.graph("note").target()
    context = RunContext(workshop.project, "note", (), None, node=Node(2, 1, "127.0.0.1", 1, timeout_s=600))
    return stage, StageFolder(stage.folder), context


def test_a_node_that_finds_no_node_0_says_what_to_look_for(waiting):
    stage, store, context = waiting
    with pytest.raises(ExperimentError, match="node 0 has not begun note within .*share the folder of the outputs"):
        run_other_node([stage], dataclasses.replace(context, node=dataclasses.replace(context.node, timeout_s=0)), None)
    store.path.mkdir(parents=True)
    store.finish({"seconds": 1})
    run_other_node([stage], context, None)  # done: nothing to wait for


@pytest.mark.parametrize(("ends_with", "code"), [("result.json", None), (STOPPED_FILE, STOPPED), (None, 1)])
def test_a_node_waits_for_what_node_0_makes_alone(waiting, ends_with, code):
    stage, store, context = waiting
    prepared = threading.Event()

    def node_0():
        with store.lock.held():
            store.path.mkdir()
            store.lock.update(prepared=True, commit=commit())
            prepared.set()
            time.sleep(0.3)
            if ends_with:
                (store.path / ends_with).write_text("{}")

    thread = threading.Thread(target=node_0)
    thread.start()
    prepared.wait()
    if code is None:
        run_other_node([stage], context, None)
    else:
        with pytest.raises(StageFailed) as failed:
            run_other_node([stage], context, None)
        assert failed.value.exit_code == code
    thread.join()


def test_a_node_with_other_code_is_refused(waiting):
    stage, store, context = waiting
    with store.lock.held():
        store.lock.update(prepared=True, commit="0123456789")
        with pytest.raises(ExperimentError, match="node 0 012345678; use one commit"):
            run_other_node([stage], context, None)


def test_node_0_notices_a_node_that_has_gone(waiting):
    _, store, _ = waiting
    look = watch_nodes(store, 2)
    assert look() is None
    with nodes._node_lock(store, 1).held():
        assert look() is None
    assert "has failed, or is gone: see log-node1" in look()


@pytest.mark.slow
def test_torchrun_says_in_a_line_that_the_others_have_not_come():
    words = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "experiments.launch.torchrun", *words, "--rdzv-conf=timeout=1", "-m", "this"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "error: the nodes have not found each other" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


# -- what cannot run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--trainer.num_nodes", "2"], "trainer.num_nodes is 2, but nothing starts the ranks of the others"),
        (["--launch", "torchrun", "--nodes", "2"], "needs the address of node 0"),
        (["--launch", "torchrun", "--nodes", "2", "--trainer.num_nodes", "3"], "NNODES=2, but trainer.num_nodes"),
        (["--launch", "torchrun", "--trainer.devices", "auto"], "must know how many processes"),
    ],
)
def test_what_cannot_run_is_said_at_once(house, run_here, words, expected):
    run = run_here("train", "toy", *words)
    assert run.returncode == 2 and expected in run.stderr
    assert not house.journal.exists()


def test_a_rank_is_no_place_to_train_from(house, run_here, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    run = run_here("train", "toy")
    assert run.returncode == 2 and "one of several ranks already" in run.stderr


@pytest.mark.parametrize("devices", ["auto"])
def test_ranks_of_several_nodes_that_nobody_can_count_are_refused(devices):
    """In a stage under the experiment, too: torchrun would be told of None processes when its turn comes."""
    config = {"experiment": {"name": "x"}, "trainer": {"devices": devices, "num_nodes": 2}}
    for check in (lambda c: require_launcher("x", c, 2), lambda c: check_shares(c, "x")):
        with pytest.raises(ExperimentError, match=f"trainer.devices is {devices!r}, but a launcher must know how many"):
            check(config)
        check({**config, "trainer": {"devices": 1, "num_nodes": 2}})
    alone = {"trainer": {"devices": devices}}
    require_launcher("x", alone, None)  # Lightning counts this machine's
    check_shares(alone, "x")


@pytest.mark.slow
def test_strategies_devices_and_shares_that_cannot_be_are_refused():
    with pytest.raises(ExperimentError, match="unknown trainer.strategy 'zero4'; did you mean 'zero3'?"):
        check_strategy("zero4", "here")
    [note] = missing_devices({"trainer": {"accelerator": "cuda", "devices": 64}}, "here")
    assert "CUDA devices that torch can use" in note
    config = {"trainer": {"devices": 3, "num_nodes": 2}, "data": {"init_args": {"prompts_per_iteration": 64}}}
    with pytest.raises(ExperimentError, match="64, which 2 x 3 = 6 ranks cannot share"):
        check_shares(config, "here")


@pytest.mark.parametrize("devices", ["2,3"])
def test_gpus_chosen_by_number_are_refused(devices):
    """The trainer would be on other GPUs than the engines, which go by the ranks' numbers."""
    with pytest.raises(ExperimentError, match="use the environment instead: CUDA_VISIBLE_DEVICES="):
        check_indices({"trainer": {"accelerator": "cuda", "devices": devices}}, "here")
    for fine in (8, "8", "auto", [0, 1], "0,1"):
        check_indices({"trainer": {"accelerator": "cuda", "devices": fine}}, "here")
