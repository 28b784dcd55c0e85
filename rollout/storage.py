"""Trajectories as parquet files: one row each, an exact round trip.

Rollout alone writes them, training alone reads them. Per-token fields are typed list columns, so that any parquet
reader can use them; turns, calls, reward and metadata are JSON.
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
    "prompt": pl.List(pl.Struct({"role": pl.String, "content": pl.String})),  # not in files of before it was recorded
    "skills": pl.String,  # likewise
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
# fields that older files lack have their defaults
_TRAJECTORY, _OBJECT = TypeAdapter(Trajectory), TypeAdapter(dict[str, Any])
_TURNS, _CALLS = TypeAdapter(tuple[Turn, ...]), TypeAdapter(tuple[ToolCall, ...])
# columns that are fields of the same name, of the trajectory and of its task
_PLAIN = (
    "prompt_ids", "response_ids", "loss_mask", "logprobs", "group", "index", "answer", "seconds", "tokens_computed",
)  # fmt: skip
_PLAIN_OF_TASK = ("question", "golden_answers", "data_source", "skills")
LATER_COLUMNS: dict[str, Any] = {"prompt": [], "skills": ""}  # files without them can be read: as these values


class TrajectoryFileError(FileError):
    """A file of trajectories cannot be read, or trajectories cannot be written as they are."""


def save_trajectories(path: str | Path, trajectories: Sequence[Trajectory]) -> None:
    """Write a parquet file, replacing one that is there; a reader never sees half a file. A program's tests
    (``metadata["tests"]``, perhaps megabytes) are left out: the question file has them.

    Raises TrajectoryFileError if metadata or call arguments are not plain JSON values (a tuple would come back as a
    list), OSError if the disk does not take it.
    """
    path = Path(path)
    frame = pl.DataFrame([to_row(t) for t in trajectories], schema=SCHEMA)
    with replacing(path) as unfinished:
        frame.write_parquet(unfinished)


def load_trajectories(path: str | Path) -> list[Trajectory]:
    """Read what ``save_trajectories`` wrote, in the same order.

    Raises FileNotFoundError; TrajectoryFileError naming the file, and the column or the row that is wrong.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file of trajectories at {path}")
    try:
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise TrajectoryFileError(f"{path} is not a readable parquet file: {error}") from error
    absent = {name: value for name, value in LATER_COLUMNS.items() if name not in frame.columns}
    later = [pl.lit(value, dtype=SCHEMA[name]).alias(name) for name, value in absent.items()]
    missing = [name for name in SCHEMA if name not in (*frame.columns, *LATER_COLUMNS)]
    if missing:
        raise TrajectoryFileError(
            f"{path} holds no saved trajectories: column(s) {', '.join(missing)} missing; "
            f"found {', '.join(frame.columns)}"
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
    """The JSON of a value of this kind. Raises TrajectoryFileError where it would not come back equal."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_fields)
        equal = kind.validate_python(json.loads(text)) == value
    except (TypeError, ValueError) as error:
        raise TrajectoryFileError(f"{what}: expected JSON values; {error}") from error
    if not equal:
        raise TrajectoryFileError(f"{what}: would not come back equal; expected lists (no tuples), text keys, no NaN")
    return text


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
