"""An engine that says it has taken the weights, and has not: what the log-prob probe is there to catch."""

from __future__ import annotations

from rollout.engines.process import EngineProcess
from rollout.engines.transformers_backend import TransformersBackend


class StaleBackend(TransformersBackend):
    def load(self, files) -> None:
        files.validate(self.info["weights"], optional=self._tied)


class StaleEngine(EngineProcess):
    def __init__(self, model: str, slots: int, max_length: int) -> None:
        options = {"model": model, "slots": slots, "max_length": max_length, "dtype": "float32", "device": "cpu"}
        super().__init__("tests.rollout.engines.stale_engine.StaleBackend", options, max_length=max_length)
