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
SEEN_BYTES = 4096  # of a file that a trainer writes to be found, at most


class WeightsMoved(Exception):
    """Other weights have come since the sender looked."""


class ServerWeights:
    """``tag`` names the push that the engine holds, ``version`` its policy version; ``refusal`` says why nothing may be
    sampled until a whole push has come: a transfer straight into the engine has not come to its end, or the engine was
    started anew and does not hold the push any more."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine, self._id = engine, uuid.uuid4().hex
        self.lock = asyncio.Lock()  # of what changes the engine's weights
        self.tag, self.version = START, 0
        self._unfit: str | None = None
        self._files: tuple[object, ...] = ()  # that brought them
        self._sending: str | None = None  # tag of the transfer that has begun

    @property
    def instance(self) -> str:
        """Another one for each process of the engine."""
        return f"{self._id}-{self._engine.pid}"

    @property
    def refusal(self) -> str | None:
        return self._unfit or self._engine.weights_lost

    @property
    def sending(self) -> bool:
        """Whether a transfer has begun, and not come to its end."""
        return self._sending is not None

    def state(self) -> dict[str, Any]:
        return {"weights": self.tag, "version": self.version, "instance": self.instance, "refusal": self.refusal}

    def sees(self, path: str) -> str | None:
        """SHA-256 of a file that a trainer on this host has written to be found; None: it is not there."""
        if not _is_ours(path) or Path(path).stat().st_size > SEEN_BYTES:
            return None
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()

    async def load(
        self, paths: list[str], tag: str, version: int, replaces: str | None = None, between_steps: bool = False
    ) -> None:
        """Load the trainer's files. Requests in flight finish first, or, ``between_steps``, go on with the new weights.

        Args:
            replaces: load only if the server still holds this push.

        Raises:
            ValueError: they do not fit, are not what was sent, are not finite, or the tag is held with others; nothing
                has changed.
            WeightsMoved: see ``replaces``.
        """
        for path in paths:
            if not _is_ours(path):
                raise ValueError(f"{path[:200]} is no file of weights on this host")
        async with self.lock:
            files = (version, *(_identity(path) for path in paths))
            if self.holds(tag):
                if files != self._files:
                    raise self.held(tag)
                return
            if replaces is not None and self.tag not in (tag, replaces):
                raise WeightsMoved(f"the server holds {self.tag or 'nothing'} by now, not {replaces}")
            await self._engine.load_files(WeightFiles(paths), version, between_steps)
            self.fit(tag, version, files)

    def holds(self, tag: str | None) -> bool:
        return self.tag == tag and self.refusal is None

    def held(self, tag: str | None) -> ValueError:
        return ValueError(
            f"push {tag} is held already, as version {self.version}; other weights need a tag of their own"
        )

    def expect(self, method: str, tag: str | None) -> None:
        """Before a call of a transfer straight into the engine. From its start on nothing may be sampled, until whole
        weights have come. Raises ValueError if the tag is held already, or none or another transfer has begun."""
        if method == "start_weight_update":
            if self.holds(tag):
                raise self.held(tag)
            self.tag, self._sending = "", tag
            self._unfit = "a transfer of weights has not come to its end; push again"
        elif method in ("update_weights", "finish_weight_update") and tag not in (None, self._sending):
            raise ValueError(f"{method}: tag is {tag}; expected that of the transfer which has begun, {self._sending}")
        elif method in ("update_weights", "finish_weight_update") and not self.sending:
            raise ValueError(f"{method}: expected start_weight_update before it")

    def fit(self, tag: str, version: int, files: tuple[object, ...] = ()) -> None:
        self.tag, self.version, self._files = tag, version, files
        self._unfit = self._sending = None

    def give_up(self) -> None:
        """The transfer that has begun will not end, and the engine was started anew for it."""
        if self._unfit is not None:
            self.fit(START, 0)


def _is_ours(path: str) -> bool:
    try:
        return Path(path).name.startswith(PREFIX) and Path(path).is_file()
    except OSError:  # a name that no file can have
        return False


def _identity(path: str) -> tuple[object, ...]:
    found = Path(path).stat()
    return path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
