"""Plays rollouts of a verifiers environment: ``.venv-verifiers/bin/python verifiers_worker.py CONFIG``, started by
``programs.verifiers_program``.

CONFIG is the environment's configuration as JSON. Each line of the standard input asks for something, as JSON, and each
line of the standard output answers one of them. Imports nothing of this project, because it runs on other packages.
"""

# pyright: reportMissingImports=false

import asyncio
import itertools
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def play(env: Any, task: Any, ask: dict[str, Any]) -> dict[str, Any]:
    """Return the reward (the mean over the episode's agents), the metrics and the last words of an episode."""
    os.environ["ROLLOUT_API_KEY"] = ask["api_key"]  # the same for all rollouts
    client = vf.EvalClientConfig(base_url=ask["base_url"], api_key_var="ROLLOUT_API_KEY")
    context = vf.ModelContext(client=client, model=ask["model"], sampling=vf.SamplingConfig())
    [slot] = env.slots(task, 1)
    episode = await env.run_slot(slot, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return {"error": "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok"}
    traces = [trace for trace in episode.traces if any(value is not None for value in trace.rewards.values())]
    metrics = {name: value for trace in episode.traces for name, value in trace.metrics.items() if value is not None}
    return {
        "reward": sum(trace.reward for trace in traces) / len(traces) if traces else None,
        "metrics": metrics | {name: r.score for t in traces for name, r in t.rewards.items() if r is not None},
        "answer": episode.traces[-1].last_reply,
    }


class Environment:
    """The environment, and the tasks of its taskset, which are read as far as they are asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.env = load_environment(resolve_env_config(config))
        self._rest, self._tasks = iter(self.env.taskset), []

    def tasks(self, count: int) -> list[Any]:
        self._tasks += itertools.islice(self._rest, max(0, count - len(self._tasks)))
        return self._tasks[:count]

    async def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        if ask["ask"] == "ready":
            return {}
        if ask["ask"] == "tasks":
            return {"prompts": [task.data.prompt_text for task in self.tasks(ask["count"])]}
        task = self.tasks(ask["index"] + 1)[-1]
        if task.data.prompt_text != ask["question"]:
            return {
                "broken": f"task {ask['index']} of the taskset is now another; run the stage of VerifiersTasks again"
            }
        return await play(self.env, task, ask)


async def main(environment: Environment, out: Any) -> None:
    """Answer lines until the standard input ends."""

    async def answer(line: str) -> None:
        ask = json.loads(line)
        try:
            said = await environment.answer(ask)
        except Exception as error:  # verifiers returns those of an episode
            said = {"broken": f"{type(error).__name__}: {error}"}
        out.write(json.dumps({"id": ask["id"], **said}) + "\n")
        out.flush()

    loop, running = asyncio.get_running_loop(), set()
    async with environment.env.serving():
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            task = asyncio.create_task(answer(line))
            running.add(task)
            task.add_done_callback(running.discard)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of the environment must not mix with answers
    asyncio.run(main(Environment(json.loads(sys.argv[1])), answers))
