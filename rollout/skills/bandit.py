"""UCB1 over the categories of a skill bank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from common.ranges import NonNegativeFloat, NonNegativeInt
from rollout.skills.bank import Selection, SkillBank
from rollout.skills.retrieval import SkillRetriever, draw, require_categories
from rollout.trajectory import Task


class UCB(SkillRetriever):
    """Selects general skills (advice texts) and those of the task category with the highest upper confidence bound.

    An arm is a category. Its score is r_mean + c sqrt(ln N / n), where n counts the rewards of the arm and N those of
    all arms (UCB1; Auer, Cesa-Bianchi and Fischer 2002). Arms without a reward come first. SDAR names UCB but publishes
    neither c, the arms nor code. The default c = sqrt(2) is UCB1's and fits rewards between 0 and 1, so give it
    success, not ALFWorld's 10.

    Rewards arrive once per iteration. Until then scores do not change, and all tasks of an iteration have the same best
    arm. Among arms with equal scores, (seed, task id, N) draws, so that a first iteration tries all arms.

    Args:
        c: width of the bound; 0 is greedy.
        seed: decides ties.
    """

    learns = True

    def __init__(self, c: NonNegativeFloat = 2**0.5, seed: NonNegativeInt = 0) -> None:
        self.c, self.seed = c, seed
        self._arms: dict[str, tuple[int, float]] = {}  # count and sum of rewards by category

    def select(self, task: Task, text: str) -> Selection:
        scores = self.scores()
        best = max(scores.values())
        total = sum(count for count, _ in self._arms.values())
        return self.with_categories(
            draw([name for name, score in scores.items() if score == best], self.seed, task.id, total)
        )

    def scores(self) -> dict[str, float]:
        """Return the upper confidence bound by skill category; infinite for a category that was never tried."""
        total = sum(count for count, _ in self._arms.values())
        scores = dict.fromkeys(self.bank.by_category, math.inf)
        for name, (count, reward) in self._arms.items():
            scores[name] = reward / count + self.c * math.sqrt(math.log(total) / count)
        return scores

    def update(self, pairs: Iterable[tuple[Selection, float]]) -> None:
        """Update the mean rewards of the categories from an iteration's pairs (selected skills, reward). A selection of
        several categories counts for each of them.

        Raises:
            ValueError: a reward is not finite, or a selection is not this retriever's; the update then has no effect.
        """
        rewards: dict[str, list[float]] = {}
        for selection, reward in pairs:
            if not math.isfinite(reward):
                raise ValueError(f"a reward is {reward}; leave out trajectories that have none")
            if not selection.categories or not self.bank.by_category.keys() >= set(selection.categories):
                raise ValueError(
                    f"a selection has the categories {list(selection.categories)}; expected some of "
                    f"{list(self.bank.by_category)}"
                )
            for name in selection.categories:
                rewards.setdefault(name, []).append(reward)
        for name, found in rewards.items():
            count, total = self._arms.get(name, (0, 0.0))
            self._arms[name] = (count + len(found), math.fsum([total, *found]))  # fsum: the same in any order

    def state_dict(self) -> dict[str, Any]:
        return {"arms": {name: list(arm) for name, arm in sorted(self._arms.items())}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        arms = state.get("arms")
        if not isinstance(arms, Mapping) or not self.bank.by_category.keys() >= arms.keys():
            raise ValueError(
                f"the state is not of a UCB over this bank: found {dict(state)}; expected arms of "
                f"{list(self.bank.by_category)}"
            )
        self._arms = {name: (int(count), float(total)) for name, (count, total) in arms.items()}

    def _check(self, bank: SkillBank) -> None:
        require_categories(self, bank)
