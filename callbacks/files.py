"""Folders and links put in the place of others so that a kill at any moment leaves either the old or the new."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder; nothing happens when it is not there."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        shutil.rmtree(path)


def replace_folder(new: Path, target: Path) -> None:
    """Put folder ``new`` in the place of ``target``. Folders cannot be swapped in one step everywhere, so for an
    instant the old one is called ``.<name>.old``; ``recover_folder`` undoes a kill in that instant."""
    old = target.with_name(f".{target.name}.old")
    remove(old)
    if target.exists():
        os.rename(target, old)
    os.rename(new, target)
    remove(old)


def recover_folder(target: Path) -> None:
    """Finish or undo a ``replace_folder`` that was killed half-way."""
    old = target.with_name(f".{target.name}.old")
    if old.exists():
        if target.exists():
            remove(old)
        else:
            os.rename(old, target)


def link_atomically(link: Path, target_name: str) -> None:
    """Make the symbolic link ``link`` (in the same folder) point at ``target_name``, replacing what it was in one
    step. A real file or folder of that name, left by another program, is removed first."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.link")
    remove(temporary)
    temporary.symlink_to(target_name)
    if link.is_dir() and not link.is_symlink():
        remove(link)
    os.replace(temporary, link)
