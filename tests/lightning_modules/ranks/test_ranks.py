"""Ranks stop together: real processes, a real collective."""

import multiprocessing

import pytest
import torch.distributed as dist

from common import ranks
from rollout.trajectory import InfrastructureError


def work(rank, store, failing, pipe):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    said = []
    for failed in failing:  # one block after the other: what comes after a failure must still meet
        try:
            with ranks.stop_together():
                if rank in failed:
                    raise InfrastructureError(f"no reply {rank}")
            said.append("fine")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    pipe.send(said)
    dist.destroy_process_group()


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path):
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    failing = [(), (1,), (), (0, 1)]
    processes = [
        context.Process(target=work, args=(rank, tmp_path / "store", failing, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        assert all(pipe[0].poll(600) for pipe in pipes), "a rank hangs or died"
        first, second = (pipe[0].recv() for pipe in pipes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    one, two = (f"rank {r}: InfrastructureError: no reply {r}" for r in (0, 1))
    assert first == second == ["fine", f"RuntimeError: {two}", "fine", f"RuntimeError: {one}; {two}"]


def test_one_process_raises_its_own_error():
    with pytest.raises(InfrastructureError, match="^gone$"), ranks.stop_together():
        raise InfrastructureError("gone")
    with ranks.stop_together():
        pass
