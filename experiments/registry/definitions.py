"""Finds experiments by name. Imports without torch.

An experiments folder holds a file per experiment (its name is the experiment's) and tables (files with ``matrix:``,
see ``matrix.py``), in itself and in the folders below it. Files below a folder ``bases`` can only be inherited, by
their path from the experiments folder: ``inherits: [tiny/bases/dgpo]``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from experiments.registry.errors import ExperimentError, nearest
from experiments.registry.files import Config, load_yaml, read_yaml
from experiments.registry.matrix import expand

BASES = "bases"
STAGE_FILE = "stage.json"  # in the output folder of a stage


@dataclass(frozen=True, slots=True)
class Definition:
    """The unresolved configuration of an experiment, a base or a cell of a table, and the path of its file."""

    config: Config
    path: Path


def definitions(directories: tuple[Path, ...]) -> dict[str, Definition]:
    """Return the definitions of all experiments by name, sorted. If two folders define the same name, the first folder
    wins.

    Unreadable files are left out (see ``faults``), so that they do not block other experiments.

    Raises:
        ExperimentError: two files in one folder define the same name.
    """
    found: dict[str, Definition] = {}
    for directory in directories:
        here, _ = _of_folder(str(directory), tuple(_scan(str(directory))))
        found |= {name: definition for name, definition in here.items() if name not in found}
    return dict(sorted(found.items()))


def faults(directories: tuple[Path, ...]) -> list[str]:
    """Return a message for each experiment file or table that cannot be read."""
    return [fault for folder in map(str, directories) for fault in _of_folder(folder, tuple(_scan(folder)))[1]]


def unreadable(directories: tuple[Path, ...]) -> str:
    """Return the end of an error message about an unknown name: the files that cannot be read, which may define it."""
    return "".join(f"; not read: {fault}" for fault in faults(directories))


def find(name: str, directories: tuple[Path, ...]) -> Definition:
    """Return the definition of an experiment by its name, or of a base by its path without ``.yaml``.

    Raises:
        ExperimentError: an unknown name; the message suggests the nearest one.
    """
    if "/" not in name:
        experiments = definitions(directories)
        if name in experiments:
            return experiments[name]
        raise ExperimentError(f"no experiment '{name}'{nearest(name, experiments)}{unreadable(directories)}")
    for directory in directories:
        path = directory / f"{name}.yaml"
        if path.is_file():
            return Definition(load_yaml(path), path)
    known = [str(p.relative_to(d).with_suffix("")) for d in directories for p in d.rglob("*.yaml") if BASES in p.parts]
    raise ExperimentError(f"no file '{name}.yaml' in {_listed(directories)}{nearest(name, known)}")


def _listed(directories: tuple[Path, ...]) -> str:
    return ", ".join(map(str, directories))


def _scan(folder: str) -> Iterator[tuple[str, int, int]]:
    """Yield (path, modification time, size) of every experiment file in ``folder`` and its subfolders, without hidden
    ones (``.venv``, an editor's ``.#mine.yaml``) and the output folders of stages, whose config.yaml is no
    experiment."""
    if not os.path.isdir(folder) or os.path.exists(os.path.join(folder, STAGE_FILE)):
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if entry.name != BASES:
                yield from _scan(entry.path)
        elif entry.name.endswith(".yaml"):
            with contextlib.suppress(FileNotFoundError):  # a link to nothing
                stat = entry.stat()
                yield entry.path, stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=16)
def _of_folder(folder: str, files: tuple[tuple[str, int, int], ...]) -> tuple[dict[str, Definition], list[str]]:
    """Return the experiments defined in a folder by name, and messages about its unreadable files."""
    found: dict[str, Definition] = {}
    wrong: list[str] = []
    for file, modified, size in files:
        path = Path(file)
        try:
            config = read_yaml(file, modified, size)
            cells = expand(config, file) if "matrix" in config else {path.stem: config}
        except (ExperimentError, OSError) as error:
            wrong.append(str(error))
            continue
        for name, cell in cells.items():
            if name in found:
                raise ExperimentError(
                    f"{file}: experiment '{name}' is defined in {found[name].path} already; rename one"
                )
            found[name] = Definition(cell, path)
    return found, wrong
