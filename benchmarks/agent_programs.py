"""Compares an agent program with the agent loop: processor time per turn, and the tokens of its rows.

``python -m benchmarks.agent_programs [--rollouts 1000] [--repeats 5]``

Both sides play the same conversation of four turns with a search tool, all rollouts at once, on an engine that answers
at once from a script. The program asks by ``model.chat``, without HTTP. The output is the ratio of processor times per
turn (median, least and most of the repeats), and for conversations of 2, 8 and 32 turns the tokens of a rollout's rows
beside one row per request.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import common
from rollout.engines.base import Generation, SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.programs.base import Model, ProgramResult
from rollout.programs.protocol import ProgramProtocol
from rollout.protocols.hermes import HermesProtocol
from rollout.rewards.qa import ExactMatchReward
from rollout.system import RolloutSystem
from rollout.tools.schemas import SCHEMAS
from rollout.trajectory import Task, ToolResult, Trajectory, split_turns

PASSAGE = "There are 25 primes below 100, and 168 below 1,000."
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "primes below 100"}}\n</tool_call><|im_end|>'
SAMPLING = SamplingParams(max_new_tokens=200)


class Scripted:
    """An engine that calls the tool until a conversation has so many turns, then answers."""

    max_length = 100_000

    def __init__(self, tokenizer: Any, turns: int) -> None:
        self.call, self.answer = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (CALL, "\\boxed{25}<|im_end|>")
        )
        self.result, self.turns = tokenizer.convert_tokens_to_ids("<tool_response>"), turns

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def load_files(self, files: Any, version: int, between_steps: bool = False) -> None:
        raise ValueError("a script has no weights")

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        await asyncio.sleep(0)
        ids = self.answer if token_ids.count(self.result) >= self.turns - 1 else self.call
        return Generation(ids, (-0.5,) * len(ids), "eos", 0)


class Search:
    name = "search"

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult.of(PASSAGE)

    async def close(self) -> None: ...


class Agent:
    """The agent loop's conversation as a program."""

    failure_reward: float | None = None

    async def run(self, task: Task, model: Model) -> ProgramResult:
        messages: list[Any] = [{"role": "user", "content": task.question}]
        while True:
            said = (await model.chat(messages=messages, tools=[SCHEMAS["search"]]))["choices"][0]["message"]
            messages.append(said)
            if not said.get("tool_calls"):
                return ProgramResult(1.0)
            for call in said["tool_calls"]:
                json.loads(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": PASSAGE})

    async def close(self) -> None: ...


def systems(folder: str, turns: int, rollouts: int) -> dict[str, RolloutSystem]:
    tokens = {"max_turn_tokens": 200, "max_response_tokens": 50_000}
    limits: dict[str, Any] = {"max_turns": turns, "concurrency": rollouts, **tokens}
    loop, program = HermesProtocol(folder, tools=["search"]), ProgramProtocol(folder)
    return {
        "loop": RolloutSystem(
            Scripted(loop.tokenizer, turns), loop, QuestionAnswering({"search": Search()}), ExactMatchReward(), **limits
        ),
        "program": RolloutSystem(Scripted(program.tokenizer, turns), program, program=Agent(), **limits),
    }


def played(system: RolloutSystem, rollouts: int) -> tuple[float, list[Trajectory]]:
    """Return the processor time of all rollouts in seconds, and their trajectories. The first two are not timed."""
    tasks = [Task(str(n), "How many primes are below 100?", ("25",), "toy") for n in range(rollouts)]
    try:
        system.rollout(tasks[:2], sampling=SAMPLING, seed=0)
        began = time.process_time()
        trajectories = system.rollout(tasks, sampling=SAMPLING, seed=1)
        return time.process_time() - began, trajectories
    finally:
        system.close()


def measured(rollouts: int, repeats: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        common.save_tokenizer(folder)
        ratios, milliseconds, turns = [], 0.0, 4
        for _ in range(repeats):
            found = {name: played(system, rollouts) for name, system in systems(folder, turns, rollouts).items()}
            for name, (_, trajectories) in found.items():
                assert all(len(t.turns) == turns for t in trajectories), name
            ratios.append(found["program"][0] / found["loop"][0])
            milliseconds = found["program"][0] / rollouts / turns * 1000
        yield (
            f"{rollouts} programs at once: processor time of a turn is {statistics.median(ratios):.2f} "
            f"[{min(ratios):.2f}, {max(ratios):.2f}] of the agent loop's ({milliseconds:.2f} ms)"
        )
        for turns in (2, 8, 32):
            _, [trajectory] = played(systems(folder, turns, 2)["program"], 1)
            rows = sum(len(row.prompt_ids) + len(row.response_ids) for row in split_turns(trajectory))
            first = len(trajectory.prompt_ids)
            single = sum(first + turn.end for turn in trajectory.turns)
            yield f"{turns} turns: {rows} tokens in one row, {single} in a row per request ({single / rows:.1f} times)"


if __name__ == "__main__":
    parser = common.make_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    common.print_metrics(options, measured(options.rollouts, options.repeats))
