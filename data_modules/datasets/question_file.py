"""Reads one question file into tasks, row by row, so that messages can name the wrong rows."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import polars as pl

from common.text import HalfPair, strict_json
from data_modules.datasets.files import (
    DatasetError,
    read_parquet,
    refuse_faults,
    refuse_lines,
    said_faults,
    said_lines,
)
from data_modules.datasets.gold_paragraphs import NOT_THERE, NoParagraphs, Passages, gold_paragraphs
from data_modules.datasets.ground_truths import TEST_FIELDS, GroundTruth, ability_of, as_answers, read_truth
from data_modules.datasets.own_questions import OwnRows, read_own
from rollout.rewards.answers import choice_letter
from rollout.rewards.code.solution_tests import check_tests
from rollout.tags import BROKEN_BOX, mended
from rollout.trajectory import Task

logger = logging.getLogger(__name__)

QUESTION_MARKER = "Question:"

Value = TypeVar("Value")
OnInvalidRow = Literal["refuse", "drop"]
NO_ANSWER = "no gold answer"
OF_A_WORLD = ". The class of a world that scores its episodes, whose tasks need no answer, says scores_itself = True"
ADVICE = ", or leave them out with on_invalid_row: drop"

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


class RowFault(ValueError):
    """A row of a question file cannot be used. ``faults`` fit the message "3 rows with <fault>"."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class Reader:
    """Reads the values of one row of a question file, and collects the faults of all values."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def read(self, default: Value, function: Callable[..., Value], *arguments: Any) -> Value:
        """Call ``function(*arguments)`` and return its value. If it raises RowFault, collect the faults and return
        ``default``.
        """
        try:
            return function(*arguments)
        except RowFault as fault:
            self.faults += fault.faults
            return default


class QuestionFile:
    """Reads one question file into tasks, by the columns that ``questions.py`` documents. Raises the errors of
    ``questions.load_tasks``.

    Args:
        columns: for a file of another shape, our columns by the file's own names (see ``own_questions``); None: parquet
            with our names.
    """

    def __init__(self, path: Path, columns: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._own: OwnRows | None = None
        if columns is None:
            frame = read_parquet(path)
            if frame.is_empty():
                raise DatasetError(f"{path}: the file has no rows")
            self._columns, self._rows = frame.columns, frame.to_dicts()
        else:
            self._own = read_own(path, columns)
            self._columns, self._rows = self._own.columns, self._own.rows
            if not self._rows:
                refuse_lines(path, self._own.unit, self._own.unreadable)
        truths = [
            row["reward_model"].get("ground_truth") for row in self._rows if isinstance(row.get("reward_model"), dict)
        ]
        fields = {field for truth in truths if isinstance(truth, dict) for field in truth}
        # verl's schema without Search-R1's columns: only the prompt holds the question.
        self._bare = (
            not {"id", "question", "golden_answers"} & set(self._columns)
            and any(truth is not None for truth in truths)
            and ("target" not in fields or not fields.isdisjoint(TEST_FIELDS))
        )
        self._question_in = self._find_question()
        self._incomplete = 0  # rows whose supporting paragraphs are not all there
        self._has_truths = bool({"golden_answers", "reward_model"} & set(self._columns))
        if not self._has_truths:
            self._rows = [row | {"golden_answers": []} for row in self._rows]
        if "data_source" not in self._columns:
            raise self._missing("data_source")

    def tasks(self, on_invalid_row: OnInvalidRow = "refuse", answers: bool = True) -> list[Task]:
        """Return the rows of the question file as tasks. ``answers`` requires a gold answer or tests.

        Rows with faults are refused in one message, or dropped and logged; dropping does not change ids. Raises
        DatasetError if answers are required and the file has no column of them.
        """
        if answers and not self._has_truths:
            raise self._missing("golden_answers", "reward_model.ground_truth.target")
        tasks, faults = self._checked(answers)
        if self._own is not None:
            self._report_lines(self._own, faults, on_invalid_row if tasks else "refuse")
        elif on_invalid_row == "refuse":
            unanswered = any(NO_ANSWER in texts for texts in faults)
            refuse_faults(self._path, faults, ADVICE + (OF_A_WORLD if unanswered else ""))
        elif said := said_faults(faults):
            total = len(self._rows)
            if not tasks:
                raise DatasetError(f"{self._path}: all {total} rows are invalid: {said}")
            left_out = total - len(tasks)
            logger.warning("%s: %d of %d rows are left out (counted from 0): %s", self._path, left_out, total, said)
        if self._incomplete:
            logger.warning("%s: %d rows name %s; they have no gold passages", self._path, self._incomplete, NOT_THERE)
        broken = sum(BROKEN_BOX in m["content"] for row in self._rows for m in _messages(row) if m.get("content"))
        if broken:
            logger.warning(
                "%s: %d prompt messages hold a backspace before 'oxed', where '\\boxed' was meant; they are mended",
                self._path, broken,
            )  # fmt: skip
        return tasks

    def _checked(self, answers: bool) -> tuple[list[Task], list[Sequence[str]]]:
        """Return the usable rows as tasks, and a list with the faults of every row."""
        tasks: list[Task] = []
        faults: list[Sequence[str]] = []
        first: dict[str, int] = {}  # lines by id, of your own files; others share ids between data sources
        for number, (identity, row) in enumerate(zip(self._ids(), self._rows, strict=True)):
            reader = Reader()
            task = self._task(reader, identity, row, answers)
            if self._own is not None and task.id in first:
                reader.faults.append(f"the id {task.id!r}, which {self._own.unit} {first[task.id]} has already")
            if not reader.faults:
                tasks.append(task)
                if self._own is not None:
                    first[task.id] = self._own.lines[number]
            faults.append(reader.faults)
        return tasks, faults

    def _report_lines(self, own: OwnRows, faults: Sequence[Sequence[str]], on_invalid_row: OnInvalidRow) -> None:
        """Raise DatasetError for the faulty lines of a user's own file, or log them if such rows are dropped."""
        found = own.unreadable | {line: texts for line, texts in zip(own.lines, faults, strict=True) if texts}
        if on_invalid_row == "refuse":
            refuse_lines(self._path, own.unit, found, ADVICE)
        elif found:
            total = len(own.lines) + len(own.unreadable)
            said = said_lines(own.unit, found)
            logger.warning("%s: %d of %d %ss are left out: %s", self._path, len(found), total, own.unit, said)

    def _task(self, reader: Reader, identity: Any, row: dict[str, Any], answers: bool) -> Task:
        """Return one row as a task; ``reader`` collects the row's faults."""
        identity = reader.read("", _text, identity, "an id", "no id")
        source = reader.read("", _text, row["data_source"], "a data_source", "no data source")
        question = reader.read("", self._question, row)
        metadata = reader.read({}, _metadata, row) | reader.read({}, _hint, row)
        passages, prompt = reader.read((), self._gold, row), reader.read((), _prompt, row)
        truth = reader.read(None, _truth, row)
        if truth is None:
            return Task(identity, question, (), source, passages, metadata, prompt)
        if truth.tests is not None:
            metadata = {"tests": truth.tests, **metadata}
        named = row.get("ability") if isinstance(row.get("ability"), str) else None
        ability = metadata.get("ability") or ability_of(named, source, truth.answers, metadata.get("tests"))
        metadata = {"ability": ability, **metadata} if ability else metadata
        reader.read(None, _check_truth, truth, metadata, answers)
        return Task(identity, question, truth.answers, source, passages, metadata, prompt)

    def _gold(self, row: dict[str, Any]) -> Passages:
        """Return the gold passages of a row: its own ``gold_passages``, else the supporting paragraphs in its
        metadata."""
        if own := _passages(row.get("gold_passages")):
            return own
        try:
            return gold_paragraphs(row.get("metadata"))
        except NoParagraphs:
            self._incomplete += 1
            return ()

    # --- columns --------------------------------------------------------------------------------------------------

    def _missing(self, name: str, substitute: str | None = None) -> DatasetError:
        near = difflib.get_close_matches(name, [c for c in self._columns if c not in SCHEMA], n=1, cutoff=0.5)
        instead = f" (nor {substitute} in its place)" if substitute and self._own is None else ""
        there = self._columns if self._own is None else self._own.given
        hint = f"; did you mean to call column '{near[0]}' so?" if near else "."
        if self._own is not None:
            hint = f"; name yours with columns.{name}, as in --data.columns.{name} {near[0] if near else 'NAME'}."
        return DatasetError(f"{self._path}: no column '{name}'{instead}{hint} The file has: {', '.join(there)}")

    def _ids(self) -> list[Any]:
        if "id" in self._columns:
            return [str(row["id"]) if isinstance(row["id"], int) else row["id"] for row in self._rows]
        indices = [_extra(row, "index") for row in self._rows]
        if all(index is None for index in indices):
            raise self._missing("id", "extra_info {index}")
        sources = [str(row["data_source"] or "").strip() for row in self._rows]
        prefixes = [_extra(row, "split") or source for row, source in zip(self._rows, sources, strict=True)]
        if None in indices or len(set(zip(sources, prefixes, indices, strict=True))) < len(indices):
            logger.warning(
                "%s: extra_info.index is missing or occurs twice in one data source; ids are made of row numbers",
                self._path,
            )
            return [f"{source}_{self._path.stem}_{row}" for row, source in enumerate(sources)]
        return [f"{prefix}_{index}" for prefix, index in zip(prefixes, indices, strict=True)]

    def _find_question(self) -> Literal["question", "extra_info", "prompt"]:
        if "question" in self._columns:
            return "question"
        own = [_extra(row, "question") for row in self._rows]
        if any(own) and (not self._bare or all(own)):
            return "extra_info"
        if "prompt" not in self._columns or (self._own is not None and not any(map(_messages, self._rows))):
            raise self._missing("question", f"extra_info.question, nor the prompt's text after {QUESTION_MARKER!r}")
        return "prompt"

    def _question(self, row: dict[str, Any]) -> str:
        if self._question_in == "question":
            return _text(row["question"], "a question", "an empty question")
        if self._question_in == "extra_info":
            return _text(_extra(row, "question"), "an extra_info.question", "an empty extra_info.question")
        fault = "no text in" if self._bare else f"no text after {QUESTION_MARKER!r} in"
        text = _question_of(_messages(row), whole=self._bare)
        return _text(text, "a prompt", f"{fault} the prompt's last user turn")


# ------------------------------------------------------------------------------------------------- values of one row


def _text(value: Any, what: str, empty: str) -> str:
    """Return ``value`` as stripped text. Raises RowFault with ``empty`` if there is no text, or that ``what`` has
    another type.
    """
    if value is not None and not isinstance(value, str):
        raise RowFault(f"{what} that is {type(value).__name__}, expected text")
    if not value or not value.strip():
        raise RowFault(empty)
    return value.strip()


def _extra(row: dict[str, Any], field: str) -> Any:
    extra = row.get("extra_info")
    return extra.get(field) if isinstance(extra, dict) else None


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the prompt's messages of a row; [] if the column is missing or has another shape. Only the template
    ``dataset`` needs them, and reports it.
    """
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        return []
    return prompt if all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt) else []


def _question_of(messages: Sequence[dict[str, Any]], whole: bool) -> str:
    """Return the question in a prompt's last user message: the text after "Question:", or the whole message if
    ``whole`` or the prompt has a system message (ARPO)."""
    text = next((m["content"] for m in reversed(messages) if m["role"] == "user"), None) or ""
    return text if whole or any(m["role"] == "system" for m in messages) else text.partition(QUESTION_MARKER)[2]


def _prompt(row: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    messages = _messages(row)
    if any(not m["role"] or m["content"] is None for m in messages):
        raise RowFault("a prompt message without role or content")
    return tuple((m["role"], mended(m["content"])) for m in messages)


def _passages(value: Any) -> Passages:
    passages = [p if isinstance(p, dict) else {} for p in value or ()] if isinstance(value, list | None) else [{}]
    if any(p.get("title") is None or not p.get("text") for p in passages):
        raise RowFault("a gold passage without title or text")
    return tuple((p["title"], p["text"]) for p in passages)


def _metadata(row: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata column of a row as a dict."""
    value = row.get("metadata")
    if isinstance(value, dict):  # a struct: its plain fields
        found = {k: v for k, v in value.items() if v is not None and not isinstance(v, (dict, list))}
    else:
        try:
            found = {} if value is None or value.strip() == "" else strict_json(value)
        except HalfPair as error:
            raise RowFault(f"metadata with {error}") from error
        except (AttributeError, ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise RowFault("metadata that is not a JSON object")
    return found


def _hint(row: dict[str, Any]) -> dict[str, Any]:
    """Return {"hint": text}, the row's hint for a teacher (OPSD), as metadata; {} without a hint."""
    hint = row.get("hint", _extra(row, "hint"))
    if hint is not None and not isinstance(hint, str):
        raise RowFault(f"a hint that is {type(hint).__name__}, expected text")
    return {"hint": hint} if hint and hint.strip() else {}


def _truth(row: dict[str, Any]) -> GroundTruth:
    """Return the row's ground truth: its ``golden_answers``, else its ``reward_model.ground_truth``."""
    golds, model = row.get("golden_answers"), row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    target = truth.get("target") if isinstance(truth, dict) else None
    faults = [
        f"{name} that are not a list of strings"
        for name, value in (("golden_answers", golds), ("reward_model.ground_truth.target", target))
        if isinstance(value, str) or as_answers(value) is None
    ]
    if faults:
        raise RowFault(*faults)
    own = as_answers(golds)
    return GroundTruth(own) if own else read_truth(truth)


def _check_truth(truth: GroundTruth, metadata: dict[str, Any], answers: bool) -> None:
    """Raise RowFault if a task's ground truth cannot be scored. Otherwise the run would fail hours later, when the
    reward judges an answer.
    """
    if truth.fault:
        raise RowFault(truth.fault)
    ability, tests = metadata.get("ability"), metadata.get("tests")
    faults = [] if tests is truth.tests else _faults_of_tests(tests)  # else of the metadata column
    if ability == "code" and not tests:
        faults.append("no tests, though they ask for a program")
    if ability == "choice" and not all(choice_letter(gold) for gold in truth.answers):
        faults.append("a gold answer that names no letter, though they ask for a choice")
    if answers and not truth.answers and not tests:
        faults.append(NO_ANSWER)
    if faults:
        raise RowFault(*faults)


def _faults_of_tests(tests: Any) -> list[str]:
    if tests and not isinstance(tests, dict):
        return [f"metadata.tests that are {type(tests).__name__}, expected an object"]
    try:
        if tests:
            check_tests(tests)
    except ValueError as fault:
        return [f"faulty metadata.tests: {fault}"]
    return []
