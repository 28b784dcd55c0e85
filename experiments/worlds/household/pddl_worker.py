"""Child process of `PddlPool`, run as ``PYTHON -I pddl_worker.py`` with a Python that has ALFWorld.

Imports nothing of this project, which need not be installed there. Messages are JSON lines. The first, to the parent,
is {"version", "domain", "grammar"} of the alfworld package. Requests are {"reset": path or content of a game file,
"timeout_s"} or {"step": command, "timeout_s"}. The answer is {"text", "admissible", "won"}, or {"error": text} after an
exception.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from typing import Any

GRACE_SECONDS = 1.0  # the parent kills at the deadline; this process ends itself later if the parent no longer exists


class Engine:
    """Plays one ALFWorld game at a time. Repeating a game takes half the time, because the loaded game is kept."""

    def __init__(self) -> None:
        os.environ.setdefault("ALFWORLD_DATA", tempfile.gettempdir())  # importing the package creates this folder
        import textworld  # pyright: ignore[reportMissingImports]  # of ALFWorld's own environment
        from alfworld import info  # pyright: ignore[reportMissingImports]
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler  # pyright: ignore[reportMissingImports]
        from textworld.envs import PddlEnv  # pyright: ignore[reportMissingImports]

        with open(info.ALFRED_PDDL_PATH) as domain, open(info.ALFRED_TWL2_PATH) as grammar:
            self.greeting = {"version": info.__version__, "domain": domain.read(), "grammar": grammar.read()}
        self._environment = AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True)))
        self._loaded: Any = None

    def reset(self, game: Any) -> dict[str, Any]:
        if game != self._loaded:
            self._loaded = None
            self._environment.load(game)
            self._loaded = game
        return self._told(self._environment.reset())

    def step(self, command: str) -> dict[str, Any]:
        return self._told(self._environment.step(command)[0])

    def _told(self, state: Any) -> dict[str, Any]:
        return {"text": state.feedback, "admissible": list(state.admissible_commands), "won": bool(state.won)}


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    # No Python handler: SIGALRM's default action ends the process even inside the planner's C++.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_SECONDS)
    try:
        return engine.reset(request["reset"]) if "reset" in request else engine.step(request["step"])
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the trainer
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries must not print into the answers

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        engine = Engine()
    except Exception:
        say({"error": traceback.format_exc()})
        return
    try:
        say(engine.greeting)
        for line in sys.stdin:
            say(answer(engine, json.loads(line)))
    except BrokenPipeError:
        return  # the parent no longer exists


if __name__ == "__main__":
    main()
