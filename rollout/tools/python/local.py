"""Local sandbox: runs each program of the model in a confined process. See docs/sandbox.md."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
from typing import Any

from common.async_calls import PerLoop
from common.errors import signal_name
from common.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from rollout.tools.python import probe
from rollout.tools.python.base import Run, RunStatus, ended, middle_cut, readable, refused
from rollout.tools.python.connection import SERVER, START_S, SandboxServer
from rollout.tools.python.packages import package_paths
from rollout.tools.python.probe import Protection
from rollout.trajectory import InfrastructureError

MECHANISMS = ("namespaces", "landlock", "seccomp")
# Programs at once, per processor. More would share the processor and miss their deadlines.
PER_PROCESSOR = 2

logger = logging.getLogger(__name__)


class UnprotectedError(RuntimeError):
    """The machine lacks an essential protection, so no program is run."""


class LocalSandbox:
    """Runs model-written programs in confined processes of this machine, one program per warm interpreter. Implements
    ``Runner`` with a small fork server.

    The server starts with the first program, or with ``start``. It serves one event loop at a time; a new loop gets a
    new server. Two programs run at once for each processor. Others wait, and a program's time begins after that.

    Args:
        timeout_s: seconds of wall time per program; keep it below the timeout of ``ToolLimits``.
        memory_mb: address space of a program, including the interpreter. All programs at once may need this times twice
            the number of processors.
        disk_mb: size of its temporary folder, which is in memory too.
        threads: threads it may start beside its first one.
        max_output: characters of output that are kept, from the beginning and the end.
        warm: interpreters that wait, ready; 0 makes each on demand.
        packages: import names of installed packages that programs may import, such as sympy, with their requirements.
        mechanisms: kernel mechanisms to use where they are available.
        allow_unprotected: run programs even if an essential protection is missing.

    Raises:
        ValueError: too little memory, an unknown mechanism, a missing package, or not Linux.
    """

    def __init__(
        self,
        timeout_s: PositiveFloat = 10.0,
        memory_mb: PositiveInt = 512,
        disk_mb: PositiveInt = 16,
        threads: NonNegativeInt = 16,
        max_output: PositiveInt = 10_000,
        warm: NonNegativeInt = 2,
        packages: tuple[str, ...] = (),
        mechanisms: tuple[str, ...] = MECHANISMS,
        allow_unprotected: bool = False,
    ) -> None:
        if memory_mb < 64:
            raise ValueError(f"sandbox: memory_mb is {memory_mb}; expected at least 64, for the interpreter itself")
        if unknown := set(mechanisms) - set(MECHANISMS):
            raise ValueError(f"sandbox: mechanisms {sorted(unknown)} are unknown; expected some of {MECHANISMS}")
        if platform.system() != "Linux":
            raise ValueError("the local sandbox needs Linux; use rollout.tools.python.fusion.SandboxFusion")
        self.timeout_s, self.max_output, self.allow_unprotected = timeout_s, max_output, allow_unprotected
        paths, search = package_paths(tuple(packages))
        self._options = {
            "memory_mb": memory_mb,
            "disk_mb": disk_mb,
            "threads": threads,
            "cpu_s": int(timeout_s) + 2,
            "warm": warm,
            "kept": 4 * max_output,  # bytes
            "mechanisms": list(mechanisms),
            "packages": list(packages),
            "paths": paths,
            "search": search,
        }
        self.concurrency = PER_PROCESSOR * len(os.sched_getaffinity(0))
        self._server: SandboxServer | None = None
        self._held = PerLoop("the sandbox", self._for_loop)
        self._protections: tuple[Protection, ...] = ()

    def protections(self) -> tuple[Protection, ...]:
        """Return the sandbox's protections found at the last start, active or not, with reasons. Empty before it."""
        return self._protections

    async def start(self) -> None:
        """Start the sandbox's server and test its protections. Raises InfrastructureError, or UnprotectedError if an
        essential protection is missing."""
        starting, _ = self._held.get()
        async with starting:
            if self._server is not None and self._server.failure is None:
                return
            server = await SandboxServer.start(self._options)
            try:
                protections = await self._probe(server)
            except BaseException:
                server.kill()
                raise
            self._server, first, self._protections = server, not self._protections, protections
            if first:
                logger.info("programs of the model are confined. %s", probe.describe(protections))

    def _for_loop(self) -> tuple[asyncio.Lock, asyncio.Semaphore]:
        """Return, for a new event loop, the lock of the start and the semaphore that limits programs. A server of an
        earlier loop cannot serve this one."""
        if self._server is not None:
            self._server.kill()
            self._server = None
        return asyncio.Lock(), asyncio.Semaphore(self.concurrency)

    async def _probe(self, server: SandboxServer) -> tuple[Protection, ...]:
        options = self._options
        text = probe.program(str(SERVER), os.getpid(), options["memory_mb"], options["threads"])
        answer = await server.ask(text, START_S)
        found = probe.protections_of(answer["output"], server.report["mechanisms"])
        if missing := [p for p in found if p.essential and not p.active]:
            reasons = [f"{name}: {why}" for name, why in server.report["failures"].items()]
            if answer["code"]:
                reasons.append(f"the probe ended with {answer['output'][-300:]!r}")
            said = f"{probe.describe(missing)}. {'; '.join(reasons)}"
            if not self.allow_unprotected:
                raise UnprotectedError(
                    f"this machine cannot confine foreign programs. {said}. Use SandboxFusion, run where namespaces or "
                    "Landlock, and seccomp, are allowed, or accept the risk with allow_unprotected: true"
                )
            logger.warning("model-written programs run UNPROTECTED. %s", said)
        return found

    async def run(self, code: str, stdin: str = "") -> Run:
        if (refusal := refused(code, stdin)) is not None:
            return refusal
        await self.start()
        _, free = self._held.get()
        async with free:
            await self.start()  # the server may have ended while this program waited
            assert self._server is not None
            return self._judge(await self._server.ask(code, self.timeout_s, stdin))

    def _judge(self, answer: dict[str, Any]) -> Run:
        output = middle_cut(readable(answer["output"]), self.max_output)
        status, code = answer["status"], answer["code"]
        if status == "broken":
            raise InfrastructureError(f"the sandbox could not prepare a process: {answer['output'][:300]}")
        if status == "timeout" or code == -signal.SIGXCPU:
            return ended(code, output, self.timeout_s)
        if status == "flood":
            return Run(RunStatus.FAILED, output, "The program printed far too much and was stopped.")
        killed = "The program was killed: it used too much memory or processor time."
        if code < 0 and code != -signal.SIGKILL:
            killed = f"The program was ended by the signal {signal_name(-code)}."
        return ended(code, output, killed=killed)

    async def close(self) -> None:
        """End the sandbox's server and every program; a later run starts it again."""
        self._held.drop()
        server, self._server = self._server, None
        if server is not None:
            await server.close()
