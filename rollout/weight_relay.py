"""Hands tensors from the thread that owns them to the engine's thread, one at a time."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_END = object()
_ENGINE_FINISHED = object()


class WeightRelay:
    """An iterator for the engine's thread whose items are produced in the caller's thread.

    Gathering sharded weights needs the trainer's thread (CUDA's current device and the gradient mode are per thread),
    and a gathered tensor may be gone once the next one is asked for: so the next item is produced only when the engine
    asks for it, which says that it is done with the one before.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._source = iter(tensors)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._ended:
            raise StopIteration
        self._requests.put(None)
        item = self._items.get()
        if item is _END:
            self._ended = True
            raise StopIteration
        if isinstance(item, BaseException):
            self._ended = True
            raise RuntimeError("the weights could not be produced") from item
        return item

    def serve_until(self, engine_done: Future[None]) -> None:
        """Produce items, in this thread, until the engine has finished; then exhaust the source. Raises what the
        source raises."""
        engine_done.add_done_callback(lambda _: self._requests.put(_ENGINE_FINISHED))
        try:
            while self._requests.get() is not _ENGINE_FINISHED:
                self._items.put(next(self._source, _END))
            self._items.put(RuntimeError("the engine has finished"))  # whoever still asks, in a thread it has left
        except BaseException as error:  # Ctrl-C included: the engine must not wait for ever
            self._items.put(error)
            raise
        for _ in self._source:
            pass
