"""Test cases of a program: what is run and what is compared; ``solution_tests`` describes the forms of tests."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from rollout.tools.python.base import readable

INPUTS = 4 << 20  # characters of inputs that one process is given, if they are of more than one test
LONGER = 8  # times the expected output that an equal one may have in characters: "\\u017e" for "ž", 1.0 for 1


@dataclass(frozen=True, slots=True)
class Case:
    """One test of one solution."""

    call: str  # of a function of the harness
    stdin: str
    passes: Callable[[str], bool]  # what was printed, by a program that finished
    expected: str  # for its length


def cases(program: str, tests: Mapping[str, Any], as_released: bool) -> list[Case] | list[Assertion]:
    """One per test, in order. ``as_released``: see ``CodeTests``."""
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
    """Name of the function of the harness that runs a solution in these tests."""
    of_functions = tests.get("fn_name") is not None
    if as_released:
        return "function" if of_functions else "whole_program"
    return "answer" if "test_code" in tests else "calls" if of_functions else "as_main"


@dataclass(frozen=True, slots=True)
class Assertion:
    """One assertion: ``harness.judge`` and ``harness.answer`` in turn, the solution in the latter's process."""

    program: str
    test: str
    prefix: str
    entry_point: str
    expected: str = ""

    def judge(self, answers: Sequence[Any]) -> tuple[str, str]:
        """A program and its standard input."""
        return "judge()", json.dumps([self.prefix, self.test, self.entry_point, answers])

    def answer(self, questions: Sequence[Any]) -> tuple[str, str]:
        return f"answer({self.program!r})", json.dumps([self.prefix, self.entry_point, questions])


@dataclass(frozen=True, slots=True)
class Calls:
    """Tests of a function that run in one process, one after the other; ``harness.calls``."""

    call: str
    stdin: str
    expected: Sequence[str]

    @classmethod
    def of(cls, program: str, name: str, pairs: Sequence[tuple[str, str]], max_output: int) -> Calls:
        """The first of the tests, as many as fit: what they may answer into ``max_output``, inputs into INPUTS."""
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
        """What the solution answered, as far as it came; None if it was not even loaded."""
        loaded, *lines = output.split("\n")
        return None if loaded or not lines else lines[:-1]


def same_output(said: str, expected: str) -> bool:
    """As many lines, and each the same as a text or as numbers, but for white space at line ends (both of them), empty
    lines at the ends and what is invisible.

    Source of the numbers: LiveCodeBench, lcb_runner/evaluation/testing_util.py (grade_stdio).

    >>> same_output("1.50 x", "1.5 x"), same_output(" 1.50  2\\n", "1.5 2"), same_output("1 2", "12")
    (False, True, False)
    """
    ours, theirs = (readable(text).strip().split("\n") for text in (said, expected))
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(a.strip() == b.strip() or _same_numbers(a, b) for a, b in pairs)


def _same_numbers(said: str, expected: str) -> bool:
    """Whether both lines are decimal numbers between white space, and equal ones."""
    ours, theirs = said.split(), expected.split()
    if len(ours) != len(theirs):
        return False
    try:
        return all(Decimal(a) == Decimal(b) for a, b in zip(ours, theirs, strict=True))
    except InvalidOperation:  # no number, or a signalling NaN
        return False


def same_ends(said: str, expected: str) -> bool:
    """Equal but for line breaks at the end, as in the released code; ``said`` is as ``Run.output`` has it."""
    return said.rstrip("\n") == expected.rstrip("\n")


def same_json(said: str, expected: str) -> bool:
    """Equal as JSON values; where what is expected is no JSON, as texts."""
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):  # nothing was printed, or it was cut
        return False
    try:
        return value == json.loads(expected)
    except (ValueError, RecursionError):
        return isinstance(value, str) and value.strip() == expected.strip()


def assertions(test_code: str) -> list[str]:
    """A text for every assertion that stands for itself, at the top or in ``check``, with what is not one before it;
    then one for the rest, where that may fail: assertions in loops and helpers, exceptions raised, calls of assert...

    Raises:
        ValueError: it is no Python, or nothing is asserted when it is run as ``harness.assertion`` does (functions
            and classes that only pytest or unittest would call).
    """
    try:
        tree = ast.parse(test_code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"tests: test_code is no Python: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    body = functions["check"].body if "check" in functions else tree.body
    if not _may_fail([*tree.body, *body], functions):
        raise ValueError(
            "tests: test_code asserts nothing when it is run: only what stands at the top, or in a function check, is, "
            "and what that calls; no test functions or classes"
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
    """Whether running ``nodes`` can meet an assertion, a raise or a call of something named assert...; in ``functions``
    only where they are called by name."""
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
