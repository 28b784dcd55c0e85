"""GRPO: advantages relative to the group of a prompt, no critic. The base of ARPO, AEPO, SOD, SDAR and relatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from common.ranges import AboveOne, NonNegativeFloat, UnitInterval
from lightning_modules import ranks
from lightning_modules.annotations import base
from lightning_modules.annotations.base import Annotation, validate_choice
from lightning_modules.batch import RowTensors, TokenBatch
from lightning_modules.maths import losses
from lightning_modules.maths.advantages import whiten
from lightning_modules.maths.divergences import Estimator, sampled_kl
from lightning_modules.maths.group_advantages import Lone, group_advantages
from lightning_modules.maths.losses import Aggregation
from lightning_modules.models.policy import DType
from lightning_modules.training.on_policy import OnPolicyModule
from lightning_modules.training.scoring import Outputs, Scores
from lightning_modules.training.token_weights import TokenWeights

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

Advantage = Literal["std", "centred", "leave_one_out", "global"]


@dataclass(frozen=True, slots=True)
class GRPONotes(RowTensors):
    """Per-token inputs of GRPO's loss beside the batch; [B, T] float32, 0 where the mask is 0."""

    advantages: Tensor
    old_logprobs: Tensor | None  # None: those of the very forward pass, see ``GRPO.reads_policy_scores``
    reference_logprobs: Tensor | None = None  # None without a KL
    annotations: tuple[RowTensors | None, ...] = ()  # what each of GRPO's annotations keeps for its loss


class GRPO(OnPolicyModule):
    """Group relative policy optimisation (arXiv 2402.03300) as verl runs it (docs/papers/arpo.md 2)::

        A_i = (R_i - mean R) / (std R + 1e-6)      over the trajectories of one prompt, unbiased std; on every token
        rho = pi / pi_old                          pi_old: recomputed before the first update, not the sampler's
        l   = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0
        L   = mean (w l + kl_coef k3(pi, pi_ref) - entropy_coef H)      w: 1, or the correction (importance_cap, ...)

    ``annotations`` put together what several papers add, for example SOD's step weights on the teacher that DGPO asks
    about wrong trajectories only, and ARPO's hard attribution (class paths below ``lightning_modules.annotations``)::

        annotations:
        - class_path: attribution.HardAttribution
        - class_path: distillation.Distillation
          init_args:
            teacher: models/teacher
            weights: [{class_path: signal_weights.StepWeights}, {class_path: signal_weights.WrongOnly}]

    Relatives that are settings of this class (with what the data module has to do, where it has to):

    * DAPO (arXiv 2503.14476): ``clip_high: 0.28``, ``dual_clip`` as you like, ``data.dynamic_sampling``;
    * Dr. GRPO (arXiv 2503.20783): ``advantage: centred``. It divides by a constant, where ``token_mean`` divides by
      the tokens of the mini-batch: the direction of a step is the same, its size is not;
    * RLOO (arXiv 2402.14740): ``advantage: leave_one_out`` with ``num_mini_batches: 1``, where no ratio leaves 1;
    * REINFORCE++ (arXiv 2501.03262): ``advantage: global``.

    Subclasses choose annotations. A trajectory goes to optimiser step i mod
    ``num_mini_batches``, so each step sees a part of every group; advantages are those of the whole group.

    Args:
        policy: Hugging Face folder to start from.
        reference: folder of the frozen model for the KL; loaded only where ``kl_coef`` is above 0.
        kl_coef: weight of the KL to the reference, a loss term; 0 for none.
        kl_estimator: k2 or k3 (verl's low_var_kl, clamped to +-10); k1 is refused, its gradient is zero in expectation.
        clip_low: how far below 1 the ratio may help.
        clip_high: how far above 1 the ratio may help.
        dual_clip: bound on the loss of tokens with negative advantage; null for none.
        clip_balanced: AEPO's clip: above its range a gradient is kept, see ``losses.clip_balanced_loss``.
        aggregation: token_mean (every token of the mini-batch alike, as the code of ARPO, SOD and SDAR) or
            sequence_mean (1/G sum 1/|y|, as their papers write it).
        advantage: std, centred or leave_one_out (see ``group_advantages``), or global: no groups, the outcome whitened
            over the model's tokens of the whole batch and all ranks (verl's REINFORCE++ at gamma 1).
        lone: advantage of a trajectory that is alone in its group, because the others failed: zero, or its reward as
            in verl.
        entropy_coef: weight of the entropy bonus.
        use_grpo: whether rewards enter; false for an annotation's signal alone.
        ratio_denominator: the log-probs that the ratio of the clipped loss divides by: the trainer's, computed before
            the update, or the sampler's, as recorded in the trajectories.
        annotations: what changes advantages or adds a loss, in this order.
        teacher_dtype: type the parameters of a distillation teacher are kept in.
    """

    applies_correction = True

    def __init__(
        self,
        policy: str,
        reference: str | None = None,
        kl_coef: NonNegativeFloat = 0.0,
        kl_estimator: Estimator = "k3",
        clip_low: UnitInterval = 0.2,
        clip_high: NonNegativeFloat = 0.2,
        dual_clip: AboveOne | None = 3.0,
        clip_balanced: bool = False,
        aggregation: Aggregation = "token_mean",
        advantage: Advantage = "std",
        lone: Lone = "zero",
        entropy_coef: NonNegativeFloat = 0.0,
        use_grpo: bool = True,
        ratio_denominator: Literal["trainer", "sampler"] = "trainer",
        annotations: list[Annotation] | None = None,
        teacher_dtype: DType = "float32",
        **kwargs,
    ) -> None:
        super().__init__(policy=policy, reference=reference if kl_coef > 0 else None, critic=None, **kwargs)
        if kl_coef < 0 or (kl_coef > 0 and reference is None):
            raise ValueError(f"kl_coef is {kl_coef} and reference {reference}; expected 0, or more with a reference")
        if kl_coef > 0 and kl_estimator == "k1":
            raise ValueError("kl_estimator: k1 as a loss has a gradient of zero mean; take k2 or k3")
        if not 0 <= clip_low <= 1 or clip_high < 0:
            raise ValueError(f"clip_low is {clip_low}, clip_high {clip_high}; expected 0 to 1, and 0 or more")
        if dual_clip is not None and dual_clip <= 1:
            raise ValueError(f"dual_clip is {dual_clip}; expected a number above 1 (3.0 is usual) or null")
        self.kl_coef, self.clip_low, self.clip_high, self.dual_clip = kl_coef, clip_low, clip_high, dual_clip
        self.kl_estimator: Estimator = kl_estimator
        self.aggregation = validate_choice("aggregation", aggregation, Aggregation)
        self.advantage: Advantage = validate_choice("advantage", advantage, Advantage)
        self.lone: Lone = validate_choice("lone", lone, Lone)
        self.ratio_denominator = validate_choice("ratio_denominator", ratio_denominator, Literal["trainer", "sampler"])
        self.entropy_coef, self.use_grpo = entropy_coef, use_grpo
        self.clip_balanced = clip_balanced
        self.teacher_dtype: DType = teacher_dtype
        self.annotations = annotations or []
        self.save_hyperparameters({"annotations": repr(self.annotations)})  # checkpoints hold plain types only
        if ratio_denominator == "sampler" and self.importance_cap is not None:
            raise ValueError("importance_cap corrects for the sampler, which ratio_denominator: sampler does already")
        base.check_annotations(self)
        if not use_grpo and not any(annotation.learns for annotation in self.annotations):
            raise ValueError("use_grpo is false, and no annotation teaches anything: nothing to learn")

    def check_data(self, data: Any) -> None:
        """Refuse groups that hold nothing to compare."""
        super().check_data(data)
        self.check_samples(getattr(data, "group_size", None))

    def check_samples(self, group_size: int | None) -> None:
        """Refuse groups of one where trajectories are compared; asked by the dry run, too, which has no data."""
        if group_size == 1 and self.compares:
            raise ValueError(
                "data.group_size is 1, so that every group advantage is 0; sample more per prompt, or take "
                "advantage: global"
            )

    @property
    def compares(self) -> bool:
        return self.use_grpo and self.advantage != "global" and self.lone == "zero"

    @property
    def reads_policy_scores(self) -> bool:
        """With one optimiser step an iteration pi_old is what the forward pass of the update says: ratios of 1."""
        return (
            self.num_mini_batches * self.epochs > 1
            or self.correction.active
            or any(annotation.reads_policy_scores for annotation in self.annotations)
        )

    # ------------------------------------------------------------------ advantages
    def token_advantages(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> Tensor:
        """The outcome's [B, T], 0 where the mask is 0. Every rank must call."""
        rewards = batch.mask.new_tensor([t.reward.total for t in trajectories if t.reward is not None])
        if self.advantage == "global":
            advantages = whiten(rewards[:, None] * batch.mask, batch.mask, ranks.sum_over_ranks)
        else:
            groups = [t.group for t in trajectories]
            advantages = group_advantages(rewards, groups, self.advantage, self.lone)[:, None] * batch.mask
        advantages = base.credit(base.RolloutBatch(self, trajectories, batch, scores), advantages)
        return advantages if self.use_grpo else torch.zeros_like(advantages)

    def annotate(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> GRPONotes:
        advantages = self.token_advantages(trajectories, batch, scores)
        self.metrics.mean("train/advantage_abs", advantages.abs().sum(), batch.mask.sum())
        advantages, own = base.annotate(base.RolloutBatch(self, trajectories, batch, scores), advantages)
        old = batch.sampler_logprobs if self.ratio_denominator == "sampler" else scores.old_logprobs
        return GRPONotes(advantages, old, scores.reference_logprobs, own)

    # ------------------------------------------------------------------ the loss
    def loss(
        self, outputs: Outputs, batch: TokenBatch, notes: GRPONotes, weights: TokenWeights
    ) -> Mapping[str, Tensor]:
        old = outputs.logprobs.detach() if notes.old_logprobs is None else notes.old_logprobs
        tokens, clip = (outputs.logprobs, old, notes.advantages), (self.clip_low, self.clip_high)
        clipped_loss = losses.clip_balanced_loss if self.clip_balanced else losses.ppo_clip_loss
        policy, _ = clipped_loss(*tokens, weights.product, *clip, self.dual_clip)
        if notes.reference_logprobs is not None:
            kl = sampled_kl(outputs.logprobs, notes.reference_logprobs, self.kl_estimator)
            policy = policy + self.kl_coef * losses.masked_sum(kl, weights.aggregation)[0]
        if self.entropy_coef:
            policy = policy - self.entropy_coef * losses.entropy_sum(outputs.entropy, weights.aggregation)[0]
        micro = base.MicroBatch(self, outputs, old, weights)
        policy = base.add_losses(policy, micro, notes.annotations)
        clipped = losses.clip_events(*tokens, *clip)
        ratio = losses.importance_ratio(outputs.logprobs.detach(), old) * batch.mask
        self.metrics.mean("train/clip_fraction", (clipped * batch.mask).sum(), batch.mask.sum())
        self.metrics.maximum("train/ratio_max", ratio.max())
        return {"policy": policy}

    def log_batch(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> None:
        super().log_batch(trajectories, batch, scores)
        if scores.reference_logprobs is not None:
            kl = sampled_kl(scores.known("old_logprobs"), scores.reference_logprobs, self.kl_estimator)
            self.metrics.mean("train/kl", (kl * batch.mask).sum(), batch.mask.sum())
        discarded = getattr(self.data, "discarded_groups", None)
        if discarded is not None:  # (thrown away by dynamic sampling, rolled out)
            self.metrics.mean("train/discarded_groups", *discarded)
