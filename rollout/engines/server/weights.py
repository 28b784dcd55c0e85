"""Weights of one engine server: how updates arrive, and which push it holds."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engines.weights.files import PREFIX, WeightFiles

if TYPE_CHECKING:
    from rollout.engines.process import EngineProcess

START = "start"  # tag of the weights that the engine has loaded from its folder


class WeightsMoved(Exception):
    """Other weights have come since the sender looked."""


class ServerWeights:
    """``tag`` names the push that the engine holds, ``version`` its policy version; ``refusal`` says why nothing may be
    sampled (a transfer straight into the engine has failed half-way), until a whole push has come."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self.instance = uuid.uuid4().hex
        self.tag, self.version = START, 0
        self.refusal: str | None = None

    def state(self) -> dict[str, Any]:
        return {"weights": self.tag, "version": self.version, "instance": self.instance, "refusal": self.refusal}

    def sees(self, path: str) -> str | None:
        """SHA-256 of a file that a trainer on this host has written to be found; None: it is not there."""
        file = Path(path)
        if not file.name.startswith(PREFIX) or not file.is_file():
            return None
        return hashlib.sha256(file.read_bytes()).hexdigest()

    async def load(
        self, paths: list[str], tag: str, version: int, replaces: str | None = None, between_steps: bool = False
    ) -> None:
        """Load the trainer's files. Requests in flight finish first, or, ``between_steps``, go on with the new weights.

        Args:
            replaces: load only if the server still holds this push.

        Raises:
            ValueError: they do not fit, or are not what was sent; nothing has changed.
            WeightsMoved: see ``replaces``.
        """
        for path in paths:
            if not Path(path).name.startswith(PREFIX) or not Path(path).is_file():
                raise ValueError(f"{path} is no file of weights on this host")
        async with self._lock:
            if replaces is not None and self.tag not in (tag, replaces):
                raise WeightsMoved(f"the server holds {self.tag or 'nothing'} by now, not {replaces}")
            if self.tag != tag:
                await self._engine.load_files(WeightFiles(paths), version, between_steps)
                self.fit(tag, version)

    def unfit(self, why: str) -> None:
        """From now on nothing may be sampled, until whole weights have come."""
        self.tag, self.refusal = "", why

    def fit(self, tag: str, version: int) -> None:
        self.tag, self.version, self.refusal = tag, version, None
