"""File system of a sandboxed program: the standard library and the requested packages, read-only.

``mounts``: a new root with nothing else in it, and an empty folder of limited size at /tmp for each program.
``landlock``, where mounting is not allowed: the old root stays, but no other file can be opened (names and sizes remain
visible) and none can be written.
"""

import ctypes
import os
import sys

import linux

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
OTHERS = ("/usr/share/zoneinfo",)
STDLIB = os.path.dirname(os.__file__)
NOT_OURS = ("site-packages", "dist-packages")  # the interpreter's; the tool's packages come by name
# not loaded beforehand: for tests, for terminals, or unused
SKIPPED = tuple("_test _xx xx _ctypes_test _tkinter _curses readline nis ossaudiodev _dbm _gdbm".split())
COMMON = (
    "math cmath random itertools functools collections fractions decimal statistics datetime time calendar json re "
    "string textwrap heapq bisect operator copy typing dataclasses enum numbers pprint contextlib traceback linecache"
)


def preload(packages: list[str]) -> None:
    """Import every extension module of the standard library, so that no shared library is needed later, then the most
    common modules and ``packages``. Raises ImportError only for ``packages``."""
    try:
        ctypes.CDLL("libgcc_s.so.1")  # the C library loads it when a thread ends
    except OSError:
        pass
    for folder in [path for path in sys.path if path.endswith("lib-dynload") and os.path.isdir(path)]:
        for name in sorted(os.listdir(folder)):
            module, ending = name.partition(".")[::2]
            if ending.endswith("so") and not module.startswith(SKIPPED):
                try:
                    __import__(module)
                except Exception:  # built for a library that this machine lacks
                    pass
    for name in (*COMMON.split(), *packages):
        __import__(name)


_SHOWN = "/shown"  # keeps paths below /tmp for ``temporary_folder``, which covers /tmp
_covered: list[str] = []


def mounted(stage: str, packages: list[str]) -> None:
    """Make a new file system root in the empty folder ``stage``, and enter it. Needs a separate mount namespace."""
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("sandbox", stage, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    os.mkdir(f"{stage}/tmp")
    for path in (STDLIB, *OTHERS, *packages, *DEVICES):
        if os.path.exists(path):
            linux.bind(path, stage + path)
            if path.startswith("/tmp/"):  # a checkout in /tmp has its packages there
                linux.bind(path, stage + _SHOWN + path)
                _covered.append(path)
    for name in NOT_OURS:
        if os.path.isdir(f"{STDLIB}/{name}") and not any(p.startswith(f"{STDLIB}/{name}") for p in packages):
            linux.mount("none", f"{stage}{STDLIB}/{name}", "tmpfs", linux.MS_RDONLY, "size=4k,mode=755")
    linux.enter_root(stage)


def ruled(packages: list[str]) -> int:
    """Return a file descriptor of Landlock rules that allow only the standard library, ``packages`` and a few devices.
    Raises OSError if the kernel has no Landlock."""
    own = [f"{STDLIB}/{name}" for name in os.listdir(STDLIB) if name not in NOT_OURS]
    paths = [path for path in (*own, *OTHERS, *packages) if os.path.exists(path)]
    return linux.landlock_rules(paths, [STDLIB], [path for path in DEVICES if os.path.exists(path)])


def temporary_folder(megabytes: int) -> None:
    """Mount an empty /tmp in memory for this process."""
    linux.unshare(linux.CLONE_NEWNS)
    options = f"size={megabytes}m,nr_inodes=4096,mode=1777"
    linux.mount("tmp", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, options)
    for path in _covered:
        linux.bind(_SHOWN + path, path)
    os.chdir("/tmp")
