"""Process of one sandboxed program: confines itself, waits for the program, runs it, exits."""

import os
import resource
import signal
import struct
import sys
from dataclasses import dataclass

import linux
import program
import seccomp
import view

USERS = 10_000  # ids per server
LENGTH = struct.Struct("<I")  # length of the program in bytes, before it; its standard input follows it
# first bytes of the output, before any foreign code runs: all protections are in place; the program was read
READY, STARTED = b"R", b"S"
# modules that programs must not find
OURS = ("linux", "prepare", "program", "program_process", "seccomp", "view", "worker", "zygote")


@dataclass(frozen=True)
class Confinement:
    """How the sandbox's server confines a program: means of isolation, users and limits."""

    view: str  # "mounts", "landlock" or "none"
    rules: int  # Landlock's descriptor, -1 if none
    seccomp: bool
    takes_uids: bool  # the server is root and may become the users below
    first_uid: int  # of a random range that no other process is likely to have
    memory_mb: int
    disk_mb: int
    threads: int
    cpu_s: int


def run(c: Confinement, source_fd: int, output_fd: int) -> None:
    """Confine this process, receive one program and run it. Never returns."""
    code = 1
    try:
        os.dup2(source_fd, 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        confine(c)
        os.write(1, READY)
        source = _read(LENGTH.unpack(_read(LENGTH.size))[0])  # not a byte more: the program reads the rest
        program.fresh_streams()
        execute = program.execute
        for name in OURS:
            sys.modules.pop(name, None)
        os.write(1, STARTED)
        code = execute(source.decode("utf-8", "replace"))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise EOFError("the server ended before it had sent the program")
        data += part
    return data


def confine(c: Confinement) -> None:
    """Confine this process by all available means. The seccomp filter comes last, because it forbids most of the steps
    before it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    os.closerange(3, max(c.rules, 3))
    os.closerange(max(c.rules, 2) + 1, 1 << 20)
    if c.view == "mounts":
        view.temporary_folder(c.disk_mb)
    else:
        os.chdir("/")
    own_count = _own_identity(c)
    _limits(c, own_count)
    linux.drop_privileges()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # no core file, and no core handler outside
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if c.rules >= 0:
        linux.landlock_enter(c.rules)
        os.close(c.rules)
    if c.seccomp:
        seccomp.enter(os.getpid(), threads=own_count, metadata=c.view == "mounts")


def _own_identity(c: Confinement) -> bool:
    """Take a user id that no other process has, or a user namespace: either has a separate count of tasks. Returns
    False if neither is available; then there can be no limit on threads, and so no threads."""
    if c.takes_uids:
        uid = c.first_uid + os.getpid() % USERS
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return True
    try:
        linux.unshare(linux.CLONE_NEWUSER)
    except OSError:
        return False
    return True


def _limits(c: Confinement, own_count: bool) -> None:
    megabyte = 1 << 20
    limits = {
        resource.RLIMIT_AS: c.memory_mb * megabyte,
        resource.RLIMIT_CPU: c.cpu_s,
        resource.RLIMIT_FSIZE: c.disk_mb * megabyte,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_STACK: 8 * megabyte,
    }
    if own_count:
        limits[resource.RLIMIT_NPROC] = c.threads + 1
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
