"""A number-guessing game as an OpenEnv server: ``.venv-openenv/bin/python openenv_server.py PORT``."""

# pyright: reportMissingImports=false

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

TURNS = 4


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class GuessTheNumber(Environment):
    """Draws a number from 1 to 9. The reward is 1 for finding it within four guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number, self._state = 0, State(step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self._number, self._state = random.Random(seed).randint(1, 9), State(episode_id=episode_id, step_count=0)
        return Hint(text="guess a number")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        self._state.step_count += 1
        found = action.number == self._number
        text = "right" if found else "higher" if action.number < self._number else "lower"
        return Hint(text=text, reward=float(found), done=found or self._state.step_count == TURNS)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(GuessTheNumber, Guess, Hint, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
