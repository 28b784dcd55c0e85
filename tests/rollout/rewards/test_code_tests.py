"""Solutions against tests, run in the local sandbox. What each comes to is worked out by hand."""

import asyncio
from contextlib import closing

import pytest

from rollout.rewards.code.cases import same_ends, same_json, same_output
from rollout.rewards.code.solution_tests import (
    CodeTests,
    TestOutcome,
    check_tests,
)
from rollout.tools.python.base import MAX_STDIN_BYTES, Run, RunStatus
from rollout.tools.python.fusion import SandboxFusion
from rollout.tools.python.local import LocalSandbox
from rollout.trajectory import InfrastructureError, PermanentFailure
from tests.processes import with_patience
from tests.rollout.rewards.conftest import Loop
from tests.rollout.tools.test_sandbox_fusion import service

PASSED, WRONG, ERROR = TestOutcome.PASSED, TestOutcome.WRONG, TestOutcome.ERROR
COMPILE, LATE = TestOutcome.COMPILE_ERROR, TestOutcome.TIMEOUT
SUM = {"inputs": ["1 2\n", "30 40\n", "-1 1\n"], "outputs": ["3\n", "70\n", "0\n"], "fn_name": None, "public": 1}
TWICE = {"inputs": ["[1, 2]\n2", "[]\n3"], "outputs": ["[2, 4]", "[]"], "fn_name": "scale"}


PROGRAMS = {
    "right": ("a, b = map(int, input().split())\nprint(a + b)", [PASSED] * 3),
    "no line break at the end": ("a, b = map(int, input().split())\nprint(a + b, end='')", [PASSED] * 3),
    "white space at line ends": ("a, b = map(int, input().split())\nprint(a + b, ' \\t')\nprint()", [PASSED] * 3),
    "main": (
        "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()", [PASSED] * 3,
    ),
    "partly": ("print(3)", [PASSED, WRONG, WRONG]),
    "white space before": ("a, b = map(int, input().split())\nprint('', a + b)", [PASSED] * 3),
    "as numbers": ("a, b = map(int, input().split())\nprint(f'{a + b:.2f}')", [PASSED] * 3),
    "more lines": ("a, b = map(int, input().split())\nprint(a + b)\nprint('done')", [WRONG] * 3),
    "nothing": ("x = 1", [WRONG] * 3),
    "the last expression is not printed": ("sum(map(int, input().split()))", [WRONG] * 3),
    "a fault": ("print(3)\n1 / 0", [ERROR] * 3),
    "on some tests": ("a, b = map(int, input().split())\nprint(a + b if a > 0 else c)", [PASSED, PASSED, ERROR]),
    "exit": ("import sys\nprint(sum(map(int, input().split())))\nsys.exit()", [PASSED] * 3),
    "exit code": ("import sys\nprint(3)\nsys.exit(1)", [PASSED, WRONG, WRONG]),
    "too much input wanted": ("input(); print(3)\ninput()", [ERROR] * 3),
    "errors are not output": (
        "import sys\nprint('log', file=sys.stderr)\nprint(sum(map(int, input().split())))", [PASSED] * 3,
    ),
    "too much memory": ("x = bytearray(10**10)\nprint(3)", [ERROR] * 3),
    "class Solution": ("class Solution: ...\nprint(sum(map(int, input().split())))", [ERROR] * 3),
    "class Solution in a string": ("x = 'class ' 'Solution'\nprint(3)", [ERROR] * 3),
    "class Solution in a comment": ("# class Solution\nprint(3)", [PASSED, WRONG, WRONG]),
    "a line break in a string": ("print('\\n'.join([str(sum(map(int, input().split())))]))", [PASSED] * 3),
    "no Python": ("def f(:\n  pass", [COMPILE] * 3),
    "a null character": ("print(3)\0", [COMPILE] * 3),
    "nested too deeply": ("(" * 5000 + ")" * 5000, [COMPILE] * 3),
    "too long": ("#" * 70_000, [COMPILE] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, bench):
    program, expected = PROGRAMS[name]
    assert bench.outcomes(program, SUM) == expected


FUNCTIONS = {
    "a function": ("def scale(xs, n):\n    return [x * n for x in xs]", [PASSED] * 2),
    "a method": (
        "class Solution:\n    def scale(self, xs: List[int], n):\n        return [x * n for x in xs]", [PASSED] * 2,
    ),
    "a tuple is a list": ("def scale(xs, n):\n    return tuple(x * n for x in xs)", [PASSED] * 2),
    "1.0 is 1": ("def scale(xs, n):\n    return [float(x * n) for x in xs]", [PASSED] * 2),
    "prints do not matter": ("def scale(xs, n):\n    print([9]); return [x * n for x in xs]", [PASSED] * 2),
    "a script's end is not run": (
        "def scale(xs, n):\n    return []\nif __name__ == '__main__':\n    input()", [WRONG, PASSED],
    ),
    "prints instead": ("def scale(xs, n):\n    print([x * n for x in xs])", [WRONG] * 2),
    "other arguments": ("def scale(xs):\n    return xs", [ERROR] * 2),
    "class Solution in a comment": ("# class Solution\ndef scale(xs, n):\n    return [2, 4]", [ERROR] * 2),
    "another name": ("def times(xs, n):\n    return [x * n for x in xs]", [ERROR] * 2),
    "leaves": ("import os\ndef scale(xs, n):\n    os._exit(0)", [WRONG] * 2),
    "not JSON": ("def scale(xs, n):\n    return {1, 2}", [WRONG] * 2),
    "pow with three arguments": ("def scale(xs, n):\n    return [x * n + pow(2, 3, 8) for x in xs]", [PASSED] * 2),
    "a very deep result": ("def scale(xs, n):\n    for _ in range(900): xs = [xs]\n    return xs", [WRONG] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, bench):
    program, expected = FUNCTIONS[name]
    assert bench.outcomes(program, TWICE) == expected


def test_texts_and_numbers_as_results(bench):
    tests = {"inputs": ['"ab"\n1', '"ž"\n2'], "outputs": ['"ab"', '"žž"'], "fn_name": "f"}
    assert bench.outcomes("def f(s, n): return s * n", tests) == [PASSED, PASSED]
    within = {"inputs": ["1"], "outputs": ["[[1]]"], "fn_name": "f"}
    assert bench.outcomes("def f(x): return ([x],)", within) == [PASSED]
    assert bench.outcomes("def f(x): return [(x,)]", within) == [WRONG]
    always = "class A(list):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return A()"
    assert bench.outcomes(always, within) == [WRONG]
    numpy = "class N:\n    shape = ()\n    def item(self): return 3\ndef f(): return N()"
    assert bench.outcomes(numpy, {"inputs": [""], "outputs": ["3"], "fn_name": "f"}) == [PASSED]


HUMAN = {
    "import_prefix": "import math\n",
    "entry_point": "area",
    "test_code": "METADATA = {}\n\ndef check(candidate):\n    big = 10\n    assert candidate(1) == math.pi\n"
    "    assert candidate(0) == 0\n    assert candidate(big) > 300, 'too small'\n",
}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def area(r): return math.pi * r * r", [PASSED] * 3),
        ("def area(r): return 0", [WRONG, PASSED, WRONG]),
        ("def area(r): return 1 / r", [WRONG, ERROR, WRONG]),
        ("def circle(r): return 0", [ERROR] * 3),
        ("raise SystemExit", [WRONG] * 3),  # what ends before the assertion has not passed it
        ("import os\ndef area(r): os._exit(0)", [WRONG] * 3),
        ("def area(r): return math.pi * r * r\ndef check(candidate): pass", [PASSED] * 3),
        ("def check(candidate): pass\narea = 1", [ERROR] * 3),
        ("def area(r) return", [COMPILE] * 3),
    ],
)
def test_assertions_are_tests_of_their_own(program, expected, bench):
    assert bench.outcomes(program, HUMAN) == expected


@pytest.mark.parametrize(
    ("test_code", "outcomes"),
    [
        ("def check(c):\n    assert c(1) == 2\n    for i in range(9):\n        assert c(i) == 2 * i", [PASSED, WRONG]),
        ("def same(a, b):\n    assert a == b\ndef check(c):\n    assert c(1) == 2\n    same(c(3), 6)", [PASSED, WRONG]),
        ("def check(c):\n    assert c(1) == 2\n    if c(4) != 8:\n        raise AssertionError", [PASSED, WRONG]),
        ("def check(c):\n    for i in range(9):\n        assert c(i) == 2 * i", [WRONG]),
    ],
)
def test_what_no_single_assertion_says_is_a_test_too(test_code, outcomes, bench):
    right_up_to_2 = "def twice(x): return 2 * x if x < 3 else 0"
    assert bench.outcomes(right_up_to_2, {"test_code": test_code, "entry_point": "twice"}) == outcomes


@pytest.mark.parametrize(
    "test_code",
    [
        "x = 1",
        "def check(c): ...",
        "def test_a():\n    assert f(1) == 2",
        "def check(c):\n    def inner():\n        assert c(1)\n    c(2)",
    ],
)
def test_code_that_asserts_nothing_is_refused(test_code):
    with pytest.raises(ValueError, match="tests: test_code asserts nothing when it is run"):
        check_tests({"test_code": test_code, "entry_point": "f"})


@pytest.mark.parametrize(
    "test_code",
    ["def same(a, b):\n    assert a == b\nsame(f(1), 2)", "import numpy as np\nnp.testing.assert_allclose(f(1), 2)",
     "if f(1) != 2:\n    raise ValueError", "def test_a():\n    assert f(1) == 2\ntest_a()"],
)  # fmt: skip
def test_code_that_asserts_elsewhere_is_taken(test_code):
    check_tests({"test_code": test_code, "entry_point": "f"})


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        (PROGRAMS["on some tests"][0], SUM, PROGRAMS["on some tests"][1]),
        (FUNCTIONS["a method"][0], TWICE, FUNCTIONS["a method"][1]),
        ("def area(r): return 0", HUMAN, [WRONG, PASSED, WRONG]),
        ("def f(:", SUM, [COMPILE] * 3),
    ],
)
def test_through_sandbox_fusion_too(program, tests, expected):
    async def scenario():
        async with service() as (url, _):
            return await _and_close(CodeTests(SandboxFusion(url, timeout_s=60)), program, tests)

    assert list(asyncio.run(scenario()).outcomes) == expected


def test_a_late_one_is_told_apart():
    with closing(Loop(timeout_s=0.7)) as bench:
        assert bench.outcomes("print(3)\nwhile True: pass", SUM) == [LATE] * 3


@pytest.mark.parametrize(
    "concurrency", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 8]
)
def test_a_solution_that_never_ends_is_given_up(concurrency):
    """Inputs from 2 to 6 time out. Which tests run depends on how many do at once; what they come to does not."""

    class Slow(Counting):
        async def run(self, code, stdin=""):
            run = await super().run(code, stdin)
            return Run(RunStatus.TIMEOUT, "") if stdin and 2 <= int(stdin) <= 6 else run

    def outcomes(**options):
        runner = Slow()
        report = asyncio.run(CodeTests(runner, concurrency, **options).run("x", echoes(12)))
        return list(report.outcomes), runner.calls - 1  # the first one compiles

    found, calls = outcomes()
    assert found == [PASSED] * 2 + [LATE] * 10 and (calls == 5 if concurrency == 1 else 5 <= calls <= 12)
    assert outcomes(max_timeouts=None) == ([PASSED] * 2 + [LATE] * 5 + [PASSED] * 5, 12)
    assert outcomes(max_timeouts=6) == outcomes(max_timeouts=None)


CALL = "def scale(xs, n):\n    return "
RELEASED = {  # each agrees with the released code_math.py over a sandbox that runs python3
    "a line break in a string": ("a, b = map(int, input().split())\nprint(a + b, end='\\n')", SUM, [COMPILE] * 3),
    "an escaped line break": ("a, b = map(int, input().split())\\nprint(a + b)", SUM, [PASSED] * 3),
    "an escaped tab": ("if True:\\n\\tprint(3)", SUM, [PASSED, WRONG, WRONG]),
    "no Python": ("def f(:\\n", SUM, [COMPILE] * 3),
    "parses, does not compile": ("return 3", SUM, [ERROR] * 3),
    "white space at line ends": ("print('3 ')", SUM, [WRONG] * 3),
    "class Solution": ("class Solution: ...\nprint(3)", SUM, [PASSED, WRONG, WRONG]),
    "a function": (CALL + "[x * n for x in xs]", TWICE, [PASSED] * 2),
    "a method": ("class Solution:\n    def scale(self, xs, n): return [x * n for x in xs]", TWICE, [PASSED] * 2),
    "a tuple": (CALL + "tuple(x * n for x in xs)", TWICE, [PASSED] * 2),
    "numbers as texts": (CALL + "[float(x * n) for x in xs]", TWICE, [WRONG, PASSED]),
    "recursion": (CALL + "[] if not xs else [xs[0] * n] + scale(xs[1:], n)", TWICE, [WRONG, PASSED]),
    "recursion in a class": ("class Solution:\n    def scale(self, xs, n):\n        return "
                             "[xs[0] * n] + self.scale(xs[1:], n) if xs else []", TWICE, [PASSED] * 2),
    "no such function": ("def times(xs, n):\n    return xs", TWICE, [COMPILE] * 2),
    "no def": ("scale = lambda xs, n: xs", TWICE, [COMPILE] * 2),
    "prints": ("print(end='[')\n" + CALL + "2", {**TWICE, "outputs": ["[2", "2"]}, [PASSED, WRONG]),
    "a fault and nothing expected": (CALL + "1 / 0", {**TWICE, "outputs": ["", "[]"]}, [PASSED, WRONG]),
    "not JSON within": (CALL + "[{1}]", {**TWICE, "outputs": ["", ""]}, [ERROR] * 2),
    "a text": (CALL + "'ab'", {**TWICE, "outputs": ["ab", '"ab"']}, [PASSED, WRONG]),
    "a line break behind the arguments": (CALL + "xs", {**TWICE, "inputs": ["[2, 4]\n2\n", "[]\n3"]}, [WRONG, PASSED]),
    "an imported name first": ("def search(a, b): return a in b",
                               {"inputs": ['"a"\n"ba"'], "outputs": ["true"], "fn_name": "search"}, [WRONG]),
    "expected line breaks": ("print(3)", {"inputs": [""], "outputs": ["3\r\n"]}, [WRONG]),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_as_released(name, bench):
    program, tests, expected = RELEASED[name]
    assert bench.outcomes(program, tests, as_released=True) == expected


def test_as_released_a_line_of_test_code_is_a_test_in_one_program_with_the_solution(bench):
    lines = "def check(f):\n    assert f(1) == 2\n\n    assert f(2) == 4\n    assert f(3) == 6\n"
    tests = {"import_prefix": "", "entry_point": "twice", "test_code": lines}
    assert bench.outcomes("def twice(x): return 4 if x == 2 else 2", tests, as_released=True) == [PASSED, PASSED, ERROR]
    assert bench.outcomes("raise SystemExit", tests, as_released=True) == [PASSED] * 3
    assert bench.outcomes("def twice(x): return '\\n'", tests, as_released=True) == [COMPILE] * 3
    alone = {**tests, "test_code": "assert twice(1) == 2"}
    assert bench.outcomes("def twice(x): return 2", alone, as_released=True) == [COMPILE], "no line behind the first"


def test_as_released_programs_are_scripts_and_each_test_has_a_process_of_its_own(bench):
    def outcomes(program, tests):
        return bench.outcomes(program, tests, as_released=True)

    lines = "import sys\ntotal = 0\ndef add(x):\n    global total\n    total += x\n"
    lines += "for line in sys.stdin:\n    add(sum(map(int, line.split())))\nprint(total)"
    assert outcomes(lines, SUM) == [PASSED] * 3 and bench.outcomes(lines, SUM) == [ERROR] * 3
    assert outcomes("print(3)\nraise SystemExit(1)", SUM) == [ERROR] * 3
    assert outcomes("print(Counter('aaa')['a'])", SUM) == [ERROR] * 3
    count = "n = 0\ndef scale(xs, k):\n    global n\n    n += 1\n    return [[2, 4], []][n - 1]"
    assert outcomes(count, TWICE) == [PASSED, WRONG] and bench.outcomes(count, TWICE) == [PASSED] * 2


def test_functions_that_do_not_end_or_end_the_process_leave_the_other_tests():
    tests = {"inputs": list("1234"), "outputs": list("1234"), "fn_name": "f"}

    def check(seconds):
        with closing(Loop(timeout_s=seconds)) as bench:
            late = "import time\ndef f(x):\n    while x == 2: pass\n    return x"
            assert bench.outcomes(late, tests) == [PASSED, LATE, PASSED, PASSED]
            assert bench.outcomes("def f(x):\n    while True: pass", tests, max_timeouts=1) == [LATE] * 4
            leaves = "import os\ndef f(x):\n    if x == 3: os._exit(x)\n    return x"
            assert bench.outcomes(leaves, tests) == [PASSED, PASSED, ERROR, PASSED]
            slow = f"import time\ndef f(x):\n    time.sleep({0.4 * seconds})\n    return x"
            assert bench.outcomes(slow, tests) == [PASSED] * 4, "each may take that long"

    with_patience(check, 0.7, 5, 60)


@pytest.mark.slow
def test_long_inputs_and_outputs(bench):
    numbers = " ".join(map(str, range(100_000)))
    tests = {"inputs": [numbers], "outputs": [numbers.replace(" ", "\n")]}
    assert bench.outcomes("print(*input().split(), sep='\\n')", tests) == [PASSED]
    small = LocalSandbox(max_output=1000)
    program = "print(*input().split(), sep='\\n')"
    with pytest.raises(ValueError, match=f"{len(numbers)} characters, but the runner keeps 1000: set max_output"):
        bench.loop.run_until_complete(_and_close(CodeTests(small), program, tests))


async def _and_close(code, program, tests):
    try:
        return await code.run(program, tests)
    finally:
        await code.close()


@pytest.mark.parametrize(
    ("said", "expected", "same", "released"),
    [
        ("3\n", "3", True, True),
        ("3 \n4", "3\n4  \n", True, False),
        ("3\n4", "3\r\n4\r\n", True, False),
        (" 3", "3", True, False),
        ("3\n\n4", "3\n4", False, False),
        ("", "\n", True, True),
        ("3.0", "3", True, False),
        ("1.5", "1.50", True, False),
        ("yes\n1e3 -0", "yes\n1000  0", True, False),
        ("yes 1.0", "yes 1", False, False),
        ("1 2 3", "1 2", False, False),
        ("0.30000000000000004", "0.3", False, False),
        ("nan", "NaN", False, False),
        ("YES", "yes", False, False),
    ],
)
def test_when_outputs_are_the_same(said, expected, same, released):
    assert (same_output(said, expected), same_ends(said, expected)) == (same, released)


@pytest.mark.parametrize(
    ("said", "expected", "same"),
    [
        ("[1,2]", "[1, 2]", True),
        ("1.0", "1", True),
        ("0.30000000000000004", "0.3", False),
        ('"a"', "a", True),
        ('{"a":[1]}', '{ "a": [1] }', True),
        ("NaN", "NaN", False),
        ("", "null", False),
        ("1" * 5000, "1" * 5000, False),
        ("[" * 100_000, "1", False),
    ],
)
def test_when_results_are_the_same(said, expected, same):
    assert same_json(said, expected) is same


class Counting:
    """A runner that counts what runs at once, and fails as often as it is told."""

    max_output = 1000

    def __init__(self, failures=0, error=None):
        self.failures, self.error = failures, error or InfrastructureError("down")
        self.running = self.most = self.calls = 0

    async def run(self, code, stdin=""):
        self.calls += 1
        if self.failures:
            self.failures -= 1
            raise self.error
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return Run(RunStatus.FINISHED, "1" if "compiles(" in code.splitlines()[-1] else stdin)

    async def close(self):
        return None


def echoes(count):
    texts = [str(number) for number in range(count)]
    return {"inputs": texts, "outputs": texts}


def test_tests_run_at_once_within_the_bound_over_all_solutions():
    async def scenario(runner):
        code = CodeTests(runner, concurrency=3)
        return await asyncio.gather(*(code.run("x", echoes(6)) for _ in range(2)))

    runner = Counting()
    reports = asyncio.run(scenario(runner))
    assert [report.share_passed for report in reports] == [1.0, 1.0] and runner.most == 3
    assert asyncio.run(scenario(runner)) == reports, "another event loop"


def test_a_failing_runner_is_tried_again_and_then_is_nobodys_score(monkeypatch):
    monkeypatch.setattr("rollout.rewards.code.solution_tests.BACKOFF_S", 0.001)
    runner = Counting(failures=2)
    assert asyncio.run(CodeTests(runner, retries=2).run("x", echoes(2))).share_passed == 1.0
    with pytest.raises(InfrastructureError, match="down"):  # and no group of errors, nor a score
        asyncio.run(CodeTests(Counting(failures=100), retries=2).run("x", echoes(2)))
    for_good = Counting(100, PermanentFailure("no key"))
    with pytest.raises(PermanentFailure):
        asyncio.run(CodeTests(for_good, retries=2).run("x", echoes(2)))
    assert for_good.calls == 1

    class Later(Counting):
        async def run(self, code, stdin=""):
            return await super().run(code, stdin) if self.calls == 0 else await self.fail()

        async def fail(self):
            raise self.error

    with pytest.raises(InfrastructureError, match="down"):
        asyncio.run(CodeTests(Later(), retries=0).run("x", echoes(4)))


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"inputs": ["1"], "outputs": []}, "as long as each other"),
        ({"inputs": "12", "outputs": "34"}, "as long as each other"),
        ({"inputs": ["x" * (MAX_STDIN_BYTES + 1)], "outputs": ["1"]}, f"expected at most {MAX_STDIN_BYTES}"),
        ({**SUM, "fn_name": "a b"}, "name of a function, or null, as fn_name; found 'a b'"),
        ({**SUM, "public": 4}, "0 to 3 as public; found 4"),
        ({"test_code": "def check(:"}, "test_code is not Python"),
        ({"test_code": 7}, "expected a text as test_code; found int"),
    ],
)
def test_tests_that_are_none(tests, message):
    with pytest.raises(ValueError, match=message):
        check_tests(tests)
    with pytest.raises(ValueError, match=message):
        asyncio.run(CodeTests(Counting()).run("x", tests))
