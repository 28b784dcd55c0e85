"""Engines that recompute the whole sequence for every token, for tests of processes, servers and weight updates: they
start in a second, and are exact by construction."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout.engines.base import Generation
from rollout.engines.process import EngineProcess
from rollout.trajectory import merged, recorded


class PlainBackend:
    """One request at a time, token by token; same seed and weights, same tokens."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._tied = set(self._model.all_tied_weights_keys or ())
        self._queue = []  # [request id, prompt, sampling, generator, ids, log-probs, runs of versions]
        self._computed = set()  # sequences since the latest update
        self.version = 0
        self.info = {
            "vocab_size": self._model.config.vocab_size,
            "weights": {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()},
            "tied": sorted(self._tied),
        }

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def add(self, request_id, token_ids, sampling) -> None:
        generator = torch.Generator().manual_seed(sampling.seed or 0)
        self._queue.append((request_id, token_ids, sampling, generator, [], [], []))

    def cancel(self, request_id) -> None:
        self._queue = [request for request in self._queue if request[0] != request_id]

    @torch.inference_mode()
    def step(self):
        """One token of every request."""
        finished = []
        for request in self._queue:
            _, prompt, sampling, generator, ids, logprobs, runs = request
            logits = self._model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
            scores = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            drawn = int(torch.multinomial(scores.exp(), 1, generator=generator))
            ids.append(drawn if sampling.temperature else int(scores.argmax()))
            logprobs.append(float(scores[ids[-1]]))
            runs.append((self.version, 1))
            if len(ids) == sampling.max_new_tokens:
                finished.append(request)
        self._queue = [request for request in self._queue if request not in finished]
        return [(request[0], self._generation(*request[1:])) for request in finished]

    def _generation(self, prompt, sampling, generator, ids, logprobs, runs):
        cached = max((n for n in range(len(prompt)) if tuple(prompt[:n]) in self._computed), default=0)
        self._computed.add((*prompt, *ids[:-1]))
        versions = recorded(merged(runs))
        return Generation(
            tuple(ids), tuple(logprobs), "length", self.version, cached_tokens=cached, version_runs=versions
        )

    def check(self, files) -> None:
        files.validate(self.info["weights"], optional=self._tied)

    @torch.no_grad()
    def load(self, files) -> None:
        targets = self._model.state_dict()
        for name, tensor in files.tensors(skip=self._tied):
            targets[name].copy_(tensor)
        self._computed.clear()


class PlainEngine(EngineProcess):
    backend = PlainBackend.__name__

    def __init__(self, model: str, max_length: int = 256, restarts: int = 3, **options) -> None:
        path = f"{__name__}.{self.backend}"
        super().__init__(path, {"model": model, **options}, max_length=max_length, restarts=restarts)


class SleepingBackend(PlainBackend):
    """Refuses what vLLM's sleep mode refuses, or would answer with aborted requests, an endless wait or a fault of the
    device: sleep with requests in flight, requests and steps while any memory is away, a load before the weights are
    back, the cache back before the weights. Weights that are away are no numbers. Writes its calls to ``log``."""

    def __init__(self, model: str, log: str, sleeps: bool = False) -> None:
        super().__init__(model)
        self._log, self._sleeps, self._away, self._kept = Path(log), sleeps, set(), {}

    def _called(self, name: str, refused: bool = False) -> None:
        if refused:
            raise RuntimeError(f"{name} with {len(self._queue)} requests in flight and {sorted(self._away)} away")
        with self._log.open("a") as file:
            file.write(f"{name}\n")

    def add(self, request_id, token_ids, sampling) -> None:
        self._called("generate", refused=bool(self._away))
        super().add(request_id, token_ids, sampling)

    def load(self, files) -> None:
        self._called("load", refused="weights" in self._away)
        super().load(files)

    @torch.no_grad()
    def sleep(self) -> None:
        self._called("sleep", refused=not self._sleeps or bool(self._queue))
        self._away = {"weights", "kv_cache"}
        self._kept = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        for tensor in self._model.parameters():
            tensor.fill_(float("nan"))
        self._computed.clear()

    @torch.no_grad()
    def wake_up(self, part) -> None:
        self._called(f"wake {part}", refused=part not in self._away or (part == "kv_cache" and len(self._away) == 2))
        self._away.discard(part)
        if part == "weights":
            for name, tensor in self._model.state_dict().items():
                tensor.copy_(self._kept[name])


class SleepingEngine(PlainEngine):
    backend = SleepingBackend.__name__
