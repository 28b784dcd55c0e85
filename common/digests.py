"""Writes SHA-256 digests beside files, and checks the files before they are read again. Does not import torch.

``digests.sha256`` in a folder lists files under it, ``<name>.sha256`` a single file; ``sha256sum -c`` reads both::

    # 2 files of iteration-00000008.ckpt, SHA-256 of this list: <64 digits>
    <64 digits> *checkpoint/mp_rank_00_model_states.pt
    <64 digits> *latest

The first line protects the list: it has the number of files, the name of their checkpoint, and the digest of all other
characters. Lists of earlier versions have no such line, so a line missing from them is not noticed. A path without a
list is not checked, because downloaded models and data have no list.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.files import write_atomically

LIST = "digests.sha256"


class DigestError(ValueError):
    """Raised if a file, or its list of SHA-256 digests, was altered, truncated, renamed or removed. ``found``: the
    message without the advice."""

    def __init__(self, found: str, cure: str) -> None:
        super().__init__(f"{found}. {cure}")
        self.found = found


def list_path(path: Path) -> Path:
    """Return the path of the digest list (SHA-256 of each file) that belongs to a file or folder."""
    return path / LIST if path.is_dir() else path.with_name(f"{path.name}.sha256")


def files_of(path: Path) -> list[Path]:
    """Return the sorted paths of all files under a folder, except the list of SHA-256 digests. For a file, return only
    its own path."""
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != LIST) if path.is_dir() else [path]


def sha256(path: Path, *, sync: bool = False) -> str:
    """Return the SHA-256 of a file of any size, in hexadecimal. ``sync``: first wait until the file is on disk."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_list(path: Path, digests: Mapping[str, str], of: str = "") -> None:
    """Write the digest list (SHA-256 of each file) of ``path`` from digests that are already computed.

    Args:
        digests: by file name, relative to the list's folder.
        of: the name that ``path`` must keep (empty: any name).

    Raises:
        DiskFullError: the earlier list is intact.
    """
    write_atomically(list_path(path), _text(digests, of))


def _text(digests: Mapping[str, str], of: str) -> bytes:
    head = f"# {len(digests)} files" + (f" of {of}" if of else "")
    lines = "".join(f"{digest} *{name}\n" for name, digest in sorted(digests.items()))
    own = hashlib.sha256(os.fsencode(head + lines)).hexdigest()
    return os.fsencode(f"{head}, SHA-256 of this list: {own}\n{lines}")


def write_digests(path: Path, files: Iterable[Path] | None = None) -> None:
    """Compute the SHA-256 digests of a file, or of ``files`` in a folder (default: all), and write the digest list."""
    folder = list_path(path).parent
    found = files_of(path) if files is None else files
    write_list(path, {file.relative_to(folder).as_posix(): sha256(file, sync=True) for file in found})


def check_digests(path: Path) -> None:
    """Compare a file, or the listed files in a folder, with their digest list (stored SHA-256).

    The list may be in a parent folder. A path without a list passes.

    Raises:
        DigestError: a file differs, the list is damaged, or the list belongs to another path.
    """
    path = path.resolve()
    places = (list_path(path), *(parent / LIST for parent in path.parents))
    if (listed := next((place for place in places if os.path.lexists(place)), None)) is None:
        return
    digests, of = _read(listed)
    subject = listed.parent if listed.name == LIST else path
    if (of or subject.name) != subject.name or (subject.is_file() and subject.name not in digests):
        raise DigestError(
            f"{listed} is the list of {of or ', '.join(digests)}: {subject.name} was renamed or replaced",
            "Restore the name, or remove the list if you trust the files",
        )
    expected = {listed.parent / name: digest for name, digest in digests.items()}
    wanted = [file for file in expected if file.is_relative_to(path)]
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL, so shards are read in parallel
        for file, digest in zip(wanted, pool.map(_found, wanted), strict=True):
            if digest != expected[file]:
                what = f"has SHA-256 {digest[:12]}..., expected {expected[file][:12]}...: it was altered or cut off"
                raise DigestError(
                    f"{file} {what if digest else 'is missing'}",
                    f"Restore it from a copy, or make it again; if the change was intended, remove {listed}",
                )


def _found(file: Path) -> str:
    try:
        return sha256(file)
    except (FileNotFoundError, IsADirectoryError):
        return ""


def _read(path: Path) -> tuple[dict[str, str], str]:
    try:
        content = path.read_bytes()
    except OSError:  # a folder, or a broken link
        content = b""
    if (read := parse_list(content)) is None:
        found = f"{path} is not a complete list of SHA-256 digests: it was altered or cut off"
        raise DigestError(found, f"Make {path.parent} again, or remove the list if you trust the files")
    return read


def parse_list(content: bytes) -> tuple[dict[str, str], str] | None:
    """Parse the content of a digest list. Return the digests by file name, and the name that the listed path must keep
    (empty: any), or None for a damaged list."""
    text = os.fsdecode(content)
    if head := re.match(r"# \d+ files(?: of (.+))?, SHA-256 of this list: \w+\n", text):
        digests, of = {line[66:]: line[:64] for line in text[head.end() :].split("\n")[:-1]}, head[1] or ""
        if _text(digests, of) == content:
            return digests, of
    elif re.fullmatch(r"(?:[0-9a-f]{64}  .+\n)+", text):  # of an earlier version
        return {line[66:]: line[:64] for line in text.split("\n")[:-1]}, ""
    return None
