"""Composes experiment files (``inherits:``) and resolves their interpolations. Imports without torch.

Composition works on plain dictionaries whose strings may contain ``${...}``. OmegaConf resolves the whole configuration
at the end, so that an override reaches every place that refers to it.

Inherited files are merged from left to right, the file itself last, by the rules of ``files.merge``.
``trainer.callbacks`` is a mapping from a name of your choice to ``{class_path, init_args}``, so that a file can add one
callback, change one argument of another, or drop a third with ``null``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.registry.columns import columns_of, score_of
from experiments.registry.definitions import find
from experiments.registry.errors import ExperimentError, require_keys
from experiments.registry.files import Config, merge, short
from experiments.registry.machine import cpu_cores, cpu_has_bfloat16, device_of

FREE_BLOCKS = ("paths", "values")  # only for references
SECTIONS = ("experiment", "seed_everything", "trainer", "model", "data", "task", *FREE_BLOCKS)
EXPERIMENT_KEYS = {
    "kind",
    "label",
    "group",  # methods of a group are compared with each other on a results page
    "summary",
    "algorithm",
    "models",
    "data",
    "hardware",
    "reproduces",
    "fixed_seed",
    "compare",
    "ablations",
    "ablations_once",
    "columns",
    "score",
    "needs",
    "preconditions",  # whether `make train` measures the gates first and stops where one fails
}
KINDS = ("fit", "test", "task")
# Key "steps" of an earlier version -> its name now.
RENAMED = {"paths": "turn_scores", "trainer.callbacks": "turn_divergence"}

_stage_reference: ContextVar[Callable[[str], str]] = ContextVar("stage_reference")
_chosen: ContextVar[Config] = ContextVar("chosen")  # the options that follow the device, with their values


def _resolve_stage(name: str) -> str:
    return _stage_reference.get()(name)


def _per_device(gpu: Any, cpu: Any, with_bfloat16: Any = None, *, _node_: Any, _root_: Any) -> Any:
    """Return the value of an option written as ``${per_device:GPU,CPU}``, chosen by the run's device. An optional third
    value is for CPUs that compute in bfloat16."""
    places = ("trainer.accelerator", "values.accelerator")
    device = device_of(next((name for place in places if (name := OmegaConf.select(_root_, place))), None))
    value = gpu if device == "gpu" else cpu if with_bfloat16 is None or not cpu_has_bfloat16() else with_bfloat16
    _chosen.get().update({"device": device, str(_node_._key()): value})
    return value


def compose(name: str, directories: tuple[Path, ...], _chain: tuple[str, ...] = ()) -> Config:
    """Return the configuration of an experiment or base file, merged with everything it inherits, without
    interpolation. The result shares parts with other configurations: copy it before you change it.

    Raises:
        ExperimentError: a missing file, an inheritance cycle, an unknown top-level or ``experiment:`` key or column.
    """
    if name in _chain:
        raise ExperimentError(f"'inherits' runs in a circle: {' -> '.join((*_chain, name))}")
    try:
        definition = find(name, directories)
    except ExperimentError as error:
        raise ExperimentError(f"{error} (inherited by '{_chain[-1]}')" if _chain else str(error)) from None
    own, where = dict(definition.config), str(definition.path)
    parents = own.pop("inherits", None) or []
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        raise ExperimentError(
            f"{where}: 'inherits' must be a list of names such as [tiny/bases/dgpo], found {parents!r}"
        )
    check_keys(own, where)
    config: Config = {}
    for parent in parents:
        config = merge(config, compose(parent, directories, (*_chain, name)))
    config = merge(config, own)
    pending = [key for key in config.get("experiment") or {} if key.endswith("+")]
    if pending and "/" not in name and not _chain:
        raise ExperimentError(f"{where}: experiment.{pending[0]} has nothing to append to; leave out the +")
    return config


def check_keys(config: Config, where: str) -> None:
    """Check a loaded experiment file. Raises ExperimentError for an unknown section, ``experiment:`` key, column or
    score."""
    require_keys(config, SECTIONS, where)
    about = config.get("experiment") or {}
    if isinstance(about, dict):
        about = {key.removesuffix("+"): value for key, value in about.items()}
    require_keys(about, EXPERIMENT_KEYS, where, "experiment.")
    check_columns(about.get("columns"), where)
    check_score(about, where)


def check_score(about: Config, where: str) -> None:
    """Raise ExperimentError for an unknown ``experiment.score``."""
    try:
        score_of(about.get("score"))
    except ValueError as error:
        raise ExperimentError(f"{where}: experiment.score: {error}") from None


def check_columns(names: Any, where: str) -> None:
    """Raise ExperimentError unless ``names`` is null or a list of known columns of results tables."""
    if names is None:
        return
    if not isinstance(names, list) or not names or len(set(map(str, names))) < len(names):
        raise ExperimentError(
            f"{where}: experiment.columns must be a list of different names such as [em, tool_calls], found {names!r}"
        )
    try:
        columns_of(names)
    except ValueError as error:
        raise ExperimentError(f"{where}: experiment.columns: {error}") from None


def check_experiment(config: Config, name: str) -> str:
    """Check that the sections of a composed experiment fit its kind (fit, test or task), and return the kind.

    Raises:
        ExperimentError: a missing or unknown kind, a missing section or ``class_path``, a section of another kind.
    """
    kind = (config.get("experiment") or {}).get("kind")
    if kind not in KINDS:
        raise ExperimentError(f"experiment '{name}': experiment.kind is {kind!r}, expected one of {', '.join(KINDS)}")
    if not isinstance(trainer := config.get("trainer") or {}, dict):
        raise ExperimentError(f"experiment '{name}': trainer is {trainer!r}; expected a mapping of Trainer options")
    for at, block in (("paths", config.get("paths")), ("trainer.callbacks", trainer.get("callbacks"))):
        if isinstance(block, dict) and "steps" in block:
            raise ExperimentError(f"experiment '{name}': unknown key '{at}.steps'; now {RENAMED[at]}")
    wanted = ("task",) if kind == "task" else ("model", "data")
    for section in wanted:
        block = config.get(section)
        if not isinstance(block, dict) or not isinstance(block.get("class_path"), str):
            raise ExperimentError(f"experiment '{name}' is of kind {kind}: '{section}.class_path' is missing")
    if kind == "task" and trainer:
        found = ", ".join(sorted(trainer))
        raise ExperimentError(f"experiment '{name}': a task has no trainer and runs in one process; remove {found}")
    for section in {"task", "model", "data"} - set(wanted):
        if config.get(section):
            raise ExperimentError(f"experiment '{name}' is of kind {kind}: it cannot have a '{section}' section")
    return kind


def written_in(name: str, key: str, raw: Any, directories: tuple[Path, ...]) -> Path | None:
    """Return the path of the experiment file, or inherited file, that sets ``key`` to ``raw``. Returns None for a value
    from the command line."""
    definition = find(name, directories)
    if raw is not None and _at(definition.config, key) == raw:
        return definition.path
    parents = reversed(definition.config.get("inherits") or [])
    return next((path for parent in parents if (path := written_in(parent, key, raw, directories))), None)


def _at(config: Any, key: str) -> Any:
    """Return the value at a dotted path of a configuration (lists by ``[0]``), or None."""
    for part in key.replace("[", ".").replace("]", "").split("."):
        if isinstance(config, list) and part.isdigit() and int(part) < len(config):
            config = config[int(part)]
        else:
            config = config.get(part) if isinstance(config, dict) else None
    return config


def resolve(
    config: Config, stage: Callable[[str], str], directories: tuple[Path, ...] = (), chosen: Config | None = None
) -> Config:
    """Return a composed configuration with all references resolved, without ``paths`` and ``values``, and with the
    callbacks as a list.

    ``${stage:NAME}`` is a stage's folder, ``${per_device:GPU,CPU[,CPU_WITH_BFLOAT16]}`` a value for the device that
    ``trainer.accelerator`` (in a task: ``values.accelerator``) names, and ``${cpu_cores:}`` a number.

    Args:
        config: composed configuration.
        stage: returns the value of ``${stage:NAME}``.
        directories: folders of its files, for messages.
        chosen: gets the options that follow the device, with their values.

    Raises:
        ExperimentError: a reference to an unknown key, an unset environment variable, a value left at ``???``.
    """
    OmegaConf.register_resolver("stage", _resolve_stage, replace=True, use_cache=False)
    OmegaConf.register_resolver("per_device", _per_device, replace=True, use_cache=False)
    OmegaConf.register_resolver("cpu_cores", cpu_cores, replace=True, use_cache=False)
    token = _stage_reference.set(stage)
    machine = _chosen.set({} if chosen is None else chosen)
    try:
        tree = OmegaConf.create(config)
        resolved: Config = {}
        for key in config:
            if key in FREE_BLOCKS:
                continue
            value = tree[key]
            is_tree = OmegaConf.is_config(value)
            resolved[key] = OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if is_tree else value
    except OmegaConfBaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ExperimentError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:  # raised by the resolver `stage`
            raise cause from None
        raise ExperimentError(
            f"{_named(config)}cannot resolve the configuration: {short(error)}{_where(error, config, directories)}"
        ) from None
    finally:
        _stage_reference.reset(token)
        _chosen.reset(machine)
    callbacks = (resolved.get("trainer") or {}).get("callbacks")
    if isinstance(callbacks, dict):
        resolved["trainer"]["callbacks"] = [c for c in callbacks.values() if c is not None]
    return resolved


def _named(config: Config) -> str:
    name = (config.get("experiment") or {}).get("name")
    return f"experiment '{name}': " if name else ""


def _where(error: OmegaConfBaseException, config: Config, directories: tuple[Path, ...]) -> str:
    """Return the end of an error message about a reference: its key, its value, its file, and the remedy."""
    text, key = str(error), str(getattr(error, "full_key", None) or "")
    raw = _at(config, key)
    while (reference := re.fullmatch(r"\$\{([\w.]+)\}", str(raw))) and _at(config, reference[1]) is not None:
        key, raw = reference[1], _at(config, reference[1])
    missing = raw == "???"
    lost = ".init_args." in short(error) and not missing  # most often dropped by a file that changed class_path
    at = " (another class_path starts with empty init_args)" if lost else ""
    if key:
        at += f" (at '{key}'" + ("" if raw is None else f": {raw!r}")
        name = (config.get("experiment") or {}).get("name")
        if name and directories:
            at += f", in {written_in(name, key, raw, directories) or 'the command line'}"
        at += ")"
    if missing:
        return f"{at}; give it a value: --{key.replace('.init_args', '')} VALUE"
    if "nvironment variable" in text:
        return f"{at}; set it in the environment, or write a default: ${{oc.env:NAME,default}}"
    return f"{at}; correct it there, or define the key that it refers to"
