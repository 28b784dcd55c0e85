"""Training metrics of a rollout batch that do not depend on the algorithm: rewards, stop reasons, calls, forks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_modules.maths.group_advantages import zero_variance_groups
from lightning_modules.metrics import StepMetrics
from rollout.trajectory import StopReason, Trajectory
from rollout.trajectory_metrics import rollout_metrics


def log_rollout(metrics: StepMetrics, trajectories: Sequence[Trajectory]) -> None:
    """Log one iteration's rollout batch (this rank's groups), over all ranks.

    Rewards and endings: ``train/reward``, ``train/<part>`` (over the trajectories whose reward has that part),
    ``train/stop/<reason>`` (shares). Where prompts have several trajectories: ``train/zero_variance_groups`` (share
    of the groups with identical rewards or a single usable trajectory, which give zero advantage).

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
    usable = [t for t in trajectories if not t.failed_by_infrastructure]
    rewards = [t.reward for t in usable if t.reward is not None]
    metrics.mean("train/reward", sum(reward.total for reward in rewards), len(rewards))
    for part in sorted({part for reward in rewards for part in reward.parts}):
        values = [reward.parts[part] for reward in rewards if part in reward.parts]
        metrics.mean(f"train/{part}", sum(values), len(values))
    if any(t.index for t in trajectories):
        groups = [t.group for t in usable if t.reward is not None]
        constant = zero_variance_groups(torch.tensor([reward.total for reward in rewards]), groups)
        metrics.mean("train/zero_variance_groups", constant, len(set(groups)))
    for reason in StopReason:
        if reason is not StopReason.INFRASTRUCTURE:
            metrics.mean(f"train/stop/{reason}", sum(t.stop_reason is reason for t in usable), len(usable))
    found = rollout_metrics(trajectories)
    for name, value in found.sums().items():
        metrics.total(f"train/{name}", value)
    for name, (total, count) in found.ratios().items():
        metrics.mean(f"train/{name}", total, count)
