"""Reads the data files of stages before the first stage runs, with the stages' own readers."""

from __future__ import annotations

import inspect
import json
import logging
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_modules.datasets.benchmark_names import split_reference
from experiments.registry.compose import Config
from experiments.registry.errors import ExperimentError
from experiments.registry.files import data_arguments
from experiments.registry.keys import QUESTION_FILES
from experiments.stages.classes import import_class, needs_answers
from experiments.stages.graph import Stage, closure
from experiments.stages.parser import instantiate
from experiments.stages.rollout_tools import to_be_written

if TYPE_CHECKING:
    from data_modules.datasets.splits import Part
    from data_modules.loading.question_loading import QuestionLoading
    from rollout.loop.agent_loop import FirstPrompts
    from rollout.trajectory import Task

BUDGETS = ("max_turn_tokens", "max_response_tokens", "max_length")  # options of rollouts that bound prompts
SELECT = (
    *QUESTION_FILES, "prompts", "lcb_examples", "splits", "abilities", "max_prompt_tokens", "max_eval_prompt_tokens",
    "eval_skills",
)  # options that select questions  # fmt: skip
WRITE = ("protocol", "skills", "engine", "test_limits", *BUDGETS)  # options of rollouts that change prompts
# Option -> its part of the data.
PARTS: dict[str, Part] = {"train_files": "train", "files": "train", "val_files": "val", "test_files": "test"}


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file as a stage reads it: its path, number of rows, and questions. ``notes``: the reader's warnings, such
    as rows that it leaves out."""

    reference: str  # a path, or name:path for an evaluation set
    what: str  # "questions" or "traces"
    count: int
    notes: tuple[str, ...] = ()
    tasks: Sequence[Task] = field(default=(), repr=False)

    def __str__(self) -> str:
        return "\n    ".join([f"{self.reference}: {self.count} {self.what}", *self.notes])


@dataclass(frozen=True, slots=True)
class PartOfData:
    """The questions of one part of a stage's data (train, val or test), from all files of that part. ``notes`` count
    the questions that are left out."""

    part: Part
    tasks: Sequence[Task] = field(repr=False)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DataOfStages:
    """All data files that stages read and that the user provides, with their questions and faults. The keys of
    ``parts`` are names of stages."""

    files: list[DataFile] = field(default_factory=list)
    parts: dict[str, list[PartOfData]] = field(default_factory=dict)
    faults: dict[str, None] = field(default_factory=dict)  # messages, each once

    def lines(self, quiet: bool = False) -> list[str]:
        """Return lines of text about the data files. ``quiet``: only lines about rows that are left out."""
        notes = (note for parts in self.parts.values() for part in parts for note in part.notes)
        return [*(str(file) for file in self.files if file.notes or not quiet), *dict.fromkeys(notes)]


def check_data_files(stages: Sequence[Stage], root: Path, count: bool = True) -> DataOfStages:
    """Read the existing data files of stages, and return their questions. Raises ExperimentError with the faults of all
    files."""
    found = read_data_files(stages, root, count=count)
    if found.faults:
        raise ExperimentError("\n  ".join(["data files cannot be used:", *found.faults]))
    return found


def read_data_files(stages: Sequence[Stage], root: Path, absent: bool = False, count: bool = True) -> DataOfStages:
    """Read the data files of stages, and return their questions and faults.

    Args:
        absent: treat a missing file, tokenizer or bank of skills as a fault.
        count: count the tokens of prompts, a second per thousand prompts.
    """
    made = [s.folder.absolute() for s in closure(stages)]
    found = DataOfStages()
    made_parts: dict[str, list[PartOfData]] = {}  # by the options that select them; the stages of a grid share most
    seen: dict[str, DataFile | None] = {}  # by file and reader, or None for a missing or faulty file
    for stage in stages:
        options = reader_options(stage)
        for reference in references(stage):
            path = (root / split_reference(reference)[1]).absolute()
            how = f"{reference} {options}"
            if how in seen:
                continue
            seen[how] = None
            if any(path.is_relative_to(folder) for folder in made) or not (absent or path.is_file()):
                continue
            try:
                seen[how] = read(stage, reference)
            except ValueError as error:  # a DatasetError, or from an option of the reader
                found.faults[str(error)] = None
        own = {reference: seen[f"{reference} {options}"] for reference in references(stage)}
        if not _reads_traces(stage):
            arguments = data_arguments(stage.config)
            rollouts = (arguments.get("rollouts") or {}).get("init_args") or {}
            chosen = [[part.get(name) for name in names] for part, names in ((arguments, SELECT), (rollouts, WRITE))]
            key = json.dumps([options, chosen], default=str, sort_keys=True)
            if key not in made_parts:
                made_parts[key] = list(_parts(stage, own, absent, count, found.faults))
            found.parts[stage.name] = made_parts[key]
    found.files.extend(file for file in seen.values() if file is not None)
    return found


def _parts(
    stage: Stage, files: Mapping[str, DataFile | None], absent: bool, count: bool, faults: dict[str, None]
) -> Iterator[PartOfData]:
    """Yield the questions of each part of a stage's data (train, val, test) whose files all exist, as the stage will
    select them."""
    from data_modules.datasets.files import DatasetError
    from data_modules.datasets.questions import unique

    arguments, writers = data_arguments(stage.config), PromptWriters(stage)
    for key, part in PARTS.items():
        references = listed(arguments.get(key))
        read = [file for reference in references if (file := files[reference]) is not None]
        if not references or len(read) < len(references):
            continue
        limit = arguments.get("max_prompt_tokens" if part == "train" else "max_eval_prompt_tokens")
        abilities = arguments.get("abilities") if part == "train" else None
        where, how = ", ".join(references), loading(stage.config)
        try:
            with _warnings() as notes:
                tasks = unique([task for file in read for task in file.tasks], references)
                try:
                    writer = writers.of(part, absent) if count else None
                    chosen = how.select(tasks, where, None, writer, limit, abilities, part)
                except DatasetError:
                    raise
                except ValueError as error:  # the protocol refuses a question
                    faults[str(error)] = None
                    chosen = how.select(tasks, where, None, None, None, abilities, part)
            yield PartOfData(part, chosen, tuple(notes))
        except ValueError as error:
            faults[str(error)] = None


class PromptWriters:
    """Creates the objects that write a stage's first prompts, from its configuration. Needs no engine."""

    def __init__(self, stage: Stage) -> None:
        self._name, self._arguments = stage.name, data_arguments(stage.config)
        self._upstream = [made.folder for made in closure(stage.upstream)]
        self._options = (self._arguments.get("rollouts") or {}).get("init_args") or {}
        self._made: dict[str, Any] = {}

    def of(self, part: Part, required: bool = True) -> FirstPrompts | None:
        """Return the object that writes the first prompts for a part of the data (train, val or test); None if the
        stage has no rollouts, a program writes its prompts, or an earlier stage has yet to write the tools.

        Args:
            required: if false, return None for a missing tokenizer folder, or for skills that cannot be made yet.

        Raises:
            ValueError: the protocol or the skills cannot be made.
        """
        from rollout.loop.agent_loop import Budgets, FirstPrompts
        from rollout.system import TestLimits

        config = self._options.get("protocol")
        if (
            self._options.get("program")
            or not config
            or not (required or Path(str(config.get("init_args", {}).get("tokenizer"))).is_dir())
            or to_be_written(config.get("init_args", {}).get("tools"), self._upstream)
        ):
            return None
        engine = self._options["engine"]
        default = inspect.signature(import_class(engine["class_path"], self._name)).parameters.get("max_length")
        given = {
            "max_length": getattr(default, "default", None), **(engine.get("init_args") or {}),
            **{name: value for name, value in self._options.items() if value is not None},
        }  # fmt: skip
        budgets = Budgets(**{name: given[name] for name in BUDGETS if name in given})
        if part == "test":
            budgets = TestLimits(**(self._options.get("test_limits") or {})).applied(budgets)
        inject_skills = part == "train" or self._arguments.get("eval_skills", True)
        protocol = self._part("protocol")
        try:
            return FirstPrompts(protocol, budgets, self._part("skills") if inject_skills else None)
        except ValueError:
            if required:
                raise
            return None

    def _part(self, name: str) -> Any:
        if name not in self._made:
            config = self._options.get(name)
            try:
                self._made[name] = None if config is None else instantiate(config, name)
            except (ValueError, TypeError, OSError, ArgumentError) as error:
                raise ValueError(f"the prompts of '{self._name}' cannot be written: {error}") from error
        return self._made[name]


def references(stage: Stage) -> list[str]:
    """Return the data files that a stage's configuration names, each once, as paths or ``name:path``."""
    arguments = data_arguments(stage.config)
    given = [arguments.get(key) or () for key in QUESTION_FILES]
    return list(dict.fromkeys(path for paths in given for path in listed(paths)))


def listed(paths: Any) -> list[str]:
    """Return the paths of an option that takes one path or several."""
    return [paths] if isinstance(paths, str) else list(paths or ())


def reader_options(stage: Stage) -> dict[str, Any]:
    """Return the options of a stage that change how its data files are read."""
    arguments = data_arguments(stage.config)
    if _reads_traces(stage):
        return {"reader": _part(stage)["class_path"]}
    return {
        "on_invalid_row": arguments.get("on_invalid_row", "refuse"),
        "answers": needs_answers(stage.config),
        "columns": arguments.get("columns"),
    }


def read(stage: Stage, reference: str) -> DataFile:
    """Read one data file with the reader of a stage, and return it as a ``DataFile``. Raises ValueError (DatasetError)
    with the faults."""
    from data_modules.datasets.questions import load_tasks

    with _warnings() as notes:
        if _reads_traces(stage):
            traces = import_class(_part(stage)["class_path"], stage.name).read_file(Path(reference))
            wrong = [trace.fault for trace in traces if trace.fault is not None]
            kinds = ", ".join(f"{fault} {wrong.count(fault)}" for fault in dict.fromkeys(wrong))
            if wrong and len(wrong) == len(traces):
                raise ValueError(f"{reference}: all {len(traces)} traces would be left out: {kinds}; give other traces")
            left_out = (f"{len(wrong)} of them are left out: {kinds}",) if wrong else ()
            return DataFile(reference, "traces", len(traces), (*left_out, *notes))
        tasks = load_tasks(reference, **reader_options(stage))
    return DataFile(reference, "questions", len(tasks), tuple(notes), tasks)


def loading(config: Config) -> QuestionLoading:
    """Return the ``QuestionLoading`` that a configuration describes, which selects and rewords questions.
    ``reader_options`` returns the options of its reader."""
    from data_modules.datasets.splits import Splits
    from data_modules.loading.question_loading import QuestionLoading

    arguments = data_arguments(config)
    options = {key: arguments[key] for key in ("prompts", "lcb_examples") if key in arguments}
    splits = None if arguments.get("splits") is None else Splits(**arguments["splits"])
    return QuestionLoading(None, answers=needs_answers(config), splits=splits, **options)


def _part(stage: Stage) -> dict[str, Any]:
    return stage.config.get("data") or stage.config.get("task") or {}


def _reads_traces(stage: Stage) -> bool:
    path = _part(stage).get("class_path")
    return path is not None and hasattr(import_class(path, stage.name), "read_file")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Context manager that collects the warnings of data readers in a list, instead of printing them."""
    notes: list[str] = []
    logger, handler = logging.getLogger("data_modules"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield notes
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
