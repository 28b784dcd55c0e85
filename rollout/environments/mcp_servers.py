"""Tools of MCP servers as an environment, called over stdio or HTTP.

Source: the Model Context Protocol (modelcontextprotocol.io), through its own client, the package ``mcp``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, CallToolResult, TextContent

from common.async_calls import PerLoop
from common.env_vars import command_path
from common.errors import end_of_output, one_line
from common.files import write_atomically
from common.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from rollout.environments.base import StepResult
from rollout.environments.question_answering import QuestionAnsweringEnvironment, one_by_one
from rollout.services.http_client import ApiKey
from rollout.services.task_variables import task_variables
from rollout.tools.limits import LimitedTool, ToolLimits
from rollout.tools.schemas import read_schemas, tool_names
from rollout.trajectory import Action, CallOutcome, InfrastructureError, Task, ToolResult

TOOLS_FILE = "tools.json"
CONNECT_S = 30.0  # of an HTTP connection
END_S = 30.0  # for a server's answer to the end of a session
# What the client says in place of an HTTP status of 400 or more, and a server of a session that it no longer has.
HTTP_FAILURES = ("Server returned an error response", "Session terminated", "Session not found")
DEFAULT_LIMITS = ToolLimits()


@dataclass(frozen=True)
class MCPServer:
    """How to reach a server: one of ``command`` (stdio) and ``url`` (streamable HTTP).

    Raises:
        ValueError: not exactly one of them, options of the other, or a key that is not set.
    """

    # Starts the server. It inherits PATH, HOME and the like, and no keys; ``python`` is the trainer's.
    command: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # further ones of the command
    url: str | None = None
    start_timeout_s: PositiveFloat = 60.0  # until it answers
    api_key_variable: str | None = None  # environment variable with the key of the url, sent as bearer token

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or bool(self.command) == bool(self.url):
            raise ValueError(
                f"an MCP server has command {self.command!r} and url {self.url!r}; expected one of them, the command "
                "as a list: the program and its arguments"
            )
        if (self.url and self.variables) or (self.command and self.api_key_variable):
            raise ValueError("variables belong to the command of an MCP server, and api_key_variable to its url")
        self._key.headers()

    @property
    def _key(self) -> ApiKey:
        return ApiKey(self.api_key_variable, f"the MCP server {self.where}")

    @property
    def where(self) -> str:
        return self.url or " ".join(self.command)

    async def transport(self, stack: contextlib.AsyncExitStack, variables: Mapping[str, str], printed: TextIO) -> Any:
        """Return the transport of the client. A command gets ``variables``, too, and prints its errors to
        ``printed``."""
        if self.url is None:
            program, *arguments = self.command
            own = {"PATH": command_path(), **self.variables, **variables}
            program = shutil.which(program, path=own["PATH"]) or program
            return stdio_client(StdioServerParameters(command=program, args=arguments, env=own), printed)
        waits = httpx2.Timeout(CONNECT_S, read=None)  # a call has the limit of its tool
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=self._key.headers(), timeout=waits))
        return streamable_http_client(self.url, http_client=http)


class Session:
    """A connection to a server. A separate asyncio task holds it, because the task that opens it must close it."""

    def __init__(self, server: MCPServer, variables: Mapping[str, str]) -> None:
        self.server, self._variables = server, variables
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._task = asyncio.create_task(self._hold())
        self.lost = False

    async def client(self) -> Client:
        """Return the connected client. Raises InfrastructureError if the server did not start or answer."""
        return await asyncio.shield(self._ready)

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool. Raises MCPError if the server refuses, and InfrastructureError if it is gone or has lost the
        session."""
        client = await self.client()
        try:
            return await client.call_tool(name, arguments)
        except MCPError as error:
            gone = self.server.url is not None and error.message in HTTP_FAILURES
            if error.code != CONNECTION_CLOSED and not gone:
                raise
            self.lost = True
            self._end.set()
            raise InfrastructureError(f"MCP server {self.server.where} ended in a call of {name}") from error

    async def close(self) -> None:
        """Close the connection, and end a server that was started by a command."""
        self._end.set()
        if not self._ready.done():
            self._task.cancel()
        ended, _ = await asyncio.wait([self._task], timeout=END_S)
        if not ended:  # an HTTP server may not answer the end of the session either
            self._task.cancel()
            await asyncio.wait([self._task], timeout=END_S)

    async def _hold(self) -> None:
        with tempfile.TemporaryFile("w+", errors="replace") as printed:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    transport = await self.server.transport(stack, self._variables, printed)
                    async with asyncio.timeout(self.server.start_timeout_s):
                        client = await stack.enter_async_context(Client(transport))
                    self._ready.set_result(client)
                    await self._end.wait()
            except BaseException as error:
                self.lost = True
                if not self._ready.done():
                    self._ready.set_exception(InfrastructureError(self._failed(error, printed)))
                    self._ready.exception()  # read, because nothing may wait for it
                if not isinstance(error, Exception):
                    raise

    def _failed(self, error: BaseException, printed: TextIO) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        end = end_of_output(printed)
        late = f"no answer within {self.server.start_timeout_s:g} s"
        why = late if isinstance(error, TimeoutError) else one_line(str(error)) or type(error).__name__
        return f"MCP server {self.server.where} does not answer: {why}{f'; it printed: {end}' if end else ''}"


class MCPTool:
    """A tool of a server. ``session`` returns the session to call it in."""

    def __init__(self, name: str, session: Callable[[], Session]) -> None:
        self.name, self._session = name, session

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            result = await self._session().call(self.name, arguments)
        except MCPError as error:
            return ToolResult(error.message, CallOutcome.ERROR, detail=error.message)
        text = result_text(result)
        return ToolResult(text, CallOutcome.ERROR, detail=text) if result.is_error else ToolResult.of(text)

    async def close(self) -> None: ...


def result_text(result: CallToolResult) -> str:
    """Return the text of a tool's result, one part per line. Pictures, sound and files are named, not shown. Without
    parts: the structured content as JSON."""
    parts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


async def list_tools(client: Client) -> list[dict[str, Any]]:
    """Return the schemas of all tools of a server, in its order."""
    schemas, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            schemas.append({"type": "function", "function": function})
        if not (cursor := page.next_cursor):
            return schemas


async def all_tools(servers: Mapping[str, MCPServer]) -> list[dict[str, Any]]:
    """Connect to all servers, and return the schemas of their tools, each with the name of its ``server``."""
    found = []
    for name, server in servers.items():
        session = Session(server, {})
        try:
            found += [{**schema, "server": name} for schema in await list_tools(await session.client())]
        finally:
            await session.close()
    return found


class MCPToolSchemas:
    """Stage that asks MCP servers for their tools, and writes the schemas to ``<output_dir>/tools.json``, which the
    options ``tools`` of ``HermesProtocol`` and of ``MCPTools`` read.

    Args:
        servers: the servers, by names of yours.
        tools: names of the tools to keep, in this order; null: all.

    Raises:
        ValueError: a tool that no server has, or two servers have.
    """

    def __init__(self, servers: dict[str, MCPServer], tools: list[str] | None = None) -> None:
        self.servers, self.tools = servers, tools

    def run(self, output_dir: Path) -> dict[str, int]:
        found = asyncio.run(all_tools(self.servers))
        names = tool_names(found)
        wanted = names if self.tools is None else self.tools
        if missing := sorted(set(wanted) - set(names)):
            raise ValueError(f"no server has the tools {', '.join(missing)}; the tools are {', '.join(names)}")
        chosen = [schema for name in wanted for schema in found if schema["function"]["name"] == name]
        read_schemas(chosen)
        write_atomically(Path(output_dir) / TOOLS_FILE, json.dumps(chosen, indent=2, ensure_ascii=False) + "\n")
        return {"tools": len(chosen)}


class MCPTools:
    """Environment factory: the agent calls tools of MCP servers. The reward function scores its answer.

    Args:
        servers: the servers, by the names that ``MCPToolSchemas`` was given.
        tools: the file that ``MCPToolSchemas`` wrote.
        sessions: ``trajectory``: each trajectory has its own session with every server, and its own process of a
            server that is started by a command, which finds the task in ``TASK_FILE`` (JSON), ``TASK_ID`` and
            ``TASK_QUESTION``. ``shared``: one session for all, for servers without a state.
        max_sessions: trajectories that have sessions at once; others wait.
        limits: of each tool. A call in a trajectory's own session is not repeated, because its first attempt may have
            changed something.
        max_calls: executed calls per trajectory over all tools; further ones are REFUSED.

    Raises:
        ValueError: a file of another form, or one that names another server.
    """

    def __init__(
        self,
        servers: dict[str, MCPServer],
        tools: str,
        sessions: Literal["trajectory", "shared"] = "trajectory",
        max_sessions: PositiveInt = 32,
        limits: ToolLimits = DEFAULT_LIMITS,
        max_calls: NonNegativeInt | None = None,
    ) -> None:
        self.servers, self.max_calls, self.limits, self.shared = servers, max_calls, limits, sessions == "shared"
        self._schemas = json.loads(Path(tools).read_text(encoding="utf-8"))
        self.tools = {schema["function"]["name"]: str(schema.get("server")) for schema in self._schemas}
        if unknown := sorted(set(self.tools.values()) - set(servers)):
            raise ValueError(f"{tools} has tools of {', '.join(unknown)}, but the servers are {', '.join(servers)}")
        self.slots = PerLoop("MCPTools", lambda: asyncio.Semaphore(max_sessions))
        self._sessions: PerLoop[dict[str, Session]] = PerLoop("MCPTools", dict)  # shared ones, by server
        self._limited = self.limited(self._shared_session, limits)

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Any:
        if self.shared or not tools_enabled:
            return QuestionAnsweringEnvironment(self._limited, tools_enabled, self.max_calls)
        return MCPEnvironment(self, task)

    def limited(self, session: Callable[[str], Session], limits: ToolLimits) -> dict[str, LimitedTool]:
        """Return the tools by name. ``session`` returns the session with a server, by its name."""
        return {
            name: LimitedTool(MCPTool(name, functools.partial(session, server)), limits)
            for name, server in self.tools.items()
        }

    async def start(self) -> None:
        """Raise ValueError if a server's tools differ from those in the file, and InfrastructureError if
        a server does not answer."""
        found = {schema["function"]["name"]: schema for schema in await all_tools(self.servers)}
        if changed := [name for name, shown in zip(self.tools, self._schemas, strict=True) if found.get(name) != shown]:
            raise ValueError(
                f"the MCP tools {', '.join(changed)} have changed since their schemas were written; run the stage of "
                "MCPToolSchemas again (--fresh)"
            )

    async def close(self) -> None:
        self.slots.drop()
        for session in (self._sessions.drop() or {}).values():
            await session.close()
        for tool in self._limited.values():
            await tool.close()

    def _shared_session(self, server: str) -> Session:
        sessions = self._sessions.get()
        if server not in sessions or sessions[server].lost:
            sessions[server] = Session(self.servers[server], {})
        return sessions[server]


class MCPEnvironment:
    """One trajectory with its own sessions. It cannot be forked, because a server's state cannot be copied."""

    def __init__(self, factory: MCPTools, task: Task) -> None:
        self._factory, self._task = factory, task
        self._stack = contextlib.AsyncExitStack()
        self._calls: QuestionAnsweringEnvironment | None = None

    async def reset(self) -> None:
        slot = self._factory.slots.get()
        await slot.acquire()
        self._stack.callback(slot.release)
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-")))
        variables = task_variables(folder, self._task)
        sessions = {name: Session(server, variables) for name, server in self._factory.servers.items()}
        for session in sessions.values():
            self._stack.push_async_callback(session.close)
        for session in sessions.values():
            await session.client()
        once = dataclasses.replace(self._factory.limits, retries=0)
        tools = self._factory.limited(sessions.__getitem__, once)
        self._calls = QuestionAnsweringEnvironment(tools, True, self._factory.max_calls)

    async def step(self, action: Action) -> StepResult:
        assert self._calls is not None
        return await one_by_one(self._calls.step, action)  # a later call may read what an earlier one has written

    async def close(self) -> None:
        await self._stack.aclose()
