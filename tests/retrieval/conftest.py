"""A corpus of 200 invented passages, its real Lucene index, and one server over it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from retrieval.index import BuildIndex
from retrieval.process import RetrieverProcess


@dataclass(frozen=True)
class Corpus:
    path: Path
    ids: list[str]
    contents: list[str]
    words: list[str]  # the vocabulary, commonest first


def make_corpus(path: Path, *, passages: int = 200, seed: int = 0, longest: int = 150) -> Corpus:
    """Passages of invented words that Porter's stemmer leaves alone, of very unequal lengths and frequencies."""
    draw = random.Random(seed)
    syllables = [consonant + vowel for consonant in "bdfgklmnprtvz" for vowel in "aou"]
    words = sorted({"".join(draw.choices(syllables, k=3)) + "k" for _ in range(400)})
    draw.shuffle(words)
    weights = [1 / (rank + 3) for rank in range(len(words))]
    contents = []
    for _ in range(passages):
        title = " ".join(word.title() for word in draw.choices(words, weights, k=2))
        text = " ".join(draw.choices(words, weights, k=draw.randint(3, longest)))
        contents.append(f'"{title}"\n{text}')
    ids = [f"p{row}" for row in range(passages)]
    lines = [json.dumps({"id": id_, "contents": text}) for id_, text in zip(ids, contents, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return Corpus(path, ids, contents, words)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="session")
def bm25_index(corpus, tmp_path_factory) -> str:
    return BuildIndex(str(corpus.path)).run(tmp_path_factory.mktemp("bm25"))["index"]


@pytest.fixture(scope="session")
def server(bm25_index) -> Iterator[RetrieverProcess]:
    process = RetrieverProcess(bm25_index)
    process.start()
    yield process
    process.stop()
