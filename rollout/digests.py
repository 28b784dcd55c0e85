"""SHA-256 of files, written beside them and compared before they are read again. Imports without torch.

``digests.sha256`` in a folder lists files under it, ``<name>.sha256`` a single file; ``sha256sum -c`` reads both. What
is not listed is taken as it is: models and data from elsewhere have no digests of ours.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollout.files import write_atomically

LIST = "digests.sha256"


class DigestError(ValueError):
    """A file is not what was written: altered, cut off, or gone. ``found`` says so without what to do."""

    def __init__(self, found: str, cure: str) -> None:
        super().__init__(f"{found}. {cure}")
        self.found = found


def list_path(path: Path) -> Path:
    """Where the digests of a file or folder stand."""
    return path / LIST if path.is_dir() else path.with_name(f"{path.name}.sha256")


def files_of(path: Path) -> list[Path]:
    """A file itself, or all files under a folder but the list, sorted."""
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != LIST) if path.is_dir() else [path]


def sha256(path: Path, *, sync: bool = False) -> str:
    """Of a file that may be larger than memory. ``sync``: it is on the disk before this returns."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_list(path: Path, digests: Mapping[str, str]) -> None:
    """``digests``: by name, relative to the folder that the list is in. Raises DiskFullError."""
    write_atomically(list_path(path), "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())))


def write_digests(path: Path, files: Iterable[Path] | None = None) -> None:
    """Of a file, or of a folder: of ``files`` in it, default all."""
    folder = list_path(path).parent
    found = files_of(path) if files is None else files
    write_list(path, {file.relative_to(folder).as_posix(): sha256(file, sync=True) for file in found})


def check_digests(path: Path) -> None:
    """Compare a file, or the files in a folder, with the digests that were written with them: its own list, or the part
    about it in that of a folder around it. Each file is read once; nothing happens where there is no list.

    Raises:
        DigestError: names the first file that differs; what to do.
    """
    path = path.resolve()
    places = (list_path(path), *(parent / LIST for parent in path.parents))
    if (listed := next((place for place in places if place.is_file()), None)) is None:
        return
    expected = {listed.parent / name: digest for name, digest in _read(listed).items()}
    wanted = [file for file in expected if file.is_relative_to(path)]
    with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter: shards are read side by side
        for file, digest in zip(wanted, pool.map(_found, wanted), strict=True):
            if digest != expected[file]:
                what = f"has SHA-256 {digest[:12]}..., expected {expected[file][:12]}...: it was altered or cut off"
                raise DigestError(
                    f"{file} {what if digest else 'is missing'}",
                    f"Bring it back from a copy, or make it again; if the change was meant, remove {listed}",
                )


def _found(file: Path) -> str:
    try:
        return sha256(file)
    except (FileNotFoundError, IsADirectoryError):
        return ""


def _read(path: Path) -> dict[str, str]:
    lines = path.read_bytes().decode(errors="replace").splitlines()
    parts = [line.partition("  ") for line in lines]
    if not all(len(digest) == 64 and name for digest, _, name in parts):
        found = f"{path} is no list of SHA-256 digests: it was altered or cut off"
        raise DigestError(found, f"Make {path.parent} again, or remove the list if you trust the files")
    return {name: digest for digest, _, name in parts}
