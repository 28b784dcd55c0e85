"""Runs the tests of a program that is an answer, each in a sandboxed process (docs/algorithms/sod.md).

* programs: ``{"inputs": [str], "outputs": [str]}``. The solution is a script that reads an input and prints the output.
* functions (LiveCodeBench): the same with ``"fn_name"``. An input has one JSON argument per line; an output is the JSON
  result. The solution defines the function, or a class Solution with such a method.
* assertions (HumanEval, LeetCodeDataset): ``{"test_code", "entry_point", "import_prefix"}``. Each assertion is a test.

``"public"`` says how many of the first tests a prompt may show; the others must not enter a prompt.

Programs and functions get the verdicts of LiveCodeBench's checker, which depend on how it runs them (``harness``). It
accepts ``exit()``, names that were not imported, deep recursion and state from earlier tests. It fails ``open(0)``,
``for line in sys.stdin``, ``global`` in a script, ``quit()`` and a script with the text "class Solution". Differences:
tests after a failed one run too, each test of a script has its own process, and the runner sets the limits.

Outputs of programs are compared by ``cases.same_output``. Results are equal if Python says so of them and the JSON
value, with a tuple for a list: 1 is 1.0, 0.3 is not 0.30000000000000004.

Assertions run in another process than the solution, which gets each call's arguments, answers with data, and sees no
expected value. So an object that equals everything, a print, an exit or an overwritten name changes no verdict. Values
that are neither data nor of a class in ``import_prefix`` stay in the solution's process; the test can call them,
iterate over them and read their attributes. Unknown names and the entry point belong to the solution. ``random`` is
seeded.

Harness and solution run as one text of at most ``tools.python.base.MAX_PROGRAM_BYTES``, with the solution quoted, so
that a line break counts twice. A longer solution gets COMPILE_ERROR in all tests.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from common.async_calls import PerLoop
from common.ranges import NonNegativeInt, PositiveInt
from rollout.rewards.code.cases import Assertion, Calls, Case, assertions, cases, form, same_json
from rollout.services.retries import with_retries
from rollout.tools.base import Startable
from rollout.tools.python.base import MAX_STDIN_BYTES, Run, Runner, RunStatus

HARNESS = ast.parse((Path(__file__).parent / "harness.py").read_text()).body
BACKOFF_S = 0.5
CALLS = 1000  # limit on calls of a solution in one assertion


class TestOutcome(StrEnum):
    """Outcome of one test of a program."""

    __test__ = False  # pytest

    PASSED = "passed"
    WRONG = "wrong"
    ERROR = "error"  # an exception, another exit code than 0, too much memory or output
    TIMEOUT = "timeout"
    COMPILE_ERROR = "compile_error"  # of the solution, so of every test; no test was run


LATE = TestOutcome.TIMEOUT


@dataclass(frozen=True, slots=True)
class CodeReport:
    """Outcomes of all tests of one program."""

    outcomes: tuple[TestOutcome, ...]  # one per test, in order

    @property
    def compiles(self) -> bool:
        return TestOutcome.COMPILE_ERROR not in self.outcomes

    @property
    def share_passed(self) -> float:
        """Share of the tests that passed, in [0, 1]."""
        return self.outcomes.count(TestOutcome.PASSED) / len(self.outcomes)


def check_tests(tests: Mapping[str, Any]) -> None:
    """Raise ValueError if a program's tests have none of the supported forms (module docstring). For readers of data
    sets."""
    if "test_code" in tests:
        _check_assertions(tests)
        return
    inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    inputs, outputs = (texts if isinstance(texts, list | tuple) else () for texts in (inputs, outputs))
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f'tests: expected "inputs" and "outputs", lists as long as each other; found the keys {sorted(tests)}'
        )
    if wrong := [type(text).__name__ for text in (*inputs, *outputs) if not isinstance(text, str)]:
        raise ValueError(f"tests: expected texts as inputs and outputs; found {wrong[0]}")
    if (longest := max(map(len, inputs))) > MAX_STDIN_BYTES:
        raise ValueError(f"tests: an input has {longest} characters; expected at most {MAX_STDIN_BYTES}")
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"tests: expected a name of a function, or null, as fn_name; found {name!r}")
    public = tests.get("public", 0)
    if not isinstance(public, int) or not 0 <= public <= len(inputs):
        raise ValueError(f"tests: expected 0 to {len(inputs)} as public; found {public!r}")


def _check_assertions(tests: Mapping[str, Any]) -> None:
    for name in ("test_code", "import_prefix", "entry_point"):
        if not isinstance(tests.get(name, ""), str):
            raise ValueError(f"tests: expected a text as {name}; found {type(tests[name]).__name__}")
    assertions(tests["test_code"])


def _around(call: str) -> str:
    return f"{_harness(call.partition('(')[0])}\n\n{call}\n"


@functools.cache
def _harness(name: str) -> str:
    """Return the source of a harness function and the definitions that it needs, no more, because each test pays for
    parsing them."""
    defined: dict[str, ast.stmt] = {}
    for node in HARNESS:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    needed: set[ast.stmt] = set()
    todo = [name]
    while todo:
        node = defined[todo.pop()]
        if node not in needed:
            needed.add(node)
            todo += [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and part.id in defined]
    return ast.unparse(ast.Module([node for node in HARNESS if isinstance(node, ast.Import) or node in needed], []))


def public_tests(tests: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (input, output) pairs of the tests that a prompt may show. Assertions are never shown."""
    count = 0 if "test_code" in tests else tests.get("public", 0)
    return list(zip(tests.get("inputs", ())[:count], tests.get("outputs", ())[:count], strict=True))


def _said(run: Run | None) -> str | TestOutcome:
    """Return the output text of a program's run, or the outcome if it did not finish."""
    if run is None or run.status is RunStatus.TIMEOUT:
        return LATE
    return TestOutcome.ERROR if run.status is RunStatus.FAILED else run.output


def _verdict(passed: bool) -> TestOutcome:
    return TestOutcome.PASSED if passed else TestOutcome.WRONG


def _of_call(said: str, expected: str) -> TestOutcome:
    if said == "error":
        return TestOutcome.ERROR
    return _verdict(same_json(said, expected))


class CodeTests:
    """Runs the tests of any number of programs, in one event loop at a time.

    Args:
        runner: runs the programs, with its limits for each test; ``max_output`` must fit the longest expected output.
        concurrency: tests in flight at once, over all solutions.
        retries: further attempts at a test after the runner failed.
        max_timeouts: after this many timeouts of a solution, its later tests count as TIMEOUT without a run. None: run
            all.
        as_released: follow SOD's released code (verl/utils/reward_score/livecodebench/code_math.py,
            sandbox_fusion/utils.py). Every backslash-n in a solution becomes a line break and every backslash-t a tab,
            which breaks a "\\n" in a string. Every test has a process, which must end with exit code 0. Scripts run as
            they are. A function becomes a method of a class Solution, so it cannot call itself by its name, and its
            prints are output too. Outputs are equal as texts except for line breaks at the end. An assertion is a line
            of ``test_code`` after the first one, in one program with the solution.
    """

    def __init__(
        self,
        runner: Runner,
        concurrency: PositiveInt = 8,
        retries: NonNegativeInt = 2,
        as_released: bool = False,
        max_timeouts: PositiveInt | None = 3,
    ) -> None:
        self.runner, self.retries = runner, retries
        self.as_released, self.max_timeouts = as_released, max_timeouts
        self._slots = PerLoop("the reward's tests", lambda: asyncio.Semaphore(concurrency))

    async def start(self) -> None:
        """Start the runner of the programs."""
        if isinstance(self.runner, Startable):
            await self.runner.start()

    async def run(self, program: str, tests: Mapping[str, Any]) -> CodeReport:
        """Run all tests of the solution ``program``, and return their outcomes.

        Raises:
            InfrastructureError: the runner failed, ``retries`` times over.
            ValueError: ``check_tests`` refuses the tests, or they are longer than the runner can take.
        """
        check_tests(tests)
        if self.as_released:
            program = program.replace("\\n", "\n").replace("\\t", "\t")
        how = form(tests, self.as_released)
        compiled = await self._run(f"compiles({program!r}, {how!r}, {tests.get('fn_name')!r})", "")
        assert compiled is not None
        todo = cases(program, tests, self.as_released)
        if compiled.status is RunStatus.TIMEOUT:
            return CodeReport((TestOutcome.TIMEOUT,) * len(todo))  # as would each of them, which compiles it too
        # Python does not compile it, it is too long for the runner, or the tests are empty as released.
        if compiled.output.strip() != "1" or not todo:
            return CodeReport((TestOutcome.COMPILE_ERROR,) * max(len(todo), 1))
        if (longest := max(len(case.expected) for case in todo)) > self.runner.max_output:
            raise ValueError(
                f"a test expects an output of {longest} characters, but the runner keeps {self.runner.max_output}: set "
                f"max_output of the reward's runner to {longest} or more"
            )
        if how == "calls":
            outcomes = await self._of_calls(program, tests)
        else:
            outcomes = await self._of_cases(todo)
        # The outcomes must not depend on how many tests run at once.
        return CodeReport(tuple(LATE if self._given_up(outcomes[:i]) else own for i, own in enumerate(outcomes)))

    async def close(self) -> None:
        """Close the runner of the programs; a later use may come from another event loop."""
        self._slots.drop()
        await self.runner.close()

    def _given_up(self, before: Iterable[TestOutcome]) -> bool:
        return self.max_timeouts is not None and sum(outcome is LATE for outcome in before) >= self.max_timeouts

    async def _of_calls(self, program: str, tests: Mapping[str, Any]) -> list[TestOutcome]:
        """Return the outcomes of a function's tests, run in as few processes as possible. If a process ends early, a
        new one takes the remaining tests."""
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        outcomes: list[TestOutcome] = []
        while len(outcomes) < len(pairs) and not self._given_up(outcomes):
            calls = Calls.of(program, tests["fn_name"], pairs[len(outcomes) :], self.runner.max_output)
            run = await self._run(calls.call, calls.stdin)
            assert run is not None
            end = {RunStatus.TIMEOUT: LATE, RunStatus.FAILED: TestOutcome.ERROR}.get(run.status, TestOutcome.WRONG)
            results = calls.results(run.output)
            if results is None:
                outcomes += [end] * (len(pairs) - len(outcomes))
                break
            outcomes += map(_of_call, results, calls.expected)
            # A test that was interrupted after others in the same process gets the whole time in the next process.
            if len(results) < len(calls.expected) and not (results and end is LATE):
                outcomes.append(end)
        return [*outcomes, *[LATE] * (len(pairs) - len(outcomes))]

    async def _of_cases(self, todo: Sequence[Case | Assertion]) -> list[TestOutcome]:
        known: dict[int, TestOutcome] = {}
        try:
            async with asyncio.TaskGroup() as group:  # a failure cancels the others
                for index, case in enumerate(todo):
                    group.create_task(self._outcome_of(index, case, known))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [known[index] for index in range(len(todo))]

    async def _outcome_of(self, index: int, case: Case | Assertion, known: dict[int, TestOutcome]) -> None:
        """Run one test and put its outcome into the dict ``known`` under its ``index``. Skip the run once earlier tests
        decide it."""

        def decided() -> bool:
            return self._given_up(outcome for earlier, outcome in known.items() if earlier < index)

        if isinstance(case, Assertion):
            known[index] = await self._of_assertion(case, decided)
            return
        said = _said(await self._run(case.call, case.stdin, decided))
        known[index] = said if isinstance(said, TestOutcome) else _verdict(case.passes(said))

    async def _of_assertion(self, case: Assertion, decided: Callable[[], bool]) -> TestOutcome:
        """Return the outcome of one assertion. Run the test until it asks a question, then the solution from the start,
        to answer all questions so far."""
        questions: list[Any] = []
        answers: list[Any] = []
        while len(questions) <= CALLS:
            said = _said(await self._run(*case.judge(answers), decided))
            if isinstance(said, TestOutcome):
                return said
            if said.startswith("["):
                try:
                    questions.append(json.loads(said))
                except ValueError as error:  # cut
                    if answers:  # which the question quotes
                        return TestOutcome.ERROR
                    raise ValueError(
                        f"an assertion asks for more than the {self.runner.max_output} characters of output that the "
                        "runner keeps: raise max_output of the reward's runner"
                    ) from error
            elif said != "passed" or questions:
                return {"passed": TestOutcome.PASSED, "wrong": TestOutcome.WRONG}.get(said, TestOutcome.ERROR)
            said = _said(await self._run(*case.answer(questions), decided))
            if isinstance(said, TestOutcome):
                return said
            try:
                answers = json.loads(said)
            except (ValueError, RecursionError):  # the solution ended the process, or its answer is too long
                return TestOutcome.WRONG
            if not questions:
                return TestOutcome.PASSED  # the test only needs a solution that runs
            if not isinstance(answers, list) or len(answers) != len(questions):
                return TestOutcome.WRONG
        return LATE

    async def _run(self, call: str, stdin: str, needless: Callable[[], bool] = lambda: False) -> Run | None:
        """Run a call of the harness in the sandbox. Returns the run, or None if it is ``needless`` by the time a slot
        is free."""

        async def attempt() -> Run | None:
            async with self._slots.get():
                return None if needless() else await self.runner.run(_around(call), stdin)

        return await with_retries(attempt, self.retries, BACKOFF_S)
