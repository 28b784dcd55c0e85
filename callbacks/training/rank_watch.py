"""Prints the stack of a rank that is stuck.

torchrun names a rank that dies (``experiments/launch/torchrun.py``). The other ranks wait for a stuck rank in a
collective, until the process group's timeout ends the run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import lightning as L

from common.ranges import PositiveFloat

INTERVAL_S = 1.0
ROOT = str(Path(__file__).parents[2]) + os.sep
COLLECTIVES = (os.path.join("torch", "distributed", ""), os.path.join("deepspeed", "comm", ""))
# These may block one rank for hours. With rollouts ahead, the main thread waits for the thread that does the rollouts.
ROLLING_OUT = tuple(ROOT + name for name in ("rollout/", "retrieval/", "data_modules/loading/rollouts_ahead.py"))


def main_thread() -> tuple[tuple[Any, ...] | None, str]:
    """Return the main thread's position in the code (a comparable value) and its stack as text. The position changes
    when the thread moves, and is None during rollouts."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(traceback.walk_stack(frame))  # the innermost first
    files = [frame.f_code.co_filename for frame, _ in frames]
    waiting = any(part in file for file in files for part in COLLECTIVES)
    rolling_out = not waiting and any(file.startswith(ROLLING_OUT) for file in files)
    mark = tuple((id(frame.f_code), frame.f_lasti) for frame, _ in frames)
    return None if rolling_out else mark, "".join(traceback.StackSummary.extract(reversed(frames)).format())


class RankWatch(L.Callback):
    """Prints the stack of a rank that is stuck, which means that its main thread stays at one instruction. Does nothing
    with one rank.

    A thread on each rank reads the stack of the main thread once a second. Rollouts may take as long as they need. A
    stack that ends in a collective belongs to a rank that waits for the stuck one.

    Args:
        report_after_s: seconds at one instruction.
    """

    def __init__(self, report_after_s: PositiveFloat = 600.0) -> None:
        self.report_after_s = report_after_s
        self._finished = threading.Event()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            self._finished = threading.Event()
            faulthandler.enable(2)  # NCCL aborts the process when a collective times out: print the stacks then
            watch = (trainer.global_rank, self._finished)
            threading.Thread(target=self._watch, args=watch, name="rank-watch", daemon=True).start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._finished.set()

    def _watch(self, rank: int, finished: threading.Event) -> None:
        before, unmoved_s = None, 0.0
        while not finished.wait(INTERVAL_S):
            mark, stack = main_thread()
            # Counted, not measured: a suspended process has not been stuck.
            unmoved_s = unmoved_s + INTERVAL_S if mark is not None and mark == before else 0.0
            before = mark
            if self.report_after_s <= unmoved_s < self.report_after_s + INTERVAL_S:
                who = f"rank {rank} (host {socket.gethostname()}, process {os.getpid()})"
                with contextlib.suppress(OSError):  # the reader of the output may be gone
                    print(
                        f"\nwarning: {who} has not moved for {unmoved_s:.0f} s:\n{stack}", file=sys.stderr, flush=True
                    )
