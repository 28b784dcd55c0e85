"""A pool of child processes that run the alfworld package, one game at a time each.

The package is built for an environment of its own (``make alfworld``), so the children run under another Python. They
are spawned, never forked; every answer has a deadline, and a child that misses it or dies is killed and replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any, cast

from common.env_vars import child_environment
from common.validation import check_at_least_one
from experiments.worlds.household.games import Game
from experiments.worlds.household.problem import game_file
from experiments.worlds.household.simulator import Observation
from rollout.trajectory import InfrastructureError

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).with_name("pddl_worker.py")
PYTHON_VARIABLE = "COMPACT_AGENTS_ALFWORLD_PYTHON"
START_SECONDS = 120.0  # to start Python and import the package, on a loaded machine
RESET_SECONDS = 120.0  # to load and start a game: about a second each, on a loaded machine more
LINE_LIMIT = 2**26  # bytes of one answer
VERSION = "0.4."  # before it the commands were others ("put X in/on R")


def default_python() -> str | None:
    """The Python that has ALFWorld: what the variable names, or that of ``make alfworld``; None: neither is there."""
    here = ROOT / ".venv-alfworld" / "bin" / "python"
    return os.environ.get(PYTHON_VARIABLE) or (str(here) if here.exists() else None)


def check_game_file(path: str | Path) -> None:
    """Raises ValueError, naming the file, unless it is there, is JSON and has what a game file has."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"game file {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, brackets within brackets without end
        raise ValueError(f"game file {path}: not JSON ({error})") from None
    needed = ("pddl_domain", "grammar", "pddl_problem")
    if not isinstance(data, dict) or not all(isinstance(data.get(key), str) and data[key] for key in needed):
        raise ValueError(f"game file {path}: expected a mapping with the texts {', '.join(needed)}")
    if data.get("solvable") is False:
        raise ValueError(f"game file {path}: marked as unsolvable")


class PddlPool:
    """Up to ``workers`` games at once; further ones wait for a process. One event loop between start and close.

    Args:
        python: interpreter that has alfworld 0.4; None: ``default_python()``.
        step_timeout_s: for one command.

    Raises:
        ValueError: a number that is not positive.
    """

    def __init__(self, python: str | None, workers: int, step_timeout_s: float) -> None:
        check_at_least_one(workers=workers)
        if step_timeout_s <= 0:
            raise ValueError(f"step_timeout_s is {step_timeout_s}; expected more than 0 seconds")
        self.python, self.workers = python, workers
        self.step_timeout_s = step_timeout_s
        self._free = asyncio.Semaphore(workers)
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()  # idle ones and busy ones

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that are up."""
        return tuple(sorted(worker.process.pid for worker in self._alive))

    async def start(self) -> None:
        """Start one process, so that a missing or wrong package is known before anything else is loaded.

        Raises:
            InfrastructureError: no Python with ALFWorld, or it does not start.
        """
        async with self._free:
            self._idle.append(await self._take())

    async def open(self, game: Game | str) -> PddlGame:
        """A generated game, or a file's path. Waits for a process; give it back with ``PddlGame.close``."""
        await self._free.acquire()
        try:
            return PddlGame(self, await self._take(), game)
        except BaseException:
            self._free.release()
            raise

    async def close(self) -> None:
        """Kill all processes; games in progress end with InfrastructureError. Idempotent."""
        self._idle.clear()
        for worker in tuple(self._alive):
            await self.discard(worker)

    async def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.returncode is None:
                return worker
            await self.discard(worker)
        python = self.python or default_python()
        if python is None:
            raise InfrastructureError(
                "the household engine alfworld needs the package: run `make alfworld`, name a Python that has it "
                f"(option python, or the variable {PYTHON_VARIABLE}), or take engine: simulator"
            )
        worker = await _Worker.spawn(python)
        self._alive.add(worker)
        try:
            await worker.greet()
        except BaseException:
            await self.discard(worker)
            raise
        return worker

    def give_back(self, worker: _Worker) -> None:
        if worker in self._alive:
            self._idle.append(worker)
        self._free.release()

    async def discard(self, worker: _Worker) -> None:
        self._alive.discard(worker)
        await worker.kill()


class PddlGame:
    """One game in one process of the pool. Raises InfrastructureError when the process fails; it is then replaced."""

    def __init__(self, pool: PddlPool, worker: _Worker, game: Game | str) -> None:
        self._pool, self._worker, self._closed = pool, worker, False
        self._what = f"the game file {game}" if isinstance(game, str) else "a generated game"
        self._game = game if isinstance(game, str) else game_file(game, worker.domain, worker.grammar)

    async def reset(self) -> Observation:
        return await self._ask({"reset": self._game}, RESET_SECONDS, f"loading {self._what}")

    async def step(self, command: str) -> Observation:
        return await self._ask({"step": command}, self._pool.step_timeout_s, f"a command in {self._what}")

    async def close(self) -> None:
        """Give the process back. Idempotent."""
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._worker)

    async def _ask(self, request: dict[str, Any], timeout_s: float, what: str) -> Observation:
        try:
            answer = await self._worker.ask(request | {"timeout_s": timeout_s}, timeout_s, what)
            return Observation(answer["text"], tuple(answer["admissible"]), answer["won"])
        except BaseException:  # also a cancelled task: the answer to this request must not reach the next game
            await self._pool.discard(self._worker)
            raise


class _Worker:
    """The parent's side of `pddl_worker.py`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Any) -> None:
        self.process, self._log = process, log
        self._stdin = cast(asyncio.StreamWriter, process.stdin)
        self._stdout = cast(asyncio.StreamReader, process.stdout)
        self.domain = self.grammar = ""

    @classmethod
    async def spawn(cls, python: str) -> _Worker:
        log = tempfile.TemporaryFile()
        try:
            process = await asyncio.create_subprocess_exec(
                python,
                "-I",  # no folder of this project before the packages, nothing of its environment
                str(WORKER),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_LIMIT,
                env=child_environment(os.environ, threads=1),
            )
        except OSError as error:
            log.close()
            raise InfrastructureError(f"{python} cannot be started: {error.strerror or error}") from None
        return cls(process, log)

    async def greet(self) -> None:
        greeting = await self._answer(START_SECONDS, "importing alfworld")
        if not greeting["version"].startswith(VERSION):
            raise InfrastructureError(f"found alfworld {greeting['version']}; expected {VERSION}x: run `make alfworld`")
        self.domain, self.grammar = greeting["domain"], greeting["grammar"]

    async def ask(self, request: dict[str, Any], timeout_s: float, what: str) -> dict[str, Any]:
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            await asyncio.wait_for(self._stdin.drain(), timeout_s)
        except (OSError, TimeoutError):
            pass  # it ended, or does not read: the answer that does not come says so
        return await self._answer(timeout_s, what)

    async def _answer(self, timeout_s: float, what: str) -> dict[str, Any]:
        try:
            line = await asyncio.wait_for(self._stdout.readline(), timeout_s)
        except TimeoutError:
            raise InfrastructureError(f"ALFWorld's process: {what} was not finished in {timeout_s:g} s") from None
        if not line.endswith(b"\n"):  # nothing, or what it had written of its answer when it ended
            code = await self.process.wait()
            raise InfrastructureError(f"ALFWorld's process ended with exit code {code} while {what}: {self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise InfrastructureError(f"ALFWorld failed while {what}: {answer['error'].strip().splitlines()[-1]}")
        return answer

    def _tail(self) -> str:
        """The end of what it wrote to stderr."""
        if self._log.closed:
            return "it was stopped"
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log.tell() - 500, 0))
        return self._log.read().decode(errors="replace").strip() or "it said nothing"

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self._log.close()
