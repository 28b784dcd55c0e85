"""The passages of a world's search corpus, and their file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a search corpus."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Return the passage in Search-R1's corpus format: quoted title, line break, text."""
        return f'"{self.title}"\n{self.text}'


def write_corpus(path: Path, passages: Iterable[Passage]) -> None:
    """Write passages as JSON lines of ``{id, contents}``, which ``BuildIndex`` reads."""
    with path.open("w", encoding="utf-8") as file:
        for passage in passages:
            file.write(json.dumps({"id": passage.id, "contents": passage.contents}, ensure_ascii=False) + "\n")
