"""A stand-in for a model, run in a real child process by the tests of the process wrapper."""

from __future__ import annotations

import os
import tempfile
import time

from rollout.engines.base import Generation


class EchoBackend:
    """Returns the given ids after ``seconds`` of blocking work; ids 12 to 16 make it misbehave."""

    def __init__(self, seconds: float = 0.0, refuse: str = "", fails_to_load: bool = False) -> None:
        if refuse:
            raise ValueError(refuse)
        self.version, self.fails_to_load = 0, fails_to_load
        self.info = {"vocab_size": 100, "threads": int(os.environ["OMP_NUM_THREADS"]), "tmp": tempfile.gettempdir()}
        self._seconds, self._queue = seconds, []

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def add(self, request_id, token_ids, sampling) -> None:
        if token_ids[0] == 16:
            raise TypeError("sixteen")
        if token_ids[0] != 12:  # never answered
            self._queue.append((request_id, token_ids))

    def cancel(self, request_id) -> None:
        self._queue = [item for item in self._queue if item[0] != request_id]

    def step(self):
        time.sleep(self._seconds)
        request_id, ids = self._queue.pop(0)
        if ids[0] == 13:
            raise ZeroDivisionError("thirteen")
        if ids[0] == 14:
            os._exit(3)
        if ids[0] == 15:
            ids = [len(self._queue)]
        return [(request_id, Generation(tuple(ids), (0.0,) * len(ids), "length", self.version))]

    def check(self, files) -> None:
        files.validate({"weight": (2, 2)})

    def load(self, files) -> None:
        if self.fails_to_load:
            raise ValueError("it failed half-way")
