"""The local sandbox with programs that mean well: results, concurrency, cancellation, the pool."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from experiments.registry.project import ROOT
from rollout.tools.limits import LimitedTool, ToolLimits
from rollout.tools.python.connection import SandboxServer
from rollout.tools.python.local import LocalSandbox, UnprotectedError
from rollout.tools.python.probe import PROTECTIONS
from rollout.tools.python.tool import PythonTool
from rollout.trajectory import CallOutcome, InfrastructureError
from tests.processes import with_patience
from tests.rollout.tools.conftest import descendants

OK, EMPTY, ERROR, TIMEOUT = CallOutcome.OK, CallOutcome.EMPTY, CallOutcome.ERROR, CallOutcome.TIMEOUT


@pytest.fixture(scope="module")
def bench(make_bench):
    return make_bench(timeout_s=600)


PROGRAMS = {
    "the last expression": ("1 + 1", "2"),
    "print": ("print('a', 'b')", "a b"),
    "both": ("print('first')\n'second'", "first\nsecond"),
    "a text as print shows it": ("'a\\nb'", "a\nb"),
    "only the last expression": ("1\n2\n3", "3"),
    "None is not shown": ("print('x')", "x"),
    "a list that was sorted": ("x = [2, 1]\nx.sort()\nx", "[1, 2]"),
    "a semicolon": ("x = 5; x * 2", "10"),
    "an expression over lines": ("sum(\n    i for i in range(5)\n)", "10"),
    "functions": ("def f(n):\n    if n < 2:\n        return n\n    return f(n - 1) + f(n - 2)\n\nf(15)", "610"),
    "main": ("def main():\n    print('ran')\n\nif __name__ == '__main__':\n    main()", "ran"),
    "half of a surrogate pair": ("len('\ud83d'), ascii('\ud83d')", "(1, \"'\\\\ufffd'\")"),
    "unicode": ("'žluťoučký kůň 🐎 数学'", "žluťoučký kůň 🐎 数学"),
    "big numbers": ("len(str(7 ** 20_000))", "16902"),
    "exact": ("from fractions import Fraction\nFraction(1, 3) + Fraction(1, 6)", "1/2"),
    "modules": (
        "import json, math, re, statistics, datetime, itertools, decimal, sqlite3, zlib, hashlib, ssl, uuid\n"
        "print(math.comb(10, 3), statistics.median([3, 1, 2]), datetime.date(2024, 2, 29).isoformat())",
        "120 2 2024-02-29",
    ),
    "a module of many files": ("import xml.etree.ElementTree as e\ne.fromstring('<a><b/></a>')[0].tag", "b"),
    "asyncio": ("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 3\nasyncio.run(f())", "3"),
    "threads": ("from concurrent.futures import ThreadPoolExecutor as T\nlist(T(4).map(abs, [-1, 2]))", "[1, 2]"),
    "files of its own": ("import tempfile\nf = tempfile.TemporaryFile('w+')\nf.write('x')\nf.seek(0)\nf.read()", "x"),
    "a database": (
        "import sqlite3\nwith sqlite3.connect('x.db') as d:\n    d.execute('create table t (a)')\n"
        "    d.execute('insert into t values (7)')\nd.close()\n"
        "sqlite3.connect('x.db').execute('select * from t').fetchall()",
        "[(7,)]",
    ),
    "pickles of its own classes": ("import pickle\nclass A: x = 4\npickle.loads(pickle.dumps(A())).x", "4"),
    "dataclasses": ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nP(1)", "P(x=1)"),
    "future": ("from __future__ import annotations\ndef f(x: nothing): return 1\nf(2)", "1"),
    "at exit": ("import atexit\natexit.register(print, 'end')\nprint('start')", "start\nend"),
    "exit": ("print('a')\nexit()\nprint('b')", "a"),
    "quit": ("def main():\n    print('a', end='')\n    quit()\nmain()\nprint('b')", "a"),
    "exit is the last expression": ("import atexit\natexit.register(print, 'end')\nexit(0)", "end"),
    "stderr too": ("import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c')", "a\nb\nc"),
    "no warnings": ("print('\\d')", "\\d"),
    "a fence": ("```python\nx = 4\nx\n```", "4"),
    "a fence without a name, not closed": ("\n```\n5", "5"),
    "indented": ("\n    x = 6\n    x\n", "6"),
    "in one line with its tag": (" import math\nmath.floor(2.5)\n", "2"),
    "an own display": ("import sys\nsys.displayhook = lambda x: print('<', x, '>')\n8", "< 8 >"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ordinary_programs(name, bench):
    code, expected = PROGRAMS[name]
    result = bench.run(code)
    assert (result.outcome, result.text) == (OK, expected)


SILENT = "x = 1", "def f(): return 1", "None", "print()", "print(end='')", "# nothing", "[].sort()"


@pytest.mark.parametrize("code", SILENT)
def test_nothing_printed(code, bench):
    result = bench.run(code)
    assert (result.outcome, result.text) == (EMPTY, "The program printed nothing.")


TRACEBACK = "Traceback (most recent call last):\n"
ERRORS = {
    "1 / 0": TRACEBACK + '  File "<program>", line 1, in <module>\n    1 / 0\nZeroDivisionError: division by zero',
    "x = 1\ndef f():\n    return y\nf()": TRACEBACK + '  File "<program>", line 4, in <module>\n'
    "    f()\n  File \"<program>\", line 3, in f\n    return y\nNameError: name 'y' is not defined",
    "x = (1": "  File \"<program>\", line 1\n    x = (1\n        ^\nSyntaxError: '(' was never closed",
    "import sys\nsys.exit('no answer')": "no answer",
    "exit('no answer')": "no answer",
    "print(1)\0": "SyntaxError: source code string cannot contain null bytes",
    "\0": "SyntaxError: source code string cannot contain null bytes",
    "x = '\0'\nx": "SyntaxError: source code string cannot contain null bytes",
    "import signal\nsignal.raise_signal(40)": "The program was ended by the signal SIG40.",
    "import sys\nsys.exit(3)": "The program ended with exit code 3 and printed nothing.",
    "class A:\n    def __repr__(self): 1 / 0\nA()": TRACEBACK + '  File "<program>", line 3, in <module>\n'
    '    A()\n  File "<program>", line 2, in __repr__\n    def __repr__(self): 1 / 0\n'
    "ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("code", ERRORS)
def test_errors_are_short_and_say_where(code, bench):
    result = bench.run(code)
    assert (result.outcome, result.text) == (ERROR, ERRORS[code])


def test_long_output_keeps_both_ends(make_bench):
    bench = make_bench(timeout_s=30, max_output=1000)
    text = bench.run("for i in range(5000): print('line', i)\n1 / 0").text
    assert text.startswith("line 0\nline 1\n") and text.endswith("ZeroDivisionError: division by zero")
    assert "output left out" in text and len(text) < 1300


@pytest.mark.parametrize(
    ("arguments", "outcome", "text"),
    [
        ({"code": 3}, ERROR, "python expects a program text as its code; found int"),
        ({"code": "```python\n```"}, CallOutcome.REFUSED, "The program was empty, so nothing was run."),
        ({"code": "x" * 70_000}, ERROR, "The program is longer than 60000 bytes and was not run."),
    ],
)
def test_what_is_not_run_starts_nothing(arguments, outcome, text):
    sandbox = LocalSandbox()
    result = asyncio.run(PythonTool(sandbox).call(arguments))
    assert (result.outcome, result.text) == (outcome, text)
    assert sandbox._server is None


def test_a_deadline_is_told_apart_and_keeps_what_was_printed(make_bench):
    def check(seconds):
        result = make_bench(timeout_s=seconds).run("print('before')\nimport time\ntime.sleep(36000)")
        assert result.outcome is TIMEOUT
        assert result.text == f"before\nThe program did not finish within {seconds:g} s and was stopped."

    with_patience(check, 0.5, 5.0, 60.0)


def test_the_deadline_begins_with_the_program(make_bench):
    def check(seconds):
        bench = make_bench(timeout_s=seconds, warm=0)
        bench.run("1")
        zygote = descendants(bench.monitor)[1]

        async def held_up():
            task = asyncio.create_task(bench.tool.call({"code": "print('innocent')"}))
            os.kill(zygote, signal.SIGSTOP)
            await asyncio.sleep(2 * seconds)
            os.kill(zygote, signal.SIGCONT)
            return await task

        assert bench.do(held_up()).text == "innocent"

    with_patience(check, 0.5, 5.0, 20.0)


@pytest.mark.slow
def test_a_crowd_makes_no_program_late(make_bench):
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint('in time')"

    def check(seconds):
        bench = make_bench(timeout_s=seconds)
        limited = LimitedTool(bench.tool, ToolLimits(timeout_s=5 * seconds, concurrency=200))

        async def crowd():
            return await asyncio.gather(*(limited.call({"code": code + f" # {n}"}) for n in range(60)))

        assert {result.text for result in bench.do(crowd())} == {"in time"}

    with_patience(check, 2.0, 6.0)


def test_descriptors_are_waited_for(make_bench):
    bench = make_bench(warm=0)
    bench.run("1")
    server = descendants(bench.monitor)[0]
    taken = {int(fd) for fd in os.listdir(f"/proc/{server}/fd")}
    room = [fd for fd in range(1000) if fd not in taken][3] + 1  # a program takes four, and two stay while it runs
    resource.prlimit(server, resource.RLIMIT_NOFILE, (room, room))

    async def several():
        codes = [f"import time; time.sleep(0.1)\n{i}" for i in range(4)]
        return await asyncio.gather(*(bench.tool.call({"code": code}) for code in codes))

    assert [result.text for result in bench.do(several())] == ["0", "1", "2", "3"]


def test_many_at_once(bench):
    async def all_of_them():
        codes = [f"import time; time.sleep(0.05)\n{i} * {i}" for i in range(16)]
        return await asyncio.gather(*(bench.tool.call({"code": code}) for code in codes))

    assert [result.text for result in bench.do(all_of_them())] == [str(i * i) for i in range(16)]


def test_they_run_at_the_same_time(bench):
    async def both(seconds):
        nap = f"import time\nstart = time.time()\ntime.sleep({seconds})\n(start, time.time())"
        results = await asyncio.gather(*(bench.tool.call({"code": nap}) for _ in range(bench.sandbox.concurrency)))
        return [eval(result.text) for result in results]

    def check(seconds):
        spans = bench.do(both(seconds))
        assert max(start for start, _ in spans) < min(end for _, end in spans)

    with_patience(check, 0.3, 3.0, 20.0)


def test_cancelling_stops_the_program(bench):
    async def scenario():
        task = asyncio.create_task(bench.tool.call({"code": "while True: pass"}))
        zygote = descendants(bench.monitor)[1]
        while not (busy := [pid for pid in descendants(zygote) if _cpu(pid) > 5]):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone(busy)

    assert bench.run("1").text == "1"
    bench.do(asyncio.wait_for(scenario(), 300))  # the program's deadline is at 600 s
    assert bench.run("2").text == "2"


async def gone(pids):
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        await asyncio.sleep(0.01)


def _cpu(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])  # ticks of 10 ms


def test_limits_around_the_tool_make_a_late_one_a_result(bench):
    limits = ToolLimits(timeout_s=0.3, timeout_is_infrastructure=False)
    result = bench.do(LimitedTool(bench.tool, limits).call({"code": "while True: pass"}))
    assert result.outcome is TIMEOUT
    assert bench.run("3").text == "3"


@pytest.mark.slow
def test_interpreters_wait_and_are_made_again(make_bench):
    async def idle(count):
        while len(descendants(bench.monitor)) != 2 + count:
            await asyncio.sleep(0.01)
        return set(descendants(bench.monitor))

    bench = make_bench(timeout_s=30, warm=3)
    bench.do(bench.sandbox.start())
    first = bench.do(asyncio.wait_for(idle(3), 300))
    assert bench.run("import os; os.getpid()").outcome is OK
    second = bench.do(asyncio.wait_for(idle(3), 300))
    assert len(first & second) == 4, "server, zygote and two interpreters stayed, one was used and replaced"
    used = {bench.run("import os; os.getpid()").text for _ in range(8)}
    assert len(used) == 8, "each is used once"


@pytest.mark.slow
def test_waiting_interpreters_that_die_are_replaced(make_bench):
    bench = make_bench(timeout_s=30, warm=2)
    bench.do(bench.sandbox.start())
    assert bench.run("1").text == "1"
    server, zygote = descendants(bench.monitor)[:2]
    for pid in descendants(zygote):
        os.kill(pid, signal.SIGKILL)
    assert bench.run("2").text == "2"
    assert descendants(bench.monitor)[:2] == [server, zygote]


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1, 2], ids=["monitor", "server", "zygote"])
def test_a_server_that_dies_is_infrastructure_and_comes_back(which, make_bench):
    bench = make_bench(timeout_s=30)

    async def scenario():
        await bench.sandbox.start()
        task = asyncio.create_task(bench.tool.call({"code": "import time; time.sleep(100)"}))
        await asyncio.sleep(0.05)
        everyone = [bench.monitor, *descendants(bench.monitor)]
        os.kill(everyone[which], signal.SIGKILL)
        with pytest.raises(InfrastructureError, match="server ended"):
            await asyncio.wait_for(task, 300)
        await gone(everyone)
        return await bench.tool.call({"code": "4"})

    assert bench.do(asyncio.wait_for(scenario(), 600)).text == "4"


@pytest.mark.slow
def test_a_new_event_loop_gets_a_new_server_and_a_second_one_is_refused():
    tool = PythonTool(LocalSandbox(timeout_s=30, warm=0))

    async def first():
        with pytest.raises(RuntimeError, match="one event loop at a time"):
            await asyncio.to_thread(asyncio.run, tool_call_after(tool))
        return await tool.call({"code": "1"})

    async def tool_call_after(tool):
        return await tool.call({"code": "0"})

    async def begun():
        await tool.call({"code": "1"})
        return await first()

    assert asyncio.run(begun()).text == "1"
    process = tool.runner._server.process
    assert asyncio.run(tool.call({"code": "2"})).text == "2"
    assert process.wait(300) is not None
    asyncio.run(tool.close())


def test_what_protects_is_listed(bench, caplog):
    bench.do(bench.sandbox.start())
    found = {p.name: p for p in bench.sandbox.protections()}
    assert found.keys() == PROTECTIONS.keys()
    assert all(p.active and p.how for p in found.values() if p.essential)
    assert "seccomp" in found["network"].how


def test_what_protects_is_logged_once(make_bench, caplog):
    bench = make_bench(timeout_s=30)
    with caplog.at_level("INFO", "rollout.tools.python.local"):
        bench.run("1")
        everyone = [bench.monitor, *descendants(bench.monitor)]
        os.kill(bench.monitor, signal.SIGKILL)
        bench.do(asyncio.wait_for(gone(everyone), 300))
        assert bench.run("2").text == "2"
    assert len([r for r in caplog.records if "network: " in r.message]) == 1


@pytest.mark.parametrize(
    ("mechanisms", "holes"),
    [
        (("seccomp",), ("file reads: NOT protected", "file writes: NOT")),
        (("namespaces",), ("network: NOT", "process tree: NOT")),
    ],
)
def test_it_refuses_without_an_essential_protection(mechanisms, holes):
    async def scenario():
        sandbox = LocalSandbox(mechanisms=mechanisms, warm=0)
        with pytest.raises(UnprotectedError, match="cannot confine") as error:
            await sandbox.run("print('ran')")
        assert sandbox._server is None
        return str(error.value)

    message = asyncio.run(scenario())
    assert all(hole in message for hole in holes) and "allow_unprotected" in message


@pytest.mark.slow
def test_unprotected_when_told_so(make_bench, caplog):
    bench = make_bench(timeout_s=30, mechanisms=(), allow_unprotected=True, warm=0)
    assert bench.run("6 * 7").text == "42"
    assert "UNPROTECTED" in caplog.text
    assert not {p.name: p for p in bench.sandbox.protections()}["file reads"].active


@pytest.mark.slow
def test_packages_are_there_when_named(make_bench):
    bench = make_bench(timeout_s=60, packages=("sympy", "numpy"), warm=1)
    code = "import numpy as np, sympy\nx = sympy.Symbol('x')\nprint(np.arange(3).sum(), sympy.integrate(x**2, x))"
    assert bench.run(code).text == "3 x**3/3"
    assert "ModuleNotFoundError" in bench.run("import torch").text
    write = bench.run("import sympy\nopen(sympy.__file__, 'a')")
    assert write.outcome is ERROR and "Error: [Errno" in write.text


@pytest.mark.slow
def test_packages_below_tmp_are_not_covered_by_the_programs_own_folder():
    """A checkout in /tmp has its packages there; what they load late must still be found, and not be written."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        package = Path(folder) / "lazily"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "later.py").write_text("VALUE = 42\n")

        async def scenario():
            sandbox = LocalSandbox(warm=0)
            sandbox._options |= {"packages": ["lazily"], "paths": [str(package)], "search": [folder]}
            try:
                late = await sandbox.run("from lazily.later import VALUE\nopen('/tmp/mine', 'w').write('x')\nVALUE")
                write = await sandbox.run("import lazily\nopen(lazily.__file__, 'a')")
            finally:
                await sandbox.close()
            return late, write

        late, write = asyncio.run(scenario())
    assert late.output.split() == ["42"], late
    assert "Error: [Errno" in write.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_mb": 1}, "memory_mb is 1; expected at least 64"),
        ({"mechanisms": ("magic",)}, "magic"),
        ({"packages": ("no_such_package",)}, "no_such_package.*not installed"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        LocalSandbox(**options)


def test_a_failing_package_says_so(tmp_path):
    """A server that cannot start is an infrastructure failure with its reason."""

    async def scenario():
        options = {**LocalSandbox()._options, "packages": ["no_such_module"]}
        with pytest.raises(InfrastructureError, match="did not start.*no_such_module"):
            await SandboxServer.start(options)

    asyncio.run(scenario())


@pytest.mark.slow
def test_as_an_ordinary_user():
    """Without root: user namespaces or Landlock, whichever is there."""
    interpreter = "/usr/bin/python{}.{}".format(*sys.version_info)
    if os.geteuid() != 0 or not os.path.exists(interpreter):
        pytest.skip("needs root, to become somebody else, and an interpreter that everybody can read")
    code = (
        "import os, asyncio\nos.setgroups([])\nos.setresgid(12345, 12345, 12345)\nos.setresuid(12345, 12345, 12345)\n"
        "from rollout.tools.python.local import LocalSandbox\n"
        "async def main():\n    s = LocalSandbox(timeout_s=30)\n"
        "    print((await s.run('import os; os.getuid() != 12345')).output, all(p.active for p in s.protections()"
        " if p.essential))\n    await s.close()\nasyncio.run(main())"
    )
    command = [interpreter, "-B", "-c", code]
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if "PermissionError" in done.stderr and str(ROOT) in done.stderr:
        pytest.skip("the project's folder is not readable for everybody")
    assert done.stdout.split() in (["True", "True"], ["False", "True"]), done.stderr[-2000:]
