"""Reads YAML and JSON files, merges and compares configurations. Imports without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf._yaml import get_yaml_loader

from experiments.registry.errors import ExperimentError, nearest

Config = dict[str, Any]


# OmegaConf's loader (1e-3 is a number, a duplicate key an error), without a node object for every value.
_Loader = get_yaml_loader()


def load_yaml(path: Path) -> Config:
    """Return the content of a YAML file without interpolation. Unchanged files are read once, so do not modify the
    result.

    Raises:
        ExperimentError: not readable, not YAML (with the line), or not a mapping.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        raise ExperimentError(f"no configuration file {path}{nearest(path.name, siblings)}") from None
    return read_yaml(str(path), stat.st_mtime_ns, stat.st_size)


@cache
def read_yaml(path: str, modified: int, size: int) -> Config:
    """Return the content of a YAML file, cached by modification time and size; see ``load_yaml``."""
    try:
        plain = parse_yaml(Path(path).read_bytes())
    except yaml.YAMLError as error:
        raise ExperimentError(f"{path} is not valid YAML: {short(error)}; correct it") from None
    if plain is not None and not isinstance(plain, dict):
        raise ExperimentError(f"{path}: expected a mapping at the top, found a {type(plain).__name__}")
    return plain or {}


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML as OmegaConf does. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # PyYAML raises ValueError for !!int abc, KeyError for !!bool abc
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file that this project wrote. Raises FileNotFoundError, or ExperimentError if it is
    damaged."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ExperimentError(f"{path} is damaged ({short(error)}); remove its folder and run again") from error


def data_arguments(config: Config) -> Config:
    """Return the arguments of the data module in a resolved configuration, or of its task if it has no data module."""
    return (config.get("data") or config.get("task") or {}).get("init_args") or {}


def short(error: Exception) -> str:
    """Return an error message as one line: its first line, or for a YAML error three lines, which name the place."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if isinstance(error, yaml.YAMLError) else (lines or [type(error).__name__])[0]


def merge(base: Config, over: Config) -> Config:
    """Return the configuration ``base`` with ``over`` merged on top. The result shares parts with both: do not modify
    it.

    Mappings merge key by key; all other values, lists included, are replaced. A mapping with another ``class_path``
    replaces the old one whole, because arguments of one class mean nothing to another. A key that ends in ``+`` appends
    its list or text to the value in ``base``; without such a value it is kept for a later merge, behind
    what is kept already.
    """
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        appends = str(key).endswith("+") and isinstance(value, list | str)
        if appends and isinstance(out.get(key[:-1]), type(value)):
            out[key[:-1]] = out[key[:-1]] + value
        elif appends and isinstance(old, type(value)):
            out[key] = out[key] + value
        elif isinstance(old, dict) and isinstance(value, dict) and not _other_class(old, value):
            out[key] = merge(old, value)
        else:
            out[key] = value
    return out


def _other_class(old: Config, new: Config) -> bool:
    return "class_path" in new and "class_path" in old and new["class_path"] != old["class_path"]


def init_args_of(value: Any, class_path: str) -> Iterator[Config]:
    """Yield the ``init_args`` of every object of ``class_path`` in a nested configuration."""
    if isinstance(value, dict):
        if value.get("class_path") == class_path:
            yield value["init_args"]
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from init_args_of(inner, class_path)


def differences(config: Config, other: Config) -> list[tuple[str, Any, Any]]:
    """Return where two resolved configurations differ, as (dotted key, value, other value), with None for a missing
    key. Leaves out the ``experiment`` block."""
    here, there = (dict(_leaves({k: v for k, v in c.items() if k != "experiment"})) for c in (config, other))
    keys = list(dict.fromkeys([*here, *there]))
    return [(key, here.get(key), there.get(key)) for key in keys if here.get(key) != there.get(key)]


def _leaves(value: Any, at: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        steps = ((key, item, "" if key == "init_args" else f".{key}") for key, item in value.items())
        return [leaf for _, item, step in steps for leaf in _leaves(item, at + step)]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        named = (item.get("class_path", str(i)).rpartition(".")[2] for i, item in enumerate(value))
        return [leaf for name, item in zip(named, value, strict=True) for leaf in _leaves(item, f"{at}.{name}")]
    return [(at.lstrip("."), value)]
