"""Ranks by torchrun on one node and on two, and by a Slurm job file that bash really runs. Over a toy module."""

import os
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from experiments.nodes import free_port
from experiments.process import END_S
from experiments.store import StageFolder
from tests.experiments.conftest import Workshop

pytestmark = pytest.mark.slow  # each of two launches starts several trainers
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
    resume: {class_path: callbacks.resume.IterationCheckpoint, init_args: {every_n_iterations: 100}}
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
def house(tmp_path):
    workshop = Workshop(tmp_path)
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


def test_two_nodes_by_torchrun(house):
    """Two agents on 127.0.0.1 with one rank each; when one node is killed, the other ends within a minute: by design,
    END_S after its connection has closed at the latest. Here it is given longer, as the machine may be busy."""
    assert END_S <= 50
    port = str(free_port())
    words = ["--launch", "torchrun", "--nodes", "2", "--processes", "1", "--master-port", port]
    address = {"MASTER_ADDR": "127.0.0.1"}
    stage = house.graph("toy", "--trainer.num_nodes", "2", "--trainer.devices", "1").target()
    store = StageFolder(stage.folder)

    started = [launch(house, *words, NODE_RANK=str(r), TOY_PAUSE="5", TOY_PAUSE_RANK="1", **address) for r in (1, 0)]
    wait_for(store.path / "paused-5", started)
    os.kill(started[0].pid, signal.SIGKILL)
    other, leader = communicate(started)
    assert started[1].returncode == 1 and "node 1" in leader and "has gone" in leader, leader
    assert f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} RESUME=last (and with NODE_RANK=1 on the other node)" in leader
    assert "node 0 makes [1/2] note" in other and "toy: node 1 of 2" in other, other
    assert store.result() is None


def test_a_node_with_another_file_system_is_refused(house, tmp_path):
    port = str(free_port())
    words = ["--launch", "torchrun", "--nodes", "2", "--processes", "1", "--master-addr", "127.0.0.1"]
    words += ["--master-port", port]
    away = {"COMPACT_AGENTS_OUTPUTS": str(tmp_path / "elsewhere")}
    both = [launch(house, *words), launch(house, *words, "--node-rank", "1", **away)]
    leader, other = communicate(both)
    assert [p.returncode for p in both] == [2, 2], leader + other
    for said in (leader, other):
        assert "must share the folder of the outputs" in said
    assert not house.journal.exists(), "nothing was run"


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
    again = "make train EXP=toy LAUNCH=slurm SBATCH='--partition=small --time=1:00' ARGS="
    assert f'To continue: {again}"--trainer.num_nodes=2 --trainer.devices=1" RESUME=last' in said, said

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


def test_without_sbatch_the_file_is_written_and_said(house, tmp_path):
    process = launch(house, "--launch", "slurm", "--nodes", "2", "--processes", "1", PATH=str(tmp_path))
    said = communicate([process])[0]
    assert process.returncode == 2 and "no sbatch on the PATH" in said, said
    job = Path(said.split("with: sbatch ")[1].strip())
    assert subprocess.run(["bash", "-n", str(job)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--trainer.num_nodes", "2"], "trainer.num_nodes is 2, but nothing starts the ranks of the others"),
        (["--launch", "torchrun", "--nodes", "2"], "needs the address of node 0"),
        (["--launch", "torchrun", "--nodes", "2", "--trainer.num_nodes", "3"], "NNODES=2, but trainer.num_nodes"),
        (["--launch", "torchrun", "--trainer.devices", "auto"], "must know how many processes"),
        (["--launch", "torchrun", "--nodes", "2", "--node-rank", "2", "--master-addr", "x"], "expected 0 to 1"),
        (["--nodes", "2"], "NNODES was given, but nothing to launch by"),
        (["--trainer.strategy", "zero4"], "there is no trainer.strategy 'zero4'; did you mean 'zero3'?"),
        (["--trainer.accelerator", "cuda", "--trainer.devices", "64"], "CUDA devices that torch can use"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_said_at_once(house, words, expected):
    done = house.run("train", "toy", *words)
    assert done.returncode == 2 and expected in done.stderr, done.stdout + done.stderr
    assert not house.journal.exists()


def test_prompts_that_ranks_cannot_share_are_said(house):
    from experiments.errors import ExperimentError
    from experiments.hardware import check_shares

    config = {"trainer": {"devices": 3, "num_nodes": 2}, "data": {"init_args": {"prompts_per_step": 64}}}
    with pytest.raises(ExperimentError, match="64, which 2 x 3 = 6 ranks cannot share"):
        check_shares(config, "here")


@pytest.mark.parametrize("devices", ["2,3", [1], [1, 0]])
def test_gpus_chosen_by_number_are_refused(devices):
    """The trainer would stand on other GPUs than the engines, which go by the ranks' numbers."""
    from experiments.errors import ExperimentError
    from experiments.hardware import check_indices

    with pytest.raises(ExperimentError, match="choose by the environment instead: CUDA_VISIBLE_DEVICES="):
        check_indices({"trainer": {"accelerator": "cuda", "devices": devices}}, "here")
    for fine in (8, "8", "auto", [0, 1], "0,1"):
        check_indices({"trainer": {"accelerator": "cuda", "devices": fine}}, "here")


def test_a_rank_is_no_place_to_train_from(house):
    done = launch(house, TORCHELASTIC_RUN_ID="none")
    assert "one of several ranks already" in communicate([done])[0] and done.returncode == 2
