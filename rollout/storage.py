"""Saves trajectories to parquet files and loads them back exactly, one row per trajectory.

Per-token fields are typed list columns, which any parquet reader can use. Turns, calls, reward and metadata are JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from pydantic import TypeAdapter

from common.errors import FileError
from common.files import replacing
from rollout.trajectory import ToolCall, Trajectory, Turn

SCHEMA: dict[str, Any] = {
    "task_id": pl.String,
    "question": pl.String,
    "golden_answers": pl.List(pl.String),
    "data_source": pl.String,
    "gold_passages": pl.List(pl.Struct({"title": pl.String, "text": pl.String})),
    "metadata": pl.String,  # JSON
    "prompt": pl.List(pl.Struct({"role": pl.String, "content": pl.String})),  # missing in older files
    "skills": pl.String,  # missing in older files
    "prompt_ids": pl.List(pl.Int32),  # [P]
    "response_ids": pl.List(pl.Int32),  # [L]
    "loss_mask": pl.List(pl.Int8),  # [L]
    "logprobs": pl.List(pl.Float64),  # [L]
    "turns": pl.String,  # JSON
    "calls": pl.String,  # JSON
    "stop_reason": pl.String,
    "group": pl.String,
    "index": pl.Int64,
    "reward": pl.Float64,  # null: not scored
    "reward_parts": pl.String,  # JSON, null: not scored
    "fork_parent": pl.Int64,  # null: not forked
    "fork_at": pl.Int64,
    "answer": pl.String,
    "seconds": pl.Float64,
    "tokens_computed": pl.Int64,
}
# Fields that older files lack get their defaults.
_TRAJECTORY, _OBJECT = TypeAdapter(Trajectory), TypeAdapter(dict[str, Any])
_TURNS, _CALLS = TypeAdapter(tuple[Turn, ...]), TypeAdapter(tuple[ToolCall, ...])
# Columns that are fields of the same name, of the trajectory and of its task.
_PLAIN = (
    "prompt_ids", "response_ids", "loss_mask", "logprobs", "group", "index", "answer", "seconds", "tokens_computed",
)  # fmt: skip
_PLAIN_OF_TASK = ("question", "golden_answers", "data_source", "skills")
LATER_COLUMNS: dict[str, Any] = {"prompt": [], "skills": ""}  # files without these columns are read with these values


class TrajectoryFileError(FileError):
    """A trajectory file cannot be read, or trajectories cannot be written."""


def save_trajectories(path: str | Path, trajectories: Sequence[Trajectory]) -> None:
    """Write trajectories to a parquet file. The write is atomic and replaces an existing file.

    Leaves out a program's tests (``metadata["tests"]``, up to megabytes), because the question file has them.

    Raises TrajectoryFileError if metadata or call arguments are not plain JSON values (a tuple would load as a list),
    OSError if the disk is full.
    """
    path = Path(path)
    frame = pl.DataFrame([to_row(t) for t in trajectories], schema=SCHEMA)
    with replacing(path) as unfinished:
        frame.write_parquet(unfinished)


def load_trajectories(path: str | Path) -> list[Trajectory]:
    """Load trajectories from a parquet file, in their order in the file.

    Raises FileNotFoundError, or TrajectoryFileError with the file and the wrong column or row.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no trajectory file at {path}")
    try:
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise TrajectoryFileError(f"{path} is not a readable parquet file: {error}") from error
    absent = {name: value for name, value in LATER_COLUMNS.items() if name not in frame.columns}
    later = [pl.lit(value, dtype=SCHEMA[name]).alias(name) for name, value in absent.items()]
    missing = [name for name in SCHEMA if name not in (*frame.columns, *LATER_COLUMNS)]
    if missing:
        raise TrajectoryFileError(
            f"{path} is not a trajectory file: column(s) {', '.join(missing)} missing; found {', '.join(frame.columns)}"
        )
    frame = frame.with_columns(later)
    for name, wanted in SCHEMA.items():
        if frame.schema[name] != wanted:
            raise TrajectoryFileError(f"{path}: column {name} is {frame.schema[name]}; expected {wanted}")
    trajectories = []
    for number, row in enumerate(frame.iter_rows(named=True)):
        try:
            trajectories.append(from_row(row))
        except (ValueError, TypeError, KeyError) as error:
            raise TrajectoryFileError(f"{path}, row {number}: {type(error).__name__}: {error}") from error
    return trajectories


def to_row(t: Trajectory) -> dict[str, Any]:
    where = f"trajectory {t.group}/{t.index}"
    return {name: getattr(t, name) for name in _PLAIN} | {
        **{name: getattr(t.task, name) for name in _PLAIN_OF_TASK},
        "task_id": t.task.id,
        "gold_passages": [{"title": title, "text": text} for title, text in t.task.gold_passages],
        "metadata": _json({k: v for k, v in t.task.metadata.items() if k != "tests"}, f"{where}: metadata"),
        "prompt": [{"role": role, "content": content} for role, content in t.task.prompt],
        "turns": _json(t.turns, f"{where}: turns", _TURNS),
        "calls": _json(t.calls, f"{where}: calls", _CALLS),
        "stop_reason": t.stop_reason.value,
        "reward": None if t.reward is None else t.reward.total,
        "reward_parts": None if t.reward is None else _json(t.reward.parts, f"{where}: reward parts"),
        "fork_parent": None if t.fork is None else t.fork.parent,
        "fork_at": None if t.fork is None else t.fork.at,
    }


def from_row(row: dict[str, Any]) -> Trajectory:
    task = {name: row[name] for name in _PLAIN_OF_TASK} | {
        "id": row["task_id"],
        "gold_passages": [(passage["title"], passage["text"]) for passage in row["gold_passages"]],
        "metadata": json.loads(row["metadata"]),
        "prompt": [(message["role"], message["content"]) for message in row["prompt"]],
    }
    reward, parent = row["reward"], row["fork_parent"]
    values = {name: row[name] for name in (*_PLAIN, "stop_reason")} | {
        "task": task,
        "turns": json.loads(row["turns"]),
        "calls": json.loads(row["calls"]),
        "reward": None if reward is None else {"total": reward, "parts": json.loads(row["reward_parts"])},
        "fork": None if parent is None else {"parent": parent, "at": row["fork_at"]},
    }
    return _TRAJECTORY.validate_python(values)


def _json(value: Any, what: str, kind: TypeAdapter[Any] = _OBJECT) -> str:
    """Return a value as JSON text. Raises TrajectoryFileError if it would not load as an equal value."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_fields)
        equal = kind.validate_python(json.loads(text)) == value
    except (TypeError, ValueError) as error:
        raise TrajectoryFileError(f"{what}: expected JSON values; {error}") from error
    if not equal:
        raise TrajectoryFileError(f"{what}: would not load as an equal value; expected lists, text keys, no NaN")
    return text


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
