"""A scripted expert of the shop, for demonstrations.

It knows the goal of the task's metadata, including the product, and sees pages as a model does. It searches with the
instruction's words, opens the product, chooses the options that the instruction names, and buys. In a generated shop
the search results show which product is meant.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.worlds.expert_engine import WorldExpert
from experiments.worlds.shopping import pages
from experiments.worlds.shopping.goals import Goal, goal_of
from rollout.protocols.episodes import ACTION
from rollout.tags import between
from rollout.trajectory import Task

PAGES = 5  # pages of results that it searches for the product

_LIMIT = re.compile(r",? and price lower than [\d.]+ dollars$")
_ASKING = frozenset("i am looking for please get me find want need a an some the with and of pair box bag".split())


class ShoppingExpert:
    """A scripted expert that chooses the next shopping action from the page and the earlier actions. It keeps no state.

    Args:
        error_rate: probability that a visit is careless: it chooses a wrong value for the first option if there is one,
            or, without options, buys the first result.
        seed: seed of the careless visits.
    """

    def __init__(self, error_rate: float = 0.0, seed: int = 0) -> None:
        self.error_rate, self.seed = error_rate, seed

    def next_action(self, task: Task, info: Mapping[str, Any], past: Sequence[str]) -> str:
        """Return the text of the next shopping action, such as "click[buy now]".

        Args:
            info: description of the current page: ``FirstObservation.info`` or ``ToolResult.info``.
            past: the actions of this visit so far, oldest first.
        """
        goal, admissible, page = goal_of(task), info["admissible"], info["page"]
        if page == pages.SEARCH or not past:
            return f"search[{query_words(goal)}]"
        if page == pages.RESULTS:
            return self._open(task, goal, admissible, past)
        if page == pages.ITEM:
            return self._choose(task, goal, admissible, past)
        return _click(pages.PREVIOUS)

    def _open(self, task: Task, goal: Goal, admissible: Sequence[str], past: Sequence[str]) -> str:
        links = [action for action in admissible if action not in _TURNS]
        wanted = _click(goal.asin)
        if not goal.options and links and self._is_careless(task):
            return links[0]
        if wanted in links:
            return wanted
        turned = _since_search(past).count(_click(pages.NEXT))
        if links and turned + 1 < PAGES:
            return _click(pages.NEXT)
        if past[-1] != _click(pages.BACK) and _searches(past) < 2:
            # the instruction's words did not find the product; search for its name
            return f"search[{goal.title.lower()}]"
        back = _click(pages.PREVIOUS)
        return links[0] if links else back if back in admissible else _click(pages.BACK)

    def _choose(self, task: Task, goal: Goal, admissible: Sequence[str], past: Sequence[str]) -> str:
        done = _since_search(past)
        for number, (_, value) in enumerate(goal.options):
            choice = _click(value)
            if number == 0 and self._is_careless(task):
                others = [a for a in admissible if a not in _BUTTONS and a not in {_click(v) for _, v in goal.options}]
                choice = self._draw(task).choice(others) if others else choice
            if choice in admissible and choice not in done:
                return choice
        return _click(pages.BUY)

    def _draw(self, task: Task) -> random.Random:
        return random.Random(f"{self.seed}:{task.id}")

    def _is_careless(self, task: Task) -> bool:
        return random.Random(f"slip:{self.seed}:{task.id}").random() < self.error_rate


def query_words(goal: Goal) -> str:
    """Return a search query for a goal: its instruction without price limit, option names and words of asking.

    >>> query_words(Goal("B1", "find me a shirt with slim fit with color: red, and price lower than 20.00 dollars",
    ...                  ("slim fit",), (("color", "red"),), 20.0, "Shirt", "apparel", "shirt", "Clothing"))
    'shirt slim fit red'
    """
    text = _LIMIT.sub("", goal.instruction)
    for name, value in goal.options:
        text = text.replace(f"{name}: {value}", value) if name else text
    words = re.findall(r"[\w'.-]+", text.lower())
    return " ".join(dict.fromkeys(word for word in words if word not in _ASKING))


def _click(label: str) -> str:
    return f"click[{label.lower()}]"


_TURNS = frozenset(_click(label) for label in (pages.BACK, pages.NEXT, pages.PREVIOUS))
_BUTTONS = _TURNS | {_click(label) for label in (pages.BUY, *pages.SUB_PAGES)}


def _searches(past: Sequence[str]) -> int:
    return sum(action.startswith("search[") for action in past)


def _since_search(past: Sequence[str]) -> list[str]:
    """Return the actions after the last search, oldest first."""
    latest = max((n for n, action in enumerate(past) if action.startswith("search[")), default=-1)
    return list(past[latest + 1 :])


class ShoppingExpertPolicy:
    """A scripted shopping expert that writes its next action between action tags, as text.

    The transcript of the whole conversation (``window: null``) shows the actions so far and the current page. With
    probability ``error_rate`` a visit is careless: see ``ShoppingExpert``.
    """

    def __init__(self, error_rate: float = 0.0, seed: int = 0) -> None:
        self._expert = ShoppingExpert(error_rate, seed)

    def next_turn(self, task: Task, transcript: str) -> str:
        """Return the text of the expert's next turn, without its end token. ``transcript`` is everything since the
        instruction.
        """
        shown = transcript.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        facts = page_facts(shown.split(pages.SEPARATOR), goal_of(task))
        return f"<action>{self._expert.next_action(task, facts, between(transcript, *ACTION))}</action>"


def page_facts(parts: Sequence[str], goal: Goal) -> dict[str, Any]:
    """Return a shop page's ``Page.info``, read from the page's texts: the page's name and what can be clicked.

    ``goal`` gives the names of the options, which products of one kind share in a generated shop.
    """
    if pages.BUY in parts:
        names = {name for name, _ in goal.options}
        price = next(i for i, part in enumerate(parts) if part.startswith("Price: "))
        chosen = parts[parts.index(pages.PREVIOUS) + 1 : price - 1]  # the title precedes the price
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
    """Inference engine that answers with ``ShoppingExpertPolicy``, a scripted expert. Turns end with the tokenizer's
    EOS. ``error_rate`` is the probability of a careless visit.
    """

    QUESTION = re.compile(r"Instruction: \[SEP\] (.*?) \[SEP\]", re.DOTALL)
    Policy = ShoppingExpertPolicy
    ends_turns = True
