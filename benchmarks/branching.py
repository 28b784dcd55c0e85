"""What rollouts cost beside the model: waiting, tokens computed anew, orchestration.

    python -m benchmarks.branching [--prompts 8] [--samples 8] [--skip-model]

*Waiting* (scripted engine, 20 us per given and 1 ms per sampled token, one slot per trajectory; a search takes 50 ms):
one group of 16 trajectories with two searches each, as a ratio to the critical path (one trajectory alone, measured
the same way): the agent loop; ARPO's sampler, which adds a stage where too few forks are drawn; a loop with a barrier
per turn; and one that also runs its searches one after the other, as TRL's tool loop does.

*The engine's idle share* (same engine with 8 slots, 64 trajectories under way): the share of the wall time in which no
request is computed, over ``--prompts`` x 4 prompts.

*Tokens computed* (transformers engine, a random Qwen3 whose every turn is read as a search, two searches): given tokens
that were in no cache plus sampled tokens, with and without prefix reuse, for GRPO's groups and for ARPO's.

*Orchestration*: processor time of this process per turn over an engine and a tool that answer at once, tokenisation of
prompts and results included.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import page
from benchmarks.rollouts import EveryTurnSearches, SlowSearch, make_model
from rollout.agent_loop import AgentLoop, Budgets, Request
from rollout.branching import BranchingSampler
from rollout.engines.base import Engine, SamplingParams
from rollout.engines.scripted import ScriptedEngine
from rollout.engines.transformers_engine import TransformersEngine
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.sampling import IndependentSampler, Sampler, derive_seed
from rollout.system import RolloutSystem
from rollout.trajectory import CallOutcome, Task, ToolResult, Trajectory

SEARCHES, TOOL_S, TURN_TOKENS = 2, 0.05, 24
SAMPLING = SamplingParams(max_new_tokens=TURN_TOKENS)
PREFILL_S, DECODE_S = 2e-5, 1e-3
REPEATS = 3  # of the single groups; the best counts, since whatever else runs here only adds


class Search(SlowSearch):
    """Always takes the same time."""

    async def call(self, arguments: dict[str, object]) -> ToolResult:
        if self.median_s:
            await asyncio.sleep(self.median_s)
        return ToolResult("A town by the sea with a harbour, a tower and a market.", CallOutcome.OK)


def scripted(protocol: SearchR1Protocol, **options: object) -> ScriptedEngine:
    """Searches twice, then answers; about 24 tokens per turn, other ones for each seed."""
    tokenizer = protocol.tokenizer
    search, answer = (tokenizer.encode(text) for text in ("<search> town </search>", "<answer> town </answer>"))
    mark = tokenizer.encode("\n\n<information>")

    def reply(ids: tuple[int, ...], sampling: SamplingParams) -> list[int]:
        done = sum(ids[i : i + len(mark)] == tuple(mark) for i in range(len(ids)))
        thought = [100 + (sampling.seed >> 8 * i) % 200 for i in range(7)] * 2
        return [*thought[:14], *(search if done < SEARCHES else answer)]

    return ScriptedEngine(reply, tokenizer, prefix_reuse=True, **options)  # type: ignore[arg-type]


def tasks(count: int) -> list[Task]:
    return [Task(f"q{i}", f"What lies near town {i}?", (), "bench") for i in range(count)]


def make_system(
    engine: Engine, protocol: SearchR1Protocol, sampler: Sampler, tool_s: float = 0.0, concurrency: int = 256
) -> RolloutSystem:
    """Started and warm."""
    environment = QuestionAnswering({"search": Search(tool_s)})
    system = RolloutSystem(
        engine,
        protocol,
        environment,
        reward=None,
        max_turns=SEARCHES,
        max_turn_tokens=TURN_TOKENS,
        concurrency=concurrency,
        sampler=sampler,
    )
    system.rollout(tasks(1), n=1, sampling=SAMPLING, seed=99)
    return system


def roll(system: RolloutSystem, prompts: int, n: int) -> tuple[list[Trajectory], float, float]:
    """Trajectories, wall seconds and processor seconds of this process. Closes the system."""
    try:
        wall, processor = time.perf_counter(), time.process_time()
        done = system.rollout(tasks(prompts), n=n, sampling=SAMPLING, seed=0)
        return done, time.perf_counter() - wall, time.process_time() - processor
    finally:
        system.close()


async def turn_by_turn(engine: ScriptedEngine, protocol: SearchR1Protocol, n: int, serial: bool) -> float:
    """Wall seconds of a loop that generates for all, then searches for all; ``serial``: one search after the other."""
    await engine.start()
    search, [task] = Search(TOOL_S), tasks(1)
    contexts = [protocol.prompt_ids(task) for _ in range(n)]
    began = time.perf_counter()
    for turn in range(SEARCHES + 1):

        async def generate(index: int, context: list[int], turn: int = turn) -> tuple[int, ...]:
            sampling = dataclasses.replace(SAMPLING, stop=protocol.stop, seed=derive_seed(0, index, turn))
            return (await engine.generate(context, sampling)).token_ids

        sampled = await asyncio.gather(*(generate(i, context) for i, context in enumerate(contexts)))
        if turn == SEARCHES:
            break
        actions = [protocol.parse(protocol.decode(ids)) for ids in sampled]
        searches = [search.call(action.calls[0].arguments) for action in actions]
        results = [await one for one in searches] if serial else await asyncio.gather(*searches)
        for context, ids, action, result in zip(contexts, sampled, actions, results, strict=True):
            context += [*ids, *protocol.observation_ids(action, [result], 500)[0]]
    return time.perf_counter() - began


SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "independent": lambda n: IndependentSampler(),
    "ARPO fixed": lambda n: BranchingSampler(n // 2),
    "ARPO as published": lambda n: BranchingSampler(n // 2, variant="as_published"),
}


def waiting(protocol: SearchR1Protocol, prompts: int) -> Iterator[str]:
    speed = {"prefill_s": PREFILL_S, "decode_s": DECODE_S}

    def best(run: Callable[[], float]) -> float:
        return min(run() for _ in range(REPEATS))

    def group(sampler: Sampler, n: int) -> float:
        return roll(make_system(scripted(protocol, **speed), protocol, sampler, TOOL_S), 1, n)[1]

    def loop(serial: bool) -> float:
        return asyncio.run(turn_by_turn(scripted(protocol, **speed), protocol, 16, serial))

    critical = best(lambda: group(IndependentSampler(), 1))
    yield f"critical path of {SEARCHES} searches of {1000 * TOOL_S:.0f} ms: {1000 * critical:.0f} ms"
    for name, make in SAMPLERS.items():
        wall = best(lambda make=make: group(make(16), 16))
        yield f"16 trajectories, {name}: {1000 * wall:.0f} ms, {wall / critical:.2f} of the critical path"
    for name, serial in (("barrier per turn", False), ("searches one after the other", True)):
        wall = best(lambda serial=serial: loop(serial))
        yield f"16 trajectories, {name}: {1000 * wall:.0f} ms, {wall / critical:.2f} of the critical path"
    for name, make in SAMPLERS.items():
        engine = scripted(protocol, slots=8, **speed)
        system = make_system(engine, protocol, make(8), TOOL_S, concurrency=64)
        engine.busy_s = 0.0
        wall = roll(system, 4 * prompts, 8)[1]
        idle = 1 - engine.busy_s / wall
        yield f"{4 * prompts} prompts of 8, 8 slots, {name}: {wall:.2f} s, the engine waits {idle:.1%} of it"


def tokens(folder: Path, prompts: int, samples: int) -> Iterator[str]:
    from safetensors.torch import load_file

    protocol = EveryTurnSearches(str(folder), template="short")
    weights = load_file(folder / "model.safetensors")
    names = ("independent", "ARPO fixed")
    computed: dict[tuple[str, bool], int] = {}
    found = {}
    for reuse in (False, True):
        engine = TransformersEngine(str(folder), slots=prompts * samples, max_length=1024, prefix_reuse=reuse)
        system = make_system(engine, protocol, IndependentSampler())
        try:
            for version, name in enumerate(names, start=1):
                system.load_weights(weights.items(), version)  # the same weights: empties the prefix cache
                system.sampler = SAMPLERS[name](samples)
                found[name] = system.rollout(tasks(prompts), n=samples, sampling=SAMPLING, seed=0)
                computed[name, reuse] = sum(t.tokens_computed or 0 for t in found[name])
        finally:
            system.close()
    for name in names:
        forks, ratio = sum(t.fork is not None for t in found[name]), computed[name, True] / computed[name, False]
        yield (
            f"{prompts} prompts of {samples}, {name}: {forks} forks, {executed(found[name])} searches executed, "
            f"{computed[name, True]} tokens computed, {computed[name, False]} without prefix reuse, ratio {ratio:.2f}"
        )


def executed(done: list[Trajectory]) -> int:
    """Searches that took place; a fork's inherited ones are its source's."""
    return sum(t.fork is None or t.turns[call.turn].start >= t.fork.at for t in done for call in t.executed_calls)


def orchestration(protocol: SearchR1Protocol, prompts: int, samples: int) -> Iterator[str]:
    for name, make in SAMPLERS.items():
        engine = scripted(protocol)
        done, _, processor = roll(make_system(engine, protocol, make(samples)), 4 * prompts, samples)
        turns = sum(t.fork is None or turn.start >= t.fork.at for t in done for turn in t.turns)
        script = asyncio.run(replay(engine, len(engine.requests)))
        yield (
            f"orchestration, {name}: {1e6 * (processor - script) / turns:.0f} us of processor time per turn "
            f"({turns} turns; the scripted engine's own share is taken off)"
        )


async def replay(engine: ScriptedEngine, count: int) -> float:
    """Processor seconds that the engine takes for its latest ``count`` requests by itself."""
    await engine.start()
    asked = engine.requests[-count:]
    began = time.process_time()
    for request in asked:
        await engine.generate(request.token_ids, request.sampling)
    return time.process_time() - began


def figures(arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    protocol = SearchR1Protocol(str(make_model(folder)), template="short")
    yield from waiting(protocol, arguments.prompts)
    if not arguments.skip_model:
        yield from tokens(folder, arguments.prompts, arguments.samples)
    yield from orchestration(protocol, arguments.prompts, arguments.samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="trajectories per prompt")
    parser.add_argument("--skip-model", action="store_true", help="without the tokens computed by a real engine")
    page.add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for figure in figures(arguments, Path(folder)):
            print(page.rows([figure]) if arguments.markdown else figure, flush=True)


if __name__ == "__main__":
    main()
