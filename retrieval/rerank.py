"""Reranks a backend's documents with a cross-encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.ranges import PositiveInt
from retrieval.dense.encoder import devices_of
from retrieval.hybrid import describe
from retrieval.types import Document, IndexFolderError, SearchBackend


class Reranked:
    """Ranks the ``candidates`` best documents of a backend by the scores of a cross-encoder.

    Args:
        backend: finds the candidates.
        model: Hugging Face folder (or hub name) of a sequence classifier with one output, such as
            ``cross-encoder/ms-marco-MiniLM-L6-v2`` or ``BAAI/bge-reranker-base``. Its raw output is the score.
        candidates: documents per query from the backend.
        max_length: tokens of query and document together; the document is cut.
        batch_size: pairs per forward pass.
        device: ``auto`` takes a GPU if available.
        threads: of torch on the CPU.

    Raises IndexFolderError if the model cannot be loaded or has several outputs.
    """

    def __init__(
        self,
        backend: SearchBackend,
        model: str,
        candidates: PositiveInt = 50,
        max_length: PositiveInt = 512,
        batch_size: PositiveInt = 64,
        device: str = "auto",
        threads: PositiveInt = 1,
    ) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.backend, self.model, self.candidates = backend, model, candidates
        self.max_length, self.batch_size = max_length, batch_size
        torch.set_num_threads(threads)
        device = devices_of(device)[0]
        self._device = device
        dtype = torch.float16 if device.startswith("cuda") else torch.float32
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            self._scorer = AutoModelForSequenceClassification.from_pretrained(model, dtype=dtype).to(device).eval()
        except (OSError, ValueError) as error:
            raise IndexFolderError(
                f"reranker {model}: cannot be loaded ({error}); give the Hugging Face folder of a sequence classifier"
            ) from error
        if self._scorer.config.num_labels != 1:
            raise IndexFolderError(
                f"reranker {model}: it has {self._scorer.config.num_labels} outputs; expected a cross-encoder with one"
            )

    @property
    def metadata(self) -> list[Any]:
        return [*describe(self.backend), {"kind": f"reranked by {self.model}"}]

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        found = self.backend.search(queries, max(k, self.candidates))
        pairs = [
            (query, f"{d.title}\n{d.text}") for query, ranking in zip(queries, found, strict=True) for d in ranking
        ]
        scores = iter(self._scores(pairs))
        scored = [[replace(document, score=next(scores)) for document in ranking] for ranking in found]
        return [sorted(ranking, key=lambda document: -document.score)[:k] for ranking in scored]

    def _scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        """Return the score of each pair, independent of its batch."""
        import torch

        scores = [0.0] * len(pairs)
        # texts of similar length share a batch, to save padding
        order = sorted(range(len(pairs)), key=lambda index: len(pairs[index][0]) + len(pairs[index][1]))
        with torch.inference_mode():
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                queries, texts = zip(*(pairs[row] for row in rows), strict=True)
                inputs = self._tokenizer(
                    list(queries), list(texts),
                    padding=True, truncation="only_second", max_length=self.max_length, return_tensors="pt",
                ).to(self._device)  # fmt: skip
                for row, score in zip(rows, self._scorer(**inputs).logits[:, 0].float().tolist(), strict=True):
                    scores[row] = score
        return scores

    def close(self) -> None:
        self.backend.close()
