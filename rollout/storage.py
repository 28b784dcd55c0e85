"""Trajectories at rest: one parquet row each, an exact round trip.

Rollout alone writes them, training alone reads them. Per-token fields are typed list columns, so that any parquet
reader can use them; turns, calls, reward and metadata are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from rollout.files import replacing
from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    Document,
    Fork,
    Reward,
    StopReason,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
    Trajectory,
    Turn,
)

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
LATER_COLUMNS: dict[str, Any] = {"prompt": [], "skills": ""}  # files without them can be read: as these values


class TrajectoryFileError(ValueError):
    """A file of trajectories cannot be read, or trajectories cannot be written as they are."""


def save_trajectories(path: str | Path, trajectories: Sequence[Trajectory]) -> None:
    """Write a parquet file, replacing one that is there; a reader never sees half a file. A program's tests
    (``metadata["tests"]``, perhaps megabytes) are left out: the question file has them.

    Raises TrajectoryFileError if metadata or call arguments are not plain JSON values (a tuple would come back as a
    list), OSError if the disk does not take it.
    """
    path = Path(path)
    frame = pl.DataFrame([_to_row(t) for t in trajectories], schema=SCHEMA, orient="row")
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
    except pl.exceptions.PolarsError as error:
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
            trajectories.append(_from_row(row))
        except (ValueError, TypeError, KeyError) as error:
            raise TrajectoryFileError(f"{path}, row {number}: {type(error).__name__}: {error}") from error
    return trajectories


def _to_row(t: Trajectory) -> tuple[Any, ...]:
    where = f"trajectory {t.group}/{t.index}"
    return (
        t.task.id,
        t.task.question,
        list(t.task.golden_answers),
        t.task.data_source,
        [{"title": title, "text": text} for title, text in t.task.gold_passages],
        _json({k: v for k, v in t.task.metadata.items() if k != "tests"}, f"{where}: metadata"),
        [{"role": role, "content": content} for role, content in t.task.prompt],
        t.task.skills,
        list(t.prompt_ids),
        list(t.response_ids),
        list(t.loss_mask),
        list(t.logprobs),
        _json([_turn_to_json(turn) for turn in t.turns], f"{where}: turns"),
        _json([_call_to_json(call) for call in t.calls], f"{where}: calls"),
        t.stop_reason.value,
        t.group,
        t.index,
        None if t.reward is None else t.reward.total,
        None if t.reward is None else _json(t.reward.parts, f"{where}: reward parts"),
        None if t.fork is None else t.fork.parent,
        None if t.fork is None else t.fork.at,
        t.answer,
        t.seconds,
        t.tokens_computed,
    )


def _from_row(row: dict[str, Any]) -> Trajectory:
    reward = row["reward"]
    return Trajectory(
        task=Task(
            id=row["task_id"],
            question=row["question"],
            golden_answers=tuple(row["golden_answers"]),
            data_source=row["data_source"],
            gold_passages=tuple((passage["title"], passage["text"]) for passage in row["gold_passages"]),
            metadata=json.loads(row["metadata"]),
            prompt=tuple((message["role"], message["content"]) for message in row["prompt"]),
            skills=row["skills"],
        ),
        prompt_ids=tuple(row["prompt_ids"]),
        response_ids=tuple(row["response_ids"]),
        loss_mask=tuple(row["loss_mask"]),
        logprobs=tuple(row["logprobs"]),
        turns=tuple(_turn_from_json(turn) for turn in json.loads(row["turns"])),
        calls=tuple(_call_from_json(call) for call in json.loads(row["calls"])),
        stop_reason=StopReason(row["stop_reason"]),
        group=row["group"],
        index=row["index"],
        reward=None if reward is None else Reward(reward, json.loads(row["reward_parts"])),
        fork=None if row["fork_parent"] is None else Fork(row["fork_parent"], row["fork_at"]),
        answer=row["answer"],
        seconds=row["seconds"],
        tokens_computed=row["tokens_computed"],
    )


def _json(value: Any, what: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TrajectoryFileError(f"{what}: expected JSON values; {error}") from error
    if json.loads(text) != value:
        raise TrajectoryFileError(f"{what}: would not come back equal; expected lists (no tuples), text keys, no NaN")
    return text


def _request_to_json(request: ToolRequest) -> dict[str, Any]:
    return {"name": request.name, "arguments": request.arguments}


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    action = turn.action
    return {
        "start": turn.start,
        "end": turn.end,
        "action": {
            "kind": action.kind.value,
            "calls": [_request_to_json(request) for request in action.calls],
            "answer": action.answer,
            "error": action.error,
            "ended": action.ended,
            "well_formed": action.well_formed,
        },
        "finish_reason": turn.finish_reason,
        "policy_version": turn.policy_version,
        "observation_end": turn.observation_end,
        "observation_truncated": turn.observation_truncated,
        "entropy": turn.entropy,
        "branch_probability": turn.branch_probability,
        "prompt_ids": None if turn.prompt_ids is None else list(turn.prompt_ids),
        "reward": turn.reward,
        "version_runs": [list(run) for run in turn.version_runs],
    }


def _turn_from_json(data: dict[str, Any]) -> Turn:
    action = data["action"]
    calls = tuple(ToolRequest(**request) for request in action["calls"])
    later = {name: action[name] for name in ("ended", "well_formed") if name in action}  # not recorded by older files
    parsed = Action(ActionKind(action["kind"]), calls, action["answer"], action["error"], **later)
    prompt = data.get("prompt_ids")
    changed = {"action": parsed, "prompt_ids": None if prompt is None else tuple(prompt)}
    changed["version_runs"] = tuple((version, count) for version, count in data.get("version_runs", ()))
    return Turn(**{**data, **changed})


def _call_to_json(call: ToolCall) -> dict[str, Any]:
    result = call.result
    return {
        "turn": call.turn,
        "request": _request_to_json(call.request),
        "result": {
            "text": result.text,
            "outcome": result.outcome.value,
            "documents": [{"id": d.id, "title": d.title, "text": d.text, "score": d.score} for d in result.documents],
            "detail": result.detail,
            "info": result.info,
        },
        "latency_s": call.latency_s,
    }


def _call_from_json(data: dict[str, Any]) -> ToolCall:
    result = data["result"]
    documents = tuple(Document(**document) for document in result["documents"])
    outcome = CallOutcome(result["outcome"])
    parsed = ToolResult(result["text"], outcome, documents, result["detail"], result.get("info", {}))
    return ToolCall(data["turn"], ToolRequest(**data["request"]), parsed, data["latency_s"])
