"""The decoding options of configurations: temperature, top_p, top_k and repetition penalty."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.ranges import Penalty, PositiveShare, Temperature, TopK
from rollout.engines.base import SamplingParams

NO_LIMIT = 2**20  # tokens per turn; the budgets of the rollout system apply


@dataclass(frozen=True)
class Decoding:
    """Sampling options of a turn: temperature (0 is greedy), top_p, top_k and repetition penalty. The rollout system
    sets lengths, stop strings and seeds.

    Raises ValueError for values that no engine takes (`SamplingParams.checked`).
    """

    temperature: Temperature = 1.0
    top_p: PositiveShare = 1.0
    top_k: TopK = -1  # -1: all tokens
    # vLLM's, over prompt and response; 1 is off. Left out of the repr, because checkpoints store its fingerprint.
    repetition_penalty: Penalty = field(default=1.0, repr=False)

    def __post_init__(self) -> None:
        self.params.checked()

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            NO_LIMIT,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
        )


GREEDY, UNCHANGED = Decoding(temperature=0.0), Decoding()  # UNCHANGED: the model's own distribution
