"""What a teacher is told of attempts at recipes: the order of devices that an attempt has found, worded as a skill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.ranges import PositiveInt
from experiments.worlds.recipes.build import STEP, with_recipe
from lightning_modules.advantage_transforms.base import Algorithm
from lightning_modules.advantage_transforms.trajectory_prompts import MadePrompts
from rollout.trajectory import CallOutcome

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory


class AttemptRecipes(MadePrompts):
    """Tells the teacher the recipe that a right attempt at the same order has found, in the words of the skill bank,
    which a tiny model can read. It stands for SDPO's solutions and for OPID's advice, without a language model.

    A trajectory without a right attempt in its group is not judged.

    Args:
        own: whether a right attempt may be told its own recipe.
        max_tokens: of the recipe.
    """

    def __init__(self, own: bool = False, max_tokens: PositiveInt = 64) -> None:
        super().__init__("{told}\n\n{question}", max_tokens)
        self.own = own

    def texts(self, algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> list[str | None]:
        found: dict[str, list[tuple[int, str]]] = {}
        for t in trajectories:
            if t.reward is not None and t.reward.total > 0:
                found.setdefault(t.group, []).append((t.index, recipe_found(t)))
        others = ([r for index, r in found.get(t.group, ()) if self.own or index != t.index] for t in trajectories)
        return [self.plain(algorithm, recipes[0]) if recipes else None for recipes in others]


def recipe_found(trajectory: Trajectory) -> str:
    """Return the devices that had an effect in an attempt, in order, as a skill's text."""
    right = (call for call in trajectory.calls if call.result.outcome is CallOutcome.OK)
    devices = [STEP.findall(call.request.arguments["action"])[0][1] for call in right]
    return with_recipe(trajectory.task.metadata["product"], devices).principle
