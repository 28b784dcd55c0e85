"""Stage that writes the fictional world with numbers, for experiments with search and Python."""

from __future__ import annotations

import random
from typing import Any

from common.ranges import NonNegativeFloat
from experiments.worlds.fictional_world.build import FictionalWorldTask
from experiments.worlds.fictional_world.problems import FAMILIES, as_task, draw_problems
from experiments.worlds.fictional_world.schema import QUANTITIES_OF, RELATIONS_OF
from experiments.worlds.fictional_world.tool_expert import ToolExpertPolicy
from experiments.worlds.fictional_world.world import Entity, World, build_number_world
from rollout.tools.search import format_passages
from rollout.trajectory import Task

SHARES = {"one": 0.35, "two": 0.3, "hop": 0.25, "lookup": 0.05, "compute": 0.05}


class BuildToolWorld(FictionalWorldTask):
    """Writes an invented world with numbers: corpus, questions that need search and Python, tokenizer and articles.

    Deterministic. Training questions never look up an unseen entity, but may pass through entities that the unseen test
    reaches by a hop.

    Args:
        shares: weights of the families of questions. ``one`` looks up one number, ``two`` two numbers, ``hop`` a number
            behind a hop, and all three compute with them; ``lookup`` only looks up, ``compute`` only computes. Default:
            SHARES.
        world: see ``FictionalWorldTask``.
    """

    digits = 2
    questions = "problems"

    def __init__(self, shares: dict[str, NonNegativeFloat] | None = None, **world: Any) -> None:
        super().__init__(**world)
        self.shares = SHARES if shares is None else shares
        if unknown := sorted(set(self.shares) - set(FAMILIES)):
            raise ValueError(f"shares names {', '.join(unknown)}; the families are {', '.join(FAMILIES)}")
        self._expert = ToolExpertPolicy(error_rate=0.5, seed=self.seed)

    def _world(self, seed: int) -> World:
        return build_number_world(self.entities, seed)

    def _article(self, world: World, entity: Entity, rng: random.Random) -> str:
        """Return an article about one entity: passages in the format of search results, notes that restate some, and a
        receipt.

        The receipt has its number twice. To continue after "It is", a model must find the right passage and copy it.
        """
        facts = (*RELATIONS_OF[entity.kind], *QUANTITIES_OF[entity.kind])
        keywords = rng.sample([fact.keyword for fact in facts], 3)
        passages = [world.passages[world.passage_of[entity.id, keyword]] for keyword in keywords]
        text = format_passages((p.title, p.text) for p in passages)
        for keyword in rng.sample(keywords, 2):
            text += f"Note on {entity.mention} {keyword}. It is {world.told(entity, keyword)}.\n"
        receipt = rng.randint(0, 10_000)
        return text + f"Receipt {receipt}. It is {receipt}.\n"

    def _split(
        self, world: World, name: str, subjects: list[Entity], count: int, avoid: set[int], rng: random.Random,
        taken: set[Any],
    ) -> list[Task]:  # fmt: skip
        problems = draw_problems(world, subjects, count, self.shares, rng, taken, frozenset(avoid))
        return [as_task(world, problem, f"{name}-{i}", name) for i, problem in enumerate(problems)]

    def _tokenizer_texts(self, task: Task) -> list[str]:
        """Return the texts of an episode that the scripted expert plays, as if one search returned exactly the gold
        passages."""
        found = f" <result>\n{format_passages(task.gold_passages)}\n</result>"
        computed = f"</python> <result>\n{task.golden_answers[0]}\n</result>"
        turns = (self._expert.next_turn(task, transcript) for transcript in ("", found, found + computed))
        return [task.question, found, *turns]
