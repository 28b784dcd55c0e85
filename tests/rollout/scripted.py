"""What the tests of the agent loop stand on: texts as scripts, and a retriever with a few passages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from retrieval.types import Document, RetrievalError
from rollout.trajectory import InfrastructureError, Task
from tests.rollout.scripted_engine import ScriptedEngine

EOS = "<|im_end|>"
TASK = Task("q1", "Where was Mira Voss born?", ("Grey Harbor",), "toy", (("Mira Voss", "Born in Grey Harbor."),))
PASSAGES = {
    "mira": [
        ("d1", "Mira Voss", "The birthplace of Mira Voss is Grey Harbor."),
        ("d2", "Mira Vass", "Mira Vass was born in Oldfield."),
    ],
}


class TextEngine(ScriptedEngine):
    """A ScriptedEngine whose script is given the decoded context and the seed, and may be exchanged."""

    def __init__(self, protocol, script: Callable[[str, int], str | Exception], latency=0.0) -> None:
        self.script = script
        super().__init__(
            lambda ids, sampling: self.script(protocol.decode(ids), sampling.seed), protocol.tokenizer, latency
        )


class ToyRetriever:
    """Finds a passage list by the first word of the query. ``latency(query)`` in seconds; ``broken`` queries fail."""

    def __init__(self, latency: Callable[[str], float] = lambda query: 0.0, broken: str | None = None) -> None:
        self.latency, self.broken = latency, broken
        self.queries: list[str] = []
        self.cancelled: list[str] = []
        self.closed = 0

    async def search(self, queries: list[str], k: int) -> list[list[Document]]:
        self.queries += queries
        try:
            await asyncio.sleep(max(self.latency(query) for query in queries))
        except asyncio.CancelledError:
            self.cancelled += queries
            raise
        if self.broken is not None and any(self.broken in query for query in queries):
            raise RetrievalError("connection refused")
        found = [PASSAGES.get(query.lower().split()[0], []) for query in queries]
        return [[Document(*hit, score=1.0 / rank) for rank, hit in enumerate(hits[:k], start=1)] for hits in found]

    async def close(self) -> None:
        self.closed += 1


def search_then_answer(context: str, seed: int) -> str:
    """The expert of these tests: one search, then the answer if the passage has been read."""
    if "birthplace of Mira Voss is Grey Harbor" in context:
        return "<think> Grey Harbor </think>\n<answer> Grey Harbor </answer>"
    return "<think> birthplace </think>\n<search> Mira Voss birthplace </search>"


def in_turn(*texts: str | Exception) -> Callable[[str, int], str | Exception]:
    """A script that says the texts one after the other, whatever it reads."""
    left = list(texts)
    return lambda context, seed: left.pop(0)


ENGINE_DEAD = InfrastructureError("the engine has died")
