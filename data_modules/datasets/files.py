"""Parquet at rest: reading with one kind of error, writing in one step."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from rollout.files import replacing


class DatasetError(ValueError):
    """A data file is not what it should be. The message says which file, which column or rows, and what to do."""


def require_file(path: Path) -> Path:
    """Raises DatasetError with the nearest name in the same folder when there is no such file."""
    if path.is_file():
        return path
    if path.is_dir():
        raise DatasetError(f"{path} is a folder, expected a parquet file")
    names = sorted(p.name for p in path.parent.glob("*.parquet")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else f"; the folder has: {', '.join(names[:8]) or 'no parquet file'}"
    raise DatasetError(f"no such file: {path}{hint}")


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Raises DatasetError when the file is missing, cut short or not parquet."""
    require_file(path)
    try:
        return pl.read_parquet(path, columns=list(columns) if columns else None)
    except pl.exceptions.PolarsError as error:
        raise DatasetError(f"{path} cannot be read as parquet ({error}); write or fetch it again") from error


def write_parquet(path: Path, frame: pl.DataFrame) -> None:
    """Written beside the target and renamed: a kill leaves the old file or the new one, never half of one."""
    with replacing(path) as temporary:
        frame.write_parquet(temporary)


def expand(paths: Sequence[str]) -> list[Path]:
    """Files as they are, folders as the parquet files in them by name.

    Raises:
        DatasetError: nothing given, no such file, or a folder without parquet files.
    """
    if not paths:
        raise DatasetError("no file given; expected at least one parquet file, or a folder of them")
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.glob("*.parquet") if not p.name.startswith("."))
            if not inside:
                raise DatasetError(f"folder {path} holds no parquet file")
            files += inside
        else:
            files.append(require_file(path))
    return files
