"""Finds classes by their class path."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from experiments.registry.compose import Config
from experiments.registry.errors import ExperimentError, nearest
from experiments.registry.files import data_arguments
from experiments.registry.project import PACKAGES, ROOT

# Class of an earlier version -> its name now.
RENAMED = {
    "StepWeights": "DivergenceRatio",
    "WrongOnly": "IncorrectOnly",
    "StepDivergence": "TurnDivergence",
    "ServerEngine": "VLLMServers",
}


def import_class(class_path: str, where: str) -> Any:
    """Import and return the class or function that a ``class_path`` of a configuration names.

    Raises:
        ExperimentError: unknown module or name, or a package that is not installed.
    """
    module_name, _, name = class_path.rpartition(".")
    if not module_name:
        raise ExperimentError(f"{where}: '{class_path}' is not a full path such as rollout.system.RolloutSystem")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            hint = _elsewhere(RENAMED.get(name, name)) or nearest(module_name, _modules_beside(module_name))
            raise ExperimentError(f"{where}: no module '{module_name}'{hint}") from None
        raise ExperimentError(
            f"{where}: {class_path} needs the package '{error.name}', which is not installed; install it"
        ) from None
    if not hasattr(module, name):
        classes = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module_name]
        hint = _elsewhere(RENAMED.get(name, name)) or nearest(name, classes)
        raise ExperimentError(f"{where}: no class '{name}' in {module_name}{hint}")
    return getattr(module, name)


def _elsewhere(name: str) -> str:
    """Return a hint with the full path of this project's class called ``name``, or "" if no such class exists."""
    defines = re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if defines.search(path.read_text(encoding="utf-8")):
                return f"; use '{'.'.join((*path.relative_to(ROOT).with_suffix('').parts, name))}'"
    return ""


def _modules_beside(module_name: str) -> list[str]:
    """Return the names of all modules in the top-level package of ``module_name``; [] if it cannot be imported."""
    package = module_name.partition(".")[0]
    try:
        folders = [Path(folder) for folder in importlib.import_module(package).__path__]
    except (ImportError, AttributeError):
        return []
    found = [(folder, path) for folder in folders for path in folder.rglob("*.py") if path.stem != "__init__"]
    return [".".join((package, *path.relative_to(folder).with_suffix("").parts)) for folder, path in found]


def plays_episodes(config: Config) -> bool:
    """Return whether the environment scores its own episodes, so that its tasks need no golden answer."""
    environment = ((data_arguments(config).get("rollouts") or {}).get("init_args") or {}).get("environment") or {}
    path = environment.get("class_path")
    return bool(path) and bool(getattr(import_class(path, "environment"), "scores_itself", False))


def needs_answers(config: Config) -> bool:
    """Return whether the tasks of a configuration need golden answers: its environment or program does not score its
    own episodes."""
    rollouts = (data_arguments(config).get("rollouts") or {}).get("init_args") or {}
    scores = bool(rollouts.get("program")) and not rollouts.get("reward")
    return not scores and not plays_episodes(config)


def unwritten(target: Any) -> list[str]:
    """Return the abstract methods that a class does not implement, as text for a message. Lightning modules have no
    ABCMeta that would check."""
    if not inspect.isclass(target):
        return []
    static = ((name, inspect.getattr_static(target, name, None)) for name in dir(target))
    return [f"the method '{name}'" for name, member in static if getattr(member, "__isabstractmethod__", False)]
