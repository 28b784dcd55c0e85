"""Token losses of self-distillation with skills in the teacher's prompt: SDAR and its baselines. Torch only.

As in losses.py every loss returns ``(total, count)``, and shapes are [B, T]. Tokens y are drawn from the student p (at
the weights before the update), the teacher is q; S = log p(y), T = log q(y), u = q(y) / p(y) = exp(T - S). The teacher
never gets gradient. Entries where the mask is 0 may be anything, NaN included.

**From a divergence to the weight of a token.** For one position, with D(p) = sum_y p(y) f(u(y)) and q fixed::

    dD = sum_y dp(y) [f(u) - u f'(u)]        since u = q / p, du = -(u / p) dp
       = E_{y ~ p}[(f(u) - u f'(u)) grad log p(y)]

so that the loss -sg(w) log p(y) has the gradient of D in expectation for w(u) = u f'(u) - f(u). Any constant may be
added, as E[grad log p] = 0; here it makes w(1) = 0, so a token on which both agree has no gradient::

    reverse KL(p || q)     f = -log u                                      w = log u = T - S
    forward KL(q || p)     f = u log u                                     w = u - 1
    JSD(beta)              f = beta u log(u / m) + (1 - beta) log(1 / m)   w = (1 - beta) log m,  m = beta u + 1 - beta

JSD(beta) is that of ``divergences.jsd`` (GKD): beta KL(q || M) + (1 - beta) KL(p || M), M = beta q + (1 - beta) p. Its
w over beta tends to u - 1 as beta falls to 0, and over 1 - beta to log u as beta rises to 1: the constants agree.
These gradients ignore the effect of a token on the contexts of later tokens.

**With a gate.** A gate g multiplies: w becomes g w, and the expected gradient that of g w, not of D. If g depends on
the position only (entropy), positions are weighed. If it depends on u (gap), the derivation read backwards says that a
weight h that rises with u is w of another f-divergence, f'' = h' / u, smallest where student and teacher agree.
SDAR's weight is g = u^beta / (1 + u^beta) alone, not g times that of a KL: it rises, so that a fixed teacher is what
it leads to, but its direction is that of the reverse KL only while both are close (docs/algorithms/sdar.md). By exact
enumeration at beta 5, mean and least cosine over 200 students of 1,000 words: .99 and .94 where the KL is .04 nats,
.89 and .28 at .47, .72 and -.41 at 1.8. g w with w = T - S does not rise everywhere: it falls for beta (T - S) below
-1.28 and tends to 0, so a gated reverse KL ignores the tokens that the teacher rejects most.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_modules.maths.losses import masked_sum, ppo_clip_loss

SampledDivergence = Literal["reverse_kl", "forward_kl", "jsd"]

FORWARD_KL_CAP = 10.0  # on u = q / p
SKILL_SD_K3_LIMIT = 20.0  # on log(q / p) in the exponent of k3; docs/algorithms/sdar.md
SKILL_SD_RATIO_LIMIT = 10.0  # on log(p / p_old) in the exponent of rho


def sdar_loss(
    logprobs_BT: Tensor, teacher_logprobs_BT: Tensor, gate_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return SDAR's auxiliary loss, to be minimised, as (sum over tokens, sum of weights) (arXiv 2605.15155;
    docs/algorithms/sdar.md)::

        l_t = + sg(g_t) (sg(T_t) - S_t)        dl_t / dS_t = -g_t

    The loss pushes up every sampled token, and tokens that the teacher prefers more: REINFORCE with g as the reward of
    a token. Its value is not a divergence; log gate and gap instead (``gates.gate_metrics``). A centred gate removes
    the common push. The released loss has no importance ratio; ``signal_loss`` with the gate as the signal has one.

    Args:
        logprobs_BT: S, the student's, with gradient.
        teacher_logprobs_BT: T, of the same tokens after the teacher's prompt.
        gate_BT: g, of ``gates.gate``.
        mask_BT: 0 where a token does not count; other values weigh it.
    """
    gate, teacher = _where_counted(mask_BT, gate_BT.detach(), teacher_logprobs_BT.detach())
    return masked_sum(gate * (teacher - logprobs_BT), mask_BT)


def signal_loss(
    logprobs_BT: Tensor,
    signal_BT: Tensor,
    mask_BT: Tensor,
    old_logprobs_BT: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a policy loss in which a signal w, without gradient, is the reward of each sampled token. It is to be
    minimised::

        l = -sg(w) S                                                       without old log-probs
        l = max(-w r, -w clip(r, 1 - clip_low, 1 + clip_high))             with them, r = p / p_old

    Both have the gradient -w grad S where p = p_old. In later mini-batches the tokens are still those that p_old drew:
    r makes the expected gradient that under p (exact while nothing is clipped), and the clip stops what has moved
    enough, as in PPO (arXiv 1707.06347, eq. 7). SDAR as released has neither (docs/algorithms/sdar.md).

    Args:
        logprobs_BT: S, with gradient.
        signal_BT: w: of ``divergence_weights``, times a gate or not; or a gate.
        mask_BT: 0 where a token does not count; other values weigh it.
        old_logprobs_BT: of the weights that sampled; None for no ratio.
        clip_low: how far below 1 the ratio may help; only with old log-probs, as the next two.
        clip_high: how far above 1 it may help.
        dual_clip: where w < 0, bound on the loss in units of -w; above 1, or None.

    Raises:
        ValueError: if ``dual_clip`` is not above 1.
    """
    (signal,) = _where_counted(mask_BT, signal_BT.detach())
    if old_logprobs_BT is None:
        return masked_sum(-signal * logprobs_BT, mask_BT)
    old = old_logprobs_BT.detach()
    return ppo_clip_loss(logprobs_BT, old, signal, mask_BT, clip_low, clip_high, dual_clip)


def divergence_weights(
    kind: SampledDivergence, gap_BT: Tensor, beta: float = 0.5, cap: float | None = FORWARD_KL_CAP
) -> Tensor:
    """Return token weights w [B, T], without gradient, with which ``signal_loss(S, w, mask)`` has the expected gradient
    of a divergence between student and teacher.

    The derivation is at the top of this file: reverse_kl T - S, forward_kl min(u, cap) - 1,
    jsd (1 - beta) log(beta u + 1 - beta).

    The forward KL's u has no bound and, where the student hardly ever samples what the teacher wants, a large variance:
    hence the cap, which biases. On the students above, cap 10: |bias| / |gradient| is 0 where the KL is .04 nats, .04
    at .46 (cosine to the exact gradient above .99), .44 at 1.65 (cosine .90), in the mean.

    Args:
        kind: reverse_kl, forward_kl or jsd.
        gap_BT: Delta = T - S in nats (``gates.token_gap``).
        beta: of jsd: the teacher's share of the mixture, strictly between 0 and 1.
        cap: of forward_kl: largest u, above 1; None for none (finite to u = exp(88) in float32).

    Raises:
        ValueError: unknown kind, beta or cap out of range.
    """
    if kind not in get_args(SampledDivergence):
        raise ValueError(f"unknown divergence '{kind}'; expected one of {', '.join(get_args(SampledDivergence))}")
    gap = gap_BT.detach()
    if kind == "reverse_kl":
        return gap
    if kind == "forward_kl":
        if cap is not None and cap <= 1.0:
            raise ValueError(f"cap of the forward KL's ratio is {cap}; expected a number above 1, or null")
        return torch.expm1(gap if cap is None else gap.clamp(max=math.log(cap)))
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta of the JSD is {beta}; expected above 0 (forward_kl) and below 1 (reverse_kl)")
    mixture = torch.logaddexp(gap + math.log(beta), gap.new_tensor(math.log1p(-beta)))
    return (1.0 - beta) * mixture


def skill_sd_loss(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, teacher_logprobs_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Skill-SD's auxiliary loss, to be minimised, as (sum over tokens, sum of weights) (arXiv 2604.10674, as
    SDAR released it; docs/algorithms/sdar.md)::

        l = rho k3      d = S - T      k3 = exp(min(-d, 20)) - 1 + d      rho = exp(min(S - S_old, 10))

    Both factors have gradient. E_{y ~ p_old}[rho k3] = KL(student || teacher), and its gradient is the exact one, off
    policy too. With rho detached it would be that of the *forward* KL: E_p[grad k3] = E_p[(1 - u) grad log p].

    Args:
        logprobs_BT: S, with gradient.
        old_logprobs_BT: S_old, of the weights that sampled.
        teacher_logprobs_BT: T.
        mask_BT: 0 where a token does not count; other values weigh it.
    """
    known = (logprobs_BT, old_logprobs_BT.detach(), teacher_logprobs_BT.detach())
    student, old, teacher = _where_counted(mask_BT, *known)
    d = student - teacher
    k3 = (-d).clamp(max=SKILL_SD_K3_LIMIT).exp() - 1.0 + d
    return masked_sum((student - old).clamp(max=SKILL_SD_RATIO_LIMIT).exp() * k3, mask_BT)


def _where_counted(mask_BT: Tensor, *values_BT: Tensor) -> tuple[Tensor, ...]:
    """Replace values by 0 where the mask is 0: NaN times the zero gradient of a token would be NaN."""
    return tuple(torch.where(mask_BT != 0, values, torch.zeros_like(values)) for values in values_BT)
