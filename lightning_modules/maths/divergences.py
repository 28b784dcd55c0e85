"""Divergences between token distributions over the full vocabulary: torch only.

They take logits [N, V] of student and teacher and return [N] values in nats. Call them on a chunk of tokens at a time
(see ``projection.py``); the softmax is in float32. With ``normalised=True`` they take log-probs from
``finite_log_softmax``, so that two divergences share one softmax.

Notation of docs/algorithms/kd.md: p student, q teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd", "skew_forward", "skew_reverse", "tvd"]
Divergence = Callable[..., Tensor]  # (student logits [N, V], teacher logits [N, V], normalised=False) -> [N]

Rest = Literal["tail", "renormalised", "left_out"]
LOGIT_FLOOR = -1e4
LEAST_REST = 1e-7  # of probability, about float32's resolution below 1


def shared_vocabulary(student_NV: Tensor, teacher_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the logits of student and teacher to the smaller of their vocabularies, before any softmax.

    Qwen2.5 has 151,936 output rows up to 3B and 152,064 above; the rows in excess are padding
    (docs/algorithms/kd.md).
    """
    size = min(student_NV.shape[-1], teacher_NV.shape[-1])
    return student_NV[..., :size], teacher_NV[..., :size]


def finite_log_softmax(logits: Tensor) -> Tensor:
    """Compute log_softmax in float32, with logits of -inf replaced by -1e4. The probability stays 0, and products and
    gradients have no NaN from 0 * inf."""
    return logits.float().clamp(min=LOGIT_FLOOR).log_softmax(-1)


def _log_distributions(student_NV: Tensor, teacher_NV: Tensor, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the log-distributions of student (log p) and teacher (log q). Inputs are logits, or log-probs if
    ``normalised``."""
    return (student_NV, teacher_NV) if normalised else (finite_log_softmax(student_NV), finite_log_softmax(teacher_NV))


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return KL(a || b) of two log-distributions [N, V] as [N]."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def _log_mix(log_a: Tensor, log_b: Tensor, weight_a: float) -> Tensor:
    """Return log(weight_a a + (1 - weight_a) b), computed in log space. The weight is strictly between 0 and 1."""
    return torch.logaddexp(log_a + math.log(weight_a), log_b + math.log1p(-weight_a))


def forward_kl(student_NV: Tensor, teacher_NV: Tensor, normalised: bool = False) -> Tensor:
    """Return the forward KL per token [N]: KL(q || p) = sum_v q (log q - log p), teacher q, student p. Mass covering;
    Hinton's KD. Same gradient as the soft cross-entropy."""
    log_p, log_q = _log_distributions(student_NV, teacher_NV, normalised)
    return _kl(log_q, log_p)


def reverse_kl(student_NV: Tensor, teacher_NV: Tensor, normalised: bool = False) -> Tensor:
    """Return the reverse KL per token [N]: KL(p || q) = sum_v p (log p - log q), student p, teacher q. Mode seeking;
    MiniLLM, on-policy distillation."""
    return _kl(*_log_distributions(student_NV, teacher_NV, normalised))


def jsd(student_NV: Tensor, teacher_NV: Tensor, beta: float = 0.5, normalised: bool = False) -> Tensor:
    """Return GKD's generalised Jensen-Shannon divergence per token [N] (arXiv 2306.13649 eq. 1; trl
    gkd_trainer.generalized_jsd_loss)::

        M = beta q + (1 - beta) p        beta KL(q || M) + (1 - beta) KL(p || M)

    By TRL's convention beta 0 *is* KL(q || p) and beta 1 *is* KL(p || q), not their (zero) limits.

    Raises:
        ValueError: beta outside [0, 1].
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; expected a number from 0 (forward KL) to 1 (reverse KL)")
    if beta == 0.0:
        return forward_kl(student_NV, teacher_NV, normalised)
    if beta == 1.0:
        return reverse_kl(student_NV, teacher_NV, normalised)
    log_p, log_q = _log_distributions(student_NV, teacher_NV, normalised)
    mix = _log_mix(log_q, log_p, beta)
    return beta * _kl(log_q, mix) + (1.0 - beta) * _kl(log_p, mix)


def skew_forward(student_NV: Tensor, teacher_NV: Tensor, alpha: float = 0.1, normalised: bool = False) -> Tensor:
    """Return DistiLLM's skewed forward KL per token [N]: KL(q || alpha q + (1 - alpha) p) (arXiv 2402.03898). With
    alpha 0 it is the forward KL."""
    log_p, log_q = _log_distributions(student_NV, teacher_NV, normalised)
    return _kl(log_q, log_p if alpha == 0.0 else _log_mix(log_q, log_p, alpha))


def skew_reverse(student_NV: Tensor, teacher_NV: Tensor, alpha: float = 0.1, normalised: bool = False) -> Tensor:
    """Return DistiLLM's skewed reverse KL per token [N]: KL(p || (1 - alpha) q + alpha p). With alpha 0 it is the
    reverse KL."""
    log_p, log_q = _log_distributions(student_NV, teacher_NV, normalised)
    return _kl(log_p, log_q if alpha == 0.0 else _log_mix(log_p, log_q, alpha))


def tvd(student_NV: Tensor, teacher_NV: Tensor, normalised: bool = False) -> Tensor:
    """Return the total variation distance per token [N]: 0.5 sum_v |q - p|, between 0 and 1."""
    log_p, log_q = _log_distributions(student_NV, teacher_NV, normalised)
    return 0.5 * (log_q.exp() - log_p.exp()).abs().sum(-1)


def taid(student_NV: Tensor, teacher_NV: Tensor, t: float, normalised: bool = False) -> Tensor:
    """Return TAID's loss per token [N]: the cross-entropy of the student to a target between student and teacher. It is
    ``-sum_v p_t log p`` with ``p_t = softmax((1 - t) stopgrad(z_S) + t z_T)`` (arXiv 2501.16937; taid.py).

    The cross-entropy form, unlike the other divergences: ``TAIDSchedule`` is defined by how it falls. It exceeds the
    KL by the entropy of p_t, which has no gradient; t = 1 has the gradient of ``forward_kl``.
    """
    log_p, log_q = _log_distributions(student_NV, teacher_NV, normalised)
    # Log-probs instead of the logits z: what they differ by is the same for all tokens, and no softmax sees it.
    target = ((1.0 - t) * log_p.detach() + t * log_q.detach()).softmax(-1)
    return -(target * log_p).sum(-1)


def with_rest(logprobs_NK: Tensor, rest: Rest) -> Tensor:
    """Return a distribution over K given tokens from their log-probs under the whole one, as log-probs for a divergence
    with ``normalised=True``.

    ==============  =======  ==============================================================================
    rest            returns  the other tokens
    ==============  =======  ==============================================================================
    tail            K + 1    are one further outcome (SDPO), of probability 1 - sum_k p_k, at least 1e-7
    renormalised    K        do not exist: p_k / sum_k p_k (OPSD)
    left_out        K        are left out of the divergence's sum, which may be negative (verl's forward_kl_topk)
    ==============  =======  ==============================================================================

    With ``tail`` the divergence is at most that of the whole distributions (data processing inequality).

    Raises:
        ValueError: unknown name.
    """
    if rest == "left_out":
        return logprobs_NK
    total = logprobs_NK.logsumexp(-1, keepdim=True)
    if rest == "renormalised":
        return logprobs_NK - total
    if rest == "tail":
        return torch.cat([logprobs_NK, torch.log(-torch.expm1(total.clamp(max=-LEAST_REST)))], dim=-1)
    raise ValueError(f"rest is {rest!r}; expected tail, renormalised or left_out")


def log_distributions(
    logits: Tensor, teacher_hidden: Tensor, teacher_head: torch.nn.Linear, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-distributions [n, V] of student and teacher (no gradient), from the student's logits and the
    teacher's last hidden states, over the smaller vocabulary."""
    with torch.no_grad():
        teacher_hidden = teacher_hidden.to(teacher_head.weight.dtype)  # float32 where autocast has another 16-bit type
        teacher_logits = torch.nn.functional.linear(teacher_hidden, teacher_head.weight, teacher_head.bias)
    student, teacher = shared_vocabulary(logits.float() / temperature, teacher_logits.float() / temperature)
    return finite_log_softmax(student), finite_log_softmax(teacher)


def make_divergence(name: DivergenceName, *, beta: float = 0.5, alpha: float = 0.1) -> Divergence:
    """Return the divergence function of a name. ``beta`` goes to jsd, ``alpha`` to the skewed KLs.

    Raises:
        ValueError: unknown name, beta outside [0, 1], or alpha outside [0, 1).
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; expected a number from 0 to 1")
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"alpha is {alpha}; expected a number from 0 to below 1 (DistiLLM uses 0.1)")
    known: dict[str, Divergence] = {
        "forward_kl": forward_kl,
        "reverse_kl": reverse_kl,
        "jsd": partial(jsd, beta=beta),
        "skew_forward": partial(skew_forward, alpha=alpha),
        "skew_reverse": partial(skew_reverse, alpha=alpha),
        "tvd": tvd,
    }
    if name not in known:
        raise ValueError(f"unknown divergence '{name}'; expected one of {', '.join(known)}")
    return known[name]


def refuse_unused(name: str, beta: float, alpha: float) -> None:
    """Raise ValueError if ``jsd_beta`` or ``skew_alpha`` is not the default and the divergence does not read it."""
    if beta != 0.5 and name != "jsd":
        raise ValueError(f"jsd_beta is {beta}: no effect with divergence {name}; leave it out")
    if alpha != 0.1 and not name.startswith("skew"):
        raise ValueError(f"skew_alpha is {alpha}: no effect with divergence {name}; leave it out")


@dataclass
class TAIDSchedule:
    """Schedule of TAID's coefficient t, which moves the target from the student to the teacher. As in taid.py
    (docs/algorithms/kd.md). ``STATE``: fields that change::

    rel = (L_prev - L) / (L_prev + 1e-15)          m = beta m + (1 - beta) rel
    t   = min(t_end, max(t_start + (t_end - t_start) step / total, t + alpha sigmoid(m) (1 - t)))
    """

    STATE: ClassVar = ("t", "momentum", "previous_loss")

    total_steps: float
    t_start: float = 0.4
    t_end: float = 1.0
    alpha: float = 5e-4
    beta: float = 0.99
    t: float = -1.0  # negative: take t_start
    momentum: float = 0.0
    previous_loss: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.t_start <= self.t_end <= 1.0:
            raise ValueError(f"t_start {self.t_start}, t_end {self.t_end}; expected 0 <= t_start <= t_end <= 1")
        self.t = self.t_start if self.t < 0 else self.t

    def update(self, loss: float, step: int) -> float:
        """Update TAID's coefficient t from the ``loss`` of optimiser step number ``step`` (from 0), and return t. The
        first call only stores the loss."""
        if self.previous_loss is None:
            self.previous_loss = loss
            return self.t
        relative = (self.previous_loss - loss) / (self.previous_loss + 1e-15)
        self.momentum = self.beta * self.momentum + (1.0 - self.beta) * relative
        delta = self.alpha / (1.0 + math.exp(-self.momentum)) * (1.0 - self.t)
        linear = self.t_start + (self.t_end - self.t_start) * step / self.total_steps
        self.t = min(self.t_end, max(linear, self.t + delta))
        self.previous_loss = loss
        return self.t
