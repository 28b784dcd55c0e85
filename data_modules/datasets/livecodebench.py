"""Reads LiveCodeBench: the official files, and the file that SOD is evaluated on.

=========  ================  ==============================================================================
shape      question          tests
=========  ================  ==============================================================================
official   question_content  public_test_cases, private_test_cases; metadata.func_name; starter_code
SOD        problem           reward_model.ground_truth.inputs and .outputs, reward_model as a JSON string
=========  ================  ==============================================================================

SOD's file does not say which tests are public, and the released code prints all of them in the prompt
(docs/algorithms/sod.md), so that its score is the accuracy on tests that the model has read. Here at most the
first two may be shown, and at least one stays hidden.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.text import strict_json
from data_modules.datasets.files import DatasetError, refuse_faults
from data_modules.datasets.ground_truths import read_tests

PUBLIC_OF_UNMARKED = 2  # tests that may be shown where the file does not say which are public
LARGEST_DECODED = 2**30  # bytes of one row's tests
# The opcodes of a pickled text. Others are refused, and nothing is executed.
_TEXT_OPCODES = frozenset({"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"})
_OTHER_OPCODES = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    tests: dict[str, Any] = field(default_factory=dict)  # see ground_truths.read_tests
    starter_code: str = ""


def read_problems(path: Path, rows: Sequence[dict[str, Any]]) -> list[Problem]:
    """Read the problems of a LiveCodeBench file, in order.

    Raises:
        DatasetError: the columns are of neither shape, or rows hold no question or no tests that can be read.
    """
    found = list(dict.fromkeys(name for row in rows for name in row))
    if {"question_content", "public_test_cases", "private_test_cases"} <= set(found):
        read = _official
    elif {"problem", "reward_model"} <= set(found):
        read = _of_sod
    else:
        raise DatasetError(
            f"{path}: expected the columns question_content, public_test_cases and private_test_cases (the official "
            f"files) or problem and reward_model (SOD's). The file has: {', '.join(found)}"
        )
    problems: list[Problem] = []
    faults: list[list[str]] = []
    for row in rows:
        faults.append([])
        try:
            problems.append(read(row))
        except ValueError as error:
            faults[-1].append(str(error))
    refuse_faults(path, faults)
    return problems


def _official(row: dict[str, Any]) -> Problem:
    public = _cases("public_test_cases", row.get("public_test_cases"))
    cases = public + _cases("private_test_cases", row.get("private_test_cases"))
    function = None
    if any(case.get("testtype") == "functional" for case in cases):
        function = _json("metadata", row.get("metadata"), dict).get("func_name")
        if not function:
            raise ValueError("tests of a function, but no func_name in the metadata")
    given = {"inputs": [c["input"] for c in cases], "outputs": [c["output"] for c in cases], "fn_name": function}
    code = row.get("starter_code") or ""
    if not isinstance(code, str):
        raise ValueError("a starter_code that is not text")
    return _problem(row.get("question_content"), given, len(public), code)


def _of_sod(row: dict[str, Any]) -> Problem:
    truth = _json("reward_model", row.get("reward_model"), dict).get("ground_truth")
    given = _json("reward_model.ground_truth", truth, dict)
    count = len(given["inputs"]) if isinstance(given.get("inputs"), list) else 0
    return _problem(row.get("problem"), given, max(min(PUBLIC_OF_UNMARKED, count - 1), 0), "")


def _problem(question: Any, given: dict[str, Any], public: int, starter_code: str) -> Problem:
    if not isinstance(question, str) or not question.strip():
        raise ValueError("no question")
    tests = read_tests(given, public)
    if isinstance(tests, str):
        raise ValueError(tests)
    return Problem(question.strip(), tests, starter_code.strip("\n"))


def _cases(name: str, value: Any) -> list[dict[str, Any]]:
    """Read a column of test cases, [{input, output, testtype}], from JSON or from packed text (see ``unpacked``)."""
    if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{"):
        value = unpacked(value)
    cases = _json(name, value, list)
    if not all(isinstance(case, dict) and {"input", "output"} <= set(case) for case in cases):
        raise ValueError(f"{name} that are not all {{input, output}}")
    return cases


def unpacked(text: str) -> str:
    """Return the text inside base64(zlib(pickle(text))), the form of private tests in LiveCodeBench's official files.

    The pickle is read as data: one text and nothing else. A pickle may ask for any function to be called, and one that
    holds more than a text is refused without being loaded.

    Raises:
        ValueError: the text is not packed so, holds something else, or more than ``LARGEST_DECODED`` bytes.
    """
    try:
        inflater = zlib.decompressobj()
        pickled = inflater.decompress(base64.b64decode(text, validate=True), LARGEST_DECODED)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError("tests that are neither JSON nor packed with zlib and base64") from error
    if inflater.unconsumed_tail or not inflater.eof:
        raise ValueError(f"packed tests that are cut short, or unpack to more than {LARGEST_DECODED} bytes")
    try:
        opcodes = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(pickled)]
    except ValueError as error:
        raise ValueError("packed tests that are not a pickle") from error
    texts = [argument for name, argument in opcodes if name in _TEXT_OPCODES]
    if len(texts) != 1 or not all(name in _TEXT_OPCODES | _OTHER_OPCODES for name, _ in opcodes):
        raise ValueError("packed tests whose pickle is not one text; it was not loaded")
    return str(texts[0])


def _json(name: str, value: Any, kind: type) -> Any:
    """Return the value as ``kind`` (list or dict), parsed first if it is JSON text. Raises ValueError for other
    values."""
    if isinstance(value, str):
        try:
            value = strict_json(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} that cannot be read as JSON") from error
    if not isinstance(value, kind):
        raise ValueError(f"{name} that is not a JSON {'list' if kind is list else 'object'}")
    return value
