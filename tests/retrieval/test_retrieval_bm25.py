"""Lucene against BM25 written out in Python: the same passages, in the same order, with the same scores."""

import asyncio
import math
import random
import re
from collections import Counter

import pytest

from retrieval.client import RetrieverClient
from retrieval.process import RetrieverProcess
from retrieval.types import Document

ROUNDING = 1.01e-4  # Anserini rounds scores to four decimals and nudges equal ones apart by a millionth


def lucene_length(length: int) -> int:
    """The length that Lucene's one-byte norm keeps (SmallFloat.intToByte4 and back): exact to 39, then 4 bits."""
    if length < 24:
        return length
    value = length - 24
    shift = max(value.bit_length() - 4, 0)
    return 24 + (value >> shift << shift)


class SlowBM25:
    def __init__(self, texts: list[str], k1: float, b: float) -> None:
        self.k1, self.b = k1, b
        self.counts = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
        self.holding = Counter(term for count in self.counts for term in count)
        lengths = [sum(count.values()) for count in self.counts]
        self.lengths = [lucene_length(length) for length in lengths]
        self.mean = sum(lengths) / len(lengths)  # of the true lengths

    def score(self, query: str, row: int) -> float:
        total = 0.0
        for term, times in Counter(query.lower().split()).items():
            frequency = self.counts[row][term]
            holding = self.holding[term]
            idf = math.log(1 + (len(self.counts) - holding + 0.5) / (holding + 0.5))
            norm = self.k1 * (1 - self.b + self.b * self.lengths[row] / self.mean)
            total += times * idf * frequency / (frequency + norm)
        return total


def test_order_and_scores_equal_slow_bm25(corpus, bm25_index, server):
    draw = random.Random(1)
    queries = [" ".join(draw.choices(corpus.words, k=draw.randint(1, 6))) for _ in range(60)]
    queries.append(f"{corpus.words[0]} {corpus.words[0]} {corpus.words[1].upper()}")  # a word twice, another case
    compare(corpus, queries, asyncio.run(ask(server, queries)), k1=0.9, b=0.4)
    other = RetrieverProcess(bm25_index, k1=1.6, b=0.9, threads=2)
    try:
        compare(corpus, queries, asyncio.run(ask(other, queries)), k1=1.6, b=0.9)
    finally:
        other.stop()


async def ask(process: RetrieverProcess, queries: list[str]) -> list[list[Document]]:
    await asyncio.to_thread(process.start)
    client = RetrieverClient([process.url])
    try:
        return await client.search(queries, 10)
    finally:
        await client.close()


def compare(corpus, queries: list[str], answers: list[list[Document]], *, k1: float, b: float) -> None:
    slow = SlowBM25(corpus.contents, k1, b)
    assert max(slow.lengths) > 60  # lengths at which the norm is lossy
    for query, documents in zip(queries, answers, strict=True):
        scores = [slow.score(query, row) for row in range(200)]
        expected = sorted((score for score in scores if score > 0), reverse=True)[:10]
        assert [document.score for document in documents] == pytest.approx(expected, abs=ROUNDING)
        own = [scores[int(document.id[1:])] for document in documents]  # each in its place, up to ties
        assert own == pytest.approx(expected, abs=ROUNDING)
        assert len({document.id for document in documents}) == len(documents)
