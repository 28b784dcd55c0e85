"""The weights of an engine server: how they come in, and which ones it holds. All or nothing, one push at a time."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engines.weights import PREFIX, WeightFiles, new_file

if TYPE_CHECKING:
    from rollout.engines.process import EngineProcess

START = "start"  # tag of the weights that the engine has loaded from its folder


class WeightsMoved(Exception):
    """Other weights have come since the sender looked."""


class ServerWeights:
    """What the engine holds: ``tag`` names the push, ``version`` its policy version; ``refusal`` says why nothing may
    be sampled from it (a transfer straight into the engine has failed half-way), until a whole push has come.

    Buckets of a push are files in ``folder`` until all are there, so a push that does not end changes nothing. The
    files of the last push stay, for a server that has lost its weights, if its sender wants it so.
    """

    def __init__(self, engine: EngineProcess, folder: Path) -> None:
        self._engine, self.folder = engine, folder
        self._lock = asyncio.Lock()
        self._arriving: tuple[str, dict[int, Path]] = ("", {})
        self._kept: list[Path] = []
        self.instance = uuid.uuid4().hex
        self.tag, self.version = START, 0
        self.refusal: str | None = None

    def state(self) -> dict[str, Any]:
        return {
            "weights": self.tag,
            "version": self.version,
            "instance": self.instance,
            "refusal": self.refusal,
            "kept": len(self._kept),
        }

    # ------------------------------------------------------------------ files that both hosts see
    def sees(self, path: str) -> str | None:
        """SHA-256 of a file that a trainer on this host has written to be found; None: it is not there."""
        file = Path(path)
        if not file.name.startswith(PREFIX) or not file.is_file():
            return None
        return hashlib.sha256(file.read_bytes()).hexdigest()

    async def load(
        self, paths: list[str], tag: str, version: int, replaces: str | None = None, between_steps: bool = False
    ) -> None:
        """Load files of the sender's. ``replaces``: only if these weights are still the ones held. What is being
        sampled ends first, or, ``between_steps``, goes on with the new weights.

        Raises:
            ValueError: they do not fit, or are not what was sent; nothing has changed.
            WeightsMoved: see ``replaces``.
        """
        for path in paths:
            if not Path(path).name.startswith(PREFIX) or not Path(path).is_file():
                raise ValueError(f"{path} is no file of weights on this host; push by HTTP (transport: http)")
        async with self._lock:
            self._require(tag, replaces)
            if self.tag != tag:
                await self._take(paths, tag, version, between_steps)
                self._keep([])

    # ------------------------------------------------------------------ buckets
    def begin(self, tag: str) -> None:
        """What has arrived of a push that did not end is thrown away."""
        _remove(self._arriving[1].values())
        self._arriving = (tag, {})

    async def receive(self, tag: str, index: int, pieces: AsyncIterator[bytes]) -> None:
        """Write one bucket. Raises ValueError if the push is not the one that began last, or the bucket is no file of
        weights that this model has."""
        if self._arriving[0] != tag:
            raise ValueError("this push was not begun here, or another one has begun since; push again")
        path = await write_pieces(self.folder, pieces)
        try:
            self._check_bucket(path)
        except ValueError:
            path.unlink(missing_ok=True)
            raise
        self._arriving[1][index] = path

    async def commit(self, tag: str, version: int, count: int, keep: bool, between_steps: bool = False) -> None:
        """Load the buckets 0 to ``count - 1``. Raises ValueError if one is missing, or as `load`."""
        async with self._lock:
            begun, files = self._arriving
            if begun != tag or sorted(files) != list(range(count)):
                raise ValueError(f"{count} buckets were sent, {len(files)} of this push have arrived; push again")
            self._arriving = ("", {})
            paths = [files[index] for index in range(count)]
            try:
                await self._take([str(path) for path in paths], tag, version, between_steps)
            except BaseException:
                _remove(paths)
                raise
            self._keep(paths if keep else [])
            if not keep:
                _remove(paths)

    def kept(self, tag: str, index: int) -> Path | None:
        """A file of the push that is held, for another server."""
        return self._kept[index] if tag == self.tag and index < len(self._kept) else None

    async def adopt(
        self, paths: list[Path], tag: str, version: int, replaces: str | None, between_steps: bool = False
    ) -> None:
        """Load files that were fetched from another server, and keep them. They are removed if they are refused."""
        async with self._lock:
            try:
                self._require(tag, replaces)
                await self._take([str(path) for path in paths], tag, version, between_steps)
            except BaseException:
                _remove(paths)
                raise
            self._keep(paths)

    # ------------------------------------------------------------------ straight into the engine
    def unfit(self, why: str) -> None:
        """From now on nothing may be sampled, until whole weights have come."""
        self.tag, self.refusal = "", why

    def fit(self, tag: str, version: int) -> None:
        self.tag, self.version, self.refusal = tag, version, None
        self._keep([])

    # ------------------------------------------------------------------
    async def _take(self, paths: list[str], tag: str, version: int, between_steps: bool) -> None:
        await self._engine.load_files(WeightFiles(paths), version, between_steps)
        self.tag, self.version, self.refusal = tag, version, None

    def _require(self, tag: str, replaces: str | None) -> None:
        if replaces is not None and self.tag not in (tag, replaces):
            raise WeightsMoved(f"the server holds {self.tag or 'nothing'} by now, not {replaces}")

    def _keep(self, paths: list[Path]) -> None:
        _remove(self._kept)
        self._kept = paths

    def _check_bucket(self, path: Path) -> None:
        from safetensors import SafetensorError

        expected = self._engine.info.get("weights", {})
        try:
            found = WeightFiles([str(path)]).shapes()
        except SafetensorError as error:
            raise ValueError(f"a bucket of weights cannot be read ({error}); push again") from None
        for name, shape in found.items():
            if tuple(expected.get(name, ())) != shape:
                here = f"shape {tuple(expected[name])} here" if name in expected else "unknown here"
                raise ValueError(f"the weights do not fit the server's model: {name} has shape {shape}, {here}")

    def close(self) -> None:
        self.begin("")
        self._keep([])


async def write_pieces(folder: Path, pieces: AsyncIterator[bytes]) -> Path:
    """A new file of these bytes; never more than a piece is in memory. None is left if they end with an error."""
    path = new_file(folder)
    try:
        with path.open("wb") as file:
            async for piece in pieces:
                await asyncio.to_thread(file.write, piece)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def _remove(paths: Any) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
