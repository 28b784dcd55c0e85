"""An experiment as a graph of stages. The references ``${stage:NAME}`` found in a configuration *are* its edges."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_modules.datasets.benchmark_names import split_reference
from experiments.registry import overrides as cli_overrides
from experiments.registry.compose import Config, check_experiment, resolve
from experiments.registry.definitions import unreadable
from experiments.registry.errors import ExperimentError, nearest, require_keys
from experiments.registry.hub import with_local_files
from experiments.registry.keys import DATA, FILE_SUFFIXES, HASHES, MODELS, PathHasher, stage_key
from experiments.registry.listing import load, names
from experiments.registry.overrides import Overrides
from experiments.registry.project import Project

MARK = re.compile(r"@stage:([^@]*)@")


@dataclass(frozen=True, slots=True)
class Need:
    """An input file or folder that the user provides: weights, a data set or an index."""

    path: str
    how: str
    present: bool
    hub: str | None = None  # Hugging Face repository for `make download`
    repo_type: str = "model"
    files: tuple[str, ...] = ()  # glob patterns to fetch; empty: the whole repository
    assemble: bool = False  # concatenate the fetched files to ``path``, after unpacking .gz
    size_gb: float | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One resolved experiment (a training run, test or task): its configuration, output folder and dependencies."""

    name: str
    kind: str
    key: str
    folder: Path
    config: Config  # resolved, with X's folder for ``${stage:X}``
    arguments: tuple[str, ...]  # overrides that the parser applies
    upstream: tuple[Stage, ...]
    needs: tuple[Need, ...]
    chosen: Config = field(default_factory=dict)  # options that follow the machine's device

    @property
    def label(self) -> str:
        about = self.config["experiment"]
        return ", ".join(str(part) for part in (about.get("label") or self.name, about.get("group")) if part)


class Graph:
    """Resolves an experiment and the experiments it depends on into stages. Experiments that refer to the same name
    share its stage.

    Args:
        project: folders of experiment files and of outputs.
        target: the experiment of the command.
        overrides: command-line overrides; ``own`` applies to ``target`` alone.
        seed: replaces ``seed_everything`` in every stage without ``experiment.fixed_seed``.
    """

    def __init__(
        self,
        project: Project,
        target: str,
        overrides: Overrides | None = None,
        seed: int | None = None,
        hasher: PathHasher | None = None,
    ) -> None:
        self.project = project
        self.target_name = target
        self.overrides = overrides or Overrides()
        self.seed = seed
        self.hasher = hasher or PathHasher(project.outputs / HASHES)
        self._stages: dict[str, Stage] = {}

    def target(self) -> Stage:
        stage = self.stage(self.target_name)
        unused = set(self.overrides.stages) - {s.name for s in closure([stage, *self.compared(stage)])}
        if unused:
            found = sorted(unused)[0]
            raise ExperimentError(
                f"override '--stages.{found}...': '{self.target_name}' does not depend on a stage '{found}'"
                + nearest(found, self._stages)
            )
        self.hasher.save()
        return stage

    def plan(self, *, compare: bool) -> list[Stage]:
        """Return the stages to run for the target experiment, each after its dependencies.

        Args:
            compare: include the stages that the target is compared with.
        """
        target = self.target()
        return closure([target, *(self.compared(target) if compare else [])])

    def compared(self, stage: Stage) -> list[Stage]:
        """Return the stages that the results table shows beside ``stage`` (its option ``experiment.compare``)."""
        return [self.stage(name) for name in stage.config["experiment"].get("compare") or []]

    def stage(self, name: str, _chain: tuple[str, ...] = ()) -> Stage:
        """Return the stage of an experiment, resolved once. Raises ExperimentError for an unknown name or a circle of
        stages."""
        if name in _chain:
            raise ExperimentError(f"the stages run in a circle: {' -> '.join((*_chain, name))}")
        if name not in self._stages:
            self._stages[name] = self._build(name, _chain)
        return self._stages[name]

    def _build(self, name: str, chain: tuple[str, ...]) -> Stage:
        if chain and name not in names(self.project):
            known = names(self.project)
            there = nearest(name, known) + unreadable(self.project.experiment_dirs)
            raise ExperimentError(f"'{chain[-1]}' refers to an unknown stage '{name}'{there}")
        config = load(name, self.project)
        if self.seed is not None and not config["experiment"].get("fixed_seed"):
            config["seed_everything"] = self.seed
        pairs = self.overrides.for_stage(name, is_target=name == self.target_name)
        config, arguments = cli_overrides.apply(config, pairs)
        check_experiment(config, name)
        upstream: dict[str, Stage] = {}

        def referred(reference: str) -> str:
            upstream[reference] = self.stage(reference, (*chain, name))
            return f"@stage:{reference}@"

        chosen: Config = {}
        settled = resolve(
            config, referred, self.project.experiment_dirs, chosen
        )  # a mark takes the place of each folder
        settled = with_local_files(settled, self.project.root)
        keyed = _marked(settled, lambda reference: f"@stage/{upstream[reference].key}" if reference else "@this")
        key = stage_key(keyed, arguments, self.project.root, self.hasher)
        folder = self.project.outputs / name / key
        folders = {"": folder, **{reference: stage.folder for reference, stage in upstream.items()}}
        resolved = _marked(settled, lambda reference: self.project.relative(folders[reference]))
        return Stage(
            name=name,
            kind=resolved["experiment"]["kind"],
            key=key,
            folder=folder,
            config=resolved,
            arguments=arguments,
            upstream=tuple(upstream.values()),
            needs=_needs(resolved, name, self.project.root),
            chosen=chosen,
        )


def _marked(value: Any, replacement: Callable[[str], str]) -> Any:
    """Return ``value`` with the placeholder of every stage's folder replaced. The placeholder of the own stage has no
    name."""
    if isinstance(value, dict):
        return {key: _marked(inner, replacement) for key, inner in value.items()}
    if isinstance(value, list):
        return [_marked(inner, replacement) for inner in value]
    return MARK.sub(lambda found: replacement(found[1]), value) if isinstance(value, str) else value


def _needs(config: Config, name: str, root: Path) -> tuple[Need, ...]:
    """Return the inputs that the user provides, from ``experiment.needs``: a mapping from any name to the fields of
    ``Need``."""
    needs = []
    for title, entry in (config["experiment"].get("needs") or {}).items():
        if entry is None:
            continue
        valid = {f.name for f in dataclasses.fields(Need)} - {"present"}
        where = f"experiment '{name}', needs.{title}"
        require_keys(entry, valid, where)
        if not {"path", "how"} <= set(entry):
            raise ExperimentError(f"{where} lacks 'path' or 'how'; give both")
        path = root / entry["path"]
        present = path.exists() and not unfinished(path).exists()
        needs.append(Need(**{**entry, "present": present, "files": tuple(entry.get("files", ()))}))
    return tuple(needs)


def unfinished(path: Path) -> Path:
    """Return the file that marks an input as fetched in part. ``make download`` makes and removes it."""
    return path.with_name(f".{path.name}.fetching")


def closure(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages and all stages they depend on, each once and after its own dependencies."""
    ordered: dict[str, Stage] = {}

    def visit(stage: Stage) -> None:
        if stage.name in ordered:
            return
        for parent in stage.upstream:
            visit(parent)
        ordered[stage.name] = stage

    for stage in stages:
        visit(stage)
    return list(ordered.values())


def strings(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the text of every string in a nested configuration."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from strings(inner, f"{path}[{i}]")
    elif isinstance(value, str):
        yield path, value


def require_files(stages: Sequence[Stage], root: Path) -> None:
    """Raise ExperimentError for the first stage whose input files are missing (see ``missing_files``)."""
    for stage in stages:
        if missing := missing_files(stage, root):
            raise ExperimentError(f"experiment '{stage.name}': {'; '.join(missing)}")


def _model_fault(text: str, key: str, root: Path) -> str | None:
    """Return why ``text`` names no model, or None if it is a model folder or a Hugging Face name (owner/name)."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    wanted = "give a Hugging Face folder, or owner/name[@revision] of the hub"
    path = root / text
    if path.exists():
        whole = path.is_dir() and (key == "tokenizer" or (path / "config.json").is_file())
        return None if whole else f"'{text}' is not a model folder (it has no config.json); {wanted}"
    owner, *rest = text.split("/")
    if text.startswith((".", "/", "~")) or len(rest) != 1 or (root / owner).is_dir():
        return f"no model folder '{text}'; {wanted}"
    try:
        validate_repo_id(text)
    except HFValidationError:
        return f"'{text}' is not a name of the hub; {wanted}"
    return None


def missing_files(stage: Stage, root: Path) -> list[str]:
    """Return a message for each missing input file that no stage will make, with the first option that names the file.

    ``Stage.needs`` reports the files of ``experiment.needs``.
    """
    made = [s.folder for s in closure(stage.upstream)] + [stage.folder]
    listed = [root / need.path for need in stage.needs]
    lines: list[str] = []
    reported: set[str] = set()
    for section in ("model", "data", "task", "trainer"):
        for where, text in strings(stage.config.get(section), section):
            path = root / split_reference(text)[1]  # as in "gsm8k:data/gsm8k.jsonl"
            key = where.rpartition(".")[2].partition("[")[0]
            model = key in MODELS and (key != "model" or where.endswith(".engine.init_args.model"))  # not of a service
            named = model or (section != "trainer" and (key in DATA or text.endswith(FILE_SUFFIXES)))
            if not named or text in reported or any(path.is_relative_to(place) for place in (*made, *listed)):
                continue
            if model:
                if fault := _model_fault(text, key, root):
                    reported.add(text)
                    lines.append(f"{where}: {fault}")
                continue
            if path.exists():
                continue
            reported.add(text)
            if path.parent == root:  # do not suggest other files of the root
                lines.append(f"{where}: no file '{text}' in {root}")
                continue
            prefix = text[: len(text) - len(path.name)]
            siblings = [prefix + p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            lines.append(f"{where}: no file '{text}'{nearest(text, siblings)}")
    return lines
