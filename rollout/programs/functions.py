"""Programs that are Python functions, in the trainer's process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

from common.async_calls import PerLoop, holdable
from common.ranges import FiniteFloat, PositiveFloat, PositiveInt
from rollout.programs.base import Model, ProgramError, ProgramResult
from rollout.tools.base import OwnFault, own_faults
from rollout.trajectory import Task


class PythonProgram:
    """Runs a Python function as the agent: ``function(task, model)``. ``programs.base`` has the types of its arguments
    and results.

    A coroutine function runs in the rollout's event loop, where many can wait for the model at once, and must not
    block. An ordinary function runs in a thread. Its code is trusted: it has the trainer's rights. A thread whose time
    is over cannot be ended; it gets no more turns, and does not keep the process from ending.

    Args:
        function: dotted path, as ``my_agents.search.solve``.
        timeout_s: seconds of one rollout, the model's time included; null: no limit.
        failure_reward: reward of a rollout whose program fails, also at a limit of turns, tokens or time. null: it is
            not scored, and left out unless there is a reward function.
        threads: ordinary functions that run at once; others wait, and their time does not run.

    Raises:
        ValueError: the function cannot be imported, or does not take two arguments.
    """

    def __init__(
        self,
        function: str,
        timeout_s: PositiveFloat | None = 600.0,
        failure_reward: FiniteFloat | None = None,
        threads: PositiveInt = 64,
    ) -> None:
        self.name, self.timeout_s, self.failure_reward = function, timeout_s, failure_reward
        self._function = _imported(function)
        self._slots = PerLoop("a program", lambda: asyncio.Semaphore(threads))

    async def run(self, task: Task, model: Model) -> ProgramResult:
        waits = inspect.iscoroutinefunction(self._function)
        try:
            async with contextlib.nullcontext() if waits else self._slots.get(), asyncio.timeout(self.timeout_s):
                with own_faults():
                    returned = self._function(task, model) if waits else _in_thread(self._function, task, model)
                    returned = await returned
                    if inspect.isawaitable(returned):  # a coroutine function in a decorator
                        returned = await returned
                    return ProgramResult.of(returned)
        except OwnFault as fault:
            raise ProgramError(f"{self.name} raised {fault}") from fault.__cause__

    async def close(self) -> None:
        self._slots.drop()


def _in_thread(function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
    """Call a function in a new daemon thread. The process does not wait for it at its exit, as it would for an
    executor's."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():  # not cancelled
            future.set_result(result) if error is None else future.set_exception(error)

    def call() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:
            error = holdable(raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=call, daemon=True, name="program").start()
    return future


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
