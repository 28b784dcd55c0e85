"""Applies command-line overrides in Lightning CLI's syntax: ``--model.kl_coef 0.01 --trainer.max_steps=20``.

Simple overrides (a dotted path to a leaf) change the composed configuration *before* interpolation, so that references
such as ``${model.init_args.kl_coef}`` and the stage's key follow. Overrides that need the parser (``+=``, another class
with the arguments that still fit, an edited list) are passed on and enter the key as text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from experiments.registry.compose import SECTIONS, check_keys
from experiments.registry.errors import ExperimentError, nearest
from experiments.registry.files import Config, load_yaml, merge, parse_yaml

STAGE_PREFIX = "stages"
OVERRIDE_SECTIONS = [*(s for s in SECTIONS if s != "experiment"), "config"]
CALLBACKS = "trainer.callbacks."
NAMED = "trainer.strategy"  # a name (zero3) or a class; a name drops the arguments of the class


@dataclass(frozen=True, slots=True)
class Overrides:
    """The parsed command-line overrides (``ARGS``). ``own``: for the experiment itself (``--paths.NAME`` for all
    stages); ``stages[NAME]``: for a stage that it depends on (``--stages.kd_tiny.trainer.max_steps 5``)."""

    own: tuple[tuple[str, str], ...] = ()
    stages: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def for_stage(self, name: str, *, is_target: bool) -> tuple[tuple[str, str], ...]:
        """Return the overrides (path, value) that apply to the stage ``name``. Of the experiment's own overrides, a
        stage that it depends on gets only ``paths.*``."""
        shared = tuple(pair for pair in self.own if is_target or pair[0].startswith("paths."))
        return (*shared, *self.stages.get(name, ()))


def parse(arguments: Sequence[str]) -> Overrides:
    """Parse the overrides of a command line, written as ``--path value`` or ``--path=value``.

    Raises:
        ExperimentError: a word that is not an option, an option without a value, an unknown section.
    """
    own: list[tuple[str, str]] = []
    stages: dict[str, list[tuple[str, str]]] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        match = re.fullmatch(r"--([A-Za-z_][\w.\-]*\+?)(?:=(.*))?", word, flags=re.DOTALL)
        if not match:
            raise ExperimentError(f"override {word!r}: expected --section.name VALUE, as in --model.kl_coef 0.01")
        path, value = match.groups()
        if value is None:
            if not rest or rest[0].startswith("--"):
                raise ExperimentError(f"override '--{path}' needs a value, as in --{path} true")
            value = rest.pop(0)
        head, _, tail = path.partition(".")
        if head == STAGE_PREFIX:
            heads = "|".join(OVERRIDE_SECTIONS)  # names contain dots: kd_qwen2.5_0.5b
            named = re.fullmatch(rf"(.+?)\.((?:{heads})(?:[.+].*)?)", tail)
            stage, inner = named.groups() if named else tail.partition(".")[::2]
            if not inner:
                raise ExperimentError(f"override '--{path}': expected --stages.NAME.section.name VALUE")
            _check_head(inner)
            if inner == "paths.outputs":
                raise ExperimentError(f"override '--{path}': all stages share one outputs folder; use --paths.outputs")
            stages.setdefault(stage, []).append((inner, value))
        else:
            _check_head(path)
            own.append((path, value))
    return Overrides(tuple(own), {name: tuple(pairs) for name, pairs in stages.items()})


def _check_head(path: str) -> None:
    valid = [*OVERRIDE_SECTIONS, STAGE_PREFIX]
    head = path.partition(".")[0].rstrip("+")
    if head not in valid:
        raise ExperimentError(f"override '--{path}': unknown section '{head}'{nearest(head, valid)}")


def apply(config: Config, pairs: Sequence[tuple[str, str]]) -> tuple[Config, tuple[str, ...]]:
    """Apply overrides (path, value) to a configuration. Returns the new configuration, and the overrides that only the
    option parser can apply, as arguments in order."""
    config = copy.deepcopy(config)
    for_parser: list[str] = []
    touched: list[str] = []  # changed by the parser, which must then apply later edits below it, too
    for path, value in pairs:
        if path == "config":
            extra = load_yaml(Path(value))
            check_keys(extra, value)
            config = merge(config, extra)
        elif any(path == t or path.startswith(t + ".") for t in touched) or not _put(config, path, value):
            for_parser.append(f"--{path}={value}")
            touched.append(path.rstrip("+").removesuffix(".class_path"))
    return config, tuple(for_parser)


def _put(config: Config, path: str, text: str) -> bool:
    """Set one option in a configuration, in place. Return False for an override that needs the parser."""
    if path.endswith("+"):
        return False
    *parents, leaf = path.split(".")
    node: Any = config
    for part in parents:
        node = _step(config, node, part)
        if not isinstance(node, dict):
            return False
    if leaf == "class_path" and "class_path" in node:
        if path.startswith(CALLBACKS):  # a mapping by name; the parser sees a list
            node |= {"class_path": text, "init_args": {}}
            return True
        return False
    if "class_path" in node and leaf not in ("class_path", "init_args"):  # the short form --model.x
        node = _step(config, node, "init_args")
    value = _read_value(text, node.get(leaf))
    old = _follow(config, node.get(leaf))
    if isinstance(old, dict) and isinstance(value, str) and (path != NAMED or "." in value):
        return False  # '--model lightning_modules.algorithms.ppo.PPO': a class name
    node[leaf] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return True


def _step(config: Config, node: Config, part: str) -> Any:
    if "class_path" in node and part not in ("class_path", "init_args"):
        node = _step(config, node, "init_args")
    if node.get(part) is None:
        node[part] = {}
    return _follow(config, node[part])


def _follow(config: Config, value: Any) -> Any:
    """Return the mapping that a bare reference such as ``${values.rollouts}`` names; return other values unchanged."""
    match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    if not match:
        return value
    node: Any = config
    for part in match.group(1).split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return _follow(config, node) if isinstance(node, (dict, str)) else value


def _read_value(text: str, old: Any) -> Any:
    """Parse an override's text as YAML, as OmegaConf does (``1e-3`` is a number). It stays text where the old value is
    text."""
    if isinstance(old, str) and not old.startswith("${") and text.lower() not in ("null", "none"):
        return text
    if "${" in text or not text:
        return text
    try:
        return parse_yaml(f"value: {text}")["value"]
    except yaml.YAMLError:
        return text
