"""GRPO: no critic, a trajectory is judged by the others of its prompt. The base of ARPO, AEPO, SOD and SDAR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from lightning_modules import losses, ranks
from lightning_modules.advantages import whiten
from lightning_modules.batch import RowTensors, TokenBatch
from lightning_modules.divergences import Estimator, sampled_kl
from lightning_modules.group_advantages import Lone, constant_groups, group_advantages
from lightning_modules.losses import Aggregation
from lightning_modules.on_policy import OnPolicyModule
from lightning_modules.scoring import Outputs, Scores

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

Advantage = Literal["std", "centred", "leave_one_out", "global"]


@dataclass(frozen=True, slots=True)
class GRPONotes(RowTensors):
    """What GRPO's loss needs besides the tokens; [B, T] float32, 0 where the mask is 0."""

    advantages: Tensor
    old_logprobs: Tensor
    importance: Tensor | None  # what the policy's loss of each token is multiplied by; None for no correction
    reference_logprobs: Tensor | None  # None without a KL


class GRPO(OnPolicyModule):
    """Group relative policy optimisation (arXiv 2402.03300) as verl runs it (specs/arpo.md 2)::

        A_i = (R_i - mean R) / (std R + 1e-6)      over the trajectories of one prompt, unbiased std; on every token
        rho = pi / pi_old                          pi_old: recomputed before the first update, not the sampler's
        l   = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0
        L   = mean (w l + kl_coef k3(pi, pi_ref) - entropy_coef H)      w: 1, or the correction (importance_cap, ...)

    Relatives that are settings of this class (with what the data module has to do, where it has to):

    * DAPO (arXiv 2503.14476): ``clip_high: 0.28``, ``dual_clip`` as you like, ``data.dynamic_sampling``;
    * Dr. GRPO (arXiv 2503.20783): ``advantage: centred``. It divides by a constant, where ``token_mean`` divides by
      the tokens of the mini-batch: the direction of a step is the same, its size is not;
    * RLOO (arXiv 2402.14740): ``advantage: leave_one_out`` with ``mini_batches: 1``, where no ratio leaves 1;
    * REINFORCE++ (arXiv 2501.03262): ``advantage: global``.

    Subclasses change ``token_advantages`` or ``policy_loss``. A trajectory goes to optimiser step i mod
    ``mini_batches``, so each step sees a part of every group; advantages are those of the whole group.

    Args:
        policy: Hugging Face folder to start from.
        reference: folder of the frozen model for the KL; loaded only where ``kl_coef`` is above 0.
        kl_coef: weight of the KL to the reference, a loss term; 0 for none.
        kl_estimator: k2 or k3 (verl's low_var_kl, clamped to +-10); k1 is refused, its gradient is zero in expectation.
        clip_low: how far below 1 the ratio may help.
        clip_high: how far above 1 the ratio may help.
        dual_clip: bound on the loss of tokens with negative advantage; null for none.
        aggregation: token_mean (every token of the mini-batch alike, as the code of ARPO, SOD and SDAR) or
            sequence_mean (1/G sum 1/|y|, as their papers write it).
        advantage: std, centred or leave_one_out (see ``group_advantages``), or global: no groups, the outcome whitened
            over the model's tokens of the whole batch and all ranks (verl's REINFORCE++ at gamma 1).
        lone: advantage of a trajectory that is alone in its group, because the others failed: zero, or its reward as
            in verl.
        entropy_coef: weight of the entropy bonus.
    """

    def __init__(
        self,
        policy: str,
        reference: str | None = None,
        kl_coef: float = 0.0,
        kl_estimator: Estimator = "k3",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = 3.0,
        aggregation: Aggregation = "token_mean",
        advantage: Advantage = "std",
        lone: Lone = "zero",
        entropy_coef: float = 0.0,
        **kwargs,
    ) -> None:
        super().__init__(policy=policy, teacher=reference if kl_coef > 0 else None, critic=None, **kwargs)
        if kl_coef < 0 or (kl_coef > 0 and reference is None):
            raise ValueError(f"kl_coef is {kl_coef} and reference {reference}; expected 0, or more with a reference")
        if kl_coef > 0 and kl_estimator == "k1":
            raise ValueError("kl_estimator: k1 as a loss has a gradient of zero mean; take k2 or k3")
        if not 0 <= clip_low <= 1 or clip_high < 0:
            raise ValueError(f"clip_low is {clip_low}, clip_high {clip_high}; expected 0 to 1, and 0 or more")
        for name, value, known in (
            ("aggregation", aggregation, get_args(Aggregation)),
            ("advantage", advantage, get_args(Advantage)),
            ("lone", lone, get_args(Lone)),
        ):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        if dual_clip is not None and dual_clip <= 1:
            raise ValueError(f"dual_clip is {dual_clip}; expected a number above 1 (3.0 is usual) or null")
        self.kl_coef, self.kl_estimator = kl_coef, kl_estimator
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self.aggregation, self.advantage, self.lone = aggregation, advantage, lone
        self.entropy_coef = entropy_coef

    def check_data(self, data: Any) -> None:
        """Refuse groups that hold nothing to compare."""
        super().check_data(data)
        if getattr(data, "samples_per_prompt", None) == 1 and self.compares:
            raise ValueError(
                "data.samples_per_prompt is 1, so that every group advantage is 0; sample more per prompt, or take "
                "advantage: global"
            )

    @property
    def compares(self) -> bool:
        """Whether a trajectory learns from its reward only by comparison with others of its group."""
        return self.advantage != "global" and self.lone == "zero"

    # ------------------------------------------------------------------ what a trajectory is worth
    def token_advantages(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> Tensor:
        """[B, T], 0 where the mask is 0. Every rank must call."""
        rewards = batch.mask.new_tensor([t.reward.total for t in trajectories if t.reward is not None])
        if self.advantage == "global":
            return whiten(rewards[:, None] * batch.mask, batch.mask, ranks.sum_over_ranks)
        groups = [t.group for t in trajectories]
        return group_advantages(rewards, groups, self.advantage, self.lone)[:, None] * batch.mask

    def annotate(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> GRPONotes:
        advantages = self.token_advantages(trajectories, batch, scores)
        self.metrics.mean("train/advantage_abs", advantages.abs().sum(), batch.mask.sum())
        importance = self.importance(batch, scores)
        reference = scores.teacher_logprobs if self.kl_coef > 0 else None
        if reference is not None:
            kl = sampled_kl(scores.old_logprobs, reference, self.kl_estimator)
            self.metrics.mean("train/kl", (kl * batch.mask).sum(), batch.mask.sum())
        return GRPONotes(advantages, scores.old_logprobs, importance, reference)

    # ------------------------------------------------------------------ the loss
    def streams(self, batch: TokenBatch, notes: GRPONotes) -> Mapping[str, Tensor]:
        return {"policy": losses.aggregation_weights(batch.mask, self.aggregation)}

    def policy_loss(self, outputs: Outputs, notes: GRPONotes, weights: Tensor) -> Tensor:
        """The clipped loss summed over a micro-batch's tokens, each times its weight [B, T]."""
        tokens = (outputs.logprobs, notes.old_logprobs, notes.advantages)
        return losses.ppo_clip_loss(*tokens, weights, self.clip_low, self.clip_high, self.dual_clip)[0]

    def loss(self, outputs: Outputs, batch: TokenBatch, notes: GRPONotes) -> Mapping[str, Tensor]:
        weights = self.streams(batch, notes)["policy"]
        policy = self.policy_loss(outputs, notes, weights if notes.importance is None else weights * notes.importance)
        if notes.reference_logprobs is not None:
            kl = sampled_kl(outputs.logprobs, notes.reference_logprobs, self.kl_estimator)
            policy = policy + self.kl_coef * losses.masked_sum(kl, weights)[0]
        if self.entropy_coef:
            policy = policy - self.entropy_coef * losses.entropy_sum(outputs.entropy, weights)[0]
        with torch.no_grad():
            tokens = (outputs.logprobs, notes.old_logprobs)
            clipped = losses.clip_events(*tokens, notes.advantages, self.clip_low, self.clip_high) * batch.mask
            ratio = losses.importance_ratio(*tokens) * batch.mask
        self.metrics.mean("train/clip_fraction", clipped.sum(), batch.mask.sum())
        self.metrics.maximum("train/ratio_max", ratio.max())
        return {"policy": policy}

    # ------------------------------------------------------------------ figures
    def _describe(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> None:
        super()._describe(trajectories, batch, scores)
        groups = [t.group for t in trajectories]
        rewards = torch.tensor([t.reward.total for t in trajectories if t.reward is not None])
        self.metrics.mean("train/constant_groups", constant_groups(rewards, groups), len(set(groups)))
        discarded = getattr(getattr(self.trainer, "datamodule", None), "discarded_groups", None)
        if discarded is not None:  # (thrown away by dynamic sampling, rolled out)
            self.metrics.mean("train/discarded_groups", *discarded)
