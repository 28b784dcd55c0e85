"""One question file, checked column by column, so that a message can say which rows are wrong."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import polars as pl

from data_modules.datasets.files import DatasetError, read_parquet, refuse_rows
from rollout.protocols.boxed import BROKEN_BOX, mended
from rollout.trajectory import Task

logger = logging.getLogger(__name__)

QUESTION_MARKER = "Question:"
ABILITIES = ("math", "qa")  # what rewards tell apart; any other value of the column says nothing to them

STRINGS = pl.List(pl.String)
SCHEMA = {
    "id": pl.String,
    "data_source": pl.String,
    "question": pl.String,
    "golden_answers": STRINGS,
    "prompt": pl.List(pl.Struct({"role": pl.String, "content": pl.String})),
    "ability": pl.String,
    "reward_model": pl.Struct({"style": pl.String, "ground_truth": pl.Struct({"target": STRINGS})}),
    "extra_info": pl.Struct({"split": pl.String, "index": pl.Int64}),
    "gold_passages": pl.List(pl.Struct({"title": pl.String, "text": pl.String})),
    "metadata": pl.String,
}


class QuestionFile:
    """Reads the columns that ``questions.py`` documents; its errors are those of ``questions.load_tasks``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._frame = read_parquet(path)
        if self._frame.is_empty():
            raise DatasetError(f"{path}: the file has no rows")

    def tasks(self) -> list[Task]:
        columns = (
            self._ids(), self._questions(), self._answers(), self._data_sources(), self._passages(), self._metadata(),
            self._prompts(),
        )  # fmt: skip
        return [
            Task(identity, question, tuple(answers), source, passages, metadata, prompt)
            for identity, question, answers, source, passages, metadata, prompt in zip(*columns, strict=True)
        ]

    # --- columns --------------------------------------------------------------------------------------------------

    def _data_sources(self) -> list[str]:
        return self._text("data_source", self._require("data_source"), "no data source")

    def _ids(self) -> list[str]:
        if "id" in self._frame.columns:
            values = self._frame["id"]
            if values.dtype.is_integer():
                values = values.cast(pl.String)
            return self._text("id", values, "no id")
        info = self._optional("extra_info")
        if info is None:
            raise self._missing("id", "extra_info {split, index}")
        fields = [self._field(info, "extra_info", name) for name in ("split", "index")]
        self._refuse_rows(fields[0].is_null() | fields[1].is_null(), "no id (extra_info has no split or no index)")
        return [f"{split}_{index}" for split, index in zip(*fields, strict=True)]

    def _questions(self) -> list[str]:
        if "question" in self._frame.columns:
            return self._text("question", self._frame["question"], "an empty question")
        info, prompt = self._optional("extra_info"), self._optional("prompt")
        if info is not None and isinstance(info.dtype, pl.Struct) and "question" in {f.name for f in info.dtype.fields}:
            return self._text("extra_info.question", info.struct.field("question"), "an empty extra_info.question")
        if prompt is None:
            raise self._missing("question", f"extra_info.question, nor the prompt's text after {QUESTION_MARKER!r}")
        self._expect(prompt, "prompt", "a list of {role, content}", _is_records("role", "content"))
        texts = pl.Series([_question_of(messages or []) for messages in prompt.to_list()], dtype=pl.String)
        return self._text("prompt", texts, f"no text after {QUESTION_MARKER!r} in the prompt's last user turn")

    def _answers(self) -> list[list[str]]:
        given, target = self._optional("golden_answers"), self._target()
        if given is None and target is None:
            raise self._missing("golden_answers", "reward_model.ground_truth.target")
        found = [
            self._expect(s, name, "a list of strings", _is_strings).to_list()
            for s, name in ((given, "golden_answers"), (target, "reward_model.ground_truth.target"))
            if s is not None
        ]
        answers = [
            next((kept for kept in (_non_empty(values) for values in candidates) if kept), [])
            for candidates in zip(*found, strict=True)
        ]
        self._refuse_rows(pl.Series([not kept for kept in answers], dtype=pl.Boolean), "no gold answer")
        return answers

    def _target(self) -> pl.Series | None:
        model = self._optional("reward_model")
        if model is None:
            return None
        truth = self._field(model, "reward_model", "ground_truth")
        if truth.dtype == pl.String:  # ARPO's files: the one answer
            return pl.Series([[answer] for answer in truth], dtype=STRINGS)
        return self._field(truth, "reward_model.ground_truth", "target")

    def _passages(self) -> list[tuple[tuple[str, str], ...]]:
        column = self._optional("gold_passages")
        if column is None:
            return [()] * self._frame.height
        self._expect(column, "gold_passages", "a list of {title, text}", _is_records("title", "text"))
        rows = column.to_list()
        broken = [any(p is None or p["title"] is None or not p["text"] for p in row or []) for row in rows]
        self._refuse_rows(pl.Series(broken, dtype=pl.Boolean), "a gold passage without title or text")
        return [tuple((p["title"], p["text"]) for p in row or []) for row in rows]

    def _metadata(self) -> list[dict[str, Any]]:
        abilities = self._optional("ability")
        if abilities is None or abilities.dtype != pl.String:
            return self._own_metadata()
        known = [{"ability": name} if name in ABILITIES else {} for name in abilities.to_list()]
        return [ability | own for ability, own in zip(known, self._own_metadata(), strict=True)]

    def _own_metadata(self) -> list[dict[str, Any]]:
        column = self._optional("metadata")
        if column is None:
            return [{} for _ in range(self._frame.height)]
        self._expect(column, "metadata", "a JSON string or a struct", lambda d: isinstance(d, (pl.String, pl.Struct)))
        if isinstance(column.dtype, pl.Struct):
            plain = [f.name for f in column.dtype.fields if not f.dtype.is_nested()]
            rows = column.to_list()
            return [{name: row[name] for name in plain if row[name] is not None} if row else {} for row in rows]
        parsed = [_json_object(text) for text in column.to_list()]
        wrong = pl.Series([m is None for m in parsed], dtype=pl.Boolean)
        self._refuse_rows(wrong, "metadata that is not a JSON object")
        return [m or {} for m in parsed]

    def _prompts(self) -> list[tuple[tuple[str, str], ...]]:
        """Messages as (role, content); () where there are none, or the column holds something else: only the prompt
        template ``dataset`` needs them, and says so."""
        column = self._optional("prompt")
        if column is None or not _is_records("role", "content")(column.dtype):
            return [()] * self._frame.height
        rows = column.to_list()
        broken = [any(m is None or not m["role"] or m["content"] is None for m in row or []) for row in rows]
        self._refuse_rows(pl.Series(broken, dtype=pl.Boolean), "a prompt message without role or content")
        backspaces = sum(BROKEN_BOX in m["content"] for row in rows for m in row or [])
        if backspaces:
            logger.warning(
                "%s: %d prompt messages hold a backspace before 'oxed', where '\\boxed' was meant; they are mended",
                self._path, backspaces,
            )  # fmt: skip
        return [tuple((m["role"], mended(m["content"])) for m in row or []) for row in rows]

    # --- checks ---------------------------------------------------------------------------------------------------

    def _optional(self, name: str) -> pl.Series | None:
        """The column; None if there is none, or nothing in it."""
        missing = name not in self._frame.columns or self._frame.schema[name] == pl.Null
        return None if missing else self._frame[name]

    def _require(self, name: str) -> pl.Series:
        if name not in self._frame.columns:
            raise self._missing(name)
        return self._frame[name]

    def _missing(self, name: str, substitute: str | None = None) -> DatasetError:
        found = self._frame.columns
        near = difflib.get_close_matches(name, [c for c in found if c not in SCHEMA], n=1, cutoff=0.5)
        instead = f" (nor {substitute}, which would do instead)" if substitute else ""
        hint = f"; did you mean to call column '{near[0]}' so?" if near else "."
        return DatasetError(f"{self._path}: no column '{name}'{instead}{hint} The file has: {', '.join(found)}")

    def _expect(
        self, series: pl.Series, name: str, expected: str, fits: Callable[[pl.DataType], bool]
    ) -> pl.Series:
        if not fits(series.dtype):
            raise DatasetError(f"{self._path}: column '{name}' is {series.dtype}, expected {expected}")
        return series

    def _field(self, series: pl.Series, name: str, field: str) -> pl.Series:
        fields = {f.name for f in series.dtype.fields} if isinstance(series.dtype, pl.Struct) else None
        if fields is None or field not in fields:
            raise DatasetError(f"{self._path}: column '{name}' is {series.dtype}, expected a struct with '{field}'")
        return series.struct.field(field)

    def _text(self, name: str, values: pl.Series, fault: str) -> list[str]:
        self._expect(values, name, "String", lambda d: d == pl.String)
        stripped = values.str.strip_chars()
        self._refuse_rows(stripped.is_null() | (stripped == ""), fault)
        return stripped.to_list()

    def _refuse_rows(self, wrong: pl.Series, fault: str) -> None:
        refuse_rows(self._path, self._frame.height, wrong.fill_null(True).arg_true().to_list(), fault)


def _is_strings(dtype: pl.DataType) -> bool:
    return isinstance(dtype, pl.List) and dtype.inner in (pl.String, pl.Null)  # Null: every list is empty


def _is_records(*names: str) -> Callable[[pl.DataType], bool]:
    """Whether a type is a list of structs that have these fields, as strings."""

    def fits(dtype: pl.DataType) -> bool:
        if not isinstance(dtype, pl.List) or not isinstance(dtype.inner, pl.Struct):
            return dtype == pl.List(pl.Null)  # every list is empty
        return set(names) <= {f.name for f in dtype.inner.fields if f.dtype == pl.String}

    return fits


def _question_of(messages: list[dict[str, str]]) -> str:
    """The last user turn where a system message says the rest (ARPO), else what follows the marker in it."""
    text = next((m["content"] for m in reversed(messages) if m["role"] == "user"), None) or ""
    return text if any(m["role"] == "system" for m in messages) else text.partition(QUESTION_MARKER)[2]


def _non_empty(values: Iterable[str | None] | None) -> list[str]:
    return [value for value in values if value and value.strip()] if values is not None else []


def _json_object(text: str | None) -> dict[str, Any] | None:
    """The object, {} for null, None for anything that is not a JSON object."""
    if text is None or not text.strip():
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
