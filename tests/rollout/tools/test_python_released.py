"""The Python tool as SOD released it: which programs its wrapper breaks, what it cuts, what it hides."""

import asyncio

import pytest

from rollout.tools.python.base import Run, RunStatus
from rollout.tools.python.released import cut_in_the_middle, last_line_printed
from rollout.tools.python.tool import NOTHING_PRINTED, PythonTool
from rollout.trajectory import CallOutcome, InfrastructureError

OK, ERROR = CallOutcome.OK, CallOutcome.ERROR


@pytest.fixture(scope="module")
def bench(make_bench):
    return make_bench(timeout_s=30)


def called(tool, code):
    return tool.call({"code": code})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = 1\nx", "x = 1\nprint(x)\npass"),
        ("print(1)", "print(1)\npass"),
        ("printed = 1", "printed = 1\npass"),
        ("for i in a:\n    f(i)", "for i in a:\nprint(    f(i))\npass"),
        ("use this\n```python\nx = 2\nx\n```\nor\n```python\ny\n```", "x = 2\nprint(x)\npass"),
        ("", ""),
    ],
)
def test_what_the_wrapper_makes_of_a_program(code, expected):
    assert last_line_printed(code) == expected


BROKEN = {  # docs/algorithms/sod.md; here with what each shows without the wrapper
    "a loop's body": ("for i in range(2):\n    print(i)", "0\n1", "IndentationError"),
    "a function's body": ("print(1)\ndef f():\n    return 2", "1", "IndentationError"),
    "an import": ("print(1)\nimport math", "1", "SyntaxError"),
    "a comment": ("print(1)\n# the end", "1", "SyntaxError"),
    "a closing bracket": ("print(1)\nx = [\n    2,\n]", "1", "SyntaxError"),
    "an assignment": ("print(1)\nb = 1 + 1", "1", "TypeError: 'b' is an invalid keyword argument for print()"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_it_breaks_valid_programs(name, bench):
    code, shown, error = BROKEN[name]
    assert (bench.run(code).outcome, bench.run(code).text) == (OK, shown)
    result = bench.do(called(PythonTool(bench.sandbox, print_last_line=True), code))
    assert result.outcome is ERROR and error in result.text


def test_programs_that_survive_it(bench):
    tool = PythonTool(bench.sandbox, print_last_line=True)
    for code, text in (("1 + 1", "2"), ("x = [3]\nx.sort()", "None"), ("print(5)", "5"), ("print\nprint", None)):
        result = bench.do(called(tool, code))
        assert (result.outcome, result.text) == ((OK, text) if text else (CallOutcome.EMPTY, result.text)), code
    assert bench.do(called(tool, "print(\n    1,\n)")).text == "\n1 None", "the last line is print())"
    assert bench.do(called(tool, "")).outcome is CallOutcome.REFUSED


def test_the_cut_keeps_both_halves(bench):
    assert cut_in_the_middle("x" * 256, 256) == "x" * 256
    assert cut_in_the_middle("a" * 200 + "b" * 100, 256) == "a" * 128 + "...(truncated)..." + "a" * 28 + "b" * 100
    tool = PythonTool(bench.sandbox, cut_at=256)
    assert bench.do(called(tool, "'a' * 200 + 'b' * 200")).text == "a" * 128 + "...(truncated)..." + "b" * 128
    failed = bench.do(called(tool, "print('a' * 200)\n1 / 0"))
    assert failed.outcome is ERROR and len(failed.text) == 256 + 17 and failed.text.endswith("division by zero")
    assert len(bench.run("'a' * 300").text) == 300
    with pytest.raises(ValueError, match="cut_at is 1"):
        PythonTool(bench.sandbox, cut_at=1)


class Ends:
    """A runner whose every program ends so."""

    max_output = 1000

    def __init__(self, end):
        self.end = end

    async def run(self, code, stdin=""):
        if isinstance(self.end, Exception):
            raise self.end
        return self.end

    async def close(self):
        return None


@pytest.mark.parametrize(
    ("end", "outcome", "hidden", "told"),
    [
        (Run(RunStatus.FINISHED, "1\n"), OK, "1", "1"),
        (Run(RunStatus.FINISHED, ""), CallOutcome.EMPTY, NOTHING_PRINTED, NOTHING_PRINTED),
        (Run(RunStatus.TIMEOUT, "so far", "late"), CallOutcome.TIMEOUT, "no stdout here", "so far\nlate"),
        (Run(RunStatus.FAILED, "Traceback"), ERROR, "Traceback", "Traceback"),
        (Run(RunStatus.FAILED, "out", "killed"), ERROR, "out", "out\nkilled"),
        (InfrastructureError("down"), ERROR, "no stdout here", None),
    ],
)
def test_failures_that_look_alike(end, outcome, hidden, told):
    result = asyncio.run(called(PythonTool(Ends(end), hide_failures=True), "1"))
    assert (result.outcome, result.text) == (outcome, hidden)
    if told is None:
        assert "down" in result.detail
        with pytest.raises(InfrastructureError, match="down"):
            asyncio.run(called(PythonTool(Ends(end)), "1"))
    else:
        shown = asyncio.run(called(PythonTool(Ends(end)), "1"))
        assert (shown.outcome, shown.text) == (outcome, told)
