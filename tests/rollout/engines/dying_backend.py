"""A model of one table, the next token's scores by the last one, in a process that dies, once, where a test wants it.
It starts as fast as torch is imported, and is exact by construction."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from rollout.engines.base import Generation
from rollout.engines.process import EngineProcess
from rollout.engines.weights import ipc
from rollout.trajectory import merged, recorded

WORDS = 40


def table(seed: int) -> dict[str, torch.Tensor]:
    """Weights, in three tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(WORDS, WORDS, generator=generator) for name in ("a", "b", "c")}


class DyingBackend:
    """Each call is written to ``log``. The first ``at`` in it is the end of its process (``stops``: it stops). Refuses
    what vLLM's sleep mode refuses: sleep with requests, steps and updates while weights are away, and others."""

    def __init__(self, log: str, at: str = "", stops: bool = False, sleeps: bool = False, takes_s: float = 0) -> None:
        self._log, self._at, self._stops, self._buffer = Path(log), at, stops, None
        self._called("start")
        time.sleep(takes_s)
        self._weights, self._queue, self._away = table(0), {}, set()
        self.version = 0
        shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
        self.info = {"vocab_size": WORDS, "weights": shapes, "tied": [], "dtype": "float32", "ipc_memory": "cpu"}

    def _called(self, name: str, refused: bool = False) -> None:
        assert not refused, f"{name} with {len(self._queue)} requests in flight and {sorted(self._away)} away"
        before = self._log.read_text().split("\n") if self._log.exists() else []
        with self._log.open("a") as file:
            file.write(f"{name}\n")
        if name == self._at and name not in before:
            os.kill(os.getpid(), signal.SIGSTOP if self._stops else signal.SIGKILL)

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def add(self, request_id, token_ids, sampling) -> None:
        assert not self._away
        generator = torch.Generator().manual_seed(sampling.seed or 0)
        self._queue[request_id] = (token_ids, sampling, generator, [], [], [])

    def cancel(self, request_id) -> None:
        self._queue.pop(request_id, None)

    def step(self):
        """One token of every request."""
        if any(len(ids) == 5 for _, _, _, ids, _, _ in self._queue.values()):
            self._called("step")
        finished = []
        for number, (prompt, sampling, generator, ids, logprobs, runs) in self._queue.items():
            scores = sum(self._weights.values())[[*prompt, *ids][-1]].log_softmax(-1)
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            logprobs.append(float(scores[ids[-1]]))
            runs.append((self.version, 1))
            if len(ids) == sampling.max_new_tokens:
                versions = recorded(merged(runs))
                done = Generation(tuple(ids), tuple(logprobs), "length", self.version, version_runs=versions)
                finished.append((number, done))
        for number, _ in finished:
            del self._queue[number]
        time.sleep(0.001)
        return finished

    def check(self, files) -> None:
        files.validate(self.info["weights"])

    def load(self, files) -> None:
        self._called("load", refused="weights" in self._away)
        self._weights = dict(files.tensors())

    def transfer(self, method, arguments) -> None:
        """As `ipc_receiver` with a buffer in shared memory, straight into the model."""
        if method == "init_weight_transfer_engine":
            handle, size = arguments["init_info"]["handle"], arguments["init_info"]["size"]
            self._buffer = torch.from_file(handle, shared=True, size=size, dtype=torch.uint8)
        if self._buffer is None:
            raise RuntimeError(f"{method} without a buffer")
        self._called(method, refused="weights" in self._away and method != "init_weight_transfer_engine")
        if method == "update_weights":
            info = arguments["update_info"]
            for name, shape, offset in zip(info["names"], info["shapes"], info["offsets"], strict=True):
                self._weights[name] = ipc.view(self._buffer, offset, torch.float32, shape).clone()
                self._called(name)
        elif method == "finish_weight_update":
            self._buffer = None

    def sleep(self) -> None:
        self._called("sleep", refused=bool(self._queue or self._away))
        self._away = {"weights", "kv_cache"}

    def wake_up(self, part) -> None:
        self._called(f"wake {part}", refused=part not in self._away or (part == "kv_cache" and len(self._away) == 2))
        self._away.discard(part)


class DyingEngine(EngineProcess):
    def __init__(
        self, transport: str = "files", heartbeat_timeout_s: float = 600, restarts: int = 3, **options
    ) -> None:
        path = f"{__name__}.{DyingBackend.__name__}"
        super().__init__(path, options, max_length=256, heartbeat_timeout_s=heartbeat_timeout_s, restarts=restarts)
        self.transport = transport
