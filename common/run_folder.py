"""The temporary folder of a run, shared by a command and all processes that it starts.

The process that creates the folder holds a lock in it, and removes the folder at its end. The lock ends with the
process, even by ``kill -9``. The next start removes all such folders without a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from multiprocessing.util import Finalize
from pathlib import Path

PREFIX = "ca-"  # short, because a socket's path has at most 107 bytes
OWNER = ".compact-agents-run"  # the locked file; a folder without it is not ours
AFTER_MULTIPROCESSING = -200  # it removes its folder inside ours with -100, and must do so first
_outside: dict[str, str | None] = {}  # variables before `use_run_folder`
_making = threading.Lock()
_made: dict[int, tuple[Path, int]] = {}  # process id (a fork owns no folder) -> folder, descriptor of the lock


def run_folder() -> Path:
    """Return the path of the run's temporary folder. The first process of a run creates the folder, and removes it when
    it ends.

    Returns the system's temporary folder if the run's folder cannot be created, as on a full disk.
    """
    parent = Path(tempfile.gettempdir())
    if (parent / OWNER).exists():  # a parent process has created it
        return parent
    with _making:
        if os.getpid() not in _made:
            remove_orphans(parent)
            try:
                _made[os.getpid()] = _make(parent)
            except OSError:
                return parent
            Finalize(None, remove_run_folder, exitpriority=AFTER_MULTIPROCESSING)
        return _made[os.getpid()][0]


def use_run_folder() -> None:
    """Put all temporary files of this process and its children into the run's temporary folder. torch's compiled
    kernels stay outside, because later runs use them."""
    _outside.update({name: os.environ.get(name) for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")})
    kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kernels)
    tempfile.tempdir = os.environ["TMPDIR"] = str(run_folder())


def outside_environment() -> dict[str, str]:
    """Return the environment variables as they were before ``use_run_folder``, for a job that outlives the run."""
    return {name: value for name, value in {**os.environ, **_outside}.items() if value is not None}


def remove_run_folder() -> None:
    """Remove the run's temporary folder if this process made it. Runs at exit; call it before ``os._exit``."""
    folder, lock = _made.pop(os.getpid(), (None, -1))
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            lock = _lock(folder, os.O_CREAT)
        except (BlockingIOError, FileNotFoundError):  # another start removed it before it was locked
            continue
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if (folder / OWNER).exists():
            return folder, lock


def remove_orphans(parent: Path) -> None:
    """Remove the temporary folders of dead runs from the folder ``parent``."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # not ours, in use, or removed by another start
            lock = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path, flags: int = 0) -> int:
    """Lock a run's temporary folder, and return the descriptor of its lock file. Raises OSError if another process has
    locked it."""
    lock = os.open(folder / OWNER, os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
