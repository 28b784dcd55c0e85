"""WebShop's shopping tasks as an environment: one visit per trajectory, scored at the purchase."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import ClassVar

from common.ranges import PositiveFloat, PositiveInt
from experiments.worlds.shopping.catalogue import Catalogue, load_catalogue
from experiments.worlds.shopping.goals import Goal, goal_of
from experiments.worlds.shopping.reward import OptionTexts
from experiments.worlds.shopping.search_index import TOPK, ProductSearch
from experiments.worlds.shopping.shop import ShopData, ShopSession
from rollout.environments.base import (
    ACT,
    Environment,
    FirstObservation,
    StepResult,
    act_in_order,
    check_tasks,
    refusal,
)
from rollout.tools.search import Retriever
from rollout.trajectory import Action, ActionKind, CallOutcome, Task, ToolCall, ToolRequest, ToolResult, Turn


class Shopping:
    """Environment factory for WebShop's shopping tasks: makes one environment per trajectory. All share the catalogue
    and the search.

    The task's goal is ``metadata["shopping"]`` (``goals.as_task``).

    Args:
        catalogue: ``catalogue.jsonl`` of the stages BuildShop and ListWebShop (``write_catalogue``).
        search: a retriever over the index of the catalogue's corpus (``search_index.write_corpus``).
        reward: reward for a purchase with score 1.0; any other purchase gives 0. Published by verl-agent: 10.
        option_texts: how options are compared, see ``reward.py``.
        topk: results of a search over all its pages.

    Raises:
        ValueError: ``reward`` is not above 0, ``topk`` below 1, ``option_texts`` is unknown.
    """

    scores_itself: ClassVar[bool] = True
    tools: ClassVar[tuple[str, ...]] = (ACT,)

    def __init__(
        self,
        catalogue: str,
        search: Retriever,
        reward: PositiveFloat = 10.0,
        option_texts: OptionTexts = "pairs",
        topk: PositiveInt = TOPK,
    ) -> None:
        self.reward = reward
        self._path = catalogue
        self._search = ProductSearch(search, topk)
        self._texts: OptionTexts = option_texts
        self._shop: ShopData | None = None

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Environment:
        """Return the environment of one shopping task.

        Raises RuntimeError before ``start``, and ValueError for a task without a goal of this catalogue.
        """
        if self._shop is None:
            raise RuntimeError("the shop is not open; await start() first")
        goal = self._goal(task, self._shop.catalogue)
        return ShoppingEnvironment(ShopSession(goal, self._shop), self.reward, tools_enabled)

    def check(self, tasks: Iterable[Task]) -> None:
        """Check, before training starts, that every task has a shopping goal whose product is in the catalogue.

        Raises:
            ValueError: names the first task without one, or says what is wrong with the catalogue (CatalogueError).
        """
        catalogue = load_catalogue(self._path)
        check_tasks(tasks, lambda task: self._goal(task, catalogue), "goals that cannot be shopped for")

    def _goal(self, task: Task, catalogue: Catalogue) -> Goal:
        goal = goal_of(task)
        if goal.asin not in catalogue.by_asin:
            raise ValueError(
                f"task {task.id}: its product {goal.asin} is not in the catalogue {self._path}; its goal was "
                "made of another one"
            )
        return goal

    async def start(self) -> None:
        """Read the product catalogue, start the search and check that both belong together. Idempotent.

        Raises CatalogueError, and the errors of ``ProductSearch.start``.
        """
        catalogue = await asyncio.to_thread(load_catalogue, self._path)
        await self._search.start(catalogue)
        self._shop = ShopData(catalogue, self._search, self._texts)

    async def close(self) -> None:
        """Close the shop's search. A later ``start`` opens the shop again."""
        self._shop = None
        await self._search.close()


class ShoppingEnvironment:
    """Environment of one shopping task, from the first page to the purchase.

    Every action has a reward (0 except for the purchase) and the measures score and success. A text without effect
    gives the outcome ERROR and the same page. ``info`` of observation and results is ``Page.info``.
    """

    def __init__(self, session: ShopSession, reward: float, enabled: bool = True) -> None:
        self._session, self._reward, self._enabled = session, reward, enabled

    async def reset(self) -> FirstObservation:
        page = self._session.page
        return FirstObservation(page.text, page.info, self._measures())

    async def resume(self, turns: Sequence[Turn], calls: Sequence[ToolCall]) -> float:
        """Continue a shopping episode after ``calls`` by repeating their actions, and return the reward so far."""
        for call in calls:
            if call.executed and isinstance(action := call.request.arguments.get("action"), str):
                await self._session.act(action)
        return self._earned()

    async def step(self, action: Action) -> StepResult:
        before = self._earned()
        results, latencies = await act_in_order(action, self._answer)
        done = self._session.done or action.kind is ActionKind.ANSWER
        return StepResult(results, latencies, done, self._earned() - before, self._measures())

    def _measures(self) -> dict[str, float]:
        score = self._session.score if self._session.done else 0.0
        return {"score": score, "success": float(score == 1.0)}

    async def _answer(self, request: ToolRequest) -> ToolResult:
        if why := refusal(request, self._enabled, "The visit is over." if self._session.done else None):
            return ToolResult(why, CallOutcome.REFUSED, detail=why, info=self._session.page.info)
        action = request.arguments.get("action")
        if not isinstance(action, str):
            why = f"{ACT} expects a text as its action; found {type(action).__name__}"
            return ToolResult(self._session.page.text, CallOutcome.ERROR, detail=why, info=self._session.page.info)
        did = await self._session.act(action)
        page = self._session.page
        if did:
            return ToolResult(page.text, CallOutcome.OK, info=page.info)
        return ToolResult(page.text, CallOutcome.ERROR, detail=f"nothing on the page: {action[:80]!r}", info=page.info)

    def _earned(self) -> float:
        return self._reward if self._session.done and self._session.score == 1.0 else 0.0

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
