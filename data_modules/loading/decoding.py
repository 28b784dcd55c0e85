"""Decoding: temperature, top_p and top_k of sampling, as configurations give them."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval.ranges import NonNegativeFloat, PositiveShare, TopK
from rollout.engines.base import SamplingParams

NO_LIMIT = 2**20  # tokens per turn; the rollout system's own budgets are the ones that hold


@dataclass(frozen=True)
class Decoding:
    """``temperature`` 0 is greedy. Lengths, stop strings and seeds are the rollout system's business."""

    temperature: NonNegativeFloat = 1.0
    top_p: PositiveShare = 1.0
    top_k: TopK = -1  # -1: all tokens

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected a share above 0 and up to 1")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}; expected -1 (all tokens) or at least 1")

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(NO_LIMIT, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


GREEDY, UNCHANGED = Decoding(temperature=0.0), Decoding()  # UNCHANGED: the model's own distribution
