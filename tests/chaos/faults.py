"""What is done to a run while it is in flight. Each fault draws its particulars from its own generator."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.chaos.runs import Place, roles

STOP_S = (0.5, 8.0)  # less than any tool may take
HOUR_S = 3600
Fault = Callable[[Place, random.Random], str]  # does it; returns what it was, in words, or nothing: it found no victim
FAULTS: dict[str, Fault] = {}
ALTERS = {"alter a checkpoint", "alter an input"}  # need a run that is down: nobody rereads what it has loaded


def fault(name: str) -> Callable[[Fault], Fault]:
    def register(function: Fault) -> Fault:
        FAULTS[name] = function
        return function

    return register


# ------------------------------------------------------------------ processes
@fault("kill one process")
def kill_one(place: Place, draw: random.Random) -> str:
    victim, what = _pick(place, draw)
    victim.kill()
    return what


@fault("kill all")
def kill_every(place: Place, draw: random.Random) -> str:
    place.kill()
    return "every process of the run"


@fault("stop one process")
def stop_one(place: Place, draw: random.Random) -> str:
    (victim, what), seconds = _pick(place, draw), draw.uniform(*STOP_S)
    victim.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(signal.SIGCONT)
    return f"{what}, {seconds:.1f} s"


@fault("stop the engine for good")
def hang_engine(place: Place, draw: random.Random) -> str:
    engines = [process for process, what in roles(place) if what in ("engine", "vLLM engine")]
    if engines:
        draw.choice(engines).send_signal(signal.SIGSTOP)
    return "engine" if engines else ""


def _pick(place: Place, draw: random.Random) -> tuple[psutil.Process, str]:
    """The kind first: ten programs in the sandbox are no likelier than the one launcher."""
    found = roles(place)
    what = draw.choice(sorted({what for _, what in found}))
    return draw.choice([process for process, other in found if other == what]), what


# ------------------------------------------------------------------ files
@fault("alter a checkpoint")
def alter_checkpoint(place: Place, draw: random.Random) -> str:
    place.kill()
    return _alter(place.folder / "checkpoints", place, draw)


@fault("alter an input")
def alter_input(place: Place, draw: random.Random) -> str:
    """What earlier stages have made: the student's export, the questions. ``mend`` brings it back."""
    place.kill()
    return _alter(draw.choice([place.student, *place.outputs.glob("chaos_world/*/train.parquet")]), place, draw)


def _alter(path: Path, place: Place, draw: random.Random) -> str:
    """One bit, or the end cut off. A small file is as likely as a large one."""
    files = sorted(p for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file() and not p.is_symlink())
    files = [p for p in files if p.stat().st_size and p.suffix != ".sha256"]
    if not files:
        return ""
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content))
    aside = _aside(place) / file.relative_to(place.outputs)
    aside.parent.mkdir(parents=True)
    shutil.copy2(file, aside)
    if draw.random() < 0.5:
        content[at] ^= 1 << draw.randrange(8)
        what = f"bit flipped at byte {at}"
    else:
        del content[at:]
        what = f"cut off at byte {at}"
    file.write_bytes(content)
    return f"{file.name}, {what}"


def _aside(place: Place) -> Path:
    return place.outputs.parent / "whole"


def mend(place: Place) -> bool:
    """Bring back what was altered. Whether there was something."""
    if altered := _aside(place).is_dir():
        shutil.copytree(_aside(place), place.outputs, dirs_exist_ok=True)
        shutil.rmtree(_aside(place))
    return altered


@fault("fill the disk")
def fill_disk(place: Place, draw: random.Random) -> str:
    """The outputs are a file system of their own then, see ``own_disk``."""
    seconds, filler = draw.uniform(1, 10), place.outputs / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    time.sleep(seconds)
    filler.unlink()
    return f"for {seconds:.1f} s"


@contextlib.contextmanager
def own_disk(folder: Path, size: int) -> Iterator[None]:
    """``folder`` is a file system of ``size`` bytes, for which one must be root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


# ------------------------------------------------------------------ the database
def _database(place: Place) -> Path:
    return place.outputs / "mlflow.db"


@fault("remove the database")
def remove_database(place: Place, draw: random.Random) -> str:
    for path in place.outputs.glob("mlflow.db*"):
        path.unlink()
    return "mlflow.db"


@fault("overwrite the database")
def overwrite_database(place: Place, draw: random.Random) -> str:
    _database(place).write_bytes(draw.randbytes(8192))
    return "mlflow.db, by noise"


@fault("lock the database")
def lock_database(place: Place, draw: random.Random) -> str:
    seconds = draw.uniform(2, 20)
    with contextlib.closing(sqlite3.connect(_database(place), timeout=30)) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds)
        database.rollback()
    return f"for {seconds:.1f} s"


# ------------------------------------------------------------------ the clock
@fault("move the clock")
def move_clock(place: Place, draw: random.Random) -> str:
    hours = draw.choice([-1, 1]) * draw.choice([1, 24, 24 * 365 * 5])
    with place.clock.open("r+b") as file:  # in place: a process that has mapped an empty file would die by SIGBUS
        file.write(struct.pack("=q", hours * HOUR_S))
    return f"by {hours} hours"


# ------------------------------------------------------------------ requests
REQUESTS = {
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "seed": 1, "logprobs": 0}},
    "/retrieve": {"queries": ["a"], "topk": 1, "return_scores": True},
    "/health": {},
}
WRONG = (None, True, -1, 1 << 70, 1.5, float("nan"), "", "é\0", [], [[]], ["x"] * 5000, {}, {"a": []}, "x" * (1 << 20))


@fault("send bad requests")
def bad_requests(place: Place, draw: random.Random) -> str:
    """To every port that the run listens on: 30 requests each, wrong in one place or all noise, some never ended."""
    open_ones = []
    for port in place.ports:
        for _ in range(30):
            with contextlib.suppress(OSError):  # refused, reset: as it should be
                connection = socket.create_connection(("127.0.0.1", port), timeout=2)
                connection.settimeout(0.05)
                open_ones.append(connection)
                connection.sendall(_bad_request(draw))
                connection.recv(1 << 12)
    time.sleep(draw.uniform(0, 3))
    for connection in open_ones:
        connection.close()
    return f"to {len(place.ports)} ports" if place.ports else ""


def _bad_request(draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return draw.randbytes(draw.choice([1, 100, 10000]))
    path, right = draw.choice(sorted(REQUESTS.items()))
    body = dict(right)
    for key in draw.sample(sorted(body), k=min(len(body), draw.choice([1, 1, 2]))):
        body[key] = draw.choice(WRONG)
    data = json.dumps(body).encode()
    if draw.random() < 0.2:
        data = data[: draw.randrange(len(data))] + draw.randbytes(draw.randrange(20))
    length = draw.choice([len(data)] * 6 + [1 << 40, -1, 0])
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    whole = head.encode() + data
    return whole if draw.random() < 0.8 else whole[: draw.randrange(len(whole))]


def ports_of(place: Place) -> list[int]:
    """On which the run listens."""
    found = set()
    for process in place.processes():
        with contextlib.suppress(psutil.Error):
            found |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return sorted(found)
