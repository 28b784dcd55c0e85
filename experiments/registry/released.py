"""Experiments a second time, as their paper's released code has them. Imports without torch.

A file or a table with

::

    as_released: {inherits: [arpo/bases/as_released], only: {method: [arpo, grpo]}}   # only: of tables; or a list

defines NAME_as_released beside each NAME (that ``only`` allows): the same, with these files merged last, on the twins
of the stages that it builds on, where they have one. ``reproduces`` is the twin's alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from experiments.registry.errors import ExperimentError, require_keys
from experiments.registry.files import Config

SUFFIX = "_as_released"
STAGE = re.compile(r"(\$\{stage:)([^}]+)(\})")
NAMES = ("compare", "ablations", "ablations_once")  # under `experiment`: names of other experiments


def untwinned(name: str) -> str:
    """The name of the experiment that this one is, or is the twin of."""
    return name.removesuffix(SUFFIX)


def parents_of_twins(block: Any, at: str, keys: Collection[str]) -> list[str]:
    """What the ``as_released`` block of a file inherits.

    Raises:
        ExperimentError: an unknown key, or no list of names.
    """
    require_keys(block, keys, at)
    parents = block.get("inherits")
    if not isinstance(parents, list) or not parents or not all(isinstance(p, str) for p in parents):
        raise ExperimentError(
            f"{at}: 'inherits' must be a list of names such as [arpo/bases/as_released], found {parents!r}"
        )
    return parents


def with_twins(cells: Mapping[str, Config], parents: list[str], twinned: Collection[str]) -> dict[str, Config]:
    """The experiments of a file, and the twins of those that are ``twinned``."""
    return dict(cells) | {name + SUFFIX: {"inherits": [name, *parents]} for name in cells if name in twinned}


def settled(name: str, config: Config, known: Collection[str], for_twin: bool) -> Config:
    """A composed experiment with what having, or being, a twin means for it; ``config`` is not changed.

    Args:
        known: names of all experiments.
        for_twin: it is composed for its own twin, which takes ``reproduces`` over.
    """
    about = config.get("experiment") or {}
    if name + SUFFIX in known and not for_twin:
        return config | {"experiment": {key: value for key, value in about.items() if key != "reproduces"}}
    if not name.endswith(SUFFIX) or untwinned(name) not in known:
        return config

    def twin(other: str) -> str:
        return other + SUFFIX if other + SUFFIX in known else other

    def on_twins(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: on_twins(item) for key, item in value.items()}
        if isinstance(value, list):
            return [on_twins(item) for item in value]
        return STAGE.sub(lambda m: m[1] + twin(m[2]) + m[3], value) if isinstance(value, str) else value

    names = {key: [twin(other) for other in about[key]] for key in NAMES if about.get(key)}
    texts = {key: f"{about[key]}, as released" for key in ("label", "summary") if about.get(key)}
    return on_twins(config) | {"experiment": on_twins(about) | names | texts}


def differences(config: Config, twin: Config) -> list[tuple[str, Any, Any]]:
    """Where two resolved configurations differ, as (dotted key, value here, value of the twin); None: not there.
    What the experiment says of itself is left out."""
    here, there = (dict(_leaves({k: v for k, v in c.items() if k != "experiment"})) for c in (config, twin))
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
