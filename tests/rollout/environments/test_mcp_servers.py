"""Tools of MCP servers: real servers of the package ``mcp``, over stdio and HTTP."""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from common.files import write_atomically
from rollout.environments.base import StepResult
from rollout.environments.mcp_servers import MCPEnvironment, MCPServer, MCPTools, MCPToolSchemas, all_tools
from rollout.protocols.hermes import HermesProtocol
from rollout.tools.limits import ToolLimits
from rollout.tools.schemas import read_schemas, tool_names
from rollout.trajectory import Action, ActionKind, CallOutcome, InfrastructureError, Task, ToolRequest, ToolResult
from tests.rollout.environments.processes import children_named

SERVER = Path(__file__).with_name("note_server.py")
STDIO = {"notes": MCPServer(command=["python", str(SERVER)])}
NAMES = ("add", "task", "fails", "dies", "sleeps", "numbers")


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    assert MCPToolSchemas(STDIO).run(folder) == {"tools": 6}
    return str(folder / "tools.json")


def call(name, **arguments):
    return Action(ActionKind.CALL, (ToolRequest(name, arguments),))


def question(number=0):
    return Task(f"t{number}", "what?", ("a",), "notes", metadata={"facts": {"x": number}})


async def results(environment, *actions):
    return [(await environment.step(action)).results[0] for action in actions]


def play(factory, *actions):
    """The results of one trajectory's actions."""

    async def run():
        environment = factory(question())
        try:
            await environment.reset()
            return await results(environment, *actions)
        finally:
            await environment.close()
            await factory.close()

    return asyncio.run(run())


@pytest.mark.slow
def test_schemas_are_those_of_the_server_and_reach_the_protocol(tools, tmp_path, model_dir):
    schemas = read_schemas([tools])
    assert tool_names(schemas) == NAMES
    assert schemas[0]["function"]["parameters"]["properties"]["text"]["type"] == "string"
    assert HermesProtocol(str(model_dir), tools=[tools]).tools == NAMES
    MCPToolSchemas(STDIO, tools=["task", "add"]).run(tmp_path)
    assert list(MCPTools(STDIO, str(tmp_path / "tools.json")).tools) == ["task", "add"]
    with pytest.raises(ValueError, match="no server has the tools nothing; the tools are add, task"):
        MCPToolSchemas(STDIO, tools=["nothing"]).run(tmp_path)
    with pytest.raises(ValueError, match="two tools have one name"):
        MCPToolSchemas(STDIO | {"again": STDIO["notes"]}).run(tmp_path)
    with pytest.raises(ValueError, match="has tools of notes, but the servers are others"):
        MCPTools({"others": STDIO["notes"]}, tools)


def test_a_call_returns_what_the_server_says(tools):
    first, second, wrong, failed, unknown, structured, told = play(
        MCPTools(STDIO, tools),
        call("add", text="a"), call("add", text="b"), call("add"), call("fails"), call("nothing"), call("numbers"),
        call("task"),
    )  # fmt: skip
    assert (first.text, first.outcome) == ("1: a", CallOutcome.OK)
    assert second.text == "2: a b"
    assert wrong.outcome is CallOutcome.ERROR and "Field required" in wrong.text
    assert failed.outcome is CallOutcome.ERROR and "fails" in failed.text
    assert unknown.outcome is CallOutcome.REFUSED
    assert json.loads(structured.text) == {"a": 1}
    assert told.text.startswith("t0 what? {") and json.loads(told.text[9:])["metadata"] == {"facts": {"x": 0}}


@pytest.mark.slow
def test_each_trajectory_has_a_server_of_its_own_and_leaves_nothing_behind(tools):
    factory = MCPTools(STDIO, tools, max_sessions=2)

    async def one(number):
        environment = factory(question(number))
        await environment.reset()
        said = await results(environment, call("add", text=str(number)), call("task"))
        await environment.close()
        return [said[0].text, said[1].text.split()[0]]

    async def run():
        said = await asyncio.gather(*map(one, range(4)))
        await factory.close()
        return said

    assert asyncio.run(run()) == [[f"1: {n}", f"t{n}"] for n in range(4)]
    assert not children_named("note_server.py")


@pytest.mark.slow
def test_a_shared_session_keeps_its_state_and_is_opened_again_after_its_server_died(tools):
    factory = MCPTools(STDIO, tools, sessions="shared", limits=ToolLimits(retries=1, backoff_s=0.0))

    async def run():
        one, other = factory(question()), factory(question(1))
        said = await results(one, call("add", text="a")) + await results(other, call("add", text="b"), call("dies"))
        said += await results(one, call("add", text="c"))
        await factory.close()
        return said

    first, second, died, again = asyncio.run(run())
    assert (first.text, second.text, again.text) == ("1: a", "2: a b", "1: c")
    assert died.outcome is CallOutcome.INFRASTRUCTURE
    assert not children_named("note_server.py")


@pytest.mark.slow
def test_a_call_of_an_own_session_is_not_repeated(tools):
    died, after = play(
        MCPTools(STDIO, tools, limits=ToolLimits(retries=3, backoff_s=0.0)), call("dies"), call("add", text="x")
    )
    assert died.outcome is after.outcome is CallOutcome.INFRASTRUCTURE, "the state of its server is lost"
    assert "ended in a call of dies" in died.detail


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_cancelled(tools):
    limits = ToolLimits(timeout_s=0.2, timeout_is_infrastructure=False)
    late, many = play(MCPTools(STDIO, tools, limits=limits, max_calls=1), call("sleeps"), call("add", text="x"))
    assert late.outcome is CallOutcome.TIMEOUT and many.outcome is CallOutcome.REFUSED
    assert not children_named("note_server.py")


@pytest.mark.parametrize(
    "command, message",
    [
        ([sys.executable, "-c", "raise SystemExit('no key given')"], "does not answer: .*it printed: no key given"),
        (["no-such-program"], "No such file or directory"),
        (["sleep", "77"], "does not answer: no answer within 0.5 s"),
    ],
)
def test_a_server_that_does_not_start_says_why(tools, command, message):
    limit = 0.5 if command[0] == "sleep" else 60.0
    factory = MCPTools({"notes": MCPServer(command=command, start_timeout_s=limit)}, tools)
    with pytest.raises(InfrastructureError, match=message):
        play(factory)
    with pytest.raises(InfrastructureError, match=message):
        asyncio.run(factory.start())
    assert not children_named("77")


@pytest.mark.slow
def test_tools_that_have_changed_are_refused_before_a_model_loads(tools, tmp_path):
    schemas = json.loads(Path(tools).read_text())
    schemas[0]["function"]["description"] = "Keep two notes."
    (tmp_path / "old.json").write_text(json.dumps(schemas))
    asyncio.run(MCPTools(STDIO, tools).start())
    with pytest.raises(ValueError, match=r"the MCP tools add have changed .*\(--fresh\)"):
        asyncio.run(MCPTools(STDIO, str(tmp_path / "old.json")).start())


def test_without_tools_no_server_starts(tools):
    factory = MCPTools({"notes": MCPServer(command=["no-such-program"])}, tools)

    async def run():
        environment = factory(question(), tools_enabled=False)
        await environment.reset()
        return (await environment.step(call("add", text="a"))).results[0]

    assert asyncio.run(run()).outcome is CallOutcome.REFUSED


@pytest.mark.slow
def test_over_http(tools):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            factory = MCPTools({"notes": MCPServer(url=f"http://127.0.0.1:{port}/mcp")}, tools)

            async def run():
                for _ in range(200):
                    try:
                        await factory.start()
                        break
                    except InfrastructureError:
                        await asyncio.sleep(0.2)
                environment = factory(question())
                await environment.reset()
                said = await results(environment, call("add", text="a"), call("fails"), call("dies"))
                await environment.close()
                await factory.close()
                return said

            added, failed, died = asyncio.run(run())
        finally:
            server.kill()
    assert added.text == "1: a" and failed.outcome is CallOutcome.ERROR
    assert died.outcome is CallOutcome.INFRASTRUCTURE


class WebServer:
    """A server of one tool over HTTP, whose ``status`` and ``session`` a test sets. ``silent``: it answers nothing."""

    status, session, silent = 200, "first", False

    async def serve(self, tools):
        """Start, and write the server's tools to a file; return the runner to clean up, and the server's settings."""
        app = web.Application()
        app.router.add_route("*", "/mcp", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.SockSite(runner, listener := socket.create_server(("127.0.0.1", 0)))
        await site.start()
        servers = {"notes": MCPServer(url=f"http://127.0.0.1:{listener.getsockname()[1]}/mcp")}
        write_atomically(tools, json.dumps(await all_tools(servers)))
        return runner, servers

    async def answer(self, request):
        if self.silent:
            await asyncio.Event().wait()
        if request.method != "POST":
            return web.Response(status=405)
        asked = await request.json()
        if asked["method"] == "initialize":
            about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            result = {**about, "serverInfo": {"name": "notes", "version": "1"}}
        elif request.headers["Mcp-Session-Id"] != self.session:
            return web.Response(status=404)
        elif "id" not in asked:
            return web.Response(status=202)
        elif self.status != 200:
            return web.Response(status=self.status)
        elif asked["method"] == "tools/list":
            result = {"tools": [{"name": "add", "description": "", "inputSchema": {"type": "object"}}]}
        else:
            if asked["params"]["arguments"]:
                await asyncio.sleep(0.5)
            result = {"content": [{"type": "text", "text": "added"}], "isError": False}
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": result}
        return web.json_response(answer, headers={"Mcp-Session-Id": self.session})


def test_a_server_that_fails_or_forgets_the_session_is_asked_again_in_a_new_one(tmp_path):
    said = WebServer()

    async def run():
        runner, servers = await said.serve(tmp_path / "tools.json")
        limits = ToolLimits(retries=1, backoff_s=0.0)
        factory = MCPTools(servers, str(tmp_path / "tools.json"), sessions="shared", limits=limits)
        environment = factory(question())
        slow = asyncio.create_task(results(environment, call("add", slowly=True)))
        found = await results(environment, call("add"))
        said.status = 503
        found += await results(environment, call("add"))
        [beside] = await slow
        assert beside.outcome in (CallOutcome.OK, CallOutcome.INFRASTRUCTURE), "a call in flight ends in order"
        said.status, said.session = 200, "after a restart"
        found += await results(environment, call("add"), call("add"))
        await factory.close()
        await runner.cleanup()
        return found

    found = asyncio.run(run())
    assert [result.outcome for result in found] == [CallOutcome.OK, CallOutcome.INFRASTRUCTURE, *[CallOutcome.OK] * 2]


def test_a_server_that_falls_silent_costs_a_call_and_not_the_run(tmp_path, monkeypatch):
    """Neither the call nor the end of the session is answered."""
    monkeypatch.setattr("rollout.environments.mcp_servers.END_S", 0.2)
    said = WebServer()

    async def run():
        runner, servers = await said.serve(tmp_path / "tools.json")
        limits = ToolLimits(retries=0, timeout_s=0.5)
        factory = MCPTools(servers, str(tmp_path / "tools.json"), limits=limits)
        environment = factory(question())
        await environment.reset()
        found = await results(environment, call("add"))
        said.silent = True
        found += await results(environment, call("add"))
        await environment.close()
        await factory.close()
        await runner.cleanup()
        return found

    found = asyncio.run(asyncio.wait_for(run(), 60))
    assert [result.outcome for result in found] == [CallOutcome.OK, CallOutcome.INFRASTRUCTURE]


def test_calls_of_one_turn_reach_an_own_server_one_after_the_other():
    running = 0

    async def step(action):
        nonlocal running
        running += 1
        assert running == len(action.calls) == 1
        await asyncio.sleep(0)
        running -= 1
        return StepResult((ToolResult(action.calls[0].name, CallOutcome.OK),), (0.5,))

    environment = MCPEnvironment(None, question())
    environment._calls = SimpleNamespace(step=step)
    both = Action(ActionKind.CALL, (ToolRequest("write", {}), ToolRequest("read", {})))
    done = asyncio.run(environment.step(both))
    assert [result.text for result in done.results] == ["write", "read"] and done.latencies_s == (0.5, 0.5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "expected one of them"),
        ({"command": ["a"], "url": "http://b"}, "expected one of them"),
        ({"command": "python server.py"}, "as a list"),
        ({"url": "http://b", "variables": {"A": "b"}}, "variables belong to the command"),
        ({"url": "http://b", "api_key_variable": "NO_SUCH_KEY"}, "needs a key: set the environment variable"),
        ({"url": "http://b", "api_key_variable": "sk-1234"}, "NAME of an environment variable"),
    ],
)
def test_wrong_options_are_refused(options, message, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ValueError, match=message):
        MCPServer(**options)
