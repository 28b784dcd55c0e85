"""An expert that shops: it knows the goal's product and options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from data_modules.worlds.expert_engine import WorldExpert
from rollout.environments.shopping import pages
from rollout.environments.shopping.expert import ShoppingExpert
from rollout.environments.shopping.goals import Goal, goal_of
from rollout.protocols.episodes import ACTION
from rollout.tags import between
from rollout.trajectory import Task


class ShoppingExpertPolicy:
    """Text in, text out: the expert's next action between action tags.

    The transcript of a whole conversation (``window: null``) says what it has done and shows the page it is on. With
    probability ``slip`` a visit is careless: see ``ShoppingExpert``.
    """

    def __init__(self, slip: float = 0.0, seed: int = 0) -> None:
        self._expert = ShoppingExpert(slip, seed)

    def next_turn(self, task: Task, transcript: str) -> str:
        """The next turn, without the token that ends it, after ``transcript``: everything since the instruction."""
        shown = transcript.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        facts = page_facts(shown.split(pages.SEPARATOR), goal_of(task))
        return f"<action>{self._expert.next_action(task, facts, between(transcript, *ACTION))}</action>"


def page_facts(parts: Sequence[str], goal: Goal) -> dict[str, Any]:
    """What a page says of itself (``Page.info``), read from its text: which page it is, and what the expert may click.

    ``goal``: its option names are told from values, which a generated shop's products of one kind have in common.
    """
    if pages.BUY in parts:
        names = {name for name, _ in goal.options}
        price = next(i for i, part in enumerate(parts) if part.startswith("Price: "))
        chosen = parts[parts.index(pages.PREVIOUS) + 1 : price - 1]  # the title stands before the price
        page, labels = pages.ITEM, [*(v for v in chosen if v not in names), *_buttons(parts)]
    elif pages.NEXT in parts:
        page, labels = pages.RESULTS, [*_buttons(parts), *parts[parts.index(pages.NEXT) + 1 :: 3]]  # asin, title, price
    else:
        page, labels = (pages.SUB_PAGE if pages.PREVIOUS in parts else pages.SEARCH), _buttons(parts)
    return {"page": page, "admissible": [f"click[{label.lower()}]" for label in labels]}


def _buttons(parts: Sequence[str]) -> list[str]:
    known = (pages.BACK, pages.PREVIOUS, pages.NEXT, *pages.SUB_PAGES.values(), pages.BUY)
    return [part for part in parts if part in known]


class ShoppingExpertEngine(WorldExpert):
    """Engine over ``ShoppingExpertPolicy``; turns end with the tokenizer's EOS; ``slip``: probability that a visit is
    careless."""

    QUESTION = re.compile(r"Instruction: \[SEP\] (.*?) \[SEP\]", re.DOTALL)
    Policy = ShoppingExpertPolicy
    ends_turns = True
