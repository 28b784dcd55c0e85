"""ALFWorld's household tasks as an environment: one text command per action, reward 10 for success, otherwise 0.

``task.metadata["household"]`` is {"game": a game of `games.py` as JSON} or {"file": path of a game.tw-pddl}. Reward and
end are verl-agent's: the goal gives 10 and ends the episode. The agent loop limits the number of turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Protocol, cast

from common.ranges import PositiveFloat, PositiveInt
from experiments.worlds.household.games import Game
from experiments.worlds.household.pddl import PddlPool, check_game_file
from experiments.worlds.household.simulator import NOTHING, Observation, Simulator
from rollout.environments.base import ACT, FirstObservation, StepResult, act_in_order, check_tasks, refusal
from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    InfrastructureError,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
    Turn,
)


class Household:
    """Environment factory for ALFWorld's household games: makes one environment per trajectory.

    Args:
        engine: "simulator" plays generated games in this process. "alfworld" plays generated and downloaded games with
            the alfworld package, in child processes (a tenth of a second per step).
        reward: reward for reaching the goal.
        python: for "alfworld": a Python that has the package. Default: the variable COMPACT_AGENTS_ALFWORLD_PYTHON,
            else the environment of ``make alfworld``.
        workers: for "alfworld": number of child processes, which is the number of concurrent episodes.
        step_timeout_s: for "alfworld": deadline of one command in seconds.

    Raises:
        ValueError: unknown engine, or a number out of range.
    """

    scores_itself: ClassVar[bool] = True
    tools: ClassVar[tuple[str, ...]] = (ACT,)

    def __init__(
        self,
        engine: Literal["simulator", "alfworld"] = "simulator",
        reward: PositiveFloat = 10.0,
        python: str | None = None,
        workers: PositiveInt = 8,
        step_timeout_s: PositiveFloat = 30.0,
    ) -> None:
        if engine not in ("simulator", "alfworld"):
            raise ValueError(f"engine is {engine!r}; expected simulator or alfworld")
        self.engine, self.reward = engine, reward
        self._pool = PddlPool(python, workers, step_timeout_s) if engine == "alfworld" else None

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> HouseholdEnvironment:
        return HouseholdEnvironment(task, self._pool, self.reward, tools_enabled)

    def check(self, tasks: Iterable[Task]) -> None:
        """Check, before training starts, that every task has a household game that the option ``engine`` can play.

        Raises:
            ValueError: names the first task without one.
        """

        def look(task: Task) -> None:
            try:
                game = _game_of(task, self._pool is not None)
                if isinstance(game, str):
                    check_game_file(game)
            except ValueError as error:
                raise ValueError(f"task {task.id}: {error}") from error

        check_tasks(tasks, look, "household games that cannot be played")

    async def start(self) -> None:
        """Start the first process of the alfworld engine; the simulator needs none. Raises InfrastructureError if
        ALFWorld is missing.
        """
        if self._pool is not None:
            await self._pool.start()

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


class Engine(Protocol):
    async def reset(self) -> Observation: ...

    async def step(self, command: str) -> Observation: ...

    async def close(self) -> None: ...


class HouseholdEnvironment:
    """Environment of one episode of a household game. Its measures are ``success`` (0 or 1) and ``steps`` (number of
    commands).
    """

    def __init__(self, task: Task, pool: PddlPool | None, reward: float, tools_enabled: bool) -> None:
        self._task, self._pool, self._reward, self._enabled = task, pool, reward, tools_enabled
        self._engine: Engine | None = None
        self._steps, self._won = 0, False

    async def reset(self) -> FirstObservation:
        """Start the household game and return its first observation. Raises InfrastructureError if the task has no
        valid game; `Household.check` reports this earlier.
        """
        try:
            game = _game_of(self._task, self._pool is not None)
        except ValueError as error:
            raise InfrastructureError(f"task {self._task.id}: {error}") from None
        self._engine = await self._pool.open(game) if self._pool else _InThisProcess(cast(Game, game))  # not a file
        observation = await self._engine.reset()
        return FirstObservation(observation.text, {"admissible": list(observation.admissible)}, self._measures())

    async def resume(self, turns: Sequence[Turn], calls: Sequence[ToolCall]) -> float | None:
        """Continue an episode after ``calls`` by repeating their commands, and return the reward so far. Call `reset`
        first.
        """
        for call in calls:
            if call.executed:
                await self._act(call.request)
        return self._reward * self._won

    async def step(self, action: Action) -> StepResult:
        before = self._won
        results, latencies = await act_in_order(action, self._act)
        return StepResult(
            results,
            latencies,
            done=self._won or action.kind is ActionKind.ANSWER,
            reward=self._reward * (self._won and not before),
            measures=self._measures(),
        )

    def _measures(self) -> dict[str, float]:
        return {"success": float(self._won), "steps": float(self._steps)}

    async def _act(self, request: ToolRequest) -> ToolResult:
        command = request.arguments.get("action")
        if why := refusal(request, self._enabled, "The task is done already." if self._won else None):
            return ToolResult(why, CallOutcome.REFUSED, detail=why)
        if self._engine is None:
            raise RuntimeError("reset() comes before step()")
        observation = await self._engine.step(command if isinstance(command, str) else "")
        self._steps += 1
        self._won = observation.won
        outcome = CallOutcome.ERROR if observation.text == NOTHING else CallOutcome.OK
        return ToolResult(observation.text, outcome, info={"admissible": list(observation.admissible)})

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


class _InThisProcess:
    """Wraps the household simulator in the asynchronous interface of ALFWorld's processes. A step takes some
    microseconds.
    """

    def __init__(self, game: Game) -> None:
        self._simulator = Simulator(game)

    async def reset(self) -> Observation:
        return self._simulator.reset()

    async def step(self, command: str) -> Observation:
        return self._simulator.step(command)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _game_of(task: Task, files: bool) -> Game | str:
    """Return a task's household game, or the path of its game file. Raises ValueError if the metadata hold neither, or
    the engine cannot play files.
    """
    world: Any = task.metadata.get("household")
    if not isinstance(world, dict) or len(world) != 1 or not world.keys() <= {"game", "file"}:
        raise ValueError(f"metadata['household'] is {world!r:.100}; expected {{'game': ...}} or {{'file': path}}")
    if "game" in world:
        return Game.from_json(world["game"])
    if not isinstance(world["file"], str):
        raise ValueError(f"metadata['household']['file'] is {world['file']!r:.100}; expected a path")
    if not files:
        raise ValueError(f"the simulator cannot play the game file {world['file']}; take engine: alfworld")
    return world["file"]
