"""An expert that follows a recipe if it is shown one, and guesses otherwise."""

from __future__ import annotations

import random
import re

from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from experiments.worlds.recipes.build import with_recipe
from experiments.worlds.recipes.environment import recipe_of
from rollout.protocols.episodes import ACTION
from rollout.skills.bank import Selection
from rollout.skills.retrieval import SkillRetriever
from rollout.tags import between
from rollout.trajectory import Task

STEP = re.compile(r"step (\d+)")


class RecipeExpertPolicy(CarelessPolicy):
    """A scripted expert that follows a recipe if it is shown one, and guesses otherwise. With probability
    ``error_rate`` it uses a random device although the recipe is shown.
    """

    def next_turn(self, task: Task, transcript: str) -> str:
        """Return the text of the expert's next turn, without its end token. ``transcript`` is everything since the
        question.
        """
        turn = len(between(transcript, *ACTION))
        step = int((STEP.findall(transcript) or ["1"])[-1])
        careless = self.slips(task, turn)
        if careless is None and task.metadata["shown"]:
            device = recipe_of(task)[step - 1]
        else:
            device = (careless or random.Random(f"{self.seed}:{task.id}:{turn}:guess")).choice(task.metadata["devices"])
        return f"<action> step {step} {device} </action>"


class RecipeExpertEngine(WorldExpert):
    """Inference engine that answers with ``RecipeExpertPolicy``, a scripted expert. Turns end with the tokenizer's EOS.
    ``error_rate``: see the policy.
    """

    QUESTION = re.compile(r"(make \w+, order \d+\. step 1)")
    Policy = RecipeExpertPolicy
    ends_turns = True


class DemonstratedRecipe(SkillRetriever):
    """Skill retriever that shows a demonstration's own recipe as a skill (advice text), whatever the bank's recipe is.
    Orders that hide their recipe get no skill.
    """

    def select(self, task: Task, text: str) -> Selection:
        if not task.metadata["shown"]:
            return Selection()
        product = task.metadata["product"]
        return Selection((), ((product, (with_recipe(product, recipe_of(task)),)),))

    def check_task(self, task: Task) -> None:
        if not {"shown", "product"} <= task.metadata.keys():
            raise ValueError(f"task {task.id}: DemonstratedRecipe knows the orders of demonstrations.parquet alone")
