"""Programs that are Python functions, in the trainer's process."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.ranges import FiniteFloat, PositiveFloat, PositiveInt
from rollout.programs.base import Model, ProgramError, ProgramResult
from rollout.tools.base import OwnFault, own_faults
from rollout.trajectory import Task


class PythonProgram:
    """Runs a Python function as the agent: ``function(task, model)``, see ``programs.base`` for both and for what it
    returns.

    A coroutine function runs in the rollout's event loop, where thousands can wait for the model at once, and must not
    block. An ordinary function runs in a thread. Its code is trusted: it has the trainer's rights. A thread whose time
    is over cannot be ended; it gets no more turns.

    Args:
        function: dotted path, as ``my_agents.search.solve``.
        timeout_s: seconds of one rollout, the model's time included; null: no limit.
        limit_reward: reward of a rollout that fails at a limit of turns, tokens or time. null: it is not scored, and
            left out unless there is a reward function.
        threads: ordinary functions that run at once; others wait.

    Raises:
        ValueError: there is no such function, or it does not take two arguments.
    """

    def __init__(
        self,
        function: str,
        timeout_s: PositiveFloat | None = 600.0,
        limit_reward: FiniteFloat | None = None,
        threads: PositiveInt = 64,
    ) -> None:
        self.name, self.timeout_s, self.limit_reward, self.threads = function, timeout_s, limit_reward, threads
        self._function = _imported(function)
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, task: Task, model: Model) -> ProgramResult:
        try:
            async with asyncio.timeout(self.timeout_s):
                with own_faults():
                    return ProgramResult.of(await self._call(task, model))
        except OwnFault as fault:
            raise ProgramError(f"{self.name} raised {fault}") from fault.__cause__

    async def _call(self, task: Task, model: Model) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(task, model)
        self._pool = self._pool or ThreadPoolExecutor(self.threads, "program")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._function, task, model)

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _imported(path: str) -> Callable[[Task, Model], Any]:
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind(None, None)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"program function {path!r} cannot be imported: {error}; expected MODULE.FUNCTION") from error
    except TypeError as error:
        raise ValueError(f"program function {path!r} does not take (task, model): {error}") from error
    return function
