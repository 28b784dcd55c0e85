"""Ends a multi-rank run whose rank is stuck, and names the rank.

torchrun names a rank that dies (``experiments/launch/torchrun.py``). A rank that waits too long in a collective ends by
the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from callbacks.trainer import stage_dir
from common.make_command import continue_command
from common.ranges import PositiveFloat

EXIT_CODE = 75  # sysexits' "try again": the run can be resumed
REPORT = "ranks.txt"
INTERVAL_S = 1.0
ROOT = str(Path(__file__).parents[2]) + os.sep
LIBRARIES = ("site-packages" + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, "<")  # <: code made at run time
COLLECTIVES = (os.path.join("torch", "distributed", ""), os.path.join("deepspeed", "comm", ""))
# These may block one rank for hours. With rollouts ahead, the main thread waits for the thread that does the rollouts.
ROLLING_OUT = tuple(ROOT + name for name in ("rollout/", "retrieval/", "data_modules/loading/rollouts_ahead.py"))


@dataclass(frozen=True, slots=True)
class Position:
    """The instruction that the main thread executes, read from another thread."""

    mark: tuple[Any, ...]  # equal as long as the thread has not moved
    at: str  # file, line and function of the innermost frame of this project
    waiting: bool  # in a collective, for the other ranks
    rolling_out: bool
    stack: str


def main_thread() -> Position:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(traceback.walk_stack(frame))  # the innermost first
    files = [frame.f_code.co_filename for frame, _ in frames]
    ours = [i for i, file in enumerate(files) if not any(part in file for part in LIBRARIES)]
    inner = ours[0] if ours else len(files)
    waiting = any(part in file for file in files[:inner] for part in COLLECTIVES)
    return Position(
        mark=tuple((id(frame.f_code), frame.f_lasti) for frame, _ in frames),
        at=f"{files[inner].removeprefix(ROOT)}:{frames[inner][1]} {frames[inner][0].f_code.co_name}" if ours else "",
        waiting=waiting,
        rolling_out=not waiting and any(files[i].startswith(ROLLING_OUT) for i in ours),
        stack="".join(traceback.StackSummary.extract(reversed(frames)).format()),
    )


class RankWatch(L.Callback):
    """Reports a rank whose main thread stays at one instruction, with its stack, and later ends the run (exit code 75).

    A thread on each rank reads the stack of the main thread once a second. Rollouts may take as long as they need.
    A rank that waits in a collective is reported, but not ended: the process group's timeout ends it. Does nothing
    with one rank.

    Args:
        report_after_s: seconds at one instruction after which the rank is reported, on the terminal and in
            ``ranks.txt`` of the stage's folder.
        stop_after_s: seconds at one instruction after which the run ends; null for never.
    """

    def __init__(self, report_after_s: PositiveFloat = 600.0, stop_after_s: PositiveFloat | None = 1800.0) -> None:
        if stop_after_s is not None and stop_after_s < report_after_s:
            raise ValueError(f"RankWatch: stop_after_s is {stop_after_s}, less than report_after_s, {report_after_s}")
        self.report_after_s, self.stop_after_s = report_after_s, stop_after_s
        self._finished: threading.Event | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.start(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._finished is not None:
            self._finished.set()
            self._finished = None

    def start(self, trainer: L.Trainer) -> None:
        """Start the watching thread, unless it runs already or there is only one rank."""
        if trainer.world_size == 1 or self._finished is not None:
            return
        self._finished = threading.Event()
        faulthandler.enable(2)  # NCCL aborts the process when a collective times out: print the stacks then
        threading.Thread(target=self._watch, args=(trainer, self._finished), name="rank-watch", daemon=True).start()

    def _watch(self, trainer: L.Trainer, finished: threading.Event) -> None:
        before, unmoved_s, reported = None, 0.0, False
        while not finished.wait(INTERVAL_S):
            now = main_thread()
            if now.mark != before or now.rolling_out:
                before, unmoved_s, reported = now.mark, 0.0, False
                continue
            unmoved_s += INTERVAL_S  # counted, not measured: a suspended process has not been stuck
            if self.stop_after_s is not None and unmoved_s >= self.stop_after_s and not now.waiting:
                end = f"the run ends here. To continue from the last checkpoint: {continue_command()}"
                _print(trainer, "error", now, unmoved_s, end)
                os._exit(EXIT_CODE)  # no exception reaches a main thread that is stuck; torchrun ends the other ranks
            if unmoved_s >= self.report_after_s and not reported:
                reported = True
                then = "it waits in a collective for the other ranks" if now.waiting else self._then()
                _print(trainer, "warning", now, unmoved_s, then)

    def _then(self) -> str:
        return "it is not stopped" if self.stop_after_s is None else f"the run ends after {self.stop_after_s:.0f} s"


def _print(trainer: L.Trainer, kind: str, now: Position, unmoved_s: float, then: str) -> None:
    who = f"rank {trainer.global_rank} (host {socket.gethostname()}, process {os.getpid()})"
    where = f"iteration {trainer.fit_loop.total_batch_idx + 1}, has not moved for {unmoved_s:.0f} s at {now.at}"
    stack = "" if now.waiting else f"\nThe stack of rank {trainer.global_rank}:\n{now.stack.rstrip()}"
    message = f"{kind}: {who}, {where}; {then}.{stack}\n"
    with contextlib.suppress(OSError):  # the reader of the output may be gone
        print(f"\n{message}", end="", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), (stage_dir(trainer) / REPORT).open("a") as stream:
        stream.write(message)


def watch_from_the_start(trainer: Any) -> None:
    """Start the trainer's ``RankWatch`` before the data are set up, because Lightning calls no hook so early (2.6,
    Trainer._run)."""
    for callback in trainer.callbacks:
        if isinstance(callback, RankWatch):
            callback.start(trainer)
