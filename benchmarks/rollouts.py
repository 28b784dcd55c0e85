"""Compares trajectories per second of the agent loop with a loop that has a barrier per turn, on the same engine.

    python -m benchmarks.rollouts [--trajectories 48] [--turns 3] [--repeats 2]

A random Qwen3 (4 layers, hidden 128) writes ``turns`` turns of up to 24 tokens, each read as a search, and a last turn.
A search takes a log-normal time (sigma 1, as measured on loaded retrievers: a few are ten times slower than the
median). Its query determines the time, so both loops have the same latencies, with medians of 0, 50 and 200 ms. The
barrier loop generates for all trajectories, waits, searches for all, and waits, as verl and Search-R1 do. Both loops
use the same vLLM engine and seeds and start with an empty prefix cache. The numbers of sampled tokens are compared to
check that both did the same work. The output is the median over the repeats, and the ratio.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks import common
from common.seeds import derive_seed
from rollout.engines.base import Engine, SamplingParams
from rollout.engines.vllm_engine import VLLMEngine
from rollout.engines.weights.files import WeightFiles
from rollout.environments.question_answering import QuestionAnswering
from rollout.loop.agent_loop import AgentLoop, Budgets, Request
from rollout.protocols.base import PromptMode
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.trajectory import Action, ActionKind, CallOutcome, Task, ToolRequest, ToolResult

MEDIANS_S = (0.0, 0.05, 0.2)
TURN_TOKENS = 24
SAMPLING = SamplingParams(max_new_tokens=TURN_TOKENS)
MODEL = {
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "initializer_range": 0.2,
}  # fmt: skip
PASSAGE = 'Doc 1(Title: "Somewhere") ' + "A town by the sea with a harbour, a tower and a market. " * 3


class EveryTurnSearches(SearchR1Protocol):
    """Reads every text as a search query, because random weights never write a tag."""

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        return Action(ActionKind.CALL, (ToolRequest("search", {"query": text}),))


class SlowSearch:
    """Returns one passage after a time that depends only on the query."""

    name = "search"

    def __init__(self, median_s: float) -> None:
        self.median_s = median_s

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        factor = random.Random(derive_seed(arguments["query"])).lognormvariate(0, 1)
        await asyncio.sleep(self.median_s * factor)
        return ToolResult(PASSAGE, CallOutcome.OK)

    async def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Bench:
    engine: Engine
    protocol: EveryTurnSearches
    tasks: list[Task]
    turns: int

    async def agent_loop(self, search: SlowSearch) -> list[tuple[int, ...]]:
        """Return the response ids per trajectory, with one task per trajectory."""
        budgets = Budgets(max_turns=self.turns, max_turn_tokens=TURN_TOKENS, max_length=1024)
        loop = AgentLoop(self.engine, self.protocol, QuestionAnswering({"search": search}), budgets)
        runs = (loop.run(task, group=task.id, index=0, request=Request(0, SAMPLING)) for task in self.tasks)
        return [trajectory.response_ids for trajectory in await asyncio.gather(*runs)]

    async def barrier_loop(self, search: SlowSearch) -> list[tuple[int, ...]]:
        """Return the response ids per trajectory, with two barriers per turn."""
        prompts = [self.protocol.prompt_ids(task) for task in self.tasks]
        responses: list[list[int]] = [[] for _ in self.tasks]
        for turn in range(self.turns + 1):
            generations = await asyncio.gather(
                *(
                    self.engine.generate(
                        prompt + response,
                        dataclasses.replace(
                            SAMPLING,
                            stop=self.protocol.stop,
                            stop_token_ids=self.protocol.stop_token_ids,
                            seed=derive_seed(0, task.id, 0, turn),
                        ),
                    )
                    for task, prompt, response in zip(self.tasks, prompts, responses, strict=True)
                )
            )
            for response, generation in zip(responses, generations, strict=True):
                response.extend(generation.token_ids)
            if turn == self.turns:
                break
            actions = [self.protocol.parse(self.protocol.decode(generation.token_ids)) for generation in generations]
            results = await asyncio.gather(*(search.call(action.calls[0].arguments) for action in actions))
            for response, action, result in zip(responses, actions, results, strict=True):
                response.extend(self.protocol.observation_ids(action, [result], 500)[0])
        return [tuple(response) for response in responses]


async def measure(bench: Bench, weights: dict[str, Any], repeats: int) -> list[dict[str, float]]:
    """Return a row per median latency: median seconds of both loops, and their ratio."""
    rows = []
    loops: dict[str, Callable[[SlowSearch], Awaitable[list[tuple[int, ...]]]]] = {
        "agent_loop": bench.agent_loop,
        "barrier": bench.barrier_loop,
    }
    await bench.agent_loop(SlowSearch(0.0))  # warm up
    version = 0
    for median_s in MEDIANS_S:
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(repeats):
            sampled = {}
            for name, run in loops.items():
                version += 1
                files = WeightFiles.write(weights.items())  # pushing the same weights empties the prefix cache
                await bench.engine.load_files(files, version)
                files.remove()
                began = time.perf_counter()
                sampled[name] = await run(SlowSearch(median_s))
                seconds[name].append(time.perf_counter() - began)
            check_same_work(sampled["agent_loop"], sampled["barrier"])
        row = {name: len(bench.tasks) / statistics.median(values) for name, values in seconds.items()}
        rows.append({"median_ms": 1000 * median_s, **row, "ratio": row["agent_loop"] / row["barrier"]})
    return rows


def check_same_work(ours: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> None:
    """Check that both sampled the same number of tokens. vLLM's numbers depend on the batch, so a few trajectories may
    differ."""
    same = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    tokens, their_tokens = sum(map(len, ours)), sum(map(len, theirs))
    if abs(tokens - their_tokens) > 0.05 * tokens:
        raise SystemExit(
            f"the loops did different work: {tokens} and {their_tokens} tokens, {same:.0%} equal responses"
        )


async def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    from safetensors.torch import load_file

    common.save_random_model(folder, **MODEL)
    engine = VLLMEngine(str(folder), max_length=1024)
    tasks = [Task(f"q{i}", f"What lies near town {i}?", (), "bench") for i in range(arguments.trajectories)]
    bench = Bench(engine, EveryTurnSearches(str(folder), template="short"), tasks, arguments.turns)
    await engine.start()
    try:
        return await measure(bench, load_file(folder / "model.safetensors"), arguments.repeats)
    finally:
        await engine.close()


def metric(row: dict[str, float]) -> str:
    return (
        f"search takes {row['median_ms']:.0f} ms (median): agent loop {row['agent_loop']:.2f} trajectories/s, "
        f"barrier per turn {row['barrier']:.2f}/s, ratio {row['ratio']:.2f}"
    )


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--trajectories", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(run(arguments, Path(folder)))
    common.print_metrics(arguments, map(metric, rows))


if __name__ == "__main__":
    main()
