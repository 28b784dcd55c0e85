"""Gathers of objects on two real ranks, also where the default group is not gloo."""

import subprocess
import sys
from pathlib import Path

from common.ranks import gather_lists, gather_objects

WORKER = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from common.ranks import gather_lists, gather_objects, wait_for
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
backend_of = dist.get_backend
for name in ("nccl", "gloo"):  # beside the first, a gloo group is made
    dist.get_backend = lambda group=None, name=name: backend_of(group) if group is not None else name
    assert gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert gather_lists(["a"] if rank else ["b", "c"]) == ["b", "c", "a"]
if rank == 0:
    wait_for(timedelta(seconds=1.5))
    try:
        gather_objects("rank 1 has ended")
    except RuntimeError as error:
        print(error, flush=True)
os._exit(0)  # the interpreter's end sometimes aborts while gloo's threads still run
"""


def test_one_process_has_its_own():
    assert gather_objects(3) == [3] and gather_lists(("a", "b")) == ["a", "b"]


def test_two_ranks_gather_in_order_and_name_a_rank_that_is_gone(tmp_path: Path):
    commands = [[sys.executable, "-c", WORKER, str(rank), str(tmp_path / "store")] for rank in range(2)]
    ranks = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "1 failed to pass monitoredBarrier in 1500 ms" in said[0][0], said
