"""SandboxFusion's client against a local server of its shape, which really runs what it is sent."""

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rollout.tools.python.fusion import SandboxFusion
from rollout.tools.python.tool import PythonTool
from rollout.trajectory import CallOutcome, InfrastructureError
from tests.processes import with_patience


def run_code(body):
    """``POST /run_code`` as sandbox/server/sandbox_api.py answers it."""
    result = {"status": "Finished", "execution_time": 0.1, "return_code": None, "stdout": "", "stderr": ""}
    try:
        command = [sys.executable, "-I", "-c", body["code"]]
        pipes = {"input": body.get("stdin") or "", "capture_output": True, "encoding": "utf-8"}
        done = subprocess.run(command, **pipes, timeout=body["run_timeout"], check=False)
    except subprocess.TimeoutExpired as error:
        result |= {"status": "TimeLimitExceeded", "stdout": (error.stdout or b"").decode()}
    else:
        result |= {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    good = result["status"] == "Finished" and not result["return_code"]
    return {
        "status": "Success" if good else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "files": {},
    }


@asynccontextmanager
async def service(answer=None):
    """``(url, requests)``; ``answer``: a function of the request's body, default: run the code."""
    requests = []

    async def handle(request):
        requests.append(await request.json())
        if answer is None:
            return web.json_response(await asyncio.to_thread(run_code, requests[-1]))
        said = answer(requests[-1])
        said = await said if asyncio.iscoroutine(said) else said
        return said if isinstance(said, web.Response) else web.json_response(said)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/run_code", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", requests
    finally:
        await runner.cleanup()


async def ask(code, answer=None, **options):
    async with service(answer) as (url, requests):
        tool = PythonTool(SandboxFusion(url, **{"timeout_s": 30, **options}))
        try:
            return await tool.call({"code": code}), requests
        finally:
            await tool.close()


@pytest.mark.parametrize(
    ("code", "outcome", "text"),
    [
        ("1 + 1", CallOutcome.OK, "2"),
        ("print('a')\n'ž🐎'", CallOutcome.OK, "a\nž🐎"),
        ("x = 1", CallOutcome.EMPTY, "The program printed nothing."),
        (
            "print('a')\n1 / 0",
            CallOutcome.ERROR,
            'a\nTraceback (most recent call last):\n  File "<program>", line 2, in <module>\n    1 / 0\n'
            "ZeroDivisionError: division by zero",
        ),
        ("x = '''\n\"\"\"\\n'''\nx", CallOutcome.OK, '\n"""'),
        ("import sys\nsys.exit(2)", CallOutcome.ERROR, "The program ended with exit code 2 and printed nothing."),
        ("import os\nos.kill(os.getpid(), 9)", CallOutcome.ERROR, "The program was killed by signal 9."),
        ("print('\\x1b[31mred\\x00')", CallOutcome.OK, "red"),
    ],
)
def test_programs_end_as_in_the_local_sandbox(code, outcome, text):
    result, _ = asyncio.run(ask(code))
    assert (result.outcome, result.text) == (outcome, text)


def test_what_is_sent():
    _, [body] = asyncio.run(ask("1", timeout_s=7.5, memory_mb=256))
    assert body.keys() == {"code", "language", "run_timeout", "memory_limit_MB"}
    assert (body["language"], body["run_timeout"], body["memory_limit_MB"]) == ("python", 7.5, 256)
    _, [body] = asyncio.run(ask("1"))
    assert "memory_limit_MB" not in body
    _, requests = asyncio.run(ask("#" * 70_000))
    assert not requests


def test_a_late_program_is_the_models_and_keeps_its_output():
    def check(seconds):
        result, _ = asyncio.run(ask("print('before')\nwhile True: pass", timeout_s=seconds))
        assert result.outcome is CallOutcome.TIMEOUT
        assert result.text == f"before\nThe program did not finish within {seconds:g} s and was stopped."

    with_patience(check, 1.5, 15.0, 120.0)


def finished(**changes):
    result = {"status": "Finished", "return_code": 0, "stdout": "x", "stderr": None, "execution_time": 0.1}
    return {"status": "Success", "message": "", "run_result": {**result, **changes}}


def test_fields_may_be_null():
    result, _ = asyncio.run(ask("1", lambda body: finished()))
    assert (result.outcome, result.text) == (CallOutcome.OK, "x")
    result, _ = asyncio.run(ask("1", lambda body: finished(stdout=None)))
    assert result.outcome is CallOutcome.EMPTY


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"status": "SandboxError", "message": "no pod is free", "run_result": None}, "no pod is free"),
        (finished(return_code=None), "the run ended as"),
        ({"status": "Success", "run_result": None}, "expected SandboxFusion's run_code answer"),
        (web.Response(status=502, text="bad gateway"), "status 502: bad gateway"),
    ],
)
def test_failures_of_the_service_are_infrastructure(answer, message):
    with pytest.raises(InfrastructureError, match=message):
        asyncio.run(ask("1", lambda body: answer))


def test_a_service_that_is_late_or_not_there():
    async def never(body):
        await asyncio.sleep(60)

    with pytest.raises(InfrastructureError, match="no answer within 0.2 s"):
        asyncio.run(ask("1", never, timeout_s=0.1, grace_s=0.1))

    async def nobody():
        fusion = SandboxFusion("http://127.0.0.1:9")
        try:
            await fusion.run("1")
        finally:
            await fusion.close()

    with pytest.raises(InfrastructureError, match="is the service running"):
        asyncio.run(nobody())


def test_the_start_runs_one_program_once_until_it_is_closed():
    async def main():
        async with service() as (url, requests):
            tool = PythonTool(SandboxFusion(url, timeout_s=30))
            for _ in range(2):
                await tool.start()
            once = len(requests)
            await tool.close()
            await tool.start()
            await tool.close()
            return once, len(requests)

    assert asyncio.run(main()) == (1, 2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (finished(stdout="2\n"), r"expected it to finish and to print 1; found finished, '2\\n'"),
        (finished(return_code=1, stdout="", stderr="SyntaxError"), "found failed, 'SyntaxError'.*Python 3.9"),
        (finished(status="TimeLimitExceeded", stdout=""), "found timeout, 'The program did not finish"),
        (web.Response(status=404, text="no such page"), "status 404: no such page"),
    ],
)
def test_the_start_tells_of_a_service_that_is_none(answer, message):
    async def main():
        async with service(lambda body: answer) as (url, _):
            tool = PythonTool(SandboxFusion(url))
            try:
                await tool.start()
            finally:
                await tool.close()

    with pytest.raises(InfrastructureError, match=message):
        asyncio.run(main())
