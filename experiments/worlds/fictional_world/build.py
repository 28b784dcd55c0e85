"""Stage that writes the fictional world: corpus, questions, tokenizer and articles."""

from __future__ import annotations

import functools
import math
import random
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt
from data_modules.datasets.question_file import QUESTION_MARKER
from experiments.worlds.corpus import write_corpus
from experiments.worlds.fictional_world.articles import article, linked_articles
from experiments.worlds.fictional_world.expert import ExpertPolicy
from experiments.worlds.fictional_world.questions import as_task, draw_questions, phrase
from experiments.worlds.fictional_world.schema import Kind
from experiments.worlds.fictional_world.world import Entity, World, build_world
from experiments.worlds.language import save_language, token_sequences
from experiments.worlds.tokenizer_training import train_tokenizer
from experiments.worlds.world_task import WorldTask
from rollout.tools.search import format_passages
from rollout.trajectory import Task

UNSEEN_SHARE = 0.15  # of the entities of each kind: kept away from training questions
HOP_TOLERANCE = 0.05  # at least, besides chance
LANGUAGE_SEED_OFFSET = 1_000_003  # the world of the articles: same words, other facts


class FictionalWorldTask(WorldTask):
    """Base class of the stages that write an invented world: corpus, questions, tokenizer and articles.

    Args:
        entities: number of entities; each has five passages, or seven in the world with numbers.
        test_unseen: number of test questions about entities at which no training question starts. The ``test``
            questions start at entities that training questions use too.
        vocab_size: vocabulary size of the tokenizer; it should hold each word of a name as one token.
        world: see ``WorldTask``. The articles describe another world.
    """

    digits: ClassVar[int] = 1  # digits of a number in one token
    questions: ClassVar[str]  # seed name of the questions

    def __init__(
        self,
        entities: PositiveInt = 4200,
        test_unseen: NonNegativeInt = 200,
        vocab_size: PositiveInt = 1536,
        **world: Any,
    ) -> None:
        super().__init__(vocab_size=vocab_size, **world)
        if entities < 20:
            raise ValueError(f"a world of {entities} entities is too small to ask about; give at least 20")
        self.entities, self.test_unseen = entities, test_unseen

    @abstractmethod
    def _world(self, seed: int) -> World: ...

    @abstractmethod
    def _split(
        self, world: World, name: str, subjects: list[Entity], count: int, avoid: set[int], rng: random.Random,
        taken: set[Any],
    ) -> list[Task]:  # fmt: skip
        """Draw ``count`` tasks that start at one of ``subjects``, avoid the entities of ``avoid`` (ids) and are not in
        ``taken``.

        Adds the tasks to ``taken``.
        """

    @abstractmethod
    def _article(self, world: World, entity: Entity, rng: random.Random) -> str: ...

    @abstractmethod
    def _tokenizer_texts(self, task: Task) -> list[str]:
        """Return the texts of one episode of a task, as an agent and its tools would write them, to train the tokenizer
        on."""

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write ``corpus.jsonl``, the question files, the tokenizer and the articles to ``output_dir``. Returns their
        counts.
        """
        write_corpus(output_dir / "corpus.jsonl", self.world.passages)
        return {"passages": len(self.world.passages)} | super().run(output_dir)

    @functools.cached_property
    def world(self) -> World:
        """The invented world (entities and facts) that the corpus and the questions describe."""
        return self._world(self.seed)

    def _prompt(self, task: Task) -> str:
        return f"{QUESTION_MARKER} {task.question}\n"

    def _splits(self) -> dict[str, list[Task]]:
        """Draw the question splits and return their tasks by name. The unseen part of the test starts at entities at
        which no training question starts.
        """
        world = self.world
        rng = random.Random(f"{self.questions}:{self.seed}")
        unseen: set[int] = set()  # ids of the entities kept away from training
        for kind in Kind:
            members = [e.id for e in world.entities if e.kind is kind]
            unseen.update(rng.sample(members, round(UNSEEN_SHARE * len(members))))
        training = [e for e in world.entities if e.id not in unseen]
        taken: set[Any] = set()
        splits = {
            name: self._split(world, name, training, count, unseen, rng, taken) for name, count in self.sizes.items()
        }
        others = [e for e in world.entities if e.id in unseen]
        splits["test"] += self._split(world, "test_unseen", others, self.test_unseen, set(), rng, taken)
        return splits

    def _write_language(self, folder: Path, demonstrations: list[Task]) -> int:
        """Train the tokenizer on articles, passages, questions and an agent's text. Write it and the articles to
        ``folder``, and return its vocabulary size.
        """
        other, rng = self._world(self.seed + LANGUAGE_SEED_OFFSET), random.Random(f"texts:{self.seed}")
        texts = [self._article(other, entity, rng) for entity in other.entities]
        texts += [passage.contents for passage in self.world.passages]
        texts += [text for task in demonstrations[:2000] for text in self._tokenizer_texts(task)]
        tokenizer = train_tokenizer(texts, self.vocab_size, self.digits)
        drawn = random.Random(f"articles:{self.seed}")
        articles = token_sequences(
            lambda: linked_articles(other, drawn, self._article), tokenizer, self.articles, self.article_tokens
        )
        return save_language(folder, tokenizer, articles)


class BuildWorld(FictionalWorldTask):
    """Writes an invented world about which multi-hop questions are asked: corpus, questions, tokenizer and articles.
    Deterministic.

    No training question starts at an unseen entity or passes through one.

    Args:
        hop_shares: weights of one-, two- and three-hop questions.
        world: see ``FictionalWorldTask``.
    """

    questions = "questions"

    def __init__(
        self, hop_shares: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (0.4, 0.4, 0.2), **world: Any
    ) -> None:
        super().__init__(**world)
        self.hop_shares = hop_shares
        self._expert = ExpertPolicy(error_rate=0.5, seed=self.seed)

    def _world(self, seed: int) -> World:
        return build_world(self.entities, seed)

    def _article(self, world: World, entity: Entity, rng: random.Random) -> str:
        return article(world, entity, rng)

    def _split(
        self, world: World, name: str, subjects: list[Entity], count: int, avoid: set[int], rng: random.Random,
        taken: set[Any],
    ) -> list[Task]:  # fmt: skip
        tasks: list[Task] = []
        while len(tasks) < count:
            missing = count - len(tasks)
            for chain in draw_questions(world, subjects, missing, self.hop_shares, rng, taken):
                question = phrase(chain, rng)
                if question not in taken and not any(entity.id in avoid for entity in chain.path):
                    taken.add(question)
                    tasks.append(as_task(world, chain, question, f"{name}-{len(tasks)}", name))
        self._check_hops(name, tasks)
        return tasks

    def _check_hops(self, name: str, tasks: list[Task]) -> None:
        # If a question exists already, draw again, with a new number of hops: when one-hop questions run out, others
        # replace them.
        if not tasks:
            return
        wanted = [share / sum(self.hop_shares) for share in self.hop_shares]
        found = [sum(t.metadata["hops"] == hops for t in tasks) / len(tasks) for hops in range(1, 4)]
        if any(abs(f - w) > HOP_TOLERANCE + 2 / math.sqrt(len(tasks)) for f, w in zip(found, wanted, strict=True)):
            raise ValueError(
                f"{name}: shares of one-, two- and three-hop questions are {', '.join(f'{f:.2f}' for f in found)}, "
                f"expected {', '.join(f'{w:.2f}' for w in wanted)}: {self.entities} entities do not have enough "
                "questions of each kind; give more entities or ask for fewer questions"
            )

    def _tokenizer_texts(self, task: Task) -> list[str]:
        """Return the texts of an episode that the scripted expert plays, as if every search returned exactly the gold
        passages."""
        information = f"\n\n<information>{format_passages(task.gold_passages)}</information>\n\n"
        first, last = (self._expert.next_turn(task, seen) for seen in ("", information))
        return [f"Question: {task.question}\n", first, information, last]
