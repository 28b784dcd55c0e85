"""What a program reads from its standard input, in the local sandbox and through SandboxFusion."""

import asyncio
import os
import time

import pytest

from rollout.tools.python.base import MAX_STDIN_BYTES, Run, RunStatus
from rollout.tools.python.fusion import SandboxFusion
from rollout.tools.python.local import LocalSandbox
from tests.rollout.tools.conftest import descendants
from tests.rollout.tools.test_sandbox_fusion import service

LINES = "import sys\nfor line in sys.stdin:\n    a, b = map(int, line.split())\n    print(a + b)"
BIG = "".join(f"{i} {i}\n" for i in range(400_000))  # 5 MB: many times what a pipe holds
COUNT = "import sys\ntext = sys.stdin.read()\nprint(len(text), sum(map(int, text.split())))"
READERS = {
    "line by line": (LINES, "1 2\n30 40\n", "3\n70\n"),
    "input()": ("print(int(input()) * 2)\nprint(input())", "21\nend", "42\nend\n"),
    "all at once": ("import sys\nprint(sys.stdin.buffer.read())", "a\n", "b'a\\n'\n"),
    "lines of bytes": ("import sys\nread = sys.stdin.buffer.readline\nprint(read(), read())", "a\nb", "b'a\\n' b'b'\n"),
    "the descriptor": ("import os\nprint(os.read(0, 100))", "xyz", "b'xyz'\n"),
    "open(0)": ("print(open(0).read().split())", "1 2\n3", "['1', '2', '3']\n"),
    "not ASCII": ("print(input()[::-1])", "数学🐎", "🐎学数\n"),
    "carriage returns": ("print([input(), input()])", "a\r\nb", "['a', 'b']\n"),
    "more than a pipe holds": (COUNT, BIG, f"{len(BIG)} {400_000 * 399_999}\n"),
    "a part of it": ("print(input())", BIG, "0 0\n"),
    "nothing of it": ("print('deaf')", BIG, "deaf\n"),
    "after closing it": ("import os\nos.close(0)\nprint('closed')", BIG, "closed\n"),
    "half a surrogate pair": ("print(input())", "\ud800", "?\n"),
}


@pytest.fixture(
    scope="module",
    params=[("namespaces", "landlock", "seccomp"), pytest.param(("landlock", "seccomp"), marks=pytest.mark.slow)],
    ids=["namespaces", "landlock"],
)
def bench(request, make_bench):
    bench = make_bench(timeout_s=60, mechanisms=request.param)
    try:
        bench.do(bench.sandbox.start())
    except RuntimeError as error:
        pytest.skip(f"these cannot confine here: {error}")
    return bench


@pytest.mark.parametrize("name", READERS)
def test_it_is_read_to_its_end_and_no_further(name, bench):
    code, stdin, output = READERS[name]
    assert bench.do(bench.sandbox.run(code, stdin)) == Run(RunStatus.FINISHED, output)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_through_sandbox_fusion_too(name):
    code, stdin, output = READERS[name]

    async def scenario():
        async with service() as (url, requests):
            fusion = SandboxFusion(url, timeout_s=60)
            try:
                return await fusion.run(code, stdin), requests
            finally:
                await fusion.close()

    run, [body] = asyncio.run(scenario())
    assert run == Run(RunStatus.FINISHED, output)
    assert body["stdin"] == stdin.replace("\ud800", "?")


def test_without_one_there_is_an_end_at_once(bench):
    run = bench.do(bench.sandbox.run("import sys\nprint([sys.stdin.read()], sys.stdin.isatty())\ninput()"))
    assert run.status is RunStatus.FAILED and run.output.startswith("[''] False\n")
    assert run.output.endswith("EOFError: EOF when reading a line\n")


def test_each_reads_its_own(bench):
    async def all_of_them():
        big = [f"{i}\n" + "x" * 200_000 for i in range(12)]
        return await asyncio.gather(*(bench.sandbox.run("print(input(), len(input()))", text) for text in big))

    assert [run.output for run in bench.do(all_of_them())] == [f"{i} 200000\n" for i in range(12)]


def test_one_that_does_not_read_holds_up_nobody(bench):
    async def scenario():
        deaf = asyncio.create_task(bench.sandbox.run("while True: pass", BIG))
        await asyncio.sleep(0)
        other = await bench.sandbox.run("print(input())", "heard")
        was_done = deaf.done()
        deaf.cancel()
        return other, was_done

    assert bench.do(scenario()) == (Run(RunStatus.FINISHED, "heard\n"), False)


def test_one_that_does_not_read_dies_on_time(make_bench):
    bench = make_bench(timeout_s=0.5, warm=1)
    assert bench.do(bench.sandbox.run("while True: pass", BIG)).status is RunStatus.TIMEOUT


def until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in 300 s"
        time.sleep(0.01)


@pytest.mark.slow
def test_nothing_of_it_is_left_open_or_running(make_bench):
    bench = make_bench(timeout_s=20, warm=1)
    assert bench.do(bench.sandbox.run("1")).output == "1\n"
    server = descendants(bench.monitor)[0]
    until(lambda: len(descendants(server)) == 2)  # the origin, and the interpreter that it makes ready for the next one
    before = len(os.listdir(f"/proc/{server}/fd"))
    for code in ("print(len(input()))", "1", "import os\nos._exit(3)", "import os\nos.close(0)\n1"):
        bench.do(bench.sandbox.run(code, BIG))

    async def cancelled():
        task = asyncio.create_task(bench.sandbox.run("while True: pass", BIG))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    bench.do(cancelled())
    # not more than before, which may still have held the two ends by which the next interpreter was made
    until(lambda: len(descendants(server)) == 2 and len(os.listdir(f"/proc/{server}/fd")) <= before)
    assert bench.do(bench.sandbox.run("print(input())", "still there")).output == "still there\n"


def test_a_program_cannot_read_what_was_meant_for_another(bench):
    """All that its descriptors give: its own input, and no program's text."""
    code = (
        "import os\nfor fd in range(64):\n    try:\n        os.set_blocking(fd, False)\n"
        "        print(fd, os.read(fd, 1000))\n    except OSError:\n        pass"
    )

    async def scenario():
        other = asyncio.create_task(bench.sandbox.run("import time\ntime.sleep(100)", "secret " * 50_000))
        await asyncio.sleep(0.05)
        run = await bench.sandbox.run(code, "mine")
        other.cancel()
        return run

    assert bench.do(scenario()).output == "0 b'mine'\n"


@pytest.mark.parametrize("runner", [LocalSandbox(), SandboxFusion("http://127.0.0.1:9")], ids=["local", "fusion"])
def test_too_much_is_refused_before_anything_starts(runner):
    with pytest.raises(ValueError, match=f"{MAX_STDIN_BYTES + 1} bytes; expected at most {MAX_STDIN_BYTES}"):
        asyncio.run(runner.run("1", "x" * (MAX_STDIN_BYTES + 1)))
