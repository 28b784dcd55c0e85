"""Returns and advantages: torch only, without gradient.

Shapes as in losses.py: ``_BT`` is [B, T], entry t belongs to token t, mask 0/1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Member = tuple[str, int]  # (group, index in the group)


def last_token(mask_BT: Tensor) -> Tensor:
    """Return a one-hot mask [B, T] of each row's last position whose mask is not 0. A row without one is all zero.

    >>> last_token(torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]])).tolist()
    [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """
    on = mask_BT != 0
    after = on.flip(1).cumsum(1).flip(1)  # how many counted positions there are from t on
    return (on & (after == 1)).to(torch.float32)


def compress(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move the entries of each row whose mask is not 0 to the left, in their order.

    Returns:
        values_BL, valid_BL (bool) and order_BL (the column each entry came from), L = largest count of a row.
    """
    on = mask_BT != 0
    order = torch.argsort((~on).to(torch.int8), dim=1, stable=True)
    counts = on.sum(1)
    length = int(counts.max()) if counts.numel() else 0
    order = order[:, :length]
    valid = torch.arange(length, device=mask_BT.device)[None] < counts[:, None]
    return values_BT.gather(1, order) * valid, valid, order


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns by generalised advantage estimation (GAE, arXiv 1506.02438) over the masked-in
    tokens only::

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        R_t = A_t + V_t

    where t+1 is the next *masked-in* token and V after the last one is 0.  With the mask of the model's own tokens
    this is the compressed form: retrieved text is not an action, so it neither discounts nor
    bootstraps (verl#2337, radixark/miles#1827).  With the mask of all response tokens it is the uncompressed form
    that DGPO released.  At gamma = lam = 1 both give A_t = sum_{u>=t} r_u - V_t on the model's tokens.

    Rewards on masked-out tokens have no effect; put them where the mask is 1 (see ``last_token``).

    Returns:
        advantages_BT, returns_BT: 0 where the mask is 0; float32, no gradient.
    """
    rewards_BT, values_BT = rewards_BT.detach().float(), values_BT.detach().float()
    rewards, valid, order = compress(rewards_BT, mask_BT)
    values, _, _ = compress(values_BT, mask_BT)
    advantages = torch.zeros_like(rewards)
    following = next_value = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = (delta + gamma * lam * following) * valid[:, t]
        advantages[:, t], next_value = following, values[:, t]
    scattered = torch.zeros_like(rewards_BT).scatter(1, order, advantages)
    return scattered, torch.zeros_like(rewards_BT).scatter(1, order, (advantages + values) * valid)


def whiten(
    values_BT: Tensor,
    mask_BT: Tensor,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    eps: float = 1e-8,
) -> Tensor:
    """Scale values to mean 0 and standard deviation 1 over the mask. Convention: verl's ``masked_whiten``.

    ``(x - mean) * rsqrt(var + 1e-8)`` with the unbiased variance (n - 1); [1, 0, 0, 1] becomes +-0.866.  Two passes,
    so that a large common offset does not eat the digits.  A single token, or equal values, give 0.

    Args:
        values_BT: values to whiten; entries with mask 0 come back as 0.
        mask_BT: which tokens make the statistics (and are returned).
        reduce: adds a small tensor of sums over ranks; the default is one rank.
        eps: added to the variance.
    """
    weights = (mask_BT != 0).to(values_BT.dtype)
    values = torch.where(weights != 0, values_BT, torch.zeros_like(values_BT))
    total, count = reduce(torch.stack([values.sum(), weights.sum()]).double())
    centred = (values - (total / count.clamp(min=1)).to(values.dtype)) * weights
    squares = reduce(centred.double().square().sum()[None])[0]
    variance = squares / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + eps).to(values.dtype)


def rlsd_advantages(advantages_BT: Tensor, gap_BT: Tensor, lam: float, eps: float = 0.2) -> Tensor:
    """Scale the advantage of each token by how much the teacher prefers it. Returns RLSD's advantages [B, T], without
    gradient, for the clipped policy loss (arXiv 2604.03128; docs/algorithms/sdar.md)::

        A_t = A [(1 - lam) + lam clip(exp(sign(A) Delta_t), 1 - eps, 1 + eps)]

    The sign of an advantage never changes. A token that the teacher prefers gets more credit for a good trajectory and
    less blame for a bad one, within a factor 1 +- lam eps. lam 0 is A.

    Args:
        advantages_BT: A, of the trajectory or turn, 0 where the mask is 0.
        gap_BT: Delta = T - S with both at the weights before the update; may be anything where A is 0.
        lam: from 0 to 1; see ``schedules.Schedule``.
        eps: half width of the clip, from 0 to 1.

    Raises:
        ValueError: lam or eps out of range.
    """
    if not 0.0 <= lam <= 1.0 or not 0.0 <= eps <= 1.0:
        raise ValueError(f"RLSD's lam is {lam} and eps {eps}; expected both from 0 to 1 (0.5 and 0.2 are usual)")
    advantages = advantages_BT.detach()
    weight = (advantages.sign() * gap_BT.detach()).exp().clamp(1.0 - eps, 1.0 + eps)
    return torch.where(advantages != 0, advantages * ((1.0 - lam) + lam * weight), torch.zeros_like(advantages))


def shared_token_advantages(
    advantages_BT: Tensor,
    prompt_lengths: Sequence[int],
    members: Sequence[Member],
    forks: Mapping[Member, tuple[int, int]],
) -> Tensor:
    """Give tokens that d trajectories have in common the mean advantage of those d (ARPO's hard attribution)::

        A_t = 1/d sum_i A_i,t       over the trajectories i that share token t by forking; their own A elsewhere

    A branch shares the response tokens before its fork with its parent and with all trajectories that share them with
    the parent; forks may be nested. Trajectories that only happen to begin with the same tokens share nothing. Each
    copy stays in the loss, so a token of d trajectories weighs d times.

    Args:
        advantages_BT: advantage of each token, aligned with positions (see batch.py).
        prompt_lengths: of each row; equal within a group.
        members: (group, index) of each row.
        forks: by (group, index), the parent's index and the response offset where the branch begins. Failed
            trajectories, which are not among the rows, may be included: branches descend through them. They add
            nothing to the mean.

    Raises:
        ValueError: a trajectory descends from itself.
    """
    length = advantages_BT.shape[1]
    names: dict[Member, int] = {}
    origin_BT = torch.zeros(advantages_BT.shape, dtype=torch.int64)  # which trajectory sampled the token first
    for row, (member, start) in enumerate(zip(members, prompt_lengths, strict=True)):
        ancestor, end, line = member, length, [member]
        origin_BT[row] = names.setdefault(member, len(names))
        while ancestor in forks:
            parent, at = forks[ancestor]
            ancestor, end = (member[0], parent), min(end, start + at)
            if ancestor in line:
                raise ValueError(f"trajectory {member[0]}/{parent} is its own ancestor by its forks")
            line.append(ancestor)
            origin_BT[row, :end] = names.setdefault(ancestor, len(names))
    token_BT = (origin_BT * length + torch.arange(length)).to(advantages_BT.device)  # one number per distinct token
    sums = advantages_BT.new_zeros(len(names) * length)
    counts = sums.clone()
    sums.index_add_(0, token_BT.flatten(), advantages_BT.flatten())
    counts.index_add_(0, token_BT.flatten(), torch.ones_like(advantages_BT).flatten())
    return (sums / counts.clamp(min=1.0))[token_BT]
