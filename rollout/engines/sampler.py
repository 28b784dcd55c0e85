"""Sampling from logits, vectorised over requests: one uniform number per token, inverted through the CDF."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout.engines.base import SamplingParams


def uniforms(seed: int | None, count: int) -> np.ndarray:
    """[count] numbers in [0, 1) for one request. Token i uses number i: it depends on the seed alone, not on what
    else is in the batch. ``seed=None`` draws from the operating system's entropy."""
    return np.random.Generator(np.random.Philox(seed)).random(count)


@dataclass(slots=True)
class Sampled:
    token_ids: list[int]  # [n]
    logprobs: list[float]  # [n]
    top: dict[int, dict[int, float]]  # row -> {token id: log-prob}, for rows that asked


class BatchSampler:
    """The sampling settings of the rows of one batch, as tensors. Built anew when the batch's members change."""

    def __init__(self, params: Sequence[SamplingParams], device: str | torch.device) -> None:
        self._device = device
        self._greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        self._all_greedy, self._any_greedy = bool(self._greedy.all()), bool(self._greedy.any())
        temperatures = [p.temperature or 1.0 for p in params]  # greedy rows report raw log-probs
        self._temperatures = None
        if any(t != 1.0 for t in temperatures):
            self._temperatures = torch.tensor(temperatures, device=device).unsqueeze(1)
        filtered = [i for i, p in enumerate(params) if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0)]
        self._filtered = torch.tensor(filtered, dtype=torch.long, device=device)
        self._top_k = torch.tensor([params[i].top_k for i in filtered], device=device).unsqueeze(1)
        self._top_p = torch.tensor([params[i].top_p for i in filtered], device=device).unsqueeze(1)
        self._top_logprobs = {i: p.top_logprobs for i, p in enumerate(params) if p.top_logprobs > 0}

    def sample(self, logits: torch.Tensor, uniform: Sequence[float]) -> Sampled:
        """logits [n, V] and one uniform number per row -> tokens with the log-probs `SamplingParams` promises."""
        scaled = logits.float() if self._temperatures is None else logits.float() / self._temperatures
        logprobs = torch.log_softmax(scaled, dim=-1)
        if self._all_greedy:
            chosen = logprobs.argmax(dim=-1)
        else:
            chosen = self._draw(logprobs, torch.tensor(uniform, dtype=torch.float64, device=self._device))
            if self._any_greedy:
                chosen = torch.where(self._greedy, logprobs.argmax(dim=-1), chosen)
        picked = logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1)
        top = {}
        for row, k in self._top_logprobs.items():
            best = torch.topk(logprobs[row], min(k, logprobs.shape[-1]))
            top[row] = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Sampled(chosen.tolist(), picked.tolist(), top)

    def _draw(self, logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        probabilities = logprobs.exp()
        if len(self._filtered):
            probabilities[self._filtered] = self._truncate(probabilities[self._filtered])
        cdf = probabilities.cumsum(dim=-1, dtype=torch.float64)
        # The first token whose CDF exceeds the target: one of probability 0 never does. The target stays below the
        # total (which is not exactly 1), or the last token would be drawn whatever its probability.
        total = cdf[:, -1]
        target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cdf, target.unsqueeze(1), right=True).squeeze(1).clamp_(max=cdf.shape[-1] - 1)

    def _truncate(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Zero what top-k, then top-p (of what top-k left) exclude; the token that crosses top_p stays."""
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill((self._top_k > 0) & (rank >= self._top_k), 0.0)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill((before >= self._top_p * ordered.sum(-1, keepdim=True)) & (rank > 0), 0.0)
        return torch.zeros_like(probabilities).scatter_(1, order, ordered)
