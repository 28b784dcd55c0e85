"""Small real stages for the runner's tests."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal

from retrieval.client import RetrieverClient


class Options:
    """Arguments of many types."""

    def __init__(
        self,
        policy: str,
        own: str | Path | None = None,
        several: list[str] | None = None,
        nested: dict[str, Any] | None = None,
        lr: float = 0.1,
        rates: list[float] | None = None,
        kind: Literal["a", "b"] = "a",
    ) -> None: ...


class Note:
    """A task that writes what it was given, and appends a line to the file TOY_JOURNAL each time it runs.

    Args:
        text: what goes into note.txt.
        source: folder of another note, copied into this one.
        seconds: how long it takes.
        fault: ``value``, ``bug`` or ``exit``: the error it ends with; ``gone``: its folder is deleted.
        retriever: a search server, which it does not ask.
    """

    def __init__(
        self,
        text: str = "",
        source: str | None = None,
        seconds: float = 0,
        fault: str = "",
        retriever: RetrieverClient | None = None,
    ) -> None:
        self.text, self.source, self.seconds, self.fault = text, source, seconds, fault

    def run(self, output_dir: Path) -> dict[str, Any]:
        with open(os.environ["TOY_JOURNAL"], "a") as stream:
            stream.write(f"{os.getpid()} {output_dir.parent.name}\n")
        print(f"writing {self.text}", flush=True)
        time.sleep(self.seconds)
        if self.fault == "gone":
            shutil.rmtree(output_dir)
        elif self.fault:
            errors = {"value": ValueError("the corpus is empty"), "bug": TypeError("unsupported operand")}
            raise errors.get(self.fault, SystemExit())
        before = (Path(self.source) / "note.txt").read_text() if self.source else ""
        (output_dir / "note.txt").write_text(before + self.text)
        return {"characters": len(before + self.text)}


class Draw:
    """Writes what the generators give and the seed that data modules look up."""

    def __init__(self) -> None:
        pass

    def run(self, output_dir: Path) -> dict[str, Any]:
        import random

        drawn = {"random": random.random(), "variable": os.environ["PL_GLOBAL_SEED"]}
        (output_dir / "drawn.json").write_text(json.dumps(drawn))
        return drawn


class Confidant:
    """Tells how long the secret is that it was given."""

    def run(self, output_dir: Path) -> dict[str, Any]:
        (output_dir / "confided").write_text(f"{len(os.environ['COMPACT_AGENTS_SECRET'])} characters")
        return {}
