"""Self-test of the sandbox: a program that tries each forbidden action inside it, and a report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

PROTECTIONS = {  # name: essential?, mechanisms that provide it
    "network": (True, ("net", "seccomp")),
    "file reads": (True, ("mounts", "landlock")),
    "file writes": (True, ("mounts", "landlock")),
    "other processes": (True, ("pid", "seccomp", "landlock")),
    "process tree": (True, ("seccomp", "pid")),
    "memory": (True, ("limits",)),
    "privileges": (True, ("seccomp", "capabilities")),
    "environment": (True, ("emptied",)),
    "descriptors": (True, ("closed",)),
    "threads": (False, ("limits", "seccomp")),
    "temporary folder": (False, ("mounts",)),
}

PROGRAM = """
import _thread, ctypes, errno, json, mmap, os, socket, tempfile, threading
found = {}
libc = ctypes.CDLL(None, use_errno=True)

def allowed(function, *arguments):
    try:
        function(*arguments)
    except (OSError, MemoryError, RuntimeError):
        return False
    return True

def child():
    if not os.fork():
        os._exit(0)

def try_all(name, cases):
    worked = [label for label, function, *arguments in cases if allowed(function, *arguments)]
    found[name] = "possible: " + ", ".join(worked) if worked else ""

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

try_all("network", [(f.name, socket.socket, f) for f in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)])
paths = [CANARY, "/etc/passwd", "/proc/self/environ", "/proc/%d/environ" % TRAINER, "/proc/1/cmdline"]
try_all("file reads", [(path, open, path) for path in paths])
MARK = "/.probe-%d" % TRAINER
folders = [os.path.dirname(CANARY), "/", "/var/tmp", "/dev/shm", "/home", "/root", os.path.dirname(os.__file__)]
try_all("file writes", [(f, lambda f=f: os.close(os.open(f + MARK, os.O_CREAT | os.O_WRONLY))) for f in folders])
for folder in folders:
    allowed(os.unlink, folder + MARK)
try_all("other processes", [("signal %d" % pid, os.kill, pid, 0) for pid in (TRAINER, os.getppid(), 1, -1)])
try_all("process tree", [("fork", child)])
too_much = (LIMIT_MB + 64) << 20
try_all("memory", [("heap", bytearray, too_much), ("map", mmap.mmap, -1, too_much)])
mount = "mount", call, "mount", b"x", b"/", b"tmpfs", 0, None
unshare = "unshare", call, "unshare", 0x10000000
try_all("privileges", [mount, unshare, ("uid 0", call, "setresuid", 0, 0, 0), ("chroot", call, "chroot", b"/")])
found["environment"] = " ".join(os.environ)
found["descriptors"] = " ".join(str(fd) for fd in range(3, 1024) if allowed(os.fstat, fd))
libc.mallopt(-8, 1)  # M_ARENA_MAX: tried is the limit on threads, so that none may run out of address space first
threading.stack_size(1 << 16)
started, gate = 0, threading.Event()
while started < THREADS + 8 and allowed(_thread.start_new_thread, gate.wait, ()):
    started += 1
found["threads"] = "%d started" % started if started >= THREADS + 8 else ""
gate.set()
found["temporary folder"] = "" if allowed(lambda: tempfile.TemporaryFile().close()) else "nothing can be written"
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Protection:
    """One line of the self-test's report: a protection, and whether it is active."""

    name: str
    active: bool
    essential: bool
    how: str  # the mechanism that provides it, or the hole that was found


def program(canary: str, trainer: int, limit_mb: int, threads: int) -> str:
    """Return the source of the program that tests the sandbox from inside. ``canary``: a file that exists outside and
    must not be readable inside."""
    values = f"CANARY, TRAINER, LIMIT_MB, THREADS = {canary!r}, {trainer}, {limit_mb}, {threads}\n"
    return values + PROGRAM


def protections_of(output: str, mechanisms: list[str]) -> tuple[Protection, ...]:
    """Return the sandbox's protections and whether each is active, judged by the output of the test program.
    ``mechanisms``: those that the server has set up. If the program did not finish, no protection is active."""
    try:
        found = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        found = {}
    there = {*mechanisms, "limits", "capabilities", "emptied", "closed"}
    lines = []
    for name, (essential, providers) in PROTECTIONS.items():
        hole = found.get(name, "not probed")
        by = ", ".join(provider for provider in providers if provider in there)
        lines.append(Protection(name, not hole, essential, hole or by))
    return tuple(lines)


def describe(protections: Iterable[Protection]) -> str:
    return "; ".join(f"{p.name}: {p.how if p.active else f'NOT protected ({p.how})'}" for p in protections)
