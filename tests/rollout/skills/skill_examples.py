"""A small bank, as SkillRL would write it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from rollout.skills.bank import Selection
from rollout.skills.retrieval import SkillRetriever
from rollout.trajectory import Task

_JSON = {
    "general_skills": [
        {"skill_id": "gen_001", "title": "Look", "principle": "Look around", "when_to_apply": "Before every move."},
        {"skill_id": "gen_002", "title": "Take", "principle": "Take it.", "when_to_apply": "when it is seen"},
    ],
    "task_specific_skills": {
        "clean": [
            {"skill_id": "cle_001", "title": "Sink", "principle": "Go to the sink.", "when_to_apply": "with dirt"},
            {"skill_id": "cle_002", "title": "Rinse", "principle": "Rinse it.", "when_to_apply": "at the sink"},
        ],
        "heat": [
            {"skill_id": "hea_001", "title": "Oven", "principle": "Go to the oven.", "when_to_apply": "when cold"},
        ],
        "compare": [
            {"skill_id": "com_001", "title": "Both", "principle": "Look up both.", "when_to_apply": "with two"},
        ],
    },
    "common_mistakes": [
        {
            "mistake_id": "err_001",
            "description": "Going back",
            "why_it_happens": "Nothing is noted.",
            "how_to_avoid": "Take notes.",
        },
    ],
    "metadata": {
        "source": "tests",
        "task_to_skill": {"pick_clean": "clean", "pick_heat": "heat", "hotpotqa": "heat", "musique": "clean"},
        "task_keywords": {"pick_clean": ["Wash", "clean"], "heat": ["hot"], "compare": []},
    },
}


def bank_json() -> dict[str, Any]:
    """A copy, to be spoilt."""
    return copy.deepcopy(_JSON)


class NoSkills(SkillRetriever):
    """Selects no skills."""

    def select(self, task: Task, text: str) -> Selection:
        return Selection()

    def possible(self) -> Iterable[Selection]:
        return (Selection(),)


def task(id: str = "t1", question: str = "", data_source: str = "pick_clean", **metadata: Any) -> Task:
    return Task(id=id, question=question, golden_answers=(), data_source=data_source, metadata=metadata)


def words(text: str) -> int:
    """A tokenizer that takes words."""
    return len(text.split())
