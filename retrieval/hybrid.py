"""Several indexes over one corpus, their rankings fused."""

from __future__ import annotations

from collections.abc import Sequence

from retrieval.types import Hit, Searcher


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Hit]], k: int, constant: int = 60) -> list[Hit]:
    """The best ``k`` of several rankings by ``sum of 1 / (constant + rank)``, ranks from 1.

    Scores of the rankings play no part, so that BM25 weights and cosines need no common scale; equal sums come in
    corpus order.  Source: Cormack, Clarke, Buettcher (SIGIR 2009), whose constant is 60.
    """
    weights: dict[int, float] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, start=1):
            weights[hit.row] = weights.get(hit.row, 0.0) + 1.0 / (constant + rank)
    best = sorted(weights.items(), key=lambda item: (-item[1], item[0]))[:k]
    return [Hit(row, weight) for row, weight in best]


class HybridSearcher:
    """Asks every searcher for ``depth`` hits and fuses them."""

    def __init__(self, searchers: list[Searcher], depth: int = 100) -> None:
        self.searchers, self.depth = searchers, depth

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        rankings = [searcher.search(queries, max(k, self.depth)) for searcher in self.searchers]
        return [reciprocal_rank_fusion(of_query, k) for of_query in zip(*rankings, strict=True)]

    def close(self) -> None:
        for searcher in self.searchers:
            searcher.close()
