"""Environments of verifiers as programs: its harness plays a rollout and asks the model through our endpoint.

Source: the package ``verifiers`` 0.4 (github.com/PrimeIntellect-ai/verifiers), which runs in ``.venv-verifiers``,
because it needs other versions of openai and mcp than vLLM. Through its tasksets it also reaches those of Harbor and
NeMo Gym.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.async_calls import PerLoop
from common.env_vars import command_path
from common.errors import end_of_output, one_line
from common.ranges import FiniteFloat, PositiveFloat, PositiveInt
from rollout.programs.base import Model, ProgramError, ProgramResult
from rollout.trajectory import InfrastructureError, RewardError, Task

WORKER = Path(__file__).with_name("verifiers_worker.py")
INDEX = "verifiers_index"  # of a task's metadata: its position in the taskset
LINE_BYTES = 1 << 30  # of a worker's answer
NULL_AGENT: dict[str, Any] = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
ROLLOUTS = 1000  # of a worker: verifiers keeps a client for each address, and so for each rollout


class VerifiersWorker:
    """A process of ``.venv-verifiers`` that holds an environment.

    Raises:
        InfrastructureError: from ``ask``, if the process has ended, with the end of its output.
    """

    def __init__(self, python: str, config: Mapping[str, Any], folders: Sequence[str]) -> None:
        self._command = [python, "-P", str(WORKER), json.dumps(config)]  # -P: imports nothing from its folder
        self._folders = folders
        self._printed = tempfile.TemporaryFile("w+", errors="replace")  # closed with the process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.asked = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def ended(self) -> bool:
        return self._reading is not None and self._reading.done()

    async def ask(self, **what: Any) -> dict[str, Any]:
        """Send a question and return the answer."""
        self.asked += 1
        async with self._starting:
            if self._process is None:
                await self._start()
        assert self._process is not None and self._process.stdin is not None
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            if self.ended:
                raise InfrastructureError(self._ended())
            self._process.stdin.write((json.dumps({"id": number, **what}) + "\n").encode())
            return await future
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading])
        self._printed.close()

    async def _start(self) -> None:
        folders = os.pathsep.join(str(Path(folder).absolute()) for folder in self._folders)
        self._process = await asyncio.create_subprocess_exec(
            *self._command, limit=LINE_BYTES, env=os.environ | {"PATH": command_path(), "PYTHONPATH": folders},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=self._printed,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # a line that is too long
            while line := await process.stdout.readline():
                answer = json.loads(line)
                future = self._waiting.get(answer.pop("id"))
                if future is not None and not future.done():
                    future.set_result(answer)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(InfrastructureError(self._ended()))

    def _ended(self) -> str:
        return f"the process of verifiers has ended; it printed: {end_of_output(self._printed)}"


class VerifiersProgram:
    """Plays a task in an environment of verifiers. Tasks come from the stage ``VerifiersTasks``.

    The reward is the mean over the episode's scored agents; their rewards and metrics become parts of it in the log.
    A rollout whose episode fails (also at a limit of turns or tokens) is a program that fails.

    Args:
        taskset: configuration of the taskset, with its ``id``, as for ``VerifiersTasks``.
        environment: further configuration of verifiers' environment: ``id``, and one block for each agent. The default
            has one agent, verifiers' loop of chat and tools, as a process of this machine; other runtimes
            (``docker``, ``prime``, ...) isolate it.
        timeout_s: seconds of one rollout, the model's time included.
        failure_reward: reward of a rollout whose program fails. null: it is not scored, and left out.
        at_once: rollouts at once; others wait, and their time does not run.
        folders: folders on the import path of the taskset.
        python: the Python of verifiers.

    Raises:
        ValueError: a taskset without an id, or no such Python.
    """

    def __init__(
        self,
        taskset: dict[str, Any],
        environment: dict[str, Any] | None = None,
        timeout_s: PositiveFloat = 600.0,
        failure_reward: FiniteFloat | None = None,
        at_once: PositiveInt = 16,
        folders: Sequence[str] = (),
        python: str = ".venv-verifiers/bin/python",
    ) -> None:
        self._config = configuration(taskset, python) | (environment or NULL_AGENT)
        self._python, self._folders = python, folders
        self.timeout_s, self.failure_reward = timeout_s, failure_reward
        self._slots = PerLoop("a program", lambda: asyncio.Semaphore(at_once))
        self._workers: list[VerifiersWorker] = []  # the last one gets new rollouts

    async def start(self) -> None:
        """Start the environment. Raises ValueError if it does not start, with the reason."""
        try:
            await (await self._worker()).ask(ask="ready")
        except InfrastructureError as error:
            await self.close()
            raise ValueError(str(error)) from error

    async def run(self, task: Task, model: Model) -> ProgramResult:
        if not isinstance(task.metadata.get(INDEX), int):
            raise InfrastructureError(f"{task.id} has no metadata.{INDEX}; expected a task of the stage VerifiersTasks")
        async with self._slots.get(), asyncio.timeout(self.timeout_s):
            worker = await self._worker()
            asked = {"index": task.metadata[INDEX], "question": task.question}
            reached = {"base_url": model.base_url, "api_key": model.api_key, "model": model.name}
            answer = await worker.ask(ask="play", **asked, **reached)
        if "broken" in answer:  # not the model's fault
            raise InfrastructureError(f"verifiers: {one_line(answer['broken'])}")
        if "error" in answer:
            raise ProgramError(one_line(answer["error"]))
        try:
            return ProgramResult(answer["reward"], answer["answer"], answer["metrics"])
        except RewardError as error:
            raise ProgramError(str(error)) from error

    async def close(self) -> None:
        self._slots.drop()
        workers, self._workers = self._workers, []
        for worker in workers:
            await worker.close()

    async def _worker(self) -> VerifiersWorker:
        """Return the process for the next rollout: a new one if the last has ended or has played enough."""
        for worker in [old for old in self._workers[:-1] if not old.busy]:
            self._workers.remove(worker)
            await worker.close()
        if not self._workers or self._workers[-1].ended or self._workers[-1].asked >= ROLLOUTS:
            self._workers.append(VerifiersWorker(self._python, self._config, self._folders))
        return self._workers[-1]


def configuration(taskset: Mapping[str, Any], python: str) -> dict[str, Any]:
    """Return the configuration of an environment with this taskset. Raises ValueError for one without an id, or if
    verifiers' Python is missing."""
    if not isinstance(taskset.get("id"), str):
        raise ValueError(f"taskset is {dict(taskset)}; expected its id, as {{id: gsm8k-v1}}")
    if shutil.which(python) is None:
        raise ValueError(f"there is no {python}; make it by `make environments`, and install your taskset there")
    return {"taskset": dict(taskset)}
