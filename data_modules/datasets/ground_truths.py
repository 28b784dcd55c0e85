"""Reads the ground truth of a row: gold answers or the tests of a program, and the ability (math, choice, code, qa)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import NoneType
from typing import Any

from common.text import HalfPair, strict_json
from rollout.rewards.code.solution_tests import check_tests

TEST_FIELDS = ("inputs", "outputs", "fn_name", "test_code", "entry_point", "import_prefix")
ABILITIES = ("math", "choice", "code", "qa")  # known to the rewards; other values are ignored

_LETTER = re.compile(r"\(?([A-J])\)?\.?")
_CODE_SOURCE = re.compile(r"(?:^|[-_])code(?:[-_]|$)")
_MATH_SOURCE = re.compile(r"(?:^|[-_])math(?:[-_]|$)")
_SCIENCE_SOURCES = ("mega-science", "megascience")  # letters of options among them


@dataclass(frozen=True, slots=True)
class GroundTruth:
    answers: tuple[str, ...] = ()
    tests: dict[str, Any] | None = None
    fault: str | None = None  # what is wrong with it, for a message


def read_truth(value: Any) -> GroundTruth:
    r"""Read the ground truth of one row (``reward_model.ground_truth``): gold answers or a program's tests.

    Text or a number is the one gold answer (ARPO, DAPO), a list several (Skywork: as JSON), and a JSON object holds
    tests. A struct has ``target`` (Search-R1), or tests. In structs of a parquet file the fields that other rows have
    are null.

    >>> read_truth('["\\\\frac{1}{2}"]').answers, read_truth("[1, 2]").answers
    (('\\frac{1}{2}',), ('[1, 2]',))
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            parsed = strict_json(value)
        except HalfPair as error:
            return GroundTruth(fault=f"a ground_truth with {error}")
        except (ValueError, RecursionError):
            parsed = None  # formulas and intervals begin so too
        if isinstance(parsed, dict) and any(field in parsed for field in TEST_FIELDS):
            value = parsed
        elif isinstance(parsed, list) and parsed and all(isinstance(answer, str) for answer in parsed):
            value = {"target": parsed}
    if not isinstance(value, dict):
        return GroundTruth(as_answers(value) or ())
    given = {field: value[field] for field in TEST_FIELDS if value.get(field) is not None}
    if not given:
        return GroundTruth(as_answers(value.get("target")) or ())
    tests = read_tests(given)
    return GroundTruth(tests=tests) if isinstance(tests, dict) else GroundTruth(fault=tests)


def read_tests(given: dict[str, Any], public: int = 0) -> dict[str, Any] | str:
    """Return a program's tests as a dict for ``Task.metadata["tests"]``, or the reason (text) why they cannot be used.

    Returns:
        {inputs, outputs, fn_name, public}: the texts that go in and must come out of standard input and output, or,
        where ``fn_name`` is not None, of the function of that name (one argument per line, and the result, as JSON);
        or {test_code, entry_point, import_prefix, public} for asserts in ``test_code`` about ``entry_point``. The first
        ``public`` tests may be shown to the model.
    """
    if given.get("test_code"):
        if not given.get("entry_point"):
            return "test_code without an entry_point"
        texts = {name: given.get(name) or "" for name in ("test_code", "entry_point", "import_prefix")}
        if not all(isinstance(text, str) for text in texts.values()):
            return "a test_code, entry_point or import_prefix that is not text"
        return _checked({**texts, "public": public})
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        return "no tests (expected inputs and outputs, or test_code)"
    if len(inputs) != len(outputs):
        return "not as many outputs as inputs in the tests"
    name = given.get("fn_name") or None
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        return "an fn_name that is not the name of a function"
    inputs, outputs = _as_texts(inputs, outputs) if name is None else _as_json(inputs, outputs)
    return _checked({"inputs": inputs, "outputs": outputs, "fn_name": name, "public": public})


def _checked(tests: dict[str, Any]) -> dict[str, Any] | str:
    """Return the ``tests`` of a program if the code reward accepts them, otherwise the reason (text) why it does
    not."""
    try:
        check_tests(tests)
    except ValueError as fault:
        return str(fault)
    return tests


def _as_texts(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return the inputs and outputs of a program's tests as texts; lists of lines are joined."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return "\n".join(map(text, value))
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return [text(value) for value in inputs], [text(value) for value in outputs]


def _as_json(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return the inputs and outputs of a function's tests as JSON. Values that are texts are JSON already
    (LiveCodeBench).

    If arguments are lists (TACO), each output is a list with one result; if not all outputs are, they are results.
    """
    if all(isinstance(value, str) for value in inputs):
        return list(inputs), [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in outputs]
    if all(isinstance(value, list) and len(value) == 1 for value in outputs):
        outputs = [value[0] for value in outputs]
    calls = [value if isinstance(value, list) else [value] for value in inputs]
    lines = ["\n".join(json.dumps(argument, ensure_ascii=False) for argument in call) for call in calls]
    return lines, [json.dumps(value, ensure_ascii=False) for value in outputs]


def read_letter(value: Any) -> str | None:
    r"""Return the option letter if the text is only that: "B", "(B)", "B." or ``\boxed{B}``. None for any other
    value."""
    if not isinstance(value, str):
        return None
    found = _LETTER.fullmatch(value.strip().removeprefix("\\boxed{").removesuffix("}").strip())
    return found[1] if found else None


def ability_of(named: str | None, source: str, answers: Sequence[str], tests: dict[str, Any] | None) -> str | None:
    """Return a task's ability ("math", "choice", "code", "qa") or None. The tests decide, then the file's ability
    column (any case), then the data source (those of Open-AgentRL and of SOD's evaluation).
    """
    name, source = (named or "").strip().lower(), source.lower()
    if tests is not None or name in ABILITIES:
        return "code" if tests is not None else name
    if "gpqa" in source:
        return "choice"
    if source in _SCIENCE_SOURCES:
        return "choice" if all(read_letter(answer) for answer in answers) else "math"
    if _CODE_SOURCE.search(source):
        return "code"
    return "math" if _MATH_SOURCE.search(source) else None


def as_answers(value: Any) -> tuple[str, ...] | None:
    """Return gold answers as a tuple of texts, without empty ones. The value is a text, a number, or a list of them;
    others yield None.

    >>> as_answers([4, "four", None, 0.5]), as_answers(7), as_answers(True)
    (('4', 'four', '0.5'), ('7',), None)
    """
    values = value if isinstance(value, list) else [value]
    if any(isinstance(v, bool) or not isinstance(v, (str, int, float, Decimal, NoneType)) for v in values):
        return None
    texts = [str(v) for v in values if v is not None and v == v]  # a missing number in a column of floats is nan
    return tuple(text for text in texts if text.strip())
