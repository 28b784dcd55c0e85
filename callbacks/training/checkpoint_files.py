"""Finds the checkpoint that a run continues from, and moves damaged ones aside. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from common.digests import DigestError, check_digests, list_path
from common.files import link_atomically, remove, set_aside

FOLDER = "checkpoints"
NAME = re.compile(r"iteration-(\d{8,})\.ckpt")
LAST, BEST = "last.ckpt", "best.ckpt"  # symbolic links, for people: a run looks at the checkpoints themselves
BAD = ".bad"


def iteration_of(path: Path) -> int | None:
    """Return the iteration number in a checkpoint's file name, or None if the name has none."""
    found = NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def numbered(stage: Path) -> list[Path]:
    """Return the paths of a stage's checkpoints written by ``IterationCheckpoint``, newest first."""
    named = [(iteration_of(path), path) for path in (Path(stage) / FOLDER).glob("*.ckpt")]
    return [path for _, path in sorted(((n, path) for n, path in named if n is not None), reverse=True)]


def usable(stage: Path) -> list[Path]:
    """Return the paths of the checkpoints that a run may continue from, newest first.

    ``last.ckpt`` comes last if it is a file (copying a folder may follow links) or a link to another name.
    """
    found, last = numbered(stage), Path(stage) / FOLDER / LAST
    return [*found, *([last] if last.exists() and last.resolve() not in [path.resolve() for path in found] else [])]


def anything_saved(stage: Path) -> list[Path]:
    """Return the paths of everything in the stage's checkpoint folder (files, folders and links), except unfinished
    checkpoints and digests."""
    folder = Path(stage) / FOLDER
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if not path.name.startswith(".") and not path.name.endswith(".sha256")]


def find_checkpoint(stage: Path, which: Literal["last", "best"] = "last") -> Path | None:
    """Return the path of the stage's last (or best) checkpoint, or None before the first."""
    if which == "last":
        return next(iter(usable(stage)), None)
    link = Path(stage) / FOLDER / BEST
    return link if link.exists() else None


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of all files under a folder."""
    path = path.resolve()
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint and the file with its SHA-256 digests."""
    digests = list_path(path)
    remove(path)
    remove(digests)


def settle_checkpoints(stage: Path) -> list[str]:
    """Find the newest intact checkpoint (its files match their SHA-256), rename newer damaged ones, and link
    ``last.ckpt`` to it.

    Returns:
        A line for each renamed or missing checkpoint; empty if the newest checkpoint is whole or nothing was saved.

    Raises:
        DigestError: checkpoints exist, but none is whole; the folder is left unchanged.
    """
    folder, bad = Path(stage) / FOLDER, dict[Path, str]()
    linked = Path(os.path.realpath(folder / LAST))
    gone = (folder / LAST).is_symlink() and not linked.exists()
    for path in usable(stage):
        try:
            if not path.exists():
                raise DigestError(f"{path} is missing", "")
            check_digests(path)
        except DigestError as error:
            bad[path] = error.found
            continue
        for other in bad:
            _set_aside(other)
        if path.name != LAST and linked != path.resolve():
            link_atomically(folder / LAST, path.name)
        lines = [f"{found}; set aside as *{BAD}, {path.name} is used instead" for found in bad.values()]
        return [*lines, f"{linked} is missing; {path.name} is used instead"] if gone else lines
    if others := [path.name for path in anything_saved(stage) if path not in bad]:
        bad[folder] = f"{folder} has {', '.join(others)}, expected iteration-<8 digits>.ckpt"
    if bad:
        raise DigestError(
            f"no checkpoint can be used: {'; '.join(bad.values())}",
            "Give a renamed checkpoint its name back, or start the stage from the beginning",
        )
    return []


def _set_aside(path: Path) -> None:
    digests = list_path(path)
    is_file = path.is_file()
    aside = set_aside(path, BAD)
    if is_file and digests.is_file():
        os.replace(digests, list_path(aside))
    best = path.with_name(BEST)
    if best.is_symlink() and not best.exists():
        best.unlink()  # the next better validation makes a new link
