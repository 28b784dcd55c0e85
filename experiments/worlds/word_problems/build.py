"""Stage that writes word problems, a tokenizer and text to learn from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.ranges import NonNegativeFloat, PositiveInt
from experiments.worlds.language import save_language, token_sequences
from experiments.worlds.tokenizer_training import train_tokenizer
from experiments.worlds.word_problems.expert import WordExpertPolicy
from experiments.worlds.word_problems.problems import (
    WORDS,
    Problem,
    as_task,
    draw_problem,
    draw_problems,
    make_problem,
)
from experiments.worlds.world_task import WorldTask
from rollout.protocols.call_formats import FORMATS
from rollout.protocols.hermes import UNREADABLE
from rollout.tools.python.tool import NOTHING_PRINTED
from rollout.trajectory import Task

SHARES = {2: 0.3, 3: 0.4, 4: 0.3}
LISTS = 0.4  # share of the sequences that are lists
RETOLD = 0.5  # share of the solutions that begin with the story
DIGITS = 2  # digits of a number in one token
READ = (  # text that an agent reads besides numbers
    "Traceback (most recent call last):\n  File \"<program>\", line 1, in <module>\n    print('=', x + 1)\n"
    "NameError: name 'x' is not defined",
    NOTHING_PRINTED,
    UNREADABLE.format(reason="not valid JSON: Expecting ',' delimiter at character 72", form=FORMATS["hermes"].form),
    "<|im_start|>user\n<tool_response>\n</tool_response>\n<|im_start|>assistant\n",
)


class BuildWordProblems(WorldTask):
    """Writes question files of word problems, a tokenizer for them, and worked solutions as plain text. Deterministic.

    Args:
        shares: weights of problems by number of calculations. Default: SHARES.
        world: see ``WorldTask``.
    """

    def __init__(self, shares: dict[PositiveInt, NonNegativeFloat] | None = None, **world: Any) -> None:
        super().__init__(**world)
        self.shares = SHARES if shares is None else shares
        if not self.shares or min(self.shares) < 2 or min(self.shares.values()) < 0:
            raise ValueError(f"shares is {self.shares}; expected weights by number of calculations, which is 2 or more")

    def _splits(self) -> dict[str, list[Task]]:
        rng = random.Random(f"problems:{self.seed}")
        taken: set[str] = set()
        return {
            name: [as_task(p, f"{name}-{i}", name) for i, p in enumerate(draw_problems(n, self.shares, rng, taken))]
            for name, n in self.sizes.items()
        }

    def _write_language(self, folder: Path, demonstrations: list[Task]) -> int:
        tokenizer = train_tokenizer(self._texts(demonstrations), self.vocab_size, DIGITS, spaced_numbers=True)
        rng = random.Random(f"articles:{self.seed}")
        articles = token_sequences(lambda: self._article(rng, tokenizer), tokenizer, self.articles, self.article_tokens)
        return save_language(folder, tokenizer, articles)

    def _texts(self, demonstrations: list[Task]) -> list[str]:
        """Return the tokenizer's training texts: stories, worked solutions and an agent's turns."""
        rng = random.Random(f"texts:{self.seed}")
        expert = WordExpertPolicy(error_rate=0.3, seed=self.seed)
        texts = [worked(make_problem(rng, 3)) for _ in range(1000)]
        for task in demonstrations[:2000]:
            transcript = ""
            texts.append(task.question)
            for result in task.metadata["results"]:
                turn = expert.next_turn(task, transcript)
                transcript += f"<tool_response>\n= {result}\n</tool_response>"
                texts += [turn, f"<tool_response>\n= {result}\n</tool_response>"]
            texts.append(expert.next_turn(task, transcript))
        return [*texts, *READ * 50]

    def _article(self, rng: random.Random, tokenizer: Any) -> Iterator[str]:
        """Yield training texts without end: either only lists of names and numbers, or only worked solutions of word
        problems.
        """
        lists = rng.random() < LISTS
        while True:
            if lists:
                yield repeated_list(rng)
            else:
                problem = draw_problem(rng, self.shares)
                yield worked(problem, tokenizer, rng.random() < RETOLD)


def repeated_list(rng: random.Random, length: int = 20) -> str:
    """Return a text that lists random names, things and numbers twice in the same order. A model learns copying from
    such texts.
    """
    words = [*WORDS["names"], *WORDS["things"], *WORDS["holders"]]
    items = " ".join(str(rng.randint(11, 99)) if rng.random() < 0.5 else rng.choice(words) for _ in range(length))
    return f"List: {items}\nAgain: {items}\n"


def worked(problem: Problem, tokenizer: Any = None, retold: bool = False) -> str:
    """Return a word problem with its solution as in a schoolbook: sentences, calculations and results, without a
    program or tool.

    With a ``tokenizer`` it is a chat. To continue, a model must read the story and copy from it. With ``retold`` the
    solution begins with the story, which teaches copying fastest.
    """
    lines = [f"{problem.told[i]} {problem.formula(i)} = {result}" for i, result in enumerate(problem.results)]
    solution = [problem.question] * retold + [*lines, f"It is {problem.answer}."]
    messages = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": "\n".join(solution)}]
    if tokenizer is None:
        return "\n".join(message["content"] for message in messages)
    return tokenizer.apply_chat_template(messages, tokenize=False)
