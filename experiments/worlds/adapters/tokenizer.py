"""Stage that trains a small tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.ranges import PositiveInt
from experiments.worlds.tokenizer_training import train_tokenizer


class TrainTokenizer:
    """Stage that writes ``<output_dir>/tokenizer``, for ``InitialModel``.

    Args:
        texts: texts to train on.
        size: entries of the vocabulary; 265 are bytes and tokens of chats and tools.
    """

    def __init__(self, texts: Sequence[str], size: PositiveInt = 300) -> None:
        self.texts, self.size = texts, size

    def run(self, output_dir: Path) -> dict[str, int]:
        tokenizer = train_tokenizer(self.texts, self.size)
        tokenizer.save_pretrained(Path(output_dir) / "tokenizer")
        return {"vocabulary": len(tokenizer)}
