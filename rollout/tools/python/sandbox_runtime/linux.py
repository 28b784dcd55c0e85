"""System calls that confine a process, by ctypes: namespaces, mounts, capabilities, Landlock.

Everything in this folder runs in a bare interpreter (no site-packages, no project), so it imports the standard library
and its neighbours by their short names only. Numbers are those of Linux's headers for x86-64.
"""

import ctypes
import os
import stat
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_NOATIME, MS_NODIRATIME, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
SYS_PIVOT_ROOT, SYS_CAPSET = 155, 126
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446

# flags of statvfs that a bind mount inherits, and that a less privileged remount must repeat
_KEPT = {2: MS_NOSUID, 4: MS_NODEV, 8: MS_NOEXEC, 1024: MS_NOATIME, 2048: MS_NODIRATIME, 4096: MS_RELATIME}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Make a Linux system call and return its result. Raises OSError with the call's errno."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(libc.syscall(ctypes.c_long(number), *words), f"system call {number}")


def unshare(flags: int) -> None:
    _check(libc.unshare(ctypes.c_int(flags)), "unshare")


def prctl(option: int, value: int = 0) -> None:
    rest = [ctypes.c_ulong(0)] * 3
    _check(libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *rest), f"prctl {option}")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    words = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def bind(source: str, target: str) -> None:
    """Bind-mount a file or folder at another path, read-only unless it is a device. Creates the path if it is
    missing."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    mount(source, target, flags=MS_BIND)
    if stat.S_ISCHR(os.stat(source).st_mode):
        return
    kept = sum(flag for bit, flag in _KEPT.items() if os.statvfs(target).f_flag & bit)
    mount(None, target, flags=kept | MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def enter_root(folder: str) -> None:
    """Make a mounted folder the root of the file system, and detach the old root (pivot_root(2), "pivot_root('.',
    '.')")."""
    os.chdir(folder)
    syscall(SYS_PIVOT_ROOT, b".", b".")
    _check(libc.umount2(b".", ctypes.c_int(MNT_DETACH)), "umount of the old root")
    os.chdir("/")
    mount(None, "/", flags=MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def drop_privileges() -> None:
    """Drop all capabilities of this process, also those that a set-uid file could bring back."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # past the last one, or not allowed: then capset and no_new_privs alone must do
            break
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    syscall(SYS_CAPSET, header, nothing)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


# Landlock (linux/landlock.h)
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3


def landlock_version() -> int:
    """Return the version of Landlock in the kernel; 0 without Landlock."""
    try:
        return syscall(SYS_LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


def landlock_rules(readable: list[str], listable: list[str], devices: list[str]) -> int:
    """Return a file descriptor of Landlock rules that allow the given files and deny all others. New kernels also deny
    network and signals."""
    version = landlock_version()
    if version < 3:  # before, files could be truncated
        raise OSError(f"Landlock's version is {version}; 3 is needed (Linux 6.2)")
    files = (1 << (15 + (version >= 5))) - 1
    attributes = struct.pack("=QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = syscall(SYS_LANDLOCK_CREATE, attributes, len(attributes), 0)
    allowed = [(path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)) for path in readable]
    allowed += [(path, _READ_DIR) for path in listable]
    allowed += [(path, _READ_FILE | _WRITE_FILE) for path in devices]
    for path, access in allowed:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            syscall(SYS_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", access, fd), 0)
        finally:
            os.close(fd)
    return rules


def landlock_enter(rules: int) -> None:
    """Restrict this thread by Landlock rules. Needs no_new_privs."""
    syscall(SYS_LANDLOCK_RESTRICT, rules, 0)
