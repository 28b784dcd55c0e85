"""Experiment files: reading one, merging two, and finding an experiment by its name. Imports without torch.

An experiments folder holds a file per experiment (its name is the experiment's) and tables (files with ``matrix:``,
see ``matrix.py``), in itself and in the folders below it. What lies below a folder ``bases`` is only there to be
inherited, by its path from the experiments folder: ``inherits: [tiny/bases/dgpo]``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf._yaml import get_yaml_loader

from experiments.registry.errors import ExperimentError, nearest

Config = dict[str, Any]
BASES = "bases"


# As OmegaConf reads its files (1e-3 is a number, a key twice an error), without a node object for every value.
_Loader = get_yaml_loader()


def load_yaml(path: Path) -> Config:
    """One file as written, interpolations untouched. Unchanged files are read once: do not change what comes back.

    Raises:
        ExperimentError: not readable, not YAML (with the line), or not a mapping.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        raise ExperimentError(f"no configuration file {path}{nearest(path.name, siblings)}") from None
    return _read_yaml(str(path), stat.st_mtime_ns, stat.st_size)


@cache
def _read_yaml(path: str, modified: int, size: int) -> Config:
    try:
        plain = parse_yaml(Path(path).read_bytes())
    except yaml.YAMLError as error:
        raise ExperimentError(f"{path} is not valid YAML: {short(error)}; correct it") from None
    if plain is not None and not isinstance(plain, dict):
        raise ExperimentError(f"{path}: expected a mapping at the top, found a {type(plain).__name__}")
    return plain or {}


def parse_yaml(text: str | bytes) -> Any:
    """As OmegaConf reads it. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # PyYAML's for !!int abc is a ValueError, for !!bool abc a KeyError
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def read_json(path: Path) -> Any:
    """A file that we wrote. Raises FileNotFoundError; ExperimentError if it was damaged since."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ExperimentError(f"{path} is damaged ({short(error)}); remove its folder, and it is made anew") from error


def data_arguments(config: Config) -> Config:
    """What the data module of a resolved configuration is built from, or the task of a stage without one."""
    return (config.get("data") or config.get("task") or {}).get("init_args") or {}


def short(error: Exception) -> str:
    """The message on one line: all of a YAML error, which says where, of others the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if isinstance(error, yaml.YAMLError) else lines[0]


def merge(base: Config, over: Config) -> Config:
    """``over`` on top of ``base``; neither is changed, and the result shares parts with both: do not change it.

    Mappings merge key by key, everything else (lists too) is replaced. A mapping that names another ``class_path``
    replaces the old one whole: arguments of one class mean nothing to another.
    """
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _other_class(old, value):
            out[key] = merge(old, value)
        else:
            out[key] = value
    return out


def _other_class(old: Config, new: Config) -> bool:
    return "class_path" in new and "class_path" in old and new["class_path"] != old["class_path"]


def init_args_of(value: Any, class_path: str) -> Iterator[Config]:
    """The ``init_args`` of every object of that class in a nested configuration."""
    if isinstance(value, dict):
        if value.get("class_path") == class_path:
            yield value["init_args"]
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from init_args_of(inner, class_path)


# -- by name --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Definition:
    """Configuration of an experiment, a base or a cell of a table as written, and its file."""

    config: Config
    path: Path


def definitions(directories: tuple[Path, ...]) -> dict[str, Definition]:
    """All experiments by name, in the order of their names; of two folders with the same name the first one counts.

    Files that cannot be read are left out (see ``faults``): they stop only those who ask for what is in them.

    Raises:
        ExperimentError: two files in one folder define the same name.
    """
    found: dict[str, Definition] = {}
    for directory in directories:
        here, _ = _of_folder(str(directory), tuple(_scan(str(directory))))
        found |= {name: definition for name, definition in here.items() if name not in found}
    return dict(sorted(found.items()))


def faults(directories: tuple[Path, ...]) -> list[str]:
    """What is wrong with the files and tables that cannot be read, a message each."""
    return [fault for folder in map(str, directories) for fault in _of_folder(folder, tuple(_scan(folder)))[1]]


def unreadable(directories: tuple[Path, ...]) -> str:
    """The end of a message about a name that is not there: it may be in a file that cannot be read."""
    return "".join(f"; not read: {fault}" for fault in faults(directories))


def find(name: str, directories: tuple[Path, ...]) -> Definition:
    """An experiment by its name, or a base by its path without ``.yaml``.

    Raises:
        ExperimentError: there is none; the nearest name is given.
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
    """(path, time of change, size) of every experiment file in ``folder`` and the folders below it."""
    if not os.path.isdir(folder):
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir():
            if entry.name != BASES:
                yield from _scan(entry.path)
        elif entry.name.endswith(".yaml"):
            stat = entry.stat()
            yield entry.path, stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=16)
def _of_folder(folder: str, files: tuple[tuple[str, int, int], ...]) -> tuple[dict[str, Definition], list[str]]:
    """Its experiments by name, and what is wrong with the files that hold none."""
    from experiments.registry import released
    from experiments.registry.matrix import expand

    found: dict[str, Definition] = {}
    wrong: list[str] = []
    for file, modified, size in files:
        path = Path(file)
        try:
            config = dict(_read_yaml(file, modified, size))
            if "matrix" in config:
                cells = expand(config, file)
            else:
                twins = config.pop("as_released", None)
                cells = {path.stem: config}
                if twins is not None:
                    parents = released.parents_of_twins(twins, f"{file}: as_released", ("inherits",))
                    cells = released.with_twins(cells, parents, cells)
        except ExperimentError as error:
            wrong.append(str(error))
            continue
        for name, cell in cells.items():
            if name in found:
                raise ExperimentError(f"{file}: there is an experiment '{name}' in {found[name].path} already")
            found[name] = Definition(cell, path)
    return found, wrong
