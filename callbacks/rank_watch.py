"""A thread on every rank that knows when another rank is gone or stuck, says so, and ends the run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import lightning as L

from callbacks.common import stage_dir
from callbacks.heartbeats import (
    RUNNING,
    Beat,
    Board,
    Observer,
    alive,
    loss_message,
    lost,
    own_beat,
    stall_message,
    stalled_s,
)
from callbacks.whereabouts import whereabouts

EXIT_CODE = 75  # sysexits' "try again": the run can be resumed
REPORT = "ranks.txt"
# What gloo, NCCL and DeepSpeed say on the ranks that are left. Else an exception is this rank's own.
FROM_OTHERS = re.compile(
    "closed by peer|reset by peer|broken pipe|timed? ?out|gloo|nccl|remote process exited|socket|store", re.IGNORECASE
)


class RankWatch(L.Callback):
    """With more than one rank: ends the run, with a message, when a rank has died or when ranks wait for one that does
    not move; nothing at all with one rank.

    Ranks on one node see each other's processes end within a second or two. From other nodes nothing is heard, which
    counts after ``dead_after_s``. A rank that *does not move* (its main thread stands where it stood a second before,
    every second) is not gone: after ``report_after_s`` a table says which rank is where, for how long and in which
    iteration, on the terminal and in ``ranks.txt`` of the stage's folder; after ``stop_after_s`` the run ends with exit
    code 75. Rollouts may take as long as they like, until other ranks have waited that long for them.

    Lightning sets up the data before it calls a callback: ``watch_from_the_start`` makes the watch begin before that.

    Args:
        report_after_s: seconds without a move after which the table is printed (and again after twice as many).
        stop_after_s: seconds without a move after which the run ends; null for never.
        dead_after_s: seconds of silence after which a rank on another node counts as dead.
        grace_s: seconds that a rank gets to end by its own error, after another has died.
        interval_s: seconds between beats.
    """

    def __init__(
        self,
        report_after_s: float = 600.0,
        stop_after_s: float | None = 1800.0,
        dead_after_s: float = 40.0,
        grace_s: float = 5.0,
        interval_s: float = 1.0,
    ) -> None:
        if interval_s <= 0 or dead_after_s < 3 * interval_s or grace_s < 0:
            raise ValueError(
                f"RankWatch(interval_s={interval_s}, dead_after_s={dead_after_s}, grace_s={grace_s}): expected a "
                "positive interval, dead_after_s of at least three of it, and no negative grace"
            )
        if stop_after_s is not None and stop_after_s < report_after_s:
            raise ValueError(f"RankWatch: stop_after_s is {stop_after_s}, less than report_after_s, {report_after_s}")
        self.report_after_s, self.stop_after_s = report_after_s, stop_after_s
        self.dead_after_s, self.grace_s, self.interval_s = dead_after_s, grace_s, interval_s
        self._board: Board | None = None
        self._thread: _Watch | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.start(trainer)

    def start(self, trainer: L.Trainer) -> None:
        """Begin to watch, unless this has been done. The ranks must have their process group; every rank must call."""
        if trainer.world_size == 1 or self._thread is not None:
            return
        if self._board is None:
            own = Board(trainer.world_size) if trainer.is_global_zero else None
            address = trainer.strategy.broadcast(None if own is None else own.address)
            self._board = own or Board(trainer.world_size, tuple(address))
            _retire_lightning_s_observer()
        trainer.strategy.barrier("rank watch")  # beats of an earlier run (a test after a fit) are not judged
        self._thread = _Watch(self, self._board, trainer)
        self._thread.start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._thread is not None:
            trainer.strategy.barrier("rank watch")  # a rank that has come to its end is not a rank that is gone
            self._thread.finish()
            self._thread = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._thread is None:
            return
        watch, self._thread = self._thread, None
        if isinstance(exception, RuntimeError) and FROM_OTHERS.search(str(exception)):
            if watch.verdict.wait(self.dead_after_s + 3 * self.interval_s):
                with contextlib.suppress(Exception):
                    trainer.datamodule.on_exception(exception)  # its engine; no collective is left to run
                watch.leave()
        words = f"{type(exception).__name__}: {exception}".splitlines()[0]
        watch.finish(state=words[:300])
        if trainer.is_global_zero:
            time.sleep(2.5 * self.interval_s)  # the board goes with this process: the others are to read why


def watch_from_the_start(trainer: L.Trainer) -> None:
    """Have the trainer's ``RankWatch`` begin as soon as the ranks have a process group: no hook of a callback comes
    before the data are prepared and set up (lightning 2.6, Trainer._run)."""
    for callback in trainer.callbacks:
        if isinstance(callback, RankWatch):
            trainer.strategy.setup_environment = partial(_set_up_environment, trainer, callback)  # type: ignore


def _set_up_environment(trainer: L.Trainer, watch: RankWatch) -> None:
    type(trainer.strategy).setup_environment(trainer.strategy)
    watch.start(trainer)


class _Watch(threading.Thread):
    """Posts this rank's beat, judges the others'."""

    def __init__(self, options: RankWatch, board: Board, trainer: L.Trainer) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self.options, self.board, self.trainer = options, board, trainer
        self.interval_s = options.interval_s * max(1.0, trainer.world_size / 64)  # every rank reads all beats
        self.report = stage_dir(trainer) / REPORT
        self.me = own_beat(trainer.global_rank)
        self.observer = Observer()
        self.verdict = threading.Event()  # the run is over
        self._message: str | None = None
        self._finished = threading.Event()
        self._leaving = threading.Lock()
        self._moved: tuple[Any, float] = (None, time.monotonic())
        self._reported_s = 0.0
        self._answered = time.monotonic()  # when the board last did
        self._told = False  # by another rank, to stop

    def run(self) -> None:
        # Threads of their own: an exchange with a node that has lost its power may hang.
        exchange = threading.Thread(target=self._exchange, name="rank-beats", daemon=True)
        exchange.start()
        while not self._finished.wait(self.interval_s):
            if self._told:
                self._end(None)
            self._judge()
        exchange.join(self.interval_s)

    def _exchange(self) -> None:
        while not self._finished.is_set():
            with contextlib.suppress(Exception):  # the board's process is gone, or the network hiccups
                self._beat()
                self.board.post(self.me)
                self.observer.update(self.board.read())
                self._told = self.board.stopped() is not None
                self._answered = time.monotonic()
            self._finished.wait(self.interval_s)

    @property
    def _unanswered_s(self) -> float:
        return time.monotonic() - self._answered

    def finish(self, state: str = RUNNING) -> None:
        """End the watch; ``state`` tells the others why this rank stops, if it does."""
        self._finished.set()
        self.join(3 * self.interval_s)
        if state != RUNNING and self._unanswered_s < self.options.dead_after_s:
            self.me = dataclasses.replace(self.me, state=state, count=self.me.count + 1)
            with contextlib.suppress(Exception):
                self.board.post(self.me)

    def _beat(self) -> None:
        place, now = whereabouts(), time.monotonic()
        loop = self.trainer.fit_loop
        iteration = loop.total_batch_idx + 1
        if place.mark != self._moved[0]:
            self._moved = (place.mark, now)
        self.me = dataclasses.replace(
            self.me, count=self.me.count + 1, place=place.text, waiting=place.waiting, rolling_out=place.rolling_out,
            still_s=round(now - self._moved[1], 1), iteration=iteration,
        )  # fmt: skip

    def _judge(self) -> None:
        beats, options = self.observer.beats, self.options
        silent = {rank: self.observer.silent_s(rank) for rank in beats}
        gone = lost(self.me, beats, silent, options.dead_after_s)
        if not gone and self._unanswered_s >= options.dead_after_s and 0 in beats and beats[0].node != self.me.node:
            gone = {0: f"it has not answered for {self._unanswered_s:.0f} s (its node is gone, or the network)"}
        if gone:
            by_hand = all(beats[rank].state.startswith("KeyboardInterrupt") for rank in gone)
            self._end(None if by_hand else loss_message(beats, gone, silent))
        still = stalled_s(beats, silent)
        if options.stop_after_s is not None and still >= options.stop_after_s:
            self._end(stall_message(beats, silent, options.stop_after_s, end=True))
        if still < options.report_after_s:
            self._reported_s = 0.0
        elif self.me.rank == 0 and still >= max(options.report_after_s, 2 * self._reported_s):
            self._reported_s = still
            self._say(stall_message(beats, silent, options.stop_after_s, end=False))

    # --- the end ------------------------------------------------------------------------------------------------

    def _end(self, message: str | None) -> None:
        """Say why (None: another rank does), give the main thread a moment, and leave."""
        if message is not None and self._speaks(message):
            self._say(message)
        self.verdict.set()
        if not self._finished.wait(self.options.grace_s):
            self.leave()

    def _speaks(self, message: str) -> bool:
        with contextlib.suppress(Exception):
            if self._unanswered_s < self.options.dead_after_s:
                return self.board.stop(message)
        left = [b.rank for b in self.observer.beats.values() if b.node == self.me.node and alive(b)]
        return self.me.rank == min(left, default=self.me.rank)  # rank 0 is gone, and the board with it

    def _say(self, message: str) -> None:
        with contextlib.suppress(OSError):  # whoever read our output may be gone as well
            print(message, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self.report.write_text(message.lstrip("\n") + "\n")

    def leave(self) -> NoReturn:
        """End this process: the main thread may hang in a collective that no exception ends. Engines and retrievers
        follow their parent by themselves."""
        self._leaving.acquire()
        with contextlib.suppress(Exception):
            self._end_the_others_here()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(EXIT_CODE)

    def _end_the_others_here(self) -> None:
        """The first rank of a node that is left goes last, and takes along those of the node that cannot go by
        themselves (stopped by a signal, or stuck where no other thread runs)."""
        here = [b for b in self.observer.beats.values() if b.node == self.me.node and b.rank != self.me.rank]
        if any(alive(b) and b.rank < self.me.rank for b in here):
            return
        _wait(lambda: not any(map(alive, here)), self.options.grace_s + 3 * self.interval_s)
        for beat in here:
            if alive(beat):
                os.kill(beat.pid, signal.SIGKILL)


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.1)


def _retire_lightning_s_observer() -> None:
    """Lightning's launcher has a thread that kills rank 0, without a word to the user, up to five seconds after another
    rank has died (lightning 2.6, fabric/strategies/launchers/subprocess_script.py). Without children it ends."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            thread._child_processes = []  # type: ignore[attr-defined]
