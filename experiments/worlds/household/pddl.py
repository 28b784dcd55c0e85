"""A pool of child processes that run the alfworld package, one game at a time each.

The package has its own environment (``make alfworld``), so the children run under another Python. They are spawned,
never forked. Every answer has a deadline; the pool kills and replaces a child that misses it or dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any, cast

from common.env_vars import child_environment
from experiments.worlds.household.games import Game
from experiments.worlds.household.problem import game_file
from experiments.worlds.household.simulator import Observation
from rollout.trajectory import InfrastructureError

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).with_name("pddl_worker.py")
PYTHON_VARIABLE = "COMPACT_AGENTS_ALFWORLD_PYTHON"
START_SECONDS = 120.0  # seconds to start Python and import the package on a loaded machine
RESET_SECONDS = 120.0  # seconds to load and start a game on a loaded machine (about one otherwise)
LINE_LIMIT = 2**26  # bytes of one answer
VERSION = "0.4."  # earlier versions have other commands ("put X in/on R")


def default_python() -> str | None:
    """Return the path of a Python that has ALFWorld, or None. The environment variable comes first, then that of ``make
    alfworld``.
    """
    here = ROOT / ".venv-alfworld" / "bin" / "python"
    return os.environ.get(PYTHON_VARIABLE) or (str(here) if here.exists() else None)


def check_game_file(path: str | Path) -> None:
    """Raise ValueError, with the path, unless an ALFWorld game file exists, is JSON and has the required fields."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"game file {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ValueError(f"game file {path}: not JSON ({error})") from None
    needed = ("pddl_domain", "grammar", "pddl_problem")
    if not isinstance(data, dict) or not all(isinstance(data.get(key), str) and data[key] for key in needed):
        raise ValueError(f"game file {path}: expected a mapping with the texts {', '.join(needed)}")
    if data.get("solvable") is False:
        raise ValueError(f"game file {path}: marked as unsolvable")


class PddlPool:
    """A pool of child processes that play ALFWorld games, up to ``workers`` at once; further games wait for a process.
    Use one event loop from start to close.

    Args:
        python: interpreter that has alfworld 0.4; None: ``default_python()``.
        step_timeout_s: deadline of one command in seconds.
    """

    def __init__(self, python: str | None, workers: int, step_timeout_s: float) -> None:
        self.python, self.workers = python, workers
        self.step_timeout_s = step_timeout_s
        self._free = asyncio.Semaphore(workers)
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()  # idle and busy processes

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the live child processes."""
        return tuple(sorted(worker.process.pid for worker in self._alive))

    async def start(self) -> None:
        """Start one child process, so that a missing or wrong alfworld package is reported before other parts load.

        Raises:
            InfrastructureError: no Python has ALFWorld, or the process does not start.
        """
        async with self._free:
            self._idle.append(await self._take())

    async def open(self, game: Game | str) -> PddlGame:
        """Open a generated game, or a game file by its path, in a child process. Waits for a free process;
        ``PddlGame.close`` returns it.
        """
        await self._free.acquire()
        try:
            return PddlGame(self, await self._take(), game)
        except BaseException:
            self._free.release()
            raise

    async def close(self) -> None:
        """Kill all child processes. Games in progress end with InfrastructureError. Idempotent."""
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
    """One ALFWorld game in one child process of the pool.

    Raises InfrastructureError if the process fails; the pool then replaces the process.
    """

    def __init__(self, pool: PddlPool, worker: _Worker, game: Game | str) -> None:
        self._pool, self._worker, self._closed = pool, worker, False
        self._what = f"the game file {game}" if isinstance(game, str) else "a generated game"
        self._game = game if isinstance(game, str) else game_file(game, worker.domain, worker.grammar)

    async def reset(self) -> Observation:
        return await self._ask({"reset": self._game}, RESET_SECONDS, f"loading {self._what}")

    async def step(self, command: str) -> Observation:
        return await self._ask({"step": command}, self._pool.step_timeout_s, f"a command in {self._what}")

    async def close(self) -> None:
        """Return the game's child process to the pool. Idempotent."""
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._worker)

    async def _ask(self, request: dict[str, Any], timeout_s: float, what: str) -> Observation:
        try:
            answer = await self._worker.ask(request | {"timeout_s": timeout_s}, timeout_s, what)
            return Observation(answer["text"], tuple(answer["admissible"]), answer["won"])
        except BaseException:  # also for a cancelled task: the next game must not receive the answer to this request
            await self._pool.discard(self._worker)
            raise


class _Worker:
    """A child process that plays ALFWorld games, as its parent sees it (`pddl_worker.py` is the child's side)."""

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
                "-I",  # with no folder of this project on its path and no variable of this environment
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
            pass  # the process ended or does not read; the missing answer reports it
        return await self._answer(timeout_s, what)

    async def _answer(self, timeout_s: float, what: str) -> dict[str, Any]:
        try:
            line = await asyncio.wait_for(self._stdout.readline(), timeout_s)
        except TimeoutError:
            raise InfrastructureError(f"ALFWorld's process: {what} was not finished in {timeout_s:g} s") from None
        if not line.endswith(b"\n"):  # nothing, or the part of an answer written before the process ended
            code = await self.process.wait()
            raise InfrastructureError(f"ALFWorld's process ended with exit code {code} while {what}: {self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise InfrastructureError(f"ALFWorld failed while {what}: {answer['error'].strip().splitlines()[-1]}")
        return answer

    def _tail(self) -> str:
        """Return the last 500 bytes of the process's stderr as text."""
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
