"""Loads experiments by name and summarises them for ``make experiments``. Imports without torch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields

from experiments.registry.compose import check_experiment, compose
from experiments.registry.definitions import definitions, faults
from experiments.registry.errors import ExperimentError
from experiments.registry.files import Config
from experiments.registry.project import Project

THIS = "@stage:@"  # placeholder for a stage's folder until its key is known


@dataclass(frozen=True, slots=True)
class Summary:
    """The description of one experiment, shown by ``make experiments``."""

    name: str
    family: str  # the outermost folder of its file, followed by the file's name for a table
    kind: str
    summary: str
    algorithm: str
    models: str
    data: str
    hardware: str
    reproduces: str


def names(project: Project) -> list[str]:
    """Return the names of all experiments, sorted, without the shared parts under ``bases/``."""
    return list(definitions(project.experiment_dirs))


def load(name: str, project: Project) -> Config:
    """Return an experiment's configuration with everything it inherits, unresolved. Adds ``${experiment.name}``,
    ``${experiment.family}``, ``${experiment.folder}`` (a placeholder until the stage's key is known) and
    ``${paths.outputs}``.

    Raises:
        ExperimentError: an unknown name (the message suggests one), a malformed file, sections that do not fit the
            kind.
    """
    config = copy.deepcopy(compose(name, project.experiment_dirs))
    check_experiment(config, name)
    config["experiment"] |= {"name": name, "family": _family(name, project), "folder": THIS}
    config["paths"] = {"outputs": str(project.outputs), **(config.get("paths") or {})}
    config.setdefault("seed_everything", 0)
    return config


def summary(name: str, project: Project) -> Summary:
    """Return an experiment's description, from the ``experiment`` block of its configuration."""
    block = load(name, project)["experiment"]
    texts = {field.name: str(block.get(field.name) or "") for field in fields(Summary)}
    return Summary(**texts)


def _family(name: str, project: Project) -> str:
    every = definitions(project.experiment_dirs)
    path = every[name].path
    several = any(other.path == path for key, other in every.items() if key != name)
    [root] = [folder for folder in project.experiment_dirs if path.is_relative_to(folder)][:1]
    folder = "" if path.parent == root else path.relative_to(root).parts[0]
    table = path.stem if several and path.stem != "tables" else ""
    return "/".join(filter(None, (folder, table))) or "own"


def summaries(project: Project) -> tuple[list[Summary], list[str]]:
    """Return the descriptions of all valid experiments, and messages about the invalid ones."""
    found, wrong = [], faults(project.experiment_dirs)
    for name in names(project):
        try:
            found.append(summary(name, project))
        except ExperimentError as error:
            wrong.append(str(error))
    return found, wrong
