"""A protocol and a search tool for models with random weights, with the latencies of a loaded retriever."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from common.seeds import derive_seed
from rollout.protocols.base import PromptMode
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.trajectory import Action, ActionKind, CallOutcome, ToolRequest, ToolResult

PASSAGE = 'Doc 1(Title: "Somewhere") ' + "A town by the sea with a harbour, a tower and a market. " * 3


class EveryTurnSearches(SearchR1Protocol):
    """Reads every text as a search query, because random weights never write a tag."""

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        return Action(ActionKind.CALL, (ToolRequest("search", {"query": text}),))


class SlowSearch:
    """Returns one passage after a log-normal time (sigma 1) that depends only on the query."""

    name = "search"

    def __init__(self, median_s: float) -> None:
        self.median_s = median_s

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        factor = random.Random(derive_seed(arguments["query"])).lognormvariate(0, 1)
        await asyncio.sleep(self.median_s * factor)
        return ToolResult(PASSAGE, CallOutcome.OK)

    async def close(self) -> None:
        pass
