"""Environments of OpenEnv servers, over their WebSocket.

Source: the messages of OpenEnv 0.10 (``openenv/core/env_server/types.py``; reset, step and close, answered by an
observation or an error). The package itself stays with the server: it needs other versions than vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp

from common.async_calls import PerLoop
from common.env_vars import command_path
from common.errors import end_of_output, one_line
from common.ranges import FiniteFloat, PositiveFloat, PositiveInt
from rollout.environments.base import ACT, check_tasks
from rollout.environments.text_episode import Played, TextEpisode, Texts, reset_arguments
from rollout.services.http_client import ApiKey
from rollout.trajectory import InfrastructureError, Task

PORT = "{port}"
ACTION = "{action}"
DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
POLL_S, END_S = 0.2, 5.0
MODEL_FAULTS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # codes of a server that could not execute an action


class OpenEnv:
    """Environment factory: one session of an OpenEnv server per trajectory, played in text through
    ``EpisodeProtocol``.

    The reward is the sum of the server's rewards. A task's ``metadata["seed"]`` and the entries of
    ``metadata["options"]`` are the arguments of ``reset`` (``SeedTasks`` writes such tasks).

    Args:
        url: address of a server that runs, such as http://127.0.0.1:8000.
        command: or a command that starts one here, with ``{port}`` among its arguments. It ends with the run.
        action: the action as the server expects it, with ``{action}`` where the agent's words go.
        observation: text of an observation (``text_episode.Texts``), such as ``{observation[text]}``.
        first: text of the first observation; null: as ``observation``.
        success_return: an episode succeeds if its rewards sum up to at least this.
        max_sessions: episodes at once; others wait. The server has its limit, too: ``max_concurrent_envs``.
        timeout_s: seconds of a reset or a step.
        start_timeout_s: seconds until the server answers.
        api_key_variable: environment variable with the key, sent as bearer token.

    Raises:
        ValueError: not exactly one of ``url`` and ``command``, a command without ``{port}``, an action without
            ``{action}``.
    """

    scores_itself = True
    tools = (ACT,)

    def __init__(
        self,
        url: str | None = None,
        command: Sequence[str] = (),
        action: Mapping[str, Any] | None = None,
        observation: str = "{observation}",
        first: str | None = None,
        success_return: FiniteFloat = 1.0,
        max_sessions: PositiveInt = 32,
        timeout_s: PositiveFloat = 60.0,
        start_timeout_s: PositiveFloat = 120.0,
        api_key_variable: str | None = None,
    ) -> None:
        if isinstance(command, str) or bool(url) == bool(command):
            raise ValueError(f"url is {url!r} and command {command!r}; expected one of them, the command as a list")
        if command and not any(PORT in part for part in command):
            raise ValueError(f"the command {' '.join(command)} has no {PORT}; expected it where the port goes")
        self._action = dict(action or {"message": ACTION})
        if ACTION not in json.dumps(self._action):
            raise ValueError(f"action is {self._action}; expected {ACTION} where the agent's words go")
        self.url, self._command = url, list(command)
        self.texts = Texts(observation, observation if first is None else first)
        self.success_return, self.timeout_s, self._start_timeout_s = success_return, timeout_s, start_timeout_s
        self.key = ApiKey(api_key_variable, "the OpenEnv server")
        self.key.headers()
        self.slots = PerLoop("OpenEnv", lambda: asyncio.Semaphore(max_sessions))
        self._http: PerLoop[aiohttp.ClientSession] = PerLoop("OpenEnv", aiohttp.ClientSession)
        self._server: asyncio.subprocess.Process | None = None

    @property
    def http(self) -> aiohttp.ClientSession:
        return self._http.get()

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Any:
        return OpenEnvEpisode(self, task, tools_enabled)

    def check(self, tasks: Iterable[Task]) -> None:
        """Raise ValueError for tasks whose seed or options are of another type."""
        check_tasks(tasks, reset_arguments, "tasks that an OpenEnv server cannot play")

    def fill(self, words: str) -> Any:
        """Return the action with the agent's words."""
        return _filled(self._action, words)

    async def start(self) -> None:
        """Start the command, and wait until the server answers. Raises ValueError if it does not, with the end of what
        it printed, or if its actions have other fields."""
        if self._server is None or self._server.returncode is not None:
            with tempfile.TemporaryFile("w+", errors="replace") as printed:
                await self._launch(printed)
                await self._until_ready(printed)
        async with self.http.get(f"{self.url}/schema", headers=self.key.headers()) as response:
            expected = (await response.json()).get("action", {})
        fields, needed = set(expected.get("properties", self._action)), set(expected.get("required", ()))
        if not needed <= set(self._action) <= fields:
            raise ValueError(
                f"the option action has the fields {', '.join(self._action)}, but the server {self.url} takes "
                f"{', '.join(sorted(fields))} (needed: {', '.join(sorted(needed)) or 'none'})"
            )

    async def close(self) -> None:
        self.slots.drop()
        http = self._http.drop()
        if http is not None:
            await http.close()
        server, self._server = self._server, None
        if server is not None and server.returncode is None:
            server.terminate()
            try:
                await asyncio.wait_for(server.wait(), END_S)
            except TimeoutError:
                server.kill()
                await server.wait()

    async def _launch(self, printed: Any) -> None:
        if not self._command:
            return
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [part.replace(PORT, str(port)) for part in self._command]
        self._server = await asyncio.create_subprocess_exec(
            *DIES_WITH_PARENT,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            env=os.environ | {"PATH": command_path()},
        )

    async def _until_ready(self, printed: Any) -> None:
        why: str | None = None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while True:
                    if self._server is not None and self._server.returncode is not None:
                        why = f"ended with code {self._server.returncode}"
                        break
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        async with self.http.get(f"{self.url}/health", headers=self.key.headers()) as response:
                            if response.status == 200:
                                return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            why = f"did not answer /health within {self._start_timeout_s:g} s"
        end = end_of_output(printed)
        await self.close()
        raise ValueError(f"the OpenEnv server {self.url} {why}{f'; it printed: {end}' if end else ''}")


class OpenEnvEpisode(TextEpisode):
    def __init__(self, factory: OpenEnv, task: Task, enabled: bool) -> None:
        super().__init__(factory.texts, factory.success_return, enabled)
        self._factory, self._task = factory, task
        self._stack = contextlib.AsyncExitStack()
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def open(self) -> Any:
        factory = self._factory
        slot = factory.slots.get()
        await slot.acquire()
        self._stack.callback(slot.release)
        arguments = reset_arguments(self._task)
        try:
            connecting = factory.http.ws_connect(f"{factory.url}/ws", headers=factory.key.headers(), max_msg_size=0)
            self._socket = await self._stack.enter_async_context(connecting)
        except (aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(f"OpenEnv server {factory.url}: {factory.key.redact(str(error))}") from None
        answer = await self._ask("reset", arguments.pop("options", {}) | arguments)
        if isinstance(answer, str):
            raise InfrastructureError(f"OpenEnv server {factory.url} refused the reset: {answer}")
        return answer["observation"]

    async def play(self, action: str) -> Played | str:
        answer = await self._ask("step", self._factory.fill(action))
        if isinstance(answer, str):
            return answer
        return Played(answer["observation"], float(answer.get("reward") or 0.0), bool(answer.get("done")))

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                await self._socket.send_json({"type": "close"})
        await self._stack.aclose()

    async def _ask(self, kind: str, data: Any) -> dict[str, Any] | str:
        """Send a message. Returns the data of the answer, or a message for the model if its action is at fault. Raises
        InfrastructureError for any other failure."""
        assert self._socket is not None
        try:
            async with asyncio.timeout(self._factory.timeout_s):
                await self._socket.send_json({"type": kind, "data": data})
                answer = await self._socket.receive_json()
        except TimeoutError:
            raise InfrastructureError(f"OpenEnv server: no answer within {self._factory.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, TypeError, ValueError) as error:  # TypeError: it closed the connection
            raise InfrastructureError(f"OpenEnv server {self._factory.url}: {one_line(str(error))}") from error
        said = answer.get("data") or {}
        if answer.get("type") != "error":
            return said
        message = one_line(f"{said.get('message')} {_details(said.get('errors'))}".strip())
        if said.get("code") in MODEL_FAULTS:
            return message
        raise InfrastructureError(f"OpenEnv server {self._factory.url}: {message} ({said.get('code')})")


def _filled(value: Any, words: str) -> Any:
    if isinstance(value, str):
        return value.replace(ACTION, words)
    if isinstance(value, Mapping):
        return {name: _filled(part, words) for name, part in value.items()}
    return [_filled(part, words) for part in value] if isinstance(value, list) else value


def _details(errors: Any) -> str:
    found = errors if isinstance(errors, list) else []
    said = [f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in found]
    return f"({'; '.join(said)})" if said else ""
