"""Tokenizer and plain text of a generated world, to teach a tiny model the language."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.worlds.tokenizer_training import train_tokenizer
from rollout.skills.bank import SkillBank
from rollout.storage import save_trajectories
from rollout.trajectory import Action, ActionKind, StopReason, Task, Trajectory, Turn

LISTS = 0.3  # share of the texts that are lists
ADVICE = 0.1  # share of the texts that are skills
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
    """Train a tokenizer on generated texts, and write ``tokenizer/`` and ``articles.parquet`` (texts to train on) to
    ``folder``. Return the vocabulary size. Deterministic.

    Args:
        text: draws a text.
        articles: number of sequences; each joins texts and is cut to ``article_tokens`` ids.
        digits: see ``train_tokenizer``.
        further: additional texts for the tokenizer.
    """
    drawn = random.Random(f"texts:{seed}")
    words = [*(text(drawn) for _ in range(TOKENIZER_TEXTS)), *further]
    tokenizer = train_tokenizer(words, vocab_size, digits, spaced_numbers=True)
    rng = random.Random(f"articles:{seed}")

    def texts() -> Iterator[str]:
        while True:
            yield text(rng)

    return save_language(folder, tokenizer, token_sequences(texts, tokenizer, articles, article_tokens))


def save_language(folder: Path, tokenizer: Any, sequences: Iterable[list[int]]) -> int:
    """Write ``tokenizer/`` and, if there are sequences of token ids, ``articles.parquet`` to ``folder``. Return the
    vocabulary size.
    """
    tokenizer.save_pretrained(folder / "tokenizer")
    articles = [as_trajectory(ids, number, tokenizer.pad_token_id) for number, ids in enumerate(sequences)]
    save_trajectories(folder / "articles.parquet", articles)
    return len(tokenizer)


def as_trajectory(ids: list[int], number: int, bos_id: int) -> Trajectory:
    """Return token ids as a trajectory whose every token is in the loss, so that `SFT` trains on plain text
    unchanged."""
    turn = Turn(0, len(ids), Action(ActionKind.INVALID, error="plain text"), "length", 0, len(ids))
    return Trajectory(
        task=Task(id=f"article-{number}", question="", golden_answers=(), data_source="articles"),
        prompt_ids=(bos_id,),
        response_ids=tuple(ids),
        loss_mask=(1,) * len(ids),
        logprobs=(0.0,) * len(ids),
        turns=(turn,),
        calls=(),
        stop_reason=StopReason.LENGTH,
        group=f"article-{number}",
        index=0,
    )


def token_sequences(texts: Callable[[], Iterator[str]], tokenizer: Any, count: int, length: int) -> Iterator[list[int]]:
    """Yield ``count`` sequences of ``length`` token ids. Each tokenises the texts that one call of ``texts`` yields."""
    for _ in range(count):
        ids: list[int] = []
        drawn = texts()
        while len(ids) < length:
            ids += tokenizer(next(drawn), add_special_tokens=False).input_ids
        yield ids[:length]


def mixed_text(rng: random.Random, bank: SkillBank, thing: Draw, episode: Draw) -> str:
    """Draw a random text: the transcript of an episode, a list of names, or two skills (advice texts) of the bank."""
    drawn = rng.random()
    if drawn < LISTS:
        return repeated_list(rng, thing)
    if drawn < LISTS + ADVICE:
        skills = [*bank.general, *(s for part in bank.by_category.values() for s in part)]
        return "\n".join(skill.principle for skill in rng.sample(skills, 2)) + "\n"
    return episode(rng)


def repeated_list(rng: random.Random, thing: Draw, length: int = 12) -> str:
    """Return a text that lists random names twice in the same order. A model learns copying from such texts."""
    items = " ".join(thing(rng) for _ in range(length))
    return f"List: {items}\nAgain: {items}\n"
