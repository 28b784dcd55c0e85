"""The registry: which experiments there are and what they say about themselves. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.compose import Config, check_experiment, compose, find_file
from experiments.project import Project


@dataclass(frozen=True, slots=True)
class About:
    """One line of ``make experiments``."""

    name: str
    kind: str
    summary: str
    algorithm: str
    models: str
    data: str
    hardware: str
    reproduces: str


def names(project: Project) -> list[str]:
    """Every experiment file's name, sorted; shared parts under ``bases/`` are none."""
    return sorted({p.stem for d in project.experiment_dirs for p in d.glob("*.yaml")})


def load(name: str, project: Project) -> Config:
    """The composed configuration of an experiment, with what files may refer to filled in:
    ``${experiment.name}``, ``${experiment.folder}`` (the stage's own folder, known once the key is) and
    ``${paths.outputs}``.

    Raises:
        ExperimentError: unknown name (the nearest one is given), a malformed file, sections that do not fit the kind.
    """
    if "/" in name:
        find_file(name, project.experiment_dirs)
    config = compose(name, project.experiment_dirs)
    check_experiment(config, name)
    config["experiment"] |= {"name": name, "folder": "@this"}
    config["paths"] = {"outputs": str(project.outputs), **(config.get("paths") or {})}
    config.setdefault("seed_everything", 0)
    return config


def about(name: str, project: Project) -> About:
    """What the experiment's file says of itself."""
    block = load(name, project)["experiment"]

    def text(key: str) -> str:
        return str(block.get(key) or "")

    return About(
        name=name,
        kind=text("kind"),
        summary=text("summary"),
        algorithm=text("algorithm"),
        models=text("models"),
        data=text("data"),
        hardware=text("hardware"),
        reproduces=text("reproduces"),
    )


def listing(project: Project) -> list[About]:
    return [about(name, project) for name in names(project)]
