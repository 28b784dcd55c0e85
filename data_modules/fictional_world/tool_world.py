"""The first stage of the tiny tool experiments: write the world with numbers to disk."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Optional

from data_modules.fictional_world.articles import token_sequences
from data_modules.fictional_world.build import WorldTask, choose_unseen
from data_modules.fictional_world.numbers import QUANTITIES_OF, NumberWorld, build_number_world
from data_modules.fictional_world.problems import FAMILIES, as_task, draw_problems
from data_modules.fictional_world.schema import RELATIONS_OF
from data_modules.fictional_world.tool_expert import ToolExpertPolicy
from data_modules.fictional_world.world import Entity
from rollout.tools.search import format_passages
from rollout.trajectory import Task

SHARES = {"one": 0.35, "two": 0.3, "hop": 0.25, "lookup": 0.05, "compute": 0.05}


class BuildToolWorld(WorldTask):
    """Make an invented world with numbers: corpus, questions that need search and Python, tokenizer, articles.
    Deterministic.

    Args:
        seed: of everything.
        entities: number of entities; the corpus has seven passages for each.
        train: training questions.
        val: validation questions.
        test: test questions about entities that training asks about too.
        test_unseen: test questions about entities that training never looks up; what lies behind their hops it may.
        demonstrations: questions for the expert, disjoint from all others, about the training entities.
        shares: weights of the families of questions: ``one`` number looked up, ``two`` numbers, a number behind a
            ``hop``, all three computed with; ``lookup`` alone, ``compute`` alone. Default: SHARES.
        unseen_share: share of the entities kept away from training questions.
        vocab_size: of the tokenizer.
        articles: sequences of plain text about another world, to teach a model the language.
        article_tokens: length of each.
    """

    DIGITS = 2

    def __init__(
        self,
        seed: int = 0,
        entities: int = 1500,
        train: int = 3000,
        val: int = 100,
        test: int = 300,
        test_unseen: int = 200,
        demonstrations: int = 3000,
        shares: Optional[dict[str, float]] = None,
        unseen_share: float = 0.15,
        vocab_size: int = 1536,
        articles: int = 6000,
        article_tokens: int = 160,
    ) -> None:
        if entities < 20:
            raise ValueError(f"a world of {entities} entities is too small to ask about; give at least 20")
        self.shares = SHARES if shares is None else shares
        if unknown := sorted(set(self.shares) - set(FAMILIES)):
            raise ValueError(f"shares names {', '.join(unknown)}; the families are {', '.join(FAMILIES)}")
        self.seed, self.entities = seed, entities
        self.sizes = {"demonstrations": demonstrations, "train": train, "val": val, "test": test}
        self.test_unseen, self.unseen_share = test_unseen, unseen_share
        self.vocab_size, self.articles, self.article_tokens = vocab_size, articles, article_tokens

    def _world(self, seed: int) -> NumberWorld:
        return build_number_world(self.entities, seed)

    def _sequences(self, world: NumberWorld, tokenizer: Any) -> Iterator[list[int]]:
        return token_sequences(world, tokenizer, self.article_tokens, self.articles, self.seed, article)

    def _questions(self, world: NumberWorld) -> dict[str, list[Task]]:
        """Disjoint splits. The unseen part of the test split starts at entities that training never looks up."""
        rng = random.Random(f"problems:{self.seed}")
        unseen = choose_unseen(world.entities, self.unseen_share, rng)
        seen = [e for e in world.entities if e.id not in unseen]
        strangers = [e for e in world.entities if e.id in unseen]
        taken: set[object] = set()

        def split(name: str, subjects: list[Entity], count: int, avoid: set[int]) -> list[Task]:
            problems = draw_problems(world, subjects, count, self.shares, rng, taken, frozenset(avoid))
            return [as_task(world, problem, f"{name}-{i}", name) for i, problem in enumerate(problems)]

        splits = {name: split(name, seen, count, unseen) for name, count in self.sizes.items()}
        splits["test"] += split("test_unseen", strangers, self.test_unseen, set())
        return splits

    def _texts(self, world: NumberWorld, other: NumberWorld, demonstrations: list[Task]) -> list[str]:
        """What the tokenizer is trained on: articles, passages, questions, and how an agent writes."""
        rng = random.Random(f"texts:{self.seed}")
        expert = ToolExpertPolicy(slip=0.5, seed=self.seed)
        texts = [article(other, entity, rng) for entity in other.entities]
        texts += [passage.contents for passage in world.passages]
        for task in demonstrations[:2000]:
            texts += [task.question, *_transcript(task, expert)]
        return texts


def article(world: NumberWorld, entity: Entity, rng: random.Random, shown: int = 3) -> str:
    """Passages about one entity, as search results are printed, then notes that restate some of them, and a receipt
    whose number is written twice: to go on after "It is" a model has to find what is meant, and copy it."""
    relations, quantities = RELATIONS_OF[entity.kind], QUANTITIES_OF[entity.kind]
    keywords = rng.sample([fact.keyword for fact in (*relations, *quantities)], shown)
    passages = [world.passages[world.passage_of[entity.id, keyword]] for keyword in keywords]
    text = format_passages((p.title, p.text) for p in passages)
    for keyword in rng.sample(keywords, 2):
        text += f"Note on {entity.mention} {keyword}. It is {world.told(entity, keyword)}.\n"
    receipt = rng.randint(0, 10_000)
    return text + f"Receipt {receipt}. It is {receipt}.\n"


def _transcript(task: Task, expert: ToolExpertPolicy) -> list[str]:
    """The expert's turns when one search shows exactly the gold passages."""
    found = f" <result>\n{format_passages(task.gold_passages)}\n</result>"
    computed = f"</python> <result>\n{task.golden_answers[0]}\n</result>"
    transcripts = ("", found, found + computed)
    return [found, *(expert.next_turn(task, transcript) for transcript in transcripts)]
