"""Client of the sandbox's fork server: starts it, sends programs, receives results."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rollout.trajectory import InfrastructureError

SERVER = Path(__file__).parent / "sandbox_runtime" / "server.py"
HEADER = struct.Struct("<II")
START_S = 60.0  # until the server answers; packages are loaded in it
GRACE_S = 20.0  # after a program's deadline, until the server counts as dead


class SandboxServer:
    """Client of a running ``sandbox_runtime/server.py``, which runs programs and returns their results. For one event
    loop."""

    def __init__(self, process: subprocess.Popen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process, self.reader, self.writer = process, reader, writer
        self.report: dict[str, Any] = {}
        self.failure: str | None = None
        self.waiting: dict[int, asyncio.Future] = {}
        self.ids = itertools.count(1)
        self.listener: asyncio.Task | None = None
        self.loop = asyncio.get_running_loop()

    @classmethod
    async def start(cls, options: dict[str, Any]) -> SandboxServer:
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryDirectory(prefix="sandbox-") as stage, theirs:  # a mount point in the server, empty here
            options = {**options, "control": theirs.fileno(), "stage": stage}
            interpreter = os.path.realpath(sys.executable)  # the virtual environment's base
            process = subprocess.Popen(
                [interpreter, "-s", "-S", "-B", "-W", "ignore", "-X", "utf8", str(SERVER), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,  # so that Ctrl-C reaches the trainer only, which then closes it
            )
            theirs.close()
            reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 24)
            server = cls(process, reader, writer)
            try:
                async with asyncio.timeout(START_S):
                    server.report = (await server._read())[1]
            except (asyncio.IncompleteReadError, TimeoutError) as error:
                raise InfrastructureError(f"the sandbox did not start: {await server._last_words()}") from error
            except BaseException:
                server.kill()
                raise
        if "error" in server.report:
            await server.close()
            raise InfrastructureError(f"the sandbox did not start: {server.report['error']}")
        server.listener = asyncio.create_task(server._listen())
        return server

    async def _read(self) -> tuple[int, dict[str, Any]]:
        id, length = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        return id, json.loads(await self.reader.readexactly(length))

    async def _listen(self) -> None:
        try:
            while True:
                id, answer = await self._read()
                if (future := self.waiting.get(id)) is not None and not future.done():
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.failure = "the sandbox's server ended"  # for calls meanwhile
            self._fail(f"{self.failure}: {await self._last_words()}")

    async def _last_words(self) -> str:
        self.kill()
        text = await asyncio.to_thread(self.process.communicate)
        return text[1].decode("utf-8", "replace").strip()[-500:] or f"exit code {self.process.returncode}"

    async def ask(self, code: str, timeout_s: float, stdin: str = "") -> dict[str, Any]:
        if self.failure is not None:
            raise InfrastructureError(self.failure)
        id = next(self.ids)
        self.waiting[id] = asyncio.get_running_loop().create_future()
        try:
            self._send(id, {"code": code, "stdin": stdin, "timeout_s": timeout_s})
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await self.waiting[id]
        except TimeoutError as error:
            self.failure = f"the sandbox's server did not answer within {timeout_s + GRACE_S:g} s"
            self.kill()
            raise InfrastructureError(self.failure) from error
        except asyncio.CancelledError:
            self._send(id, {"cancel": True})
            raise
        finally:
            del self.waiting[id]

    def _send(self, id: int, order: dict[str, Any]) -> None:
        body = json.dumps(order).encode()
        self.writer.write(HEADER.pack(id, len(body)) + body)  # no drain: the caller waits for the answer anyway

    def kill(self) -> None:
        """Kill the sandbox's server at once, from any loop. The kernel ends all its programs with it."""
        if self.process.poll() is None:
            self.process.kill()
        if not self.loop.is_closed():
            self.writer.transport.abort()

    async def close(self) -> None:
        """End the sandbox's server. Returns when no process is left."""
        if self.loop is not asyncio.get_running_loop():
            self.kill()
        else:
            if self.listener is not None:
                self.listener.cancel()
            self.writer.close()  # which the server takes as its end
        try:
            await asyncio.to_thread(self.process.communicate, timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            await asyncio.to_thread(self.process.communicate)
        self._fail("the sandbox was closed")

    def _fail(self, why: str) -> None:
        self.failure = why
        for future in self.waiting.values():
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(InfrastructureError(why))
