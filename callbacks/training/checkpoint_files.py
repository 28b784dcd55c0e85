"""The checkpoints in a stage's folder: which to continue from, and what becomes of a damaged one. Without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from rollout.digests import DigestError, check_digests, list_path
from rollout.files import link_atomically, remove

FOLDER = "checkpoints"
PATTERN = "iteration-*.ckpt"  # names sort by iteration
LAST, BEST = "last.ckpt", "best.ckpt"  # symbolic links
BAD = ".bad"


def find_checkpoint(stage: Path, which: Literal["last", "best"] = "last") -> Path | None:
    """The checkpoint to continue a stage from (or its best one), None when there is none yet."""
    link = Path(stage) / FOLDER / f"{which}.ckpt"
    return link if link.exists() else None


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files under a folder."""
    path = path.resolve()
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def remove_checkpoint(path: Path) -> None:
    """With its digests."""
    digests = list_path(path)
    remove(path)
    remove(digests)


def settle_checkpoints(stage: Path) -> list[str]:
    """Compare the last checkpoint with its digests. One that differs, or is gone, is set aside under a name of its own,
    and ``last.ckpt`` links to the newest of the others that is whole.

    Returns:
        a line for each that cannot be used; empty where the last one can, or where there is none at all.

    Raises:
        DigestError: there are checkpoints, and none can be used; all are left as they are.
    """
    folder = Path(stage) / FOLDER
    link = folder / LAST
    if not os.path.lexists(link):
        return []
    last = Path(os.path.realpath(link)).name
    older = sorted((path for path in folder.glob(PATTERN) if path.name < last), reverse=True)
    bad: dict[Path, str] = {}
    for path in (folder / last, *older):
        try:
            if not path.exists():
                raise DigestError(f"{path} is missing", "")
            check_digests(path)
        except DigestError as error:
            bad[path] = error.found
            continue
        if bad:
            link_atomically(link, path.name)
        for other in bad:
            _set_aside(other)
        return [f"{found}; set aside as *{BAD}, {path.name} is used instead" for found in bad.values()]
    if not older and not link.exists():
        return []
    raise DigestError(f"no checkpoint can be used: {'; '.join(bad.values())}", "FRESH=1 starts the stage anew")


def _set_aside(path: Path) -> None:
    aside = path.with_name(path.name + BAD)
    remove_checkpoint(aside)
    digests = list_path(path)
    if path.is_file() and digests.is_file():
        os.rename(digests, list_path(aside))
    if path.exists():
        os.rename(path, aside)
    best = path.with_name(BEST)
    if best.is_symlink() and not best.exists():
        best.unlink()  # the next better validation makes another
