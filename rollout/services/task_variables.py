"""A task as environment variables, for commands that a rollout starts (programs, servers of tools)."""

from __future__ import annotations

import json
from pathlib import Path

from common.text import whole
from rollout.trajectory import Task

FIELDS = ("id", "question", "golden_answers", "data_source", "metadata", "gold_passages")
VARIABLE_BYTES = 100_000  # Linux allows 131,072


def task_variables(folder: Path, task: Task) -> dict[str, str]:
    """Write a task to ``folder/task.json``, and return ``TASK_FILE`` (its path), ``TASK_ID`` and ``TASK_QUESTION``."""
    file = folder / "task.json"
    fields = {name: getattr(task, name) for name in FIELDS}
    file.write_text(whole(json.dumps(fields, ensure_ascii=False)), "utf-8")
    return {"TASK_ID": _word(task.id), "TASK_QUESTION": _word(task.question), "TASK_FILE": str(file)}


def _word(text: str) -> str:
    """Return a text as the value of a variable: without null characters, and empty if it is too long for one."""
    word = whole(text).replace("\0", "")
    return word if len(word.encode()) <= VARIABLE_BYTES else ""
