"""What ranks tell each other of themselves, and what to make of it: who is gone, who waits for whom.

Every rank posts a ``Beat`` a second into a TCPStore of its own (not the process group's: a rank that hangs in a
collective still answers), and reads those of the others. Ages are measured on one clock each: nodes' clocks may
differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Beat:
    rank: int
    host: str
    node: str  # equal for ranks that see each other's processes
    pid: int
    born: str  # when the process was started, in the kernel's ticks: ids are used again
    count: int = 0
    place: str = "start"
    waiting: bool = False
    rolling_out: bool = False
    still_s: float = 0.0  # how long it has not moved from there
    iteration: int = 0
    state: str = RUNNING  # or why it stops

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def own_beat(rank: int) -> Beat:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    node = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return Beat(rank, socket.gethostname(), node, os.getpid(), _born(os.getpid()) or "")


def alive(beat: Beat) -> bool:
    """Of a rank on this node: whether its process still runs (one that has died and was not yet collected does not)."""
    return _born(beat.pid) == beat.born


def _born(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


class Board:
    """Where beats are posted; any call may fail when the process that holds it, rank 0, is gone.

    Args:
        address: of the store; None opens it here (see ``address``).
    """

    def __init__(self, ranks: int, address: tuple[str, int] | None = None) -> None:
        self.ranks = ranks
        host, port = address or (os.environ.get("MASTER_ADDR", "127.0.0.1"), 0)
        timeout = timedelta(seconds=20)
        self._store = dist.TCPStore(host, port, is_master=address is None, wait_for_workers=False, timeout=timeout)
        self.address = (host, self._store.port)

    def post(self, beat: Beat) -> None:
        self._store.set(f"beat/{beat.rank}", beat.text())

    def read(self) -> dict[int, Beat]:
        keys = [f"beat/{rank}" for rank in range(self.ranks)]
        if self._store.check(keys):
            texts = self._store.multi_get(keys)
        else:  # some rank has not posted yet
            texts = [self._store.get(key) for key in keys if self._store.check([key])]
        return {beat.rank: beat for beat in (Beat(**json.loads(text)) for text in texts)}

    def stop(self, message: str) -> bool:
        """Tell all ranks to stop, and why. Returns whether this was the first to say so."""
        first = self._store.add("stops", 1) == 1
        if first:
            self._store.set("stop", message)
        return first

    def stopped(self) -> str | None:
        return self._store.get("stop").decode() if self._store.check(["stop"]) else None


class Observer:
    """Remembers when each rank's beat last changed, by this process's clock."""

    def __init__(self) -> None:
        self.beats: dict[int, Beat] = {}
        self._heard: dict[int, tuple[int, float]] = {}

    def update(self, beats: Mapping[int, Beat]) -> None:
        now = time.monotonic()
        for rank, beat in beats.items():
            if self._heard.get(rank, (None, 0.0))[0] != beat.count:
                self._heard[rank] = (beat.count, now)
        self.beats = dict(beats)

    def silent_s(self, rank: int) -> float:
        return time.monotonic() - self._heard[rank][1]


def lost(me: Beat, beats: Mapping[int, Beat], silent_s: Mapping[int, float], dead_after_s: float) -> dict[int, str]:
    """Ranks that the others need not wait for any more, and why."""
    found = {}
    for rank, beat in beats.items():
        if rank == me.rank:
            continue
        if beat.state != RUNNING:
            found[rank] = f"stopped by itself: {beat.state}"
        elif beat.node == me.node:
            if not alive(beat):
                found[rank] = "its process has ended without a word (killed, or out of memory?)"
        elif silent_s[rank] >= dead_after_s:
            found[rank] = f"no sign of life for {silent_s[rank]:.0f} s (its process, its node or the network is gone)"
    return found


def stalled_s(beats: Mapping[int, Beat], silent_s: Mapping[int, float]) -> float:
    """How long some rank has not moved from where it is, rollouts left out: all ranks may roll out for as long as that
    takes, but when one waits for another's rollout, it is the one that waits who does not move."""
    return max((b.still_s + silent_s[r] for r, b in beats.items() if not b.rolling_out), default=0.0)


def table(beats: Mapping[int, Beat], silent_s: Mapping[int, float], gone: Mapping[int, str] = {}) -> str:
    """A line a rank: where it is and for how long."""
    head = ("rank", "host", "pid", "iteration", "for", "where")
    rows = [head]
    for rank, b in sorted(beats.items()):
        where = f"GONE; last seen in: {b.place}" if rank in gone else b.place
        seconds = b.still_s + silent_s[rank]
        rows.append((str(rank), b.host, str(b.pid), str(b.iteration), f"{seconds:.0f} s", where))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[-1]]) for row in rows)


def loss_message(beats: Mapping[int, Beat], gone: Mapping[int, str], silent_s: Mapping[int, float]) -> str:
    names = [f"rank {r} (host {beats[r].host}, process {beats[r].pid}): {why}" for r, why in sorted(gone.items())]
    return "\n".join([
        f"\nerror: {'a rank is' if len(gone) == 1 else f'{len(gone)} ranks are'} missing, the others stop.",
        *(f"  {name}" for name in names), table(beats, silent_s, gone), CONTINUE,
    ])  # fmt: skip


def stall_message(
    beats: Mapping[int, Beat], silent_s: Mapping[int, float], stop_after_s: float | None, end: bool
) -> str:
    """Names the ranks that do not wait in a collective: the others wait for them."""
    held = [rank for rank, b in sorted(beats.items()) if not b.waiting]
    whom = f"they wait for {_list(held)}" if 0 < len(held) < len(beats) else "all ranks wait for each other"
    if len(held) == len(beats):
        whom = "none of them waits in a collective that can be seen from here (on GPUs they wait for the device)"
    since = stalled_s(beats, silent_s)
    first = "error" if end else "warning"
    then = "the run ends here."
    if not end:
        then = "they go on waiting." if stop_after_s is None else f"the run ends when it is {stop_after_s:.0f} s."
    lines = [f"\n{first}: ranks have not moved for {since:.0f} s: {whom}; {then}", table(beats, silent_s)]
    return "\n".join([*lines, CONTINUE] if end else lines)


def _list(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


CONTINUE = (
    "The last checkpoint, if there is one, is complete: the same command with RESUME=last goes on from it, on any "
    "number of ranks."
)
