"""A notebook: what its cells leave behind, through the real sandbox."""

import asyncio

import pytest

from rollout.environments.notebook import Notebook
from rollout.tools.limits import ToolLimits
from rollout.tools.python.local import LocalSandbox
from rollout.tools.python.tool import PythonTool
from rollout.trajectory import Action, ActionKind, CallOutcome, Task, ToolCall, ToolRequest

OK, EMPTY, ERROR, REFUSED = CallOutcome.OK, CallOutcome.EMPTY, CallOutcome.ERROR, CallOutcome.REFUSED
TASK = Task("1", "?", ("1",), "s")


class CountedSandbox(LocalSandbox):
    runs = 0

    async def run(self, code, stdin=""):
        self.runs += 1
        return await super().run(code, stdin)


class Bench:
    """Synchronous notebooks over one sandbox."""

    def __init__(self):
        self.loop, self.sandbox = asyncio.new_event_loop(), CountedSandbox(timeout_s=30)
        limits = ToolLimits(timeout_s=60, cache_size=100)
        self.factory = Notebook({"python": PythonTool(self.sandbox)}, watched=("t",), limits=limits)

    def step(self, notebook, *cells):
        requests = tuple(ToolRequest("python", {"code": cell}) for cell in cells)
        results = self.loop.run_until_complete(notebook.step(Action(ActionKind.CALL, requests))).results
        return [ToolCall(0, request, result, 0.0) for request, result in zip(requests, results, strict=True)]

    def texts(self, notebook, *cells):
        return [self.step(notebook, cell)[0].result.text for cell in cells]


@pytest.fixture(scope="module")
def bench():
    bench = Bench()
    yield bench
    bench.loop.run_until_complete(bench.factory.close())
    bench.loop.close()


def test_what_a_cell_defines_later_cells_have_and_what_it_printed_is_not_shown_again(bench):
    notebook, other = bench.factory(TASK), bench.factory(TASK)
    cells = ["t = 37\nprint('begun')", "t = t + 12", "def f(n):\n    return n + t", "f(1)", "```python\nt = f(2)\n```"]
    assert bench.texts(notebook, *cells) == ["begun\nt = 37", "t = 49", "t = 49", "50\nt = 49", "t = 51"]
    seen = bench.texts(notebook, "sorted(name for name in globals() if not name.startswith('__'))")
    assert seen == ["['f', 't']\nt = 51"], "the replay leaves no name behind"
    assert bench.step(other, "t")[0].result.outcome is ERROR, "every trajectory has its own"


def test_a_cell_that_fails_half_way_spoils_what_follows_and_does_not_end_the_notebook(bench):
    notebook = bench.factory(TASK)
    bench.texts(notebook, "t = 37")
    [failed] = bench.step(notebook, "t = 25; t += s")
    assert (failed.result.outcome, failed.result.text) == (ERROR, "NameError: name 's' is not defined\nt = 25")
    assert bench.texts(notebook, "t = t + 10", "raise SystemExit", "t = 37", "t = t + 25")[0] == "t = 35"
    assert bench.texts(notebook, "t = t + 10") == ["t = 72"]
    [unread] = bench.step(notebook, "t = t + 1 2")
    assert unread.result.outcome is ERROR and unread.result.text.startswith("SyntaxError: ")
    assert bench.texts(notebook, "t") == ["72\nt = 72"]


def test_a_cell_may_take_the_names_that_the_replay_uses(bench):
    notebook = bench.factory(TASK)
    assert bench.texts(notebook, "t = 1", "exec = print = repr = None", "t = t + 1") == ["t = 1", "t = 1", "t = 2"]


def test_a_cell_that_was_stopped_leaves_nothing_behind(bench):
    notebook = bench.factory(TASK)
    [_, stopped] = [bench.step(notebook, cell)[0] for cell in ("t = 1", "t = 2\nimport os\nos.kill(os.getpid(), 9)")]
    assert stopped.result.outcome is ERROR and stopped.result.detail
    assert bench.texts(notebook, "t") == ["1\nt = 1"]


def test_to_resume_is_to_have_lived_through_it(bench):
    cells = ["t = 37", "t = 25; t += s", "t = t + 1", ""]
    lived, resumed = bench.factory(TASK), bench.factory(TASK)
    calls = [bench.step(lived, cell)[0] for cell in cells]
    assert [call.result.outcome for call in calls] == [OK, ERROR, OK, REFUSED]
    bench.loop.run_until_complete(resumed.resume([], calls))
    assert bench.texts(resumed, "t * 2") == bench.texts(lived, "t * 2") == ["52\nt = 26"]


def test_cells_of_one_action_run_in_order_and_equal_histories_once(bench):
    first, second = bench.factory(TASK), bench.factory(TASK)
    assert [call.result.text for call in bench.step(first, "t = 5", "t = t * 3", "t = t - 1")][2] == "t = 14"
    before = bench.sandbox.runs
    assert bench.texts(second, "t = 5", "t = t * 3", "t = t - 1") == ["t = 5", "t = 15", "t = 14"]
    assert bench.sandbox.runs == before


def test_where_tools_are_off_nothing_is_kept(bench):
    notebook = bench.factory(TASK, tools_enabled=False)
    assert bench.step(notebook, "t = 1")[0].result.outcome is REFUSED and notebook._cells == []
    with pytest.raises(ValueError, match="cells is 'shell', but the tools are .'python'.; name one"):
        Notebook({"python": PythonTool(bench.sandbox)}, cells="shell")
