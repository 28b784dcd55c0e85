"""What the tests of programs share: an engine that samples ids no tokenizer would write, and one rollout at a time."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollout.engines.base import Generation, SamplingParams
from rollout.programs.base import Model, ProgramError, ProgramResult
from rollout.rewards.base import RewardFunction
from rollout.system import RolloutSystem
from rollout.tools.base import OwnFault, own_faults
from rollout.trajectory import Task, Trajectory
from tests.rollout.scripted_engine import ScriptedEngine

END = "<|im_end|>"
TASK = Task("q1", "How many primes are below 100?", ("25",), "toy")
SAMPLING = SamplingParams(max_new_tokens=256)
SEARCH = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
}


class Own:
    """A program from a function of a test."""

    failure_reward: float | None = None

    def __init__(self, play: Callable[[Task, Model], Awaitable[Any]]) -> None:
        self.play = play

    async def run(self, task: Task, model: Model) -> ProgramResult:
        try:
            with own_faults():
                return ProgramResult.of(await self.play(task, model))
        except OwnFault as fault:
            raise ProgramError(str(fault)) from fault

    async def close(self) -> None: ...


def split_ids(tokenizer: Any, text: str, seed: str) -> list[int]:
    """Encode a text piece by piece, cut at random: ids that the tokenizer would not give for the whole text. Control
    tokens and tags stay whole."""
    random_cuts = random.Random(seed)
    added = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    ids: list[int] = []
    while text:
        whole = next((token for token in added if text.startswith(token)), None)
        piece = whole or text[: random_cuts.randint(1, 4)]
        for token in added:  # do not swallow the beginning of a tag
            if whole is None and 0 < (cut := (piece + text[len(piece) : len(piece) + len(token)]).find(token)) < len(
                piece
            ):
                piece = piece[:cut]
        ids += tokenizer.encode(piece, add_special_tokens=False)
        text = text[len(piece) :]
    return ids


class Sampler(ScriptedEngine):
    """Replies with ``say(prompt text, number of the request)`` in ids that are not canonical."""

    def __init__(self, protocol: Any, say: Callable[[str, int], str], **options: Any) -> None:
        tokenizer = protocol.tokenizer
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # context and what was sampled after it

        def script(ids: tuple[int, ...], sampling: SamplingParams) -> list[int]:
            reply = say(protocol.decode(ids), len(self.requests) - 1)
            return split_ids(tokenizer, reply, repr((ids, len(self.requests))))

        super().__init__(script, tokenizer, **options)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        generation = await super().generate(token_ids, sampling)
        self.sampled.append((tuple(token_ids), generation.token_ids))
        return generation


def system_of(
    protocol: Any, say: Callable[[str, int], str], program: Any, reward: RewardFunction | None = None, **options: Any
) -> RolloutSystem:
    limits: dict[str, Any] = {"max_turns": 20, "max_turn_tokens": 256, "max_length": 4000, "max_response_tokens": 2000}
    own = program if hasattr(program, "run") else Own(program)
    engine = say if isinstance(say, ScriptedEngine) else Sampler(protocol, say)
    return RolloutSystem(engine, protocol, reward=reward, program=own, **limits | options)


def play(system: RolloutSystem, task: Task = TASK, **options: Any) -> Trajectory:
    try:
        [trajectory] = system.rollout([task], sampling=SAMPLING, seed=1, **options)
    finally:
        system.close()
    return trajectory


def call(name: str = "search", query: str = "primes") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"query": "{query}"}}}}\n</tool_call>{END}'


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
