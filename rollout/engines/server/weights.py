"""Weights of one engine server: loads updates, and tracks which push the engine holds."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engines.weights.files import PREFIX, WeightFiles

if TYPE_CHECKING:
    from rollout.engines.process import EngineProcess

START = "start"  # tag of the weights in the engine's folder
SEEN_BYTES = 4096  # largest test file of a trainer


class WeightsMoved(Exception):
    """The engine server has received other weights since the sender checked it."""


class ServerWeights:
    """Records which weight push a server's engine has loaded: its ``tag`` and policy ``version``.

    ``refusal`` says why the engine may not sample until all weights are pushed: a transfer has not finished, or the
    engine restarted and lost the push."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine, self._id = engine, uuid.uuid4().hex
        self.lock = asyncio.Lock()  # guards changes of the engine's weights
        self.tag, self.version = START, 0
        self._unfit: str | None = None
        self._files: tuple[object, ...] = ()  # that contained the weights
        self._sending: str | None = None  # tag of the transfer in progress

    @property
    def instance(self) -> str:
        """An id of the engine's process, which is new after each restart."""
        return f"{self._id}-{self._engine.pid}"

    @property
    def refusal(self) -> str | None:
        return self._unfit or self._engine.weights_lost

    @property
    def sending(self) -> bool:
        """Whether a weight transfer is in progress."""
        return self._sending is not None

    def state(self) -> dict[str, Any]:
        return {"weights": self.tag, "version": self.version, "instance": self.instance, "refusal": self.refusal}

    def sees(self, path: str) -> str | None:
        """Return the SHA-256 of a trainer's test file, or None if this host does not see the file."""
        if not _is_ours(path) or Path(path).stat().st_size > SEEN_BYTES:
            return None
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()

    async def load(
        self, paths: list[str], tag: str, version: int, replaces: str | None = None, between_steps: bool = False
    ) -> None:
        """Load weights from the trainer's files. Requests in flight finish first; with ``between_steps`` they continue
        with the new weights.

        Args:
            replaces: load only if the server still holds this push.

        Raises:
            ValueError: they do not fit, differ from their checksums, are not finite, or the tag is held with other
                files. The weights are unchanged.
            WeightsMoved: see ``replaces``.
        """
        for path in paths:
            if not _is_ours(path):
                raise ValueError(f"{path[:200]} is not a weight file on this host; expected a trainer's file")
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
        return ValueError(f"push {tag} is held already, as version {self.version}; give other weights another tag")

    def expect(self, method: str, tag: str | None) -> None:
        """Check one call of a weight transfer before it runs. After its start the engine may not sample until all
        weights have arrived. Raises ValueError if the tag is held already, or if this transfer is not in progress."""
        if method == "start_weight_update":
            if self.holds(tag):
                raise self.held(tag)
            self.tag, self._sending = "", tag
            self._unfit = "a weight transfer has not finished; push again"
        elif method in ("update_weights", "finish_weight_update") and tag not in (None, self._sending):
            raise ValueError(f"{method}: tag is {tag}; expected {self._sending}, of the transfer in progress")
        elif method in ("update_weights", "finish_weight_update") and not self.sending:
            raise ValueError(f"{method}: expected start_weight_update before it")

    def fit(self, tag: str, version: int, files: tuple[object, ...] = ()) -> None:
        self.tag, self.version, self._files = tag, version, files
        self._unfit = self._sending = None

    def give_up(self) -> None:
        """Forget a weight transfer that will not finish. The engine has been restarted."""
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
