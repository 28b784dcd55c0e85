"""``make chaos``: random faults in three small runs with all parts real, and what became of each run.

Every fault is put into a run of its own, at a random moment. A run that ends is continued by ``RESUME=last``. In the
end its weights are, bit for bit, those of a run that nothing happened to, its metrics the same, and no process,
listening port, segment of shared memory, mount or temporary file is left; else the fault counts as ELSE, its files are
kept, and the exit code is 1. The same seed and number give the same fault, at about the same moment.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from callbacks.tracking.run_info import duration
from common.run_folder import remove_orphans
from experiments.registry.project import Project
from rollout.engines.weights.files import PREFIX as WEIGHTS
from rollout.engines.weights.files import SHARED_MEMORY
from tests.chaos import faults
from tests.chaos.faults import FAULTS, own_disk, ports_of
from tests.chaos.runs import ITERATIONS, RUNS, TEMPORARY, TRACEBACK, Made, Place, kill_all, living

PR_SET_CHILD_SUBREAPER = 36  # of prctl: what a dead process leaves behind becomes a child of this one
MOST_CONTINUED = 3
LEAVE_S = 30.0  # for what a run leaves behind to end
EARLY = 0.25  # share of the faults that come before the first iteration has ended
# Segments of shared memory whose names have the number of a process: our weights, torch's tensors, joblib's semaphores
# and arrays, Intel's OpenMP.
OWNED = re.compile(
    rf"{WEIGHTS}(\d+)-\d+-\w+(?:\.safetensors)?|torch_(\d+)_\d+(?:_\d+)?|sem\.loky-(\d+)-\w+"
    r"|joblib_memmapping_folder_(\d+)_\w+|__KMP_REGISTERED_LIB_(\d+)_\d+"
)
OF_VLLM = re.compile(r"psm_|sem\.(loky|mp)-")  # between the processes of a server
WENT_ON, CONTINUED, MENDED, MISSED, ELSE = "went on", "continued", "refused, mended", "missed", "ELSE"
VERDICTS = (WENT_ON, CONTINUED, MENDED, MISSED, ELSE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=100, help="how many; they take turns in the runs")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="these numbers alone")
    parser.add_argument("--run", choices=RUNS, help="in this run alone")
    parser.add_argument("--fault", choices=sorted(FAULTS), help="this kind alone")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    home = Project.from_environment().outputs / "chaos"
    home.mkdir(parents=True, exist_ok=True)
    job = Job(home, options.seed)
    TEMPORARY.mkdir()
    try:
        for number in options.only or range(options.faults):
            job.run(number, options.run, options.fault)
    finally:
        shutil.rmtree(TEMPORARY, ignore_errors=True)
    job.table()
    return 1 if job.counts[ELSE] else 0


class Job:
    """The faults of one seed. ``home``: folder of the prepared outputs and of what went wrong."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.seed = home, seed
        self.counts: collections.Counter[str] = collections.Counter()
        self.by_fault: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._wanted: dict[str, tuple[Made, float, float]] = {}  # by run: what it makes, seconds before and in all
        self._prepared = home / "prepared"
        self._started = time.monotonic()
        self._clock = home / "clock.so"
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self._clock, source, "-ldl"], check=True)
        self._mounts = os.geteuid() == 0
        if not self._mounts:
            print("'fill the disk' is left out: only root can mount a small disk")

    def wanted(self, name: str) -> tuple[Made, float, float]:
        """What the run makes that nothing happens to; seconds until its first iteration has ended, and in all."""
        if name not in self._wanted:
            place = Place(name, self._prepared)
            _require_success(place.command("train", "chaos_sft").wait(), place)
            shutil.rmtree(place.folder, ignore_errors=True)
            place = Place(name, self._prepared)  # it knows the student now
            began = time.monotonic()
            place.start()
            self._wait(place, 1)
            first = time.monotonic() - began
            code, whole = place.wait(), time.monotonic() - began
            place.end_servers()
            _require_success(code, place)
            self._wanted[name] = place.made(), first, whole
            shutil.rmtree(place.folder)
            print(f"{name}: {ITERATIONS} iterations in {whole:.0f} s, the first after {first:.0f} s", flush=True)
        return self._wanted[name]

    def run(self, number: int, name: str | None = None, kind: str | None = None) -> None:
        """The fault of that number."""
        draw = random.Random(f"{self.seed}-{number}")
        drawn = draw.choice([kind for kind in FAULTS if kind != "fill the disk" or self._mounts])
        self.inject(name or RUNS[number % len(RUNS)], kind or drawn, draw, f"{number:03d}")

    def inject(self, name: str, kind: str, draw: random.Random, label: str) -> None:
        """Count and print what becomes of a run with one fault in it."""
        wanted, first, whole = self.wanted(name)
        before = surroundings()
        outputs = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=self.home)) / "outputs"
        size = int(2.5 * sum(f.stat().st_size for f in self._prepared.rglob("*") if f.is_file())) + (64 << 20)
        disk = own_disk(outputs, size) if kind == "fill the disk" else contextlib.nullcontext()
        began = time.monotonic()
        with disk:
            shutil.copytree(self._prepared, outputs, symlinks=True, dirs_exist_ok=True)
            clock = None
            if kind == "move the clock":
                clock = outputs.parent / "clock"
                clock.write_bytes(struct.pack("=q", 0))
                shutil.copy2(self._clock, clock.with_suffix(".so"))
            place = Place(name, outputs, clock)
            try:
                what, verdict, why = self._put(kind, place, draw, wanted, first, whole)
            finally:
                if place.process is not None and place.process.poll() is None:
                    place.kill()
                place.end_servers()
            left = left_behind(before, place.ports, name == "chaos_ranks")
            if verdict != MISSED:  # such a run was killed by us, and no later one has cleaned up
                why = why or left
                verdict = ELSE if why else verdict
            if verdict == ELSE:
                for path in place.folder.glob("log*"):
                    shutil.copy2(path, outputs.parent)
        self.counts[verdict] += 1
        self.by_fault[name, kind][verdict] += 1
        seconds = time.monotonic() - began
        print(f"{label} {name:<13} {kind}: {what}. {verdict}{f': {why}' if why else ''} ({seconds:.0f} s)", flush=True)
        if verdict == ELSE:
            print(f"    kept: {outputs.parent}", flush=True)
        else:
            shutil.rmtree(outputs.parent)

    def _put(
        self, kind: str, place: Place, draw: random.Random, wanted: Made, first: float, whole: float
    ) -> tuple[str, str, str]:
        """Run it with the fault in it, to its end. Returns the fault in words, the verdict, and the problem found."""
        place.start()
        early = draw.random() < EARLY and kind not in faults.ALTERS
        after, share = draw.randrange(1, ITERATIONS), draw.random()
        self._wait(place, 0 if early else after)
        time.sleep(share * (first if early else (whole - first) / ITERATIONS))
        if place.process.poll() is not None:
            return "too late, it had ended", MISSED, ""
        place.ports = ports_of(place)
        what = FAULTS[kind](place, draw)
        if not what:
            return "nothing there to do it to", MISSED, ""
        what += " before the first iteration had ended" if early else f" in iteration {after + 1}"
        verdict = WENT_ON
        for _ in range(MOST_CONTINUED):
            code = 1 if place.process is None else place.wait()
            if code is None:
                return what, ELSE, "it did not end"
            if TRACEBACK in place.screen():
                return what, ELSE, "a traceback on the screen"
            if code == 0:
                break
            reap(known=[p.pid for p in (place.process, *place.servers.values()) if p is not None])
            verdict = MENDED if verdict != WENT_ON and faults.mend(place) else CONTINUED
            place.start("--resume", "last")
        else:
            return what, ELSE, f"it did not go on after {MOST_CONTINUED} attempts: {place.screen()[-300:]}"
        if difference := wanted.differs(place.made()):
            return what, ELSE, difference
        trouble = self._untracked(place)
        if trouble and kind == "overwrite the database":  # as the message says
            for path in place.outputs.glob("mlflow.db*"):
                path.unlink()
            verdict, trouble = MENDED, self._untracked(place)
        return what, verdict, trouble

    def _wait(self, place: Place, iterations: int) -> None:
        while place.process.poll() is None and place.iterations() < iterations:
            place.serve()
            time.sleep(0.05)

    def _untracked(self, place: Place) -> str:
        """What MLflow lacks of the run's metrics once ``make metrics`` has brought it there."""
        importing = place.command("metrics", place.name)
        if importing.wait(timeout=300) != 0:
            return f"make metrics failed: {place.screen()[-300:]}"
        lacking = place.made().metrics.keys() - place.tracked()
        return f"MLflow lacks {len(lacking)} metrics, as {min(lacking)}" if lacking else ""

    def table(self) -> None:
        table = Table(title=f"make chaos, seed {self.seed}: {self.counts.total()} faults")
        for column in ("run", "fault", *VERDICTS):
            table.add_column(column, justify="left" if column in ("run", "fault") else "right")
        for (name, kind), counts in sorted(self.by_fault.items()):
            table.add_row(name, kind, *(str(counts[c] or "") for c in VERDICTS))
        table.add_section()
        table.add_row("all", "", *(str(self.counts[c] or "") for c in VERDICTS))
        Console(width=110).print(table)
        print(
            f"{WENT_ON}: by itself. {CONTINUED}: it ended, and RESUME=last went on. {MENDED}: it named an altered "
            f"file and went on when that was whole again. All three to the same weights and metrics, bit for bit, "
            f"with nothing left behind. {MISSED}: there was nothing to do it to. "
            f"{duration(time.monotonic() - self._started)}."
        )


def _require_success(code: int | None, place: Place) -> None:
    if code != 0:
        raise SystemExit(f"{place.name} fails by itself:\n{place.screen()}")


def surroundings() -> tuple[set[str], set[str], set[str]]:
    """Segments of shared memory, mounts, and temporary files of the runs."""
    mounts = set(Path("/proc/self/mounts").read_text().splitlines())
    return {path.name for path in SHARED_MEMORY.iterdir()}, mounts, {path.name for path in TEMPORARY.iterdir()}


def left_behind(before: tuple[set[str], set[str], set[str]], ports: list[int], has_servers: bool) -> str:
    """Say what there is now and was not before. Kills the processes. ``has_servers``: vLLM servers were killed, which
    leave segments of their own."""
    me, deadline = psutil.Process(), time.monotonic() + LEAVE_S
    while (left := _children(me)) and time.monotonic() < deadline:
        time.sleep(0.1)
    words = [f"process {' '.join(p.cmdline())[:120]!r}" for p in left]
    kill_all(left)
    for port in ports:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            words.append(f"port {port}")
    remove_orphans(TEMPORARY)  # as the next start would
    segments, mounts, files = surroundings()
    new = sorted(segments - before[0])
    words += [f"segment {n}" for n in new if not of_others(n) and not (has_servers and OF_VLLM.match(n))]
    words += [f"mount {line}" for line in sorted(mounts - before[1]) if not line.startswith("chaos ")]
    words += [f"temporary file {name}" for name in sorted(files - before[2]) if not name.startswith("torchinductor_")]
    return f"left behind: {', '.join(words)}" if words else ""


def of_others(segment: str) -> bool:
    """Whether a living process made the segment, as its name says: ours have ended. A segment whose name says nothing
    counts as ours."""
    found = OWNED.fullmatch(segment)
    return found is not None and psutil.pid_exists(int(found[found.lastindex or 0]))


def reap(known: Sequence[int] = ()) -> None:
    """End what is dead and was handed to this process, but not what it waits for itself (``known``)."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid not in known and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def _children(me: psutil.Process) -> list[psutil.Process]:
    reap()
    return living(me.children(recursive=True))


if __name__ == "__main__":
    sys.exit(main())
