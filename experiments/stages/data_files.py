"""Reads the data files that stages name, with the stages' own readers, before any of them runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_modules.datasets.benchmark_names import split_reference
from experiments.registry.errors import ExperimentError
from experiments.registry.files import data_arguments
from experiments.stages.graph import QUESTION_FILES, Stage, closure
from experiments.stages.validate import import_class, plays_episodes

if TYPE_CHECKING:
    from data_modules.loading.question_loading import QuestionLoading
    from rollout.trajectory import Task


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file as a stage reads it. ``notes``: what is left out, and whatever else its reader warns of."""

    reference: str  # a path, or name:path of an evaluation set
    what: str  # "questions" or "traces"
    count: int
    notes: tuple[str, ...] = ()
    tasks: Sequence[Task] = field(default=(), repr=False)

    def __str__(self) -> str:
        return "\n    ".join([f"{self.reference}: {self.count} {self.what}", *self.notes])


def check_data_files(stages: Sequence[Stage], root: Path) -> list[DataFile]:
    """``read_data_files`` of what is there. Raises ExperimentError with the faults of all files."""
    found, faults = read_data_files(stages, root)
    if faults:
        raise ExperimentError("\n  ".join(["data files cannot be used:", *faults]))
    return found


def read_data_files(stages: Sequence[Stage], root: Path, absent: bool = False) -> tuple[list[DataFile], list[str]]:
    """What the stages will read and no stage makes: the files, and what is wrong with the others. ``absent``: that one
    is not there is a fault, too."""
    made = [s.folder.absolute() for s in closure(stages)]
    found: list[DataFile] = []
    faults: dict[str, None] = {}
    seen: set[str] = set()
    for stage in stages:
        for reference in references(stage):
            path = (root / split_reference(reference)[1]).absolute()
            how = f"{reference} {reader_options(stage)}"
            if how in seen or any(path.is_relative_to(folder) for folder in made) or not (absent or path.is_file()):
                continue
            seen.add(how)
            try:
                found.append(read(stage, reference))
            except ValueError as error:  # DatasetError, or an option of the reader
                faults[str(error)] = None
    return found, list(faults)


def references(stage: Stage) -> list[str]:
    """The data files that a stage reads, each once, as its configuration names them."""
    arguments = data_arguments(stage.config)
    given = [arguments.get(key) or () for key in QUESTION_FILES]
    return list(dict.fromkeys(path for paths in given for path in ([paths] if isinstance(paths, str) else paths)))


def reader_options(stage: Stage) -> dict[str, Any]:
    """What decides, beside the file, what is read from it."""
    arguments = data_arguments(stage.config)
    if _reads_traces(stage):
        return {"reader": _part(stage)["class_path"]}
    return {
        "faulty_rows": arguments.get("faulty_rows", "refuse"),
        "answers": not plays_episodes(stage.config),
        "columns": arguments.get("columns"),
    }


def read(stage: Stage, reference: str) -> DataFile:
    """One file as the stage will read it. Raises ValueError (DatasetError) with what is wrong."""
    from data_modules.datasets.questions import load_tasks

    with _warnings() as notes:
        if _reads_traces(stage):
            traces = import_class(_part(stage)["class_path"], stage.name).read_file(Path(reference))
            wrong = [trace.fault for trace in traces if trace.fault is not None]
            kinds = ", ".join(f"{fault} {wrong.count(fault)}" for fault in dict.fromkeys(wrong))
            if wrong and len(wrong) == len(traces):
                raise ValueError(f"{reference}: all {len(traces)} traces would be left out: {kinds}; give others")
            left_out = (f"{len(wrong)} of them are left out: {kinds}",) if wrong else ()
            return DataFile(reference, "traces", len(traces), (*left_out, *notes))
        tasks = wording(data_arguments(stage.config)).worded(load_tasks(reference, **reader_options(stage)))
    return DataFile(reference, "questions", len(tasks), tuple(notes), tasks)


def wording(arguments: Mapping[str, Any]) -> QuestionLoading:
    """How these arguments of a data module put a question; files and splits are not in it."""
    from data_modules.loading.question_loading import QuestionLoading

    return QuestionLoading(None, **{key: arguments[key] for key in ("prompts", "lcb_examples") if key in arguments})


def _part(stage: Stage) -> dict[str, Any]:
    return stage.config.get("data") or stage.config.get("task") or {}


def _reads_traces(stage: Stage) -> bool:
    path = _part(stage).get("class_path")
    return path is not None and hasattr(import_class(path, stage.name), "read_file")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What readers warn of, instead of on the screen."""
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
