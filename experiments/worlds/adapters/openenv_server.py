"""A game of traffic lights as an OpenEnv server: ``.venv-openenv/bin/python openenv_server.py PORT``."""

# pyright: reportMissingImports=false

import random
import sys
from typing import Any, Literal

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

RIGHT = {"red": "stop", "yellow": "slow", "green": "go"}
LIGHTS = 4


class Drive(Action):
    word: Literal["stop", "slow", "go"]


class Light(Observation):
    colour: str = ""


class TrafficLights(Environment):
    """Shows four lights, one after the other. Each right action is worth a quarter."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._lights: list[str] = []
        self._state = State(step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Light:
        self._lights = random.Random(seed).choices(sorted(RIGHT), k=LIGHTS)
        self._state = State(episode_id=episode_id, step_count=0)
        return Light(colour=self._lights[0])

    def step(self, action: Drive, timeout_s: float | None = None, **options: Any) -> Light:
        seen = self._lights[self._state.step_count]
        self._state.step_count += 1
        rest = self._lights[self._state.step_count :]
        reward = float(action.word == RIGHT[seen]) / LIGHTS
        return Light(colour=rest[0] if rest else "", reward=reward, done=not rest)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(TrafficLights, Drive, Light, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
