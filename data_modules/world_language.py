"""The language of a small generated world: a tokenizer for its words, and plain text by which a model made from nothing
learns them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_modules.fictional_world.articles import as_trajectory
from data_modules.tokenizer import train_tokenizer
from rollout.skills.bank import SkillBank
from rollout.storage import save_trajectories

LISTS = 0.3  # share of the texts that are lists
ADVICE = 0.1  # share that are skills
TOKENIZER_TEXTS = 3000

Draw = Callable[[random.Random], str]


def write_language(
    folder: Path,
    text: Draw,
    seed: int,
    vocab_size: int,
    articles: int,
    article_tokens: int,
    digits: int = 1,
    further: Sequence[str] = (),
) -> int:
    """Write ``tokenizer/`` and ``articles.parquet``. Deterministic. Returns the size of the vocabulary.

    Args:
        text: draws a text.
        articles: sequences of texts, one after the other, cut to ``article_tokens`` ids.
        digits: see ``train_tokenizer``.
        further: texts for the tokenizer alone.
    """
    rng = random.Random(f"texts:{seed}")
    words = [*(text(rng) for _ in range(TOKENIZER_TEXTS)), *further]
    tokenizer = train_tokenizer(words, vocab_size, digits, spaced_numbers=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    sequences = _sequences(text, tokenizer, random.Random(f"articles:{seed}"), articles, article_tokens)
    save_trajectories(
        folder / "articles.parquet",
        [as_trajectory(ids, n, tokenizer.pad_token_id) for n, ids in enumerate(sequences)],
    )
    return len(tokenizer)


def _sequences(text: Draw, tokenizer: Any, rng: random.Random, count: int, length: int) -> Iterator[list[int]]:
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer(text(rng), add_special_tokens=False).input_ids
        yield ids[:length]


def mixed_text(rng: random.Random, bank: SkillBank, thing: Draw, episode: Draw) -> str:
    """A list of things, two skills of the bank, or (mostly) an episode as a transcript."""
    drawn = rng.random()
    if drawn < LISTS:
        return repeated_list(rng, thing)
    if drawn < LISTS + ADVICE:
        skills = [*bank.general, *(s for part in bank.by_category.values() for s in part)]
        return "\n".join(skill.principle for skill in rng.sample(skills, 2)) + "\n"
    return episode(rng)


def repeated_list(rng: random.Random, thing: Draw, length: int = 12) -> str:
    """Names of things in no order, then the same once more: nothing but copying says what comes next."""
    items = " ".join(thing(rng) for _ in range(length))
    return f"List: {items}\nAgain: {items}\n"
