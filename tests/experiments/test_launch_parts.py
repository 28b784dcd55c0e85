"""Parts of launching that need no ranks: how nodes find one another, and what a job is told."""

import os
import socket
import stat
import subprocess
import threading
import time

import pytest

from experiments.cli import build_parser
from experiments.errors import ExperimentError
from experiments.hardware import check_shares
from experiments.launch import Launch, Ranks, require_launcher
from experiments.nodes import Crew, NodeLost, free_port, join
from experiments.request import Request
from experiments.slurm import job_file

SRUN = """#!/bin/bash
shift 3 # --kill-on-bad-exit=1 bash -c
SLURM_NODEID=0 exec bash -c "${1/exec/echo}"
"""


def test_who_is_no_node_is_sent_away(workshop):
    """A port scan, JSON of another kind, somebody who hangs up: none of them ends the launch."""
    lead, helper = (Launch(2, rank, "127.0.0.1", port, 60.0) for port in [free_port()] for rank in (0, 1))
    crew = Crew(lead, workshop.project, say=lambda text: None)
    gathering = threading.Thread(target=crew.gather)
    gathering.start()
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"3\n", b'{"node": 1}\n', b"\xff\xfe\n", b""):
        while True:
            try:
                stranger = socket.create_connection(("127.0.0.1", lead.port), timeout=30)
                break
            except ConnectionRefusedError:
                assert gathering.is_alive()
                time.sleep(0.01)
        with stranger:
            stranger.sendall(said)
    leader = join(helper, workshop.project, say=lambda text: None)
    gathering.join(60)
    assert not gathering.is_alive()
    crew.tell("hello")
    assert leader.receive(30) == {"say": "hello"} and crew.trouble() is None
    crew.close(0)
    assert leader.receive(30) == {"done": 0}
    with pytest.raises(NodeLost, match="closed"):
        leader.receive(30)
    leader.close()


@pytest.mark.parametrize(("restarts", "expected"), [(None, True), ("0", True), ("1", False)])
def test_a_job_that_is_queued_again_does_not_begin_afresh(workshop, tmp_path, restarts, expected):
    workshop.task("note", "text: hello")
    request = Request(workshop.project, "note", (), None, fresh=True)
    text = job_file(workshop.graph("note").target(), request, Ranks(1, 2), tmp_path / "log", None)
    for name, content in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho host\n")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(stat.S_IRWXU)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[-2:] == ["--node-rank", "0"] and ("--fresh" in words) is expected, done.stdout


def test_one_option_of_sbatch_is_enough(workshop):
    """It begins with a dash, which argparse takes for an option of its own unless it is joined to --sbatch."""
    assert build_parser().parse_args(["train", "note", "--sbatch=--partition=gpu"]).sbatch == "--partition=gpu"
    workshop.task("note", "text: hello")
    request = Request(workshop.project, "note", (), None)
    with pytest.raises(ExperimentError, match="SBATCH: No closing quotation in --comment"):
        job_file(workshop.graph("note").target(), request, Ranks(1, 1), workshop.folder, '--comment="a')


@pytest.mark.parametrize("devices", ["auto", -1, "-1"])
def test_ranks_of_several_nodes_that_nobody_can_count_are_refused(devices):
    """In a stage under the experiment, too: torchrun would be told of None processes when its turn comes."""
    config = {"experiment": {"name": "x"}, "trainer": {"devices": devices, "num_nodes": 2}}
    both = Launch(2, 0, "127.0.0.1", 1, 60.0)
    for check in (lambda c: require_launcher("x", c, both), lambda c: check_shares(c, "x")):
        with pytest.raises(ExperimentError, match=f"trainer.devices is {devices!r}, but a launcher must know how many"):
            check(config)
        check({**config, "trainer": {"devices": 1, "num_nodes": 2}})
    alone = {"trainer": {"devices": devices}}
    require_launcher("x", alone, None)  # Lightning counts this machine's
    check_shares(alone, "x")
