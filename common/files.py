"""Atomic file writes and file locks. A kill at any moment leaves the old or the new content, never a part."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import pickle
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
WRITERS_SAY = ("PytorchStreamWriter", "unexpected pos", "iostream error", "No space left")  # mostly in torch's messages
UNREADABLE = (  # errors of torch.load for damaged files
    OSError, RuntimeError, EOFError, LookupError, TypeError, AttributeError, UnicodeError, pickle.UnpicklingError,
)  # fmt: skip
REPLACED = ".replaced"  # suffix of ``set_aside``


class DiskFullError(OSError):
    """Raised if a file cannot be written because the disk is full. The file that it would replace is intact."""


def is_no_room(error: BaseException) -> bool:
    """Return whether a full disk, a full quota or a file size limit caused the error.

    Errors of torch and safetensors have no errno, so their messages are searched.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in NO_ROOM
    told = str(error)
    said = (*WRITERS_SAY, *(f"(os error {number})" for number in NO_ROOM))
    return any(words in told for words in said)


def no_room_message(path: Path, intact: str) -> str:
    free = shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
    return (
        f"no room to write {path}: {free / 2**20:.0f} MiB free on that file system. {intact} "
        "Free some space (or set another output folder), then run the same command again."
    )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager for an atomic write: yields a temporary path, which replaces ``path`` if the block succeeds and
    is removed otherwise.

    Raises DiskFullError if the disk is full; the old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if is_no_room(error):
            raise DiskFullError(error.errno, no_room_message(path, "The previous version is intact.")) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part. Raises DiskFullError if the disk is
    full."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager that holds an exclusive lock on the file ``path``, so that one process at a time runs the block.
    The kernel releases the lock if its holder dies. The lock file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def obey_umask(folder: Path) -> None:
    """Set the permissions of every file under ``folder`` to those that the umask gives new files.

    safetensors writes mode 0600, and copies keep the mode of their source. Hard links are not changed, because they may
    be other people's files.
    """
    probe = folder / f".{os.getpid()}.mode"
    probe.touch()  # os.umask would change the umask of all threads for an instant
    given = probe.stat().st_mode & 0o666
    probe.unlink()
    for path in folder.rglob("*"):
        found = path.lstat()
        wanted = given | (found.st_mode & given >> 2 & 0o111)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and stat.S_IMODE(found.st_mode) != wanted:
            with suppress(OSError):  # a file system without modes
                path.chmod(wanted)


def remove(path: Path) -> None:
    """Delete a file, a symbolic link or a folder with its content. Does nothing if the path does not exist."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        shutil.rmtree(path)


def replace_folder(new: Path, target: Path) -> None:
    """Replace the folder ``target`` by the folder ``new``, which is moved.

    Not every system can swap folders atomically, so the old one is briefly called ``.<name>.old``. After a kill at
    that moment ``recover_folder`` restores it.
    """
    old = target.with_name(f".{target.name}.old")
    remove(old)
    if target.exists():
        os.rename(target, old)
    os.rename(new, target)
    remove(old)


def recover_folder(target: Path) -> None:
    """Finish or undo a call of ``replace_folder`` that was killed halfway."""
    old = target.with_name(f".{target.name}.old")
    if old.exists():
        if target.exists():
            remove(old)
        else:
            os.rename(old, target)


def set_aside(path: Path, suffix: str) -> Path:
    """Rename ``path`` to ``<name><suffix>``, or the first free ``<name><suffix>2``, ``3``, ... Return the new path."""
    names = (path.with_name(f"{path.name}{suffix}{number}") for number in itertools.chain([""], itertools.count(2)))
    aside = next(name for name in names if not os.path.lexists(name))
    os.rename(path, aside)
    return aside


def link_atomically(link: Path, target_name: str) -> None:
    """Create or change the symbolic link ``link`` atomically, so that it points to ``target_name`` in the same folder.

    Renames a real file or folder of the link's name to ``<name>.replaced``.
    """
    temporary = link.with_name(f".{link.name}.{os.getpid()}.link")
    remove(temporary)
    temporary.symlink_to(target_name)
    if link.exists() and not link.is_symlink():
        set_aside(link, REPLACED)
    os.replace(temporary, link)
