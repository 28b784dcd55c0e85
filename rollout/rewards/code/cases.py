"""Test cases of a program: inputs, and the comparison of outputs. ``solution_tests`` describes the forms."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from rollout.tools.python.base import readable

INPUTS = 4 << 20  # characters of inputs for one process, if it runs more than one test
LONGER = 8  # an equal output may have this many times the characters: "\\u017e" for "ž", 1.0 for 1


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a program: a call, its input, and the check of its output."""

    call: str  # of a function of the harness
    stdin: str
    passes: Callable[[str], bool]  # judges the output of a program that finished
    expected: str  # the expected output, for its length


def cases(program: str, tests: Mapping[str, Any], as_released: bool) -> list[Case] | list[Assertion]:
    """Return one test case per test of ``program``, in order. ``as_released``: see ``CodeTests``."""
    if "test_code" in tests:
        prefix, entry_point = tests.get("import_prefix", ""), tests.get("entry_point", "")
        if not as_released:
            return [Assertion(program, test, prefix, entry_point) for test in assertions(tests["test_code"])]
        head, *lines = [line for line in tests["test_code"].split("\n") if line] or [""]
        scripts = [f"{prefix}{program}\n{head}{line}\ncheck({entry_point})" for line in lines]
        return [Case(f"whole_program({script!r})", "prefix", lambda _: True, "") for script in scripts]
    names = [] if tests.get("fn_name") is None else [tests["fn_name"]]
    call = f"{form(tests, as_released)}({', '.join(map(repr, [program, *names]))})"
    same = same_ends if as_released else same_output
    pairs = zip(tests["inputs"], tests["outputs"], strict=True)
    return [Case(call, given, lambda said, e=expected: same(said, e), expected) for given, expected in pairs]


def form(tests: Mapping[str, Any], as_released: bool) -> str:
    """Return the name of the ``harness`` function that runs a program, by the form of its tests."""
    of_functions = tests.get("fn_name") is not None
    if as_released:
        return "function" if of_functions else "whole_program"
    return "answer" if "test_code" in tests else "calls" if of_functions else "as_main"


@dataclass(frozen=True, slots=True)
class Assertion:
    """A test of a program by one assertion. ``harness.judge`` and ``harness.answer`` run in turn; only the latter holds
    the solution."""

    program: str
    test: str
    prefix: str
    entry_point: str
    expected: str = ""

    def judge(self, answers: Sequence[Any]) -> tuple[str, str]:
        """Return the harness call that runs the assertion, and its standard input."""
        return "judge()", json.dumps([self.prefix, self.test, self.entry_point, answers])

    def answer(self, questions: Sequence[Any]) -> tuple[str, str]:
        return f"answer({self.program!r})", json.dumps([self.prefix, self.entry_point, questions])


@dataclass(frozen=True, slots=True)
class Calls:
    """Tests of a function that run in one process, one after the other; see ``harness.calls``."""

    call: str
    stdin: str
    expected: Sequence[str]

    @classmethod
    def of(cls, program: str, name: str, pairs: Sequence[tuple[str, str]], max_output: int) -> Calls:
        """Return the first tests, as many as one process can run: their answers fit into ``max_output`` and their
        inputs into INPUTS."""
        inputs: list[str] = []
        longest = 0
        for given, expected in pairs:
            longer = max(longest, LONGER * len(expected) + 100)
            if inputs and (sum(map(len, inputs)) + len(given) > INPUTS or longer * (len(inputs) + 1) > max_output):
                break
            inputs.append(given)
            longest = longer
        stdin = " ".join(str(len(given)) for given in inputs) + "\n" + "".join(inputs)
        expected = [output for _, output in pairs[: len(inputs)]]
        return cls(f"calls({program!r}, {name!r}, {longest})", stdin, expected)

    def results(self, output: str) -> list[str] | None:
        """Return the results that the solution printed, as far as it came, or None if it was not loaded."""
        loaded, *lines = output.split("\n")
        return None if loaded or not lines else lines[:-1]


def same_output(said: str, expected: str) -> bool:
    """Return whether two program outputs have the same lines, each equal as a text or as numbers. White space at both
    ends of a line, empty lines at the ends and invisible characters do not count.

    Source of the numbers: LiveCodeBench, lcb_runner/evaluation/testing_util.py (grade_stdio).

    >>> same_output("1.50 x", "1.5 x"), same_output(" 1.50  2\\n", "1.5 2"), same_output("1 2", "12")
    (False, True, False)
    """
    ours, theirs = (readable(text).strip().split("\n") for text in (said, expected))
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(a.strip() == b.strip() or _same_numbers(a, b) for a, b in pairs)


def _same_numbers(said: str, expected: str) -> bool:
    """Return whether both lines are equal decimal numbers between white space."""
    ours, theirs = said.split(), expected.split()
    if len(ours) != len(theirs):
        return False
    try:
        return all(Decimal(a) == Decimal(b) for a, b in zip(ours, theirs, strict=True))
    except InvalidOperation:  # not a number, or a signalling NaN
        return False


def same_ends(said: str, expected: str) -> bool:
    """Return whether two program outputs are equal except for line breaks at the end, as in the released code."""
    return said.rstrip("\n") == expected.rstrip("\n")


def same_json(said: str, expected: str) -> bool:
    """Return whether two program outputs are equal as JSON values, or as texts if the expected output is not JSON."""
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):  # the output is empty or was cut
        return False
    try:
        return value == json.loads(expected)
    except (ValueError, RecursionError):
        return isinstance(value, str) and value.strip() == expected.strip()


def assertions(test_code: str) -> list[str]:
    """Return a test program for each assertion at the top level or in ``check``, with the other statements before it. A
    last program has the rest, if that can fail: assertions in loops and helpers, exceptions, calls of assert...

    Raises:
        ValueError: the text is not Python, or running it as ``harness.judge`` does asserts nothing (functions and
            classes that only pytest or unittest would call).
    """
    try:
        tree = ast.parse(test_code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"tests: test_code is not Python: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    body = functions["check"].body if "check" in functions else tree.body
    if not _may_fail([*tree.body, *body], functions):
        raise ValueError(
            "tests: test_code asserts nothing when it is run; expected assertions at the top level, in a function "
            "check, or in functions that these call (test functions and classes are not run)"
        )
    whole = list(body)
    single = [index for index, node in enumerate(whole) if isinstance(node, ast.Assert)]
    if not single:
        return [test_code]
    texts = []
    for index in single:
        body[:] = [node for node in whole[:index] if not isinstance(node, ast.Assert)] + [whole[index]]
        texts.append(ast.unparse(tree))
    body[:] = [node for node in whole if not isinstance(node, ast.Assert)] or [ast.Pass()]
    return [*texts, ast.unparse(tree)] if _may_fail([*tree.body, *body], functions) else texts


def _may_fail(
    nodes: Iterable[ast.AST], functions: Mapping[str, ast.FunctionDef], seen: frozenset[str] = frozenset()
) -> bool:
    """Return whether running ``nodes`` can meet an assertion, a raise or a call of something named assert... Functions
    in ``functions`` count only if they are called by name."""
    for node in nodes:
        if isinstance(node, (ast.Assert, ast.Raise)):
            return True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            if name.startswith("assert"):
                return True
            called = functions.get(name) if isinstance(node.func, ast.Name) and name not in seen else None
            if called is not None and _may_fail(called.body, functions, seen | {name}):
                return True
        if _may_fail(ast.iter_child_nodes(node), functions, seen):
            return True
    return False
