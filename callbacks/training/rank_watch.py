"""Heartbeats between ranks: a stalled rank, or one on a silent host, is named with its stack, and the run ends.

(A rank that dies or fails is named by torchrun, which ends the others: ``experiments/launch/torchrun.py``.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in __all__

from callbacks.trainer import stage_dir
from retrieval.ranges import PositiveFloat
from rollout.make_command import continue_command

EXIT_CODE = 75  # sysexits' "try again": the run can be resumed
REPORT = "ranks.txt"
INTERVAL_S = 1.0  # between beats; longer with more than 64 ranks, since each reads all of them
STACK_AFTER_S = 3.0  # without a move: from then on a beat holds the whole stack
ROOT = str(Path(__file__).parents[2]) + os.sep
LIBRARIES = ("site-packages" + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, "<")  # <: made at run time
COLLECTIVES = (os.path.join("torch", "distributed", ""), os.path.join("deepspeed", "comm", ""))
# May take long on one rank; of rollouts ahead of the training the main thread only waits for the thread that does them.
ROLLING_OUT = tuple(ROOT + name for name in ("rollout/", "retrieval/", "data_modules/loading/rollouts_ahead.py"))
CONTINUE = "The last checkpoint, if there is one, is complete. To continue from it, on any number of ranks: "


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank posts of itself, every second."""

    rank: int
    host: str
    pid: int
    count: int = 0
    iteration: int = 0
    at: str = "start"  # file, line and function of the innermost frame of ours, on the main thread
    waiting: bool = False  # in a collective, for the other ranks
    rolling_out: bool = False
    unmoved_s: float = 0.0  # how long the main thread has stood at the same instruction
    stack: str = ""  # of the main thread, once it stands still


def main_thread() -> tuple[Any, dict[str, Any], str]:
    """Where the main thread is, read from outside it: a mark that is equal as long as it has not moved; ``at``,
    ``waiting`` and ``rolling_out`` of its beat; its stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(traceback.walk_stack(frame))  # the innermost first
    files = [frame.f_code.co_filename for frame, _ in frames]
    ours = [i for i, file in enumerate(files) if not any(part in file for part in LIBRARIES)]
    inner = ours[0] if ours else len(files)
    waiting = any(part in file for file in files[:inner] for part in COLLECTIVES)
    where = {
        "at": f"{files[inner].removeprefix(ROOT)}:{frames[inner][1]} {frames[inner][0].f_code.co_name}" if ours else "",
        "waiting": waiting,
        "rolling_out": not waiting and any(files[i].startswith(ROLLING_OUT) for i in ours),
    }
    stack = "".join(traceback.StackSummary.extract(reversed(frames)).format())
    return tuple((id(frame.f_code), frame.f_lasti) for frame, _ in frames), where, stack


def lost(me: Beat, beats: Mapping[int, Beat], silent_s: Mapping[int, float], dead_after_s: float) -> list[int]:
    """Ranks on other hosts that have been silent for too long."""
    return [rank for rank, beat in beats.items() if beat.host != me.host and silent_s[rank] >= dead_after_s]


def stalled_s(beats: Mapping[int, Beat], silent_s: Mapping[int, float]) -> float:
    """How long some rank has not moved from where it is, rollouts left out: all ranks may roll out for as long as that
    takes, but when one waits for another's rollout, it is the one that waits who does not move."""
    return max((b.unmoved_s + silent_s[r] for r, b in beats.items() if not b.rolling_out), default=0.0)


def report(head: str, beats: Mapping[int, Beat], silent_s: Mapping[int, float]) -> str:
    """``head``, then a line a rank: where it is and for how long."""
    lines = [f"\n{head}"]
    for rank, b in sorted(beats.items()):
        where = f"for {b.unmoved_s + silent_s[rank]:.0f} s at {b.at}{', waiting for the others' if b.waiting else ''}"
        lines.append(f"  rank {rank} (host {b.host}, process {b.pid}), iteration {b.iteration}: {where}")
    return "\n".join(lines)


def stall_report(head: str, then: str, beats: Mapping[int, Beat], silent_s: Mapping[int, float]) -> str:
    """Names the ranks that do not wait in a collective (the others wait for them), with their stacks."""
    working = [rank for rank, b in sorted(beats.items()) if not b.waiting]
    why = f"they wait for rank {', '.join(map(str, working))}" if working else "all ranks wait for each other"
    if len(working) == len(beats):
        why = "none of them waits in a collective that can be seen from here (on GPUs they wait for the device)"
    head = f"{head}: ranks have not moved for {stalled_s(beats, silent_s):.0f} s: {why}; {then}"
    stacks = [f"The stack of rank {rank}:\n{beats[rank].stack.rstrip()}" for rank in working]
    return "\n".join([report(head, beats, silent_s), *stacks])


def open_store(trainer: L.Trainer) -> TCPStore:
    """The ranks' store, on rank 0. It listens on this machine, or on the one interface by which the other nodes reach
    rank 0: by itself a TCPStore would listen on all. Raises ValueError where there is no such interface."""
    host, listener = "127.0.0.1", None
    if trainer.num_nodes > 1:  # asked on another node: on its own a machine's name may mean this machine alone
        known = str(socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_STREAM)[0][4][0])
        host = trainer.strategy.broadcast(known, src=trainer.world_size - 1)
    if trainer.is_global_zero:
        listener = _listen(host)
    port = trainer.strategy.broadcast(listener.getsockname()[1] if listener else 0)
    opened = partial(TCPStore, host, port, wait_for_workers=False, timeout=timedelta(seconds=20))
    if listener is None:
        return opened(is_master=False)
    return opened(is_master=True, master_listen_fd=listener.detach())  # which the store closes


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        raise ValueError(
            f"rank 0 cannot listen on {host}, by which another node knows MASTER_ADDR={os.environ.get('MASTER_ADDR')}: "
            "name an address of one of its network interfaces"
        ) from None


class RankWatch(L.Callback):
    """With more than one rank: ends the run, with a message, when ranks wait for one that does not move, or when
    another host has fallen silent; nothing at all with one rank.

    A thread on each rank posts a beat a second into a TCPStore of its own (not the process group's: a rank that hangs
    in a collective still answers) and reads those of the others; another judges them, so that a store that does not
    answer (rank 0's host has lost its power) is noticed as well. A rank whose main thread stands at the same
    instruction, beat after beat, does not move: that is reported on the terminal and in ``ranks.txt`` of the stage's
    folder, and later the run ends with exit code 75.

    Lightning sets up the data before it calls a callback: ``watch_from_the_start`` makes the watch begin before that.

    Args:
        report_after_s: seconds without a move after which the ranks and stacks are printed.
        stop_after_s: seconds without a move after which the run ends; null for never.
        dead_after_s: seconds of silence after which a rank on another host, or the store's host, counts as dead.
    """

    def __init__(
        self,
        report_after_s: PositiveFloat = 600.0,
        stop_after_s: PositiveFloat | None = 1800.0,
        dead_after_s: PositiveFloat = 40.0,
    ) -> None:
        if stop_after_s is not None and stop_after_s < report_after_s:
            raise ValueError(f"RankWatch: stop_after_s is {stop_after_s}, less than report_after_s, {report_after_s}")
        self.report_after_s, self.stop_after_s, self.dead_after_s = report_after_s, stop_after_s, dead_after_s
        self._store: TCPStore | None = None
        self._watch: _Watch | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.start(trainer)

    def start(self, trainer: L.Trainer) -> None:
        """Begin to watch, unless this has been done. The ranks must have their process group; every rank must call."""
        if trainer.world_size == 1 or self._watch is not None:
            return
        if self._store is None:
            self._store = open_store(trainer)
        trainer.strategy.barrier("rank watch")  # beats of an earlier run (a test after a fit) are not judged
        self._watch = _Watch(self, self._store, trainer)
        self._watch.start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._watch is not None:
            trainer.strategy.barrier("rank watch")  # a rank that has come to its end is not a rank that is gone
            self._watch.finish()
            self._watch = None


def watch_from_the_start(trainer: Any) -> None:
    """Have the trainer's ``RankWatch`` begin as soon as the ranks have a process group: no hook of a callback comes
    before the data are prepared and set up (lightning 2.6, Trainer._run)."""
    set_up = trainer.strategy.setup_environment

    def set_up_and_watch() -> None:
        set_up()
        for callback in trainer.callbacks:
            if isinstance(callback, RankWatch):
                callback.start(trainer)

    trainer.strategy.setup_environment = set_up_and_watch


class _Watch:
    """Posts this rank's beat, judges the others'."""

    def __init__(self, options: RankWatch, store: TCPStore, trainer: L.Trainer) -> None:
        self.options, self.store, self.trainer = options, store, trainer
        self.interval_s = INTERVAL_S * max(1.0, trainer.world_size / 64)
        self.me = Beat(trainer.global_rank, socket.gethostname(), os.getpid())
        self._last_change: dict[int, tuple[int, float]] = {}  # each rank: its count, and when that changed (our clock)
        # Of the last exchange: the beats, and seconds for which each had not changed then. While the store is silent
        # nothing is known of the others.
        self._read: tuple[dict[int, Beat], dict[int, float]] = ({}, {})
        self._answered = time.monotonic()  # when the store last has
        self._finished = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"rank-watch-{name}", daemon=True)
            for name, work in (("exchange", self._keep_exchanging), ("judge", self._keep_judging))
        ]
        self._moved: tuple[Any, float] = (None, time.monotonic())
        self._reported = False

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        self._finished.set()
        for thread in self._threads:
            thread.join(3 * self.interval_s)

    def _keep_exchanging(self) -> None:
        while not self._finished.wait(self.interval_s):
            with contextlib.suppress(Exception):  # the store's process is gone, or the network hiccups
                self._exchange()

    def _keep_judging(self) -> None:
        before = time.monotonic()
        while not self._finished.wait(self.interval_s):
            now = time.monotonic()
            if now - before > 5 * self.interval_s:  # this process stood still, which says nothing of the store
                self._answered = now
            before = now
            self._judge(now - self._answered)

    def _exchange(self) -> None:
        (mark, where, stack), now = main_thread(), time.monotonic()
        if mark != self._moved[0]:
            self._moved = (mark, now)
        unmoved_s, iteration = round(now - self._moved[1], 1), self.trainer.fit_loop.total_batch_idx + 1
        self.me = dataclasses.replace(
            self.me, count=self.me.count + 1, unmoved_s=unmoved_s, iteration=iteration,
            stack=stack if unmoved_s > STACK_AFTER_S else "", **where,
        )  # fmt: skip
        self.store.set(f"beat/{self.me.rank}", json.dumps(dataclasses.asdict(self.me)))
        keys = [f"beat/{rank}" for rank in range(self.trainer.world_size)]
        texts = self.store.multi_get([key for key in keys if self.store.check([key])])
        beats = {(beat := Beat(**json.loads(text))).rank: beat for text in texts}
        now = time.monotonic()
        for rank, beat in beats.items():
            if rank not in self._last_change or self._last_change[rank][0] != beat.count:
                self._last_change[rank] = (beat.count, now)
        self._read = beats, {rank: now - self._last_change[rank][1] for rank in beats}
        self._answered = now

    def _judge(self, unanswered_s: float) -> None:
        (beats, silent), options = self._read, self.options
        if unanswered_s >= options.dead_after_s:
            host = beats[0].host if 0 in beats else self.store.host
            why = f"no answer from its store for {options.dead_after_s:.0f} s (it or the network is gone)"
            reachable = {rank: silent[rank] for rank, beat in beats.items() if beat.host != host}
            self._end(report(f"error: host {host}, of rank 0: {why}; the others stop.", beats, silent), reachable)
        if gone := lost(self.me, beats, silent, options.dead_after_s):
            names = f"rank {', '.join(map(str, sorted(gone)))}"
            why = f"no sign of life for {options.dead_after_s:.0f} s (its host or the network is gone)"
            self._end(report(f"error: {names}: {why}; the others stop.", beats, silent), silent)
        unmoved, stop = stalled_s(beats, silent), options.stop_after_s
        if stop is not None and unmoved >= stop:
            self._end(stall_report("error", "the run ends here.", beats, silent), silent)
        if unmoved < options.report_after_s:
            self._reported = False
        elif self.me.rank == 0 and not self._reported:
            self._reported = True
            then = "they go on waiting." if stop is None else f"the run ends when it is {stop:.0f} s."
            self._print(stall_report("warning", then, beats, silent))

    def _end(self, message: str, silent_s: Mapping[int, float]) -> NoReturn:
        """Say why, if this is the first of the ranks that can, and end this process: the main thread may hang in a
        collective that no exception ends. torchrun then ends the other ranks; engines and retrievers follow their
        parent."""
        reporters = [rank for rank, silent in silent_s.items() if silent < 5 * self.interval_s]
        if self.me.rank == min(reporters, default=self.me.rank):
            self._print(f"{message}\n{CONTINUE}{continue_command()}")
        else:
            time.sleep(2 * self.interval_s)  # torchrun ends all when the first goes: the reporter first
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(EXIT_CODE)

    def _print(self, message: str) -> None:
        with contextlib.suppress(OSError):  # the reader of our output may be gone as well
            print(message, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            (stage_dir(self.trainer) / REPORT).write_text(message.lstrip("\n") + "\n")
