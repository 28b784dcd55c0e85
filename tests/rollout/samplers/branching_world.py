"""Rollout systems in virtual time whose model says by script when it searches, and how sure it is."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from functools import cache

from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.system import RolloutSystem
from rollout.tools.limits import ToolLimits
from rollout.tools.search import SearchTool
from rollout.trajectory import Task
from tests.rollout.scripted import ToyRetriever
from tests.rollout.scripted_engine import ScriptedEngine, fingerprint

NO_RETRIES = ToolLimits(retries=0)
SAMPLING = SamplingParams(max_new_tokens=200)


def tasks(n):
    return [Task(f"q{i}", f"Where was Mira Voss number {i} born?", ("Grey Harbor",), "toy") for i in range(n)]


class TimedEngine(ScriptedEngine):
    """Notes when each request arrived, in seconds of virtual time."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.times: list[float] = []

    async def generate(self, token_ids, sampling):
        self.times.append(asyncio.get_running_loop().time())
        return await super().generate(token_ids, sampling)


class World:
    """Makes systems; ``close`` closes them all."""

    def __init__(self, protocol) -> None:
        self.protocol, self.systems = protocol, []
        self.encode = cache(lambda text: tuple(protocol.tokenizer.encode(text, add_special_tokens=False)))
        self._number = cache(lambda ids: int(protocol.decode(ids).split("number ")[1].split()[0]))
        self.block = self.encode("<information>")[0]  # a token of its own, whatever follows

    def number(self, ids) -> int:
        """Of the question. It stands within the first 60 ids."""
        return self._number(tuple(ids[:60]))

    def results(self, ids) -> int:
        """How many tool results there are among the ids."""
        return ids.count(self.block)

    def nats(self, before: int, after: int):
        """Equally likely tokens at every position before, and after, a result has been read."""
        return lambda ids: after if self.results(ids) else before

    def make(self, calls, *, nats=None, retriever=None, limits=NO_RETRIES, engine=None, **options):
        """``calls(ids, seed)``: how many searches the trajectory makes in all; -1: it breaks off without an action.
        ``nats(ids)``: entropy of every position after the given ids, as ln of a whole number of equal tokens."""

        def reply(ids, sampling):
            wanted, done = calls(ids, sampling.seed), self.results(ids)
            word = f"{sampling.seed % 10**18:018d}"  # what makes trajectories differ; turns have 20 tokens at least
            if wanted < 0:
                return self.encode("I do not know.<|im_end|>")
            if done < wanted:
                action = f"<search> Mira {self.number(ids)} </search>"
            else:
                action = "<answer> Grey Harbor </answer>"
            return (*self.encode(f"<think> {word} </think>\n"), *self.encode(action))

        def top(ids):
            likely = 1 if nats is None else nats(ids)
            return {token: -math.log(likely) for token in range(likely)}

        engine = TimedEngine(reply, self.protocol.tokenizer, top=top, **(engine or {}))
        retriever = retriever or ToyRetriever()
        environment = QuestionAnswering({"search": SearchTool(retriever)}, limits)
        system = RolloutSystem(engine, self.protocol, environment, None, **options)
        system.retriever = retriever
        self.systems.append(system)
        return system

    def arrivals(self, system):
        """(seconds, number of the question) of each request, in order."""
        asked = zip(system.engine.times, system.engine.requests, strict=True)
        return [(time, self.number(request.token_ids)) for time, request in asked]

    def elapsed(self, system) -> float:
        """Virtual seconds since the system was started."""
        return system._thread.loop.time()

    def close(self) -> None:
        for system in self.systems:
            system.close()


def always(number):
    return lambda ids, seed: number


def mixed(ids, seed):
    """-1 to 3 searches, by the prompt and the first turn's words."""
    return fingerprint(ids[:60]) % 5 - 1


def check_group(group, n, system, after_results=True):
    """What holds for every group, whatever happened: members, forks (after results alone), prefixes, calls."""
    assert [t.index for t in group] == list(range(n)) and len({t.group for t in group}) == 1
    for child in group:
        assert len(child.loss_mask) == len(child.response_ids)
        if child.fork is None:
            continue
        parent, at = group[child.fork.parent], child.fork.at
        assert 0 < at <= len(parent.response_ids) and child.fork.parent < child.index
        for name in ("response_ids", "loss_mask", "logprobs"):
            assert getattr(child, name)[:at] == getattr(parent, name)[:at]
        shared = [turn for turn in child.turns if turn.end <= at]
        assert shared and shared[-1].observation_end == at and list(parent.turns[: len(shared)]) == shared
        assert not after_results or system.protocol.decode(child.response_ids[:at]).endswith("</information>\n\n")
        inherited = [call for call in child.calls if call.turn < len(shared)]
        assert inherited == [call for call in parent.calls if call.turn < len(shared)]
    own = Counter(t.index for t in group for call in t.calls if call.executed
                  and (t.fork is None or t.turns[call.turn].start >= t.fork.at))  # fmt: skip
    return sum(own.values())
