"""Skill retrievers: the base class, and those that do not learn.

Source: SDAR, section 2.1 (full, random, keyword matching, UCB) and its released verl/trainer/ppo/rlsd_utils.py, which
has full, the game's path, the data source and keywords. UCB is in ``bandit.py``.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from common.ranges import NonNegativeInt
from rollout.skills.bank import Selection, SkillBank
from rollout.trajectory import Task

COMPARE = "compare"
# The released rule decides these data sources before it looks for a comparison.
_DECIDED_BY_SOURCE = frozenset({"popqa", "nq", "triviaqa", "hotpotqa"})
# The released rule (rlsd_utils.py 75-141). The released search skills need it, because they map no data source.
_RELEASED_SOURCES = {
    "popqa": "entity_attribute_lookup",
    **dict.fromkeys(("nq", "triviaqa"), "direct_retrieval"),
    **dict.fromkeys(("hotpotqa", "2wikimultihopqa", "musique", "bamboogle"), "multi_hop_reasoning"),
    "2wiki": "multi_hop_reasoning",  # the same set by ARPO's name; not in the released rule
}


class SkillRetriever(ABC):
    """Chooses skills (advice texts) of one skill bank for each task. Call ``bind`` once, then ``select``, which draws
    no unseeded numbers."""

    learns: ClassVar[bool] = False  # whether ``update`` changes what is selected
    _bank: SkillBank | None = None

    def bind(self, bank: SkillBank) -> None:
        """Set the skill bank to choose from. Raises ValueError for an unsuitable bank, or a second one."""
        if self._bank is not None and self._bank != bank:
            raise ValueError(f"this {type(self).__name__} already chooses from another bank; make one for each bank")
        self._check(bank)
        self._bank = bank

    @property
    def bank(self) -> SkillBank:
        if self._bank is None:
            raise RuntimeError(f"{type(self).__name__}.bind(bank) comes before its use")
        return self._bank

    @abstractmethod
    def select(self, task: Task, text: str) -> Selection:
        """Return the skills chosen for ``task``. ``text``: the first prompt or observation that the model reads."""

    def possible(self) -> Iterable[Selection]:
        """Return possible selections of skills, to check their lengths before a model loads. Returns examples if there
        are many."""
        return (self.with_categories(name) for name in self.bank.by_category)

    def check_task(self, task: Task) -> None:
        """Raise ValueError if ``select`` would refuse the task with any text. Must be cheap, because it runs for all
        tasks."""
        return None

    def update(self, pairs: Iterable[tuple[Selection, float]]) -> None:
        """Learn from the trajectories of an iteration, given as pairs (selected skills, reward) in any order."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the learned state as a dict of plain JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned. Raises ValueError if ``state`` is another retriever's."""
        if state:
            raise ValueError(f"{type(self).__name__} learns nothing, but the state has {sorted(state)}")

    def with_categories(self, *names: str) -> Selection:
        """Return the general skills and those of the named categories, in the bank's order."""
        chosen = [(name, skills) for name, skills in self.bank.by_category.items() if name in names]
        return Selection(self.bank.general, tuple(chosen))

    def _check(self, bank: SkillBank) -> None:
        """Raise ValueError if the skill bank lacks data that the retriever needs."""
        return None


class Full(SkillRetriever):
    """Selects every skill of the bank (``skill_all`` in the released code)."""

    def select(self, task: Task, text: str) -> Selection:
        return self.with_categories(*self.bank.by_category)

    def possible(self) -> Iterable[Selection]:
        return (self.with_categories(*self.bank.by_category),)


class TaskType(SkillRetriever):
    """Selects general skills and those of the task's true type, which the bank's ``task_to_skill`` gives for
    ``task.data_source``.

    It is an oracle, because no evaluation task reveals its type; the released code reads it from the path of the game.
    A data source that the bank does not map is an error.
    """

    def select(self, task: Task, text: str) -> Selection:
        self.check_task(task)
        return self.with_categories(str(self.bank.category_of(task.data_source)))

    def check_task(self, task: Task) -> None:
        if self.bank.category_of(task.data_source) is None:
            raise ValueError(
                f"task {task.id}: the skill bank has no category for data source {task.data_source!r}; it knows "
                f"{sorted({*self.bank.tasks, *self.bank.by_category})}. Add it there"
            )


class Random(SkillRetriever):
    """Selects general skills and those of one random category per task. The choice depends on (seed, task id): a
    resumed run, and every member of a group, has the same category."""

    def __init__(self, seed: NonNegativeInt = 0) -> None:
        self.seed = seed

    def select(self, task: Task, text: str) -> Selection:
        return self.with_categories(draw(list(self.bank.by_category), self.seed, task.id))

    def _check(self, bank: SkillBank) -> None:
        require_categories(self, bank)


class Shuffled(SkillRetriever):
    """Selects general skills, and replaces the categories that ``retriever`` chooses by as many random others. This is
    a control: advice of the same form about something else. The choice depends on (seed, task id). Takes all others if
    they are fewer."""

    def __init__(self, retriever: SkillRetriever, seed: NonNegativeInt = 0) -> None:
        if retriever.learns:
            raise ValueError(
                f"Shuffled replaces the choices of {type(retriever).__name__}, which learns from them; take another"
            )
        self.retriever, self.seed = retriever, seed

    def select(self, task: Task, text: str) -> Selection:
        chosen = self.retriever.select(task, text).categories
        others = [name for name in self.bank.by_category if name not in chosen]
        random.Random(f"{self.seed}:{task.id}").shuffle(others)
        return self.with_categories(*others[: len(chosen)])

    def check_task(self, task: Task) -> None:
        self.retriever.check_task(task)

    def _check(self, bank: SkillBank) -> None:
        self.retriever.bind(bank)


class Keyword(SkillRetriever):
    """Selects general skills and every category with a keyword in the task's text, also as part of a word.

    The released code applies further rules first. Each is an option here; the first that applies decides:

    Args:
        path: the first task type of ``task_to_skill`` that is part of the path of the task's game
            (``task.metadata[environment]["file"]``), if it has one.
        data_source: the category of ``task.data_source`` by ``task_to_skill``, else the released code's for the seven
            sets of search questions; and ``compare`` for a question with "which" and "or", unless its source is popqa,
            nq, triviaqa or hotpotqa. A source without a category is an error if no keyword of the question decides.
        compare: let ``data_source`` look for a comparison: "which" and "or" among the words of the question. The
            released code never chooses ``compare`` (false), because it requires a text without "for", which its
            template contains.
        unknown_sources: treatment of a data source without a category: ``refuse`` stops, ``general`` (as released)
            selects only the general skills.
    """

    def __init__(
        self,
        path: bool = False,
        data_source: bool = False,
        compare: bool = True,
        unknown_sources: Literal["refuse", "general"] = "refuse",
    ) -> None:
        self.path, self.data_source, self.compare = path, data_source, compare
        self.unknown_sources = unknown_sources

    def select(self, task: Task, text: str) -> Selection:
        if self.path and (file := _game_file(task)):
            found = next((category for task_type, category in self.bank.tasks.items() if task_type in file), None)
            return self.with_categories(*([found] if found is not None else []))
        if self.data_source and (category := self._by_source(task)) is not None:
            return self.with_categories(category)
        read = text.lower()
        return self.with_categories(
            *(name for name, words in self.bank.keywords.items() if any(word in read for word in words))
        )

    def possible(self) -> Iterable[Selection]:
        """Return all skills of the bank as one selection, because a text may contain the words of all categories."""
        return (self.with_categories(*self.bank.by_category),)

    def check_task(self, task: Task) -> None:
        if not self.data_source or self.path or self.unknown_sources == "general" or self._by_source(task) is not None:
            return
        if not any(word in task.question.lower() for words in self.bank.keywords.values() for word in words):
            known = sorted({*self.bank.tasks, *_RELEASED_SOURCES})
            raise ValueError(
                f"task {task.id}: no skills for data source {task.data_source!r}; known are {known}. Add it to "
                "task_to_skill of the skill bank, or give the bank task_keywords"
            )

    def _by_source(self, task: Task) -> str | None:
        if self.compare and task.data_source not in _DECIDED_BY_SOURCE and COMPARE in self.bank.by_category:
            if {"which", "or"} <= set(re.findall(r"\w+", task.question.lower())):
                return COMPARE
        category = self.bank.tasks.get(task.data_source) or _RELEASED_SOURCES.get(task.data_source)
        return category if category in self.bank.by_category else None

    def _check(self, bank: SkillBank) -> None:
        if not bank.keywords and not self.path and not self.data_source:
            raise ValueError("the skill bank has no task_keywords in its metadata; give some, or another retriever")


def draw(names: list[str], seed: int, *rest: object) -> str:
    """Return one of ``names``, chosen at random. The same arguments give the same choice on every machine."""
    return random.Random("/".join(map(str, (seed, *rest)))).choice(names)


def require_categories(retriever: SkillRetriever, bank: SkillBank) -> None:
    """Raise ValueError for a skill bank without categories."""
    if not bank.by_category:
        raise ValueError(f"{type(retriever).__name__} chooses a category, and the skill bank has none")


def _game_file(task: Task) -> str:
    """Return the path of a task's game file; empty for a generated game, which has no file."""
    files = (value.get("file") for value in task.metadata.values() if isinstance(value, dict))
    return next((file for file in files if isinstance(file, str)), "")
