"""The first stage of every tiny experiment: write the world to disk."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from data_modules.datasets.questions import write_tasks
from data_modules.fictional_world.articles import article, as_trajectory, token_sequences
from data_modules.fictional_world.expert import ExpertPolicy
from data_modules.fictional_world.questions import Chain, as_task, draw_questions, phrase
from data_modules.fictional_world.schema import Kind
from data_modules.fictional_world.world import Entity, World, build_world
from data_modules.tokenizer import train_tokenizer
from rollout.storage import save_trajectories
from rollout.tools.search import format_passages
from rollout.trajectory import Task

LANGUAGE_SEED_OFFSET = 1_000_003  # the articles' world: same words, other facts


class WorldTask(ABC):
    """What the tasks that write a world have in common. Subclasses set ``seed`` and ``vocab_size``."""

    DIGITS: ClassVar[int] = 1  # of a number that the tokenizer keeps together
    seed: int
    vocab_size: int

    @abstractmethod
    def _world(self, seed: int) -> Any: ...

    @abstractmethod
    def _questions(self, world: Any) -> dict[str, list[Task]]: ...

    @abstractmethod
    def _texts(self, world: Any, other: Any, demonstrations: list[Task]) -> list[str]: ...

    @abstractmethod
    def _sequences(self, world: Any, tokenizer: Any) -> Iterator[list[int]]: ...

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write ``corpus.jsonl``, ``{demonstrations,train,val,test}.parquet``, ``tokenizer/``, ``articles.parquet``."""
        world = self._world(self.seed)
        with open(output_dir / "corpus.jsonl", "w", encoding="utf-8") as file:
            for passage in world.passages:
                file.write(json.dumps({"id": passage.id, "contents": passage.contents}) + "\n")
        splits = self._questions(world)
        for name, tasks in splits.items():
            write_tasks(output_dir / f"{name}.parquet", tasks)
        other = self._world(self.seed + LANGUAGE_SEED_OFFSET)
        texts = self._texts(world, other, splits["demonstrations"])
        tokenizer = train_tokenizer(texts, self.vocab_size, self.DIGITS)
        tokenizer.save_pretrained(output_dir / "tokenizer")
        save_trajectories(
            output_dir / "articles.parquet",
            [as_trajectory(ids, n, tokenizer.pad_token_id) for n, ids in enumerate(self._sequences(other, tokenizer))],
        )
        return {"passages": len(world.passages), "vocabulary": len(tokenizer)} | {k: len(v) for k, v in splits.items()}


def choose_unseen(entities: Iterable[Entity], share: float, rng: random.Random) -> set[int]:
    """Ids of the entities kept away from training questions: ``share`` of each kind."""
    unseen: set[int] = set()
    everyone = list(entities)
    for kind in Kind:
        members = [e.id for e in everyone if e.kind is kind]
        unseen.update(rng.sample(members, round(share * len(members))))
    return unseen


class BuildWorld(WorldTask):
    """Make an invented world: corpus, questions, tokenizer and articles. Deterministic.

    Args:
        seed: of everything.
        entities: number of entities; the corpus has five passages for each.
        train: training questions.
        val: validation questions.
        test: test questions about entities that training asks about too.
        test_unseen: test questions about entities that training never asks about nor passes through.
        demonstrations: questions for the expert, disjoint from all others, about the training entities.
        hop_shares: weights of one-, two- and three-hop questions.
        unseen_share: share of the entities kept away from training questions.
        vocab_size: of the tokenizer.
        articles: sequences of plain text about another world, to teach a model the language.
        article_tokens: length of each.
    """

    def __init__(
        self,
        seed: int = 0,
        entities: int = 4200,
        train: int = 6000,
        val: int = 100,
        test: int = 300,
        test_unseen: int = 200,
        demonstrations: int = 5000,
        hop_shares: tuple[float, float, float] = (0.4, 0.4, 0.2),
        unseen_share: float = 0.15,
        vocab_size: int = 1536,
        articles: int = 6000,
        article_tokens: int = 160,
    ) -> None:
        if entities * 5 < 100:
            raise ValueError(f"a world of {entities} entities is too small to ask about; give at least 20")
        self.seed, self.entities, self.hop_shares = seed, entities, hop_shares
        self.sizes = {
            "demonstrations": demonstrations,
            "train": train,
            "val": val,
            "test": test,
        }
        self.test_unseen, self.unseen_share = test_unseen, unseen_share
        self.vocab_size, self.articles, self.article_tokens = vocab_size, articles, article_tokens

    def _world(self, seed: int) -> World:
        return build_world(self.entities, seed)

    def _sequences(self, world: World, tokenizer: Any) -> Iterator[list[int]]:
        return token_sequences(world, tokenizer, self.article_tokens, self.articles, self.seed)

    def _questions(self, world: World) -> dict[str, list[Task]]:
        """Disjoint splits. The unseen part of the test split starts at an entity that training never touches."""
        rng = random.Random(f"questions:{self.seed}")
        unseen = choose_unseen(world.entities, self.unseen_share, rng)
        seen = [e for e in world.entities if e.id not in unseen]
        taken: set[Any] = set()
        texts: set[str] = set()
        splits = {
            name: self._split(world, name, seen, count, rng, taken, texts, avoid=unseen)
            for name, count in self.sizes.items()
        }
        strangers = [e for e in world.entities if e.id in unseen]
        splits["test"] += self._split(world, "test_unseen", strangers, self.test_unseen, rng, taken, texts, avoid=set())
        return splits

    def _split(
        self,
        world: World,
        name: str,
        subjects: list[Entity],
        count: int,
        rng: random.Random,
        taken: set[Any],
        texts: set[str],
        avoid: set[int],
    ) -> list[Task]:
        tasks: list[Task] = []

        def fits(chain: Chain) -> bool:
            return not any(entity.id in avoid for entity in chain.path)

        while len(tasks) < count:
            missing = count - len(tasks)
            for chain in draw_questions(world, subjects, missing, self.hop_shares, rng, taken):
                question = phrase(chain, rng)
                if fits(chain) and question not in texts:
                    texts.add(question)
                    tasks.append(as_task(world, chain, question, f"{name}-{len(tasks)}", name))
        return tasks

    def _texts(self, world: World, other: World, demonstrations: list[Task]) -> list[str]:
        """What the tokenizer is trained on: articles, questions, and how an agent writes."""
        rng = random.Random(f"texts:{self.seed}")
        expert = ExpertPolicy(slip=0.5, seed=self.seed)
        texts = [article(other, entity, rng) for entity in other.entities]
        texts += [passage.contents for passage in world.passages]
        for task in demonstrations[:2000]:
            texts += [f"Question: {task.question}\n", expert.next_turn(task, ""), *_transcript(task, expert)]
        return texts


def _transcript(task: Task, expert: ExpertPolicy) -> list[str]:
    """The expert's turns when every search shows exactly the gold passages."""
    information = f"\n\n<information>{format_passages(task.gold_passages)}</information>\n\n"
    return [information, expert.next_turn(task, information)]
