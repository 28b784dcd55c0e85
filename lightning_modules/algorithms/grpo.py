"""GRPO: advantages relative to the group of a prompt, no critic. The base of ARPO, AEPO, SOD, SDAR and relatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from common import ranks
from common.ranges import AboveOne, NonNegativeFloat, UnitInterval
from common.schedules import Coefficient, is_zero
from lightning_modules.advantage_transforms.base import (
    AdvantageTransform,
    MicroBatch,
    RolloutBatch,
    check_transforms,
    current,
    validate_choice,
)
from lightning_modules.advantage_transforms.distillation import spread_turns, turn_index, turn_means, turn_starts
from lightning_modules.batch import LogprobBatch, PolicyOutputs, TokenBatch
from lightning_modules.maths import losses
from lightning_modules.maths.advantages import whiten
from lightning_modules.maths.losses import Aggregation, Estimator, LossInputs, Singleton, TokenWeights
from lightning_modules.models.policy import DType
from lightning_modules.training.on_policy import OnPolicyModule

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

Advantage = Literal["std", "centred", "leave_one_out", "global"]
RatioLevel = Literal["token", "turn", "sequence"]


class GRPO(OnPolicyModule):
    """Group relative policy optimisation (arXiv 2402.03300) as verl runs it (docs/algorithms/grpo.md)::

        A_i = (R_i - mean R) / (std R + 1e-6)      over the trajectories of one prompt, unbiased std; on every token
        rho = pi / pi_old                          pi_old: recomputed before the first update, not the sampler's
        l   = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0
        L   = mean (w l + kl_coef k3(pi, pi_ref) - entropy_coef H)      w: 1, or the correction (importance_cap, ...)

    ``advantage_transforms`` combine the additions of several papers. For example, SOD's turn weights on a teacher that
    only incorrect trajectories learn from (DGPO), with ARPO's hard attribution (class paths below
    ``lightning_modules.advantage_transforms``)::

        advantage_transforms:
        - class_path: attribution.HardAttribution
        - class_path: distillation.Distillation
          init_args:
            teacher: models/teacher
            weights: [{class_path: distillation.DivergenceRatio}, {class_path: distillation.IncorrectOnly}]

    These algorithms are settings of this class (and of the data module, where named):

    * DAPO (arXiv 2503.14476): ``clip_high: 0.28``, ``dual_clip`` as you like, ``data.dynamic_sampling``;
    * Dr. GRPO (arXiv 2503.20783): ``advantage: centred``. It divides by a constant, where ``token_mean`` divides by
      the tokens of the mini-batch: the direction of a step is the same, its size is not;
    * RLOO (arXiv 2402.14740): ``advantage: leave_one_out`` with ``num_mini_batches: 1``, where no ratio leaves 1;
    * REINFORCE++ (arXiv 2501.03262): ``advantage: global``;
    * GSPO (arXiv 2507.18071): ``ratio_level: sequence``, ``clip_low: 3.0e-4``, ``clip_high: 4.0e-4``, ``dual_clip:
      null``, ``aggregation: sequence_mean``.

    Subclasses choose advantage transforms. Trajectory i goes to optimiser step i mod ``num_mini_batches``, so each step
    learns from a part of every group; advantages are those of the whole group.

    Args:
        policy: Hugging Face folder to start from.
        reference: folder of the frozen model for the KL; loaded only where ``kl_coef`` is above 0.
        kl_coef: weight of the KL to the reference, a loss term; 0 for none. A number, or a ``Schedule``.
        reference_kl_estimator: k2 or k3 (verl's low_var_kl, clamped to +-10; the default). k1 is refused because its
            expected gradient is zero. The option is refused with ``kl_coef`` 0.
        clip_low: how far below 1 the ratio may help.
        clip_high: how far above 1 the ratio may help.
        dual_clip: bound on the loss of tokens with negative advantage; null for none.
        clip_balanced: use AEPO's clip, which keeps a gradient above its range, see ``losses.clip_balanced_loss``.
        aggregation: token_mean (every token of the mini-batch weighs the same, as in the code of ARPO, SOD and SDAR) or
            sequence_mean (1/G sum 1/|y|, as in their papers).
        advantage: std, centred or leave_one_out (see ``group_advantages``), or global: no groups, the outcome whitened
            over the model's tokens of the whole batch and all ranks (verl's REINFORCE++ at gamma 1).
        singleton_advantage: advantage of the only trajectory of a group, because the others failed: zero, or its reward
            as in verl.
        entropy_coef: weight of the entropy bonus: a number, or a ``Schedule``.
        use_grpo: whether rewards enter; false for the transforms' signals only.
        ratio_denominator: pi_old of the clipped loss: trainer (computed before the update) or sampler (recorded in the
            trajectories).
        ratio_level: token, or turn or sequence: every token has the geometric mean of the ratios of its turn (AT2PO) or
            row (GSPO). Its gradient is that mean times the gradient of its own log-prob.
        advantage_transforms: applied in this order.
        teacher_dtype: type of a distillation teacher's parameters.
    """

    applies_correction = True

    def __init__(
        self,
        policy: str,
        reference: str | None = None,
        kl_coef: Coefficient = 0.0,
        reference_kl_estimator: Estimator | None = None,
        clip_low: UnitInterval = 0.2,
        clip_high: NonNegativeFloat = 0.2,
        dual_clip: AboveOne | None = 3.0,
        clip_balanced: bool = False,
        aggregation: Aggregation = "token_mean",
        advantage: Advantage = "std",
        singleton_advantage: Singleton = "zero",
        entropy_coef: Coefficient = 0.0,
        use_grpo: bool = True,
        ratio_denominator: Literal["trainer", "sampler"] = "trainer",
        ratio_level: RatioLevel = "token",
        advantage_transforms: list[AdvantageTransform] | None = None,
        teacher_dtype: DType = "float32",
        **kwargs,
    ) -> None:
        super().__init__(policy=policy, reference=None if is_zero(kl_coef) else reference, critic=None, **kwargs)
        if not is_zero(kl_coef) and reference is None:
            raise ValueError(f"kl_coef is {kl_coef}, but there is no reference; name one, or set kl_coef to 0")
        if is_zero(kl_coef) and reference_kl_estimator is not None:
            raise ValueError(
                f"reference_kl_estimator: {reference_kl_estimator} has no effect with kl_coef 0; leave it out"
            )
        if reference_kl_estimator == "k1":
            raise ValueError("reference_kl_estimator: k1 as a loss has a gradient of zero mean; take k2 or k3")
        self.kl_coef, self.clip_low, self.clip_high, self.dual_clip = kl_coef, clip_low, clip_high, dual_clip
        self.reference_kl_estimator: Estimator = reference_kl_estimator or "k3"
        self.aggregation = validate_choice("aggregation", aggregation, Aggregation)
        self.advantage: Advantage = validate_choice("advantage", advantage, Advantage)
        self.singleton_advantage: Singleton = validate_choice("singleton_advantage", singleton_advantage, Singleton)
        self.ratio_denominator = validate_choice("ratio_denominator", ratio_denominator, Literal["trainer", "sampler"])
        self.ratio_level: RatioLevel = validate_choice("ratio_level", ratio_level, RatioLevel)
        self.entropy_coef, self.use_grpo = entropy_coef, use_grpo
        self.clip_balanced = clip_balanced
        self.teacher_dtype: DType = teacher_dtype
        self.advantage_transforms = advantage_transforms or []
        # Checkpoints hold plain types only.
        self.save_hyperparameters({"advantage_transforms": repr(self.advantage_transforms)})
        if ratio_denominator == "sampler" and self.importance_cap is not None:
            raise ValueError("importance_cap corrects for the sampler, which ratio_denominator: sampler does already")
        check_transforms(self)
        if not use_grpo and not any(transform.learns for transform in self.advantage_transforms):
            raise ValueError("use_grpo is false, and no advantage transform teaches anything: nothing to learn")

    def check_data(self, data: Any) -> None:
        """Refuse a data module whose groups have one trajectory, if the algorithm compares the trajectories of a
        group."""
        super().check_data(data)
        self.check_samples(getattr(data, "group_size", None))

    def check_samples(self, group_size: int | None) -> None:
        """Raise ValueError if groups have one trajectory, but advantages compare the rewards of a group. The dry run
        calls this, too."""
        if group_size == 1 and self.compares:
            raise ValueError(
                "data.group_size is 1, so that every group advantage is 0; sample more per prompt, or take "
                "advantage: global"
            )

    @property
    def compares(self) -> bool:
        return self.use_grpo and self.advantage != "global" and self.singleton_advantage == "zero"

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether the policy's log-probs are computed before the update. With one optimiser step an iteration all
        ratios are 1."""
        return (
            self.num_mini_batches * self.epochs > 1
            or self.corrects
            or any(transform.reads_old_logprobs for transform in self.advantage_transforms)
        )

    def outcome_advantages(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: LogprobBatch) -> Tensor:
        """Return the advantage of each token from the trajectories' rewards [B, T], 0 where the mask is 0. Every rank
        must call."""
        rewards = batch.mask.new_tensor([t.reward.total for t in trajectories if t.reward is not None])
        if self.advantage == "global":
            advantages = whiten(rewards[:, None] * batch.mask, batch.mask, ranks.sum_over_ranks)
        else:
            groups, members = [t.group for t in trajectories], [t.index for t in trajectories]
            by_row = losses.group_advantages(rewards, groups, self.advantage, self.singleton_advantage, members)
            advantages = by_row[:, None] * batch.mask
        advantages = self.assign_credit(RolloutBatch(self, trajectories, batch, scores), advantages)
        return advantages if self.use_grpo else torch.zeros_like(advantages)

    def compute_advantages(
        self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: LogprobBatch
    ) -> LossInputs:
        advantages = self.outcome_advantages(trajectories, batch, scores)
        self.metrics.mean("train/advantage_abs", advantages.abs().sum(), batch.mask.sum())
        advantages, kept = self.apply_transforms(RolloutBatch(self, trajectories, batch, scores), advantages)
        old = batch.sampler_logprobs if self.ratio_denominator == "sampler" else scores.old_logprobs
        return LossInputs(advantages, old, scores.reference_logprobs, kept, self._spans(trajectories, batch))

    def _spans(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor | None:
        if self.ratio_level == "token":
            return None
        if self.ratio_level == "sequence":
            return (batch.mask != 0).long()
        return turn_index(batch.mask, turn_starts(trajectories, batch))

    def rows_without_gradient(self, inputs: LossInputs) -> Sequence[int]:
        """Return the rows with advantage 0, such as those of a group with equal rewards. None where the loss has other
        terms."""
        own = type(self).loss is not GRPO.loss or any(transform.adds_loss for transform in self.advantage_transforms)
        if own or not is_zero(self.kl_coef) or not is_zero(self.entropy_coef):
            return ()
        return (inputs.advantages == 0).all(dim=1).nonzero()[:, 0].tolist()

    def loss(
        self, outputs: PolicyOutputs, batch: TokenBatch, inputs: LossInputs, weights: TokenWeights
    ) -> Mapping[str, Tensor]:
        now = outputs.logprobs.detach()
        own = now if inputs.old_logprobs is None else inputs.old_logprobs
        if inputs.spans is not None and inputs.old_logprobs is not None:
            means, _ = turn_means(now - inputs.old_logprobs, inputs.spans)
            inputs = dataclasses.replace(inputs, old_logprobs=now - spread_turns(means, inputs.spans))
        policy = losses.grpo_loss(
            outputs.logprobs,
            outputs.entropy,
            inputs,
            weights,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            clip_balanced=self.clip_balanced,
            kl_coef=current(self, self.kl_coef),
            kl_estimator=self.reference_kl_estimator,
            entropy_coef=current(self, self.entropy_coef),
        )
        old = now if inputs.old_logprobs is None else inputs.old_logprobs
        policy = self.add_losses(policy, MicroBatch(self, outputs, own, weights), inputs.transforms)
        clipped = losses.clip_events(now, old, inputs.advantages, self.clip_low, self.clip_high)
        self.metrics.mean("train/clip_fraction", (clipped * weights.mask).sum(), weights.mask.sum())
        self.metrics.maximum("train/ratio_max", (losses.importance_ratio(now, old) * weights.mask).max())
        return {"policy": policy}

    def log_batch(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: LogprobBatch) -> None:
        super().log_batch(trajectories, batch, scores)
        if scores.reference_logprobs is not None:
            old = scores.require("old_logprobs")
            kl = losses.sampled_kl(old, scores.reference_logprobs, self.reference_kl_estimator)
            self.metrics.mean("train/kl", (kl * batch.mask).sum(), batch.mask.sum())
        discarded = getattr(self.data, "discarded_groups", None)
        if discarded is not None:  # (discarded by dynamic sampling, rolled out)
            self.metrics.mean("train/discarded_groups", *discarded)
