"""Reads files of tagged traces (ARPO's cold start) in both published shapes, and cuts a trace at its tool results."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_modules.datasets.files import DatasetError, read_each, read_rows

SHAPES = "{instruction, input, output[, system]} (alpaca) or {conversations: [{from, value}, ..][, system]} (sharegpt)"
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

_CLOSED_CALL = re.compile(r"</(search|python)>")
_RESULT = re.compile(r"\s*<result>(.*?)</result>", re.DOTALL)


class MalformedTrace(ValueError):
    """A trace (recorded conversation) cannot be trained on. ``reason``: of a tagged trace no_question,
    control_token_in_prompt, not_one_exchange, call_without_result, result_without_call, unclosed_result, no_answer,
    text_after_answer; of a conversation no_assistant, unfinished, wrong_order, unreadable_call, control_token,
    unrenderable.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Trace:
    id: str
    question: str
    output: str  # the assistant's whole turn
    system: str = ""
    instruction: str = ""  # alpaca only
    fault: str | None = None  # why question and output are missing


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one model turn of a trace, and the tool result that follows."""

    text: str  # ends with the closing tag of the call, or of the answer
    observation: str = ""  # the result block, with the white space before it
    tool: str | None = None  # "search" or "python", or None for the last piece
    argument: str = ""
    result: str = ""  # inside the block, stripped


def read_traces(path: Path) -> list[Trace]:
    """Read all rows of a .json or .jsonl file as tagged traces. Their ids are ``<file name>_<row>``.

    Raises:
        DatasetError: no such file, a file that cannot be read, or a row in neither shape.
    """
    return read_each(path, read_rows(path), partial(_trace, path))


def _trace(path: Path, number: int, row: dict[str, Any]) -> Trace:
    where, identity = f"{path}, row {number}", f"{path.stem}_{number}"
    system = _text(where, "system", row.get("system"))
    if "conversations" in row:
        said = _messages(where, row["conversations"])
        roles = [role for role, _ in said]
        if roles and roles[0] == "system":
            system = system or said[0][1]
            said, roles = said[1:], roles[1:]
        if roles != ["user", "assistant"]:
            return Trace(identity, "", "", fault="not_one_exchange")
        return Trace(identity, said[0][1], said[1][1], system)
    if "output" in row and ("input" in row or "instruction" in row):
        texts = {name: _text(where, name, row.get(name)) for name in ("input", "output", "instruction")}
        return Trace(identity, texts["input"], texts["output"], system, texts["instruction"])
    raise DatasetError(f"{where}: the columns are {', '.join(row)}; expected {SHAPES}")


def _messages(where: str, value: Any) -> list[tuple[str, str]]:
    if not isinstance(value, list) or not all(isinstance(m, dict) and str(m.get("from")) in ROLES for m in value):
        raise DatasetError(f"{where}: 'conversations' is not a list of {{from, value}}, from one of {', '.join(ROLES)}")
    return [(ROLES[m["from"]], _text(where, "value", m.get("value"))) for m in value]


def _text(where: str, name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DatasetError(f"{where}: '{name}' is {type(value).__name__}, expected text")
    return value.strip()


def cut(output: str) -> list[Piece]:
    """Cut a trace's output into pieces: one per model turn, with the tool result after it. Their texts and
    observations, concatenated, are ``output``.

    A rollout stops at every </search> and </python>, and the tool's answer follows, whether the tag is meant as a call
    or not. So each must be followed by a result, and results stand nowhere else. Other tags in a result mean nothing.

    Raises MalformedTrace.
    """
    pieces: list[Piece] = []
    position = 0
    while call := _CLOSED_CALL.search(output, position):
        text, tool = output[position : call.end()], call.group(1)
        result = _RESULT.match(output, call.end())
        if "<result>" in text or "</result>" in text:
            raise MalformedTrace("result_without_call")
        if result is None:
            opened = output[call.end() :].lstrip().startswith("<result>")
            raise MalformedTrace("unclosed_result" if opened else "call_without_result")
        if "<result>" in result.group(1):  # the closing tag is that of a later result
            raise MalformedTrace("unclosed_result")
        before, opening, argument = text[: -len(call.group())].rpartition(f"<{tool}>")
        if not opening:
            raise MalformedTrace("result_without_call")
        if "</answer>" in before:
            raise MalformedTrace("text_after_answer")
        pieces.append(Piece(text, result.group(), tool, argument.strip(), result.group(1).strip()))
        position = result.end()
    last = output[position:]
    if "<result>" in last or "</result>" in last:
        raise MalformedTrace("result_without_call")
    if "<answer>" not in last or "</answer>" not in last.partition("<answer>")[2]:
        raise MalformedTrace("no_answer")
    if not last.endswith("</answer>") or last.count("</answer>") > 1:
        raise MalformedTrace("text_after_answer")
    return [*pieces, Piece(last)]
