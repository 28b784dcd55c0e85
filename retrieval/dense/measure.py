"""How many of the exact best three an index finds, asked with the first words of passages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from retrieval.corpus import PassageStore
from retrieval.dense.opened import open_dense
from retrieval.dense.vectors import VectorShards
from retrieval.index import IndexKind

QUERIES, WORDS, BEST = 200, 12, 3


def sampled_recall(
    folder: Path, vectors: Path, kind: IndexKind, settings: dict[str, Any], threads: int, device: str
) -> float:
    """recall@3 of the index in ``folder``, at its own settings, against the exact search of ``vectors``."""
    store, shards = PassageStore(folder), VectorShards(vectors)
    rows = np.unique(np.linspace(0, len(store) - 1, min(QUERIES, len(store))).astype(int))
    texts = [" ".join(store[int(row)].contents.partition("\n")[2].split()[:WORDS]) for row in rows]
    searcher = open_dense(folder, kind, settings, threads=threads, device=device)
    queries = searcher.encode(texts)
    _, found = searcher.nearest(queries, min(BEST, len(store)))
    searcher.close()
    share = round(recall(found, queries, shards), 4)
    print(f"recall@{BEST} of {kind} against exact search, {len(texts)} queries: {share}", file=sys.stderr, flush=True)
    return share


def recall(found: np.ndarray, queries: np.ndarray, shards: VectorShards) -> float:
    """Share of the exact best k among the rows ``found`` [Q, k]; ``queries`` [Q, dimension]."""
    k = found.shape[1]
    scores, rows, start = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64), 0
    for vectors in shards:
        best, at = faiss.knn(queries, vectors, min(k, len(vectors)), metric=faiss.METRIC_INNER_PRODUCT)
        scores, rows = np.concatenate([scores, best], axis=1), np.concatenate([rows, at + start], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        start += len(vectors)
    hits = [len(set(a) & set(b)) for a, b in zip(found.tolist(), rows.tolist(), strict=True)]
    return sum(hits) / rows.size
