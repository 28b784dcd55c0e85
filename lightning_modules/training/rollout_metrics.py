"""Training metrics of every algorithm: rewards, stop reasons, calls and forks, and the sampler's log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common import ranks
from lightning_modules.batch import TokenBatch
from lightning_modules.maths.correction import Correction, ratios
from lightning_modules.maths.losses import zero_variance_groups
from lightning_modules.metrics import StepMetrics
from rollout.trajectory import LEFT_OUT, StopReason, Trajectory
from rollout.trajectory_metrics import rollout_metrics

SCORES = ("em", "f1", "acc", "success")


def log_rollout(metrics: StepMetrics, trajectories: Sequence[Trajectory]) -> None:
    """Log the rewards, stop reasons, tool calls and forks of one iteration's rollout batch (this rank's groups), over
    all ranks.

    Rewards and endings: ``train/reward``, ``train/<part>`` of the parts in ``SCORES``, ``train/reward/<part>`` of the
    others (over the trajectories whose reward has that part), ``train/stop/<reason>`` (shares). Where prompts have
    several trajectories: ``train/zero_variance_groups`` (share of the groups with identical rewards or a single usable
    trajectory, which give zero advantage).

    Sums: ``train/trajectories``, ``train/tool_calls`` (executed; a call that forks have inherited counts once),
    ``train/calls/<tool>``.

    Means and shares: ``train/distinct`` (different responses / trajectories, mean over groups), ``train/forked``
    (share of trajectories), ``train/branch_probability`` (over the decisions whether to fork),
    ``train/inherited_tokens`` (share of response tokens that forks have copied), ``train/tokens_computed`` (per
    trajectory, prefill and decode), ``train/entropy_after_tools`` (nats, over turns that follow a tool's result),
    ``train/call_outcome/<outcome>`` (share of calls). Metrics without an observation (groups of one, no calls,
    entropies that were not recorded) are left out.

    Args:
        trajectories: also those that failed by infrastructure, which enter no metric (see ``rollout_metrics``).
    """
    usable = [t for t in trajectories if not t.left_out]
    rewards = [t.reward for t in usable if t.reward is not None]
    metrics.mean("train/reward", sum(reward.total for reward in rewards), len(rewards))
    for part in sorted({part for reward in rewards for part in reward.parts}):
        values = [reward.parts[part] for reward in rewards if part in reward.parts]
        name = part if part in SCORES else f"reward/{part}"  # else a part "loss" would be added to the loss
        metrics.mean(f"train/{name}", sum(values), len(values))
    if any(t.index for t in trajectories):
        groups = [t.group for t in usable if t.reward is not None]
        constant = zero_variance_groups(torch.tensor([reward.total for reward in rewards]), groups)
        metrics.mean("train/zero_variance_groups", constant, len(set(groups)))
    for reason in StopReason:
        if reason not in LEFT_OUT:
            metrics.mean(f"train/stop/{reason}", sum(t.stop_reason is reason for t in usable), len(usable))
    found = rollout_metrics(trajectories)
    for name, value in found.sums().items():
        metrics.total(f"train/{name}", value)
    for name, (total, count) in found.ratios().items():
        metrics.mean(f"train/{name}", total, count)


def log_mismatch(
    metrics: StepMetrics,
    trajectories: Sequence[Trajectory],
    batch: TokenBatch,
    old_logprobs: Tensor,
    correction: Correction,
    version: int,
) -> None:
    """Log how far the sampler and the trainer disagree, over the sampled tokens of the whole batch and all ranks. Every
    rank must call.

    ``train/logprob_gap`` and ``_max`` (|log r|), ``train/sampler_kl_k1`` and ``_k3`` (estimates of KL(sampler ||
    trainer) in nats: means of -log r and of r - 1 - log r), ``train/importance_ess`` (effective sample size,
    (sum r)^2 / (n sum r^2), as a share of the tokens: 1 where all ratios are alike), ``train/importance_truncated`` and
    ``train/importance_masked`` (shares of the tokens; 0 without the option), ``train/version_lag`` and ``_max``
    (iterations between the weights that sampled a token and those that learn from it).

    Args:
        trajectories: the rows of ``batch``.
        version: of the weights that learn, before the iteration's first update (iterations done).
    """
    count = batch.mask.sum()
    log_ratio = (old_logprobs - batch.sampler_logprobs) * batch.mask
    ratio = ratios(old_logprobs, batch)
    metrics.mean("train/logprob_gap", log_ratio.abs().sum(), count)
    metrics.mean("train/sampler_kl_k1", -log_ratio.sum(), count)
    metrics.mean("train/sampler_kl_k3", ((ratio - 1.0 - log_ratio) * batch.mask).sum(), count)
    metrics.mean("train/importance_truncated", correction.truncated(old_logprobs, batch).sum(), count)
    metrics.mean("train/importance_masked", correction.masked(old_logprobs, batch).sum(), count)
    if log_ratio.numel():
        metrics.maximum("train/logprob_gap_max", log_ratio.abs().max())
    sums = ranks.sum_over_ranks(torch.stack([ratio.double().sum(), ratio.double().square().sum(), count.double()]))
    total, squares, n = sums.tolist()
    if n:
        share = 1.0 / ranks.world_size()  # every rank adds the same number
        metrics.mean("train/importance_ess", total**2 / (n * squares) * share, share)
    lags = [(version - sampled, tokens) for t in trajectories for turn in t.turns for sampled, tokens in turn.versions]
    metrics.mean("train/version_lag", sum(lag * n for lag, n in lags), sum(n for _, n in lags))
    if lags:
        metrics.maximum("train/version_lag_max", max(lag for lag, _ in lags))
