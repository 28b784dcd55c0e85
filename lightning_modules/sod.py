"""SOD, step-wise on-policy distillation (Zhong et al.; arXiv 2605.07725; specs/sod.md), OPD, the paper's ablations."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_modules import ranks
from lightning_modules.batch import TokenBatch, turn_starts
from lightning_modules.grpo import GRPO, GRPONotes
from lightning_modules.remote_teacher import RemoteTeacher
from lightning_modules.scoring import Scores
from lightning_modules.sod_options import Mode, check_options
from lightning_modules.stepwise import (
    Reference,
    StepDivergences,
    last_step,
    spread,
    step_divergences,
    step_index,
    step_means,
    step_weights,
)
from rollout.figures import first_error

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

SHOWN_STEPS = 8  # steps that have figures of their own in the log; the last step has, too


@dataclass(frozen=True, slots=True)
class SODNotes(GRPONotes):
    """GRPO's, the advantages being the sum of both parts; [B, T] float32, 0 where the mask is 0."""

    opd_weights: Tensor  # of the token's step
    opd_advantages: Tensor  # the distillation's part of the advantages


class SOD(GRPO):
    """GRPO plus a teacher's opinion of every sampled token, weighed by step (eq. 9 and 10)::

        A_t = A_i + opd_coef w_k (T_t - S_t)        S, T: log-probs of student (before the update) and teacher
        w_1 = 1,  w_k = min((d_1 + epsilon) / (d_k + epsilon), 1 + delta)      d_k: mean |S - T| over step k

    A step is one turn of the model; what tools said is read by both models and is in no sum. The signal is an advantage
    without gradient: its policy gradient is that of the reverse KL, which the sampled log-ratio, differentiated itself,
    does not have (its mean gradient is 0). It stays as it is during the optimiser steps of an iteration, and a token
    gets its own log-ratio only, none of later tokens.

    ``opd_mode`` says what w is: ``stepwise`` (SOD), ``uniform`` (1: on-policy distillation, OPD), ``gated``
    (w = beta_min + (beta_max - beta_min) sigmoid(-beta_gamma A_i): the released code's other branch, by which failed
    trajectories are pulled harder), ``decay_after_error`` (``decay`` to the power k - k_err from the first erroneous
    step on), ``mask_after_error`` (0 after it), ``none`` (GRPO; no teacher is loaded, and the same with
    ``opd_coef: 0``). A step is erroneous if its turn was no valid action or one of its calls was refused, failed or
    ran out of time (``rollout.figures.first_error``).

    SOD as released: clip_high 0.28, mini_batches 4, the other defaults. Not in the paper, and off: ``adv_clamp``,
    ``weight_floor``, ``reference_step`` (specs/sod.md 1.6).

    Logged: ``train/divergence/step<k>`` and ``train/weight/step<k>`` (means over trajectories, k up to 8; ``last``: of
    trajectories with two steps or more), ``train/opd_log_ratio``, ``_std``, ``_min`` and ``_max`` (T - S over tokens),
    ``train/opd_advantage_abs``, ``train/opd_weight_capped`` (share of the steps after the first), ``train/opd_clamped``
    (share of tokens).

    Args:
        policy: Hugging Face folder to start from.
        teacher: folder of the frozen teacher; it must share the student's tokenizer.
        teacher_server: a teacher behind HTTP, in the place of ``teacher``.
        opd_mode: what the distillation signal of a step weighs, see above.
        opd_coef: weight of the distillation signal beside the group advantage.
        delta: how far above 1 a step's weight may get; null for no bound.
        epsilon: keeps the ratio of divergences finite.
        use_grpo: whether rewards enter; false for distillation alone (A_i = 0).
        adv_clamp: bound on |T - S| of a token in the advantage (5 to 20 are usual); d_k is taken of what was not
            clamped. Null for none.
        weight_floor: least weight of a step, from 0 to 1.
        reference_step: which divergence is the reference: first (d_1 of the trajectory), batch_median (of d_1), or
            batch_quantile (d_1, but at least that quantile of d_1), over all ranks.
        reference_quantile: of batch_quantile, between 0 and 1.
        decay: factor per step from the first erroneous step on.
        beta_min: weight of a trajectory that is far better than its group, in mode gated.
        beta_max: weight of one that is far worse.
        beta_gamma: how steeply the weight falls with the advantage.
        ratio_denominator: the log-probs that the ratio of the clipped loss divides by: the trainer's, computed before
            the update, or the sampler's, as recorded in the trajectories.
    """

    def __init__(
        self,
        policy: str,
        teacher: str | None = None,
        teacher_server: RemoteTeacher | None = None,
        opd_mode: Mode = "stepwise",
        opd_coef: float = 1.0,
        delta: float | None = 0.2,
        epsilon: float = 1e-6,
        use_grpo: bool = True,
        adv_clamp: float | None = None,
        weight_floor: float = 0.0,
        reference_step: Reference = "first",
        reference_quantile: float = 0.5,
        decay: float = 0.9,
        beta_min: float = 0.0,
        beta_max: float = 0.1,
        beta_gamma: float = 1.0,
        ratio_denominator: Literal["trainer", "sampler"] = "trainer",
        **kwargs,
    ) -> None:
        super().__init__(policy=policy, **kwargs)
        self.opd_mode, self.opd_coef, self.use_grpo = opd_mode, opd_coef, use_grpo
        self.delta, self.epsilon, self.adv_clamp = delta, epsilon, adv_clamp
        self.weight_floor = weight_floor
        self.reference_step, self.reference_quantile = reference_step, reference_quantile
        self.decay, self.beta_min, self.beta_max, self.beta_gamma = decay, beta_min, beta_max, beta_gamma
        self.ratio_denominator = ratio_denominator
        self.distils = opd_mode != "none" and opd_coef != 0
        check_options(self, inspect.signature(SOD.__init__), teacher, teacher_server)
        self.teacher_server = teacher_server if self.distils else None
        if self.distils:
            self.teacher_path = teacher
        if teacher_server is not None:  # checkpoints hold plain types only
            self.save_hyperparameters({"teacher_server": repr(teacher_server)})

    @property
    def compares(self) -> bool:
        return self.use_grpo and super().compares

    def check_data(self, data: Any) -> None:
        """Refuse a server of the teacher that is not there, or does not read what the student does."""
        super().check_data(data)
        if self.teacher_server is not None:
            budgets = getattr(getattr(data, "rollouts", None), "budgets", None)
            with ranks.stop_together():
                self.teacher_server.check(self.policy_path, getattr(budgets, "max_length", None))

    def teacher_logprobs(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor | None:
        if self.teacher_server is None:
            return super().teacher_logprobs(trajectories, batch)
        with ranks.stop_together():
            found = self.read_by_teacher(trajectories, batch, self.teacher_server.score)
        return found

    # ------------------------------------------------------------------ what a token is worth
    def token_advantages(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> Tensor:
        if not self.use_grpo:
            return torch.zeros_like(batch.mask)
        return super().token_advantages(trajectories, batch, scores)

    def annotate(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> GRPONotes:
        notes = super().annotate(trajectories, batch, scores)
        if self.ratio_denominator == "sampler":
            notes = dataclasses.replace(notes, old_logprobs=batch.sampler_logprobs)
        if not self.distils:
            return notes
        if self.opd_mode not in ("uniform", "gated") and any(t.row is not None for t in trajectories):
            raise ValueError(
                f"opd_mode {self.opd_mode} compares the steps of a trajectory, but its turns have prompts of their own "
                "and are rows by themselves; take window: null (one conversation), or opd_mode: uniform"
            )
        steps = step_index(batch.mask, turn_starts(trajectories, batch))
        divergences = step_divergences(scores.old_logprobs, scores.teacher_logprobs, steps)
        weights = self.weigh_steps(trajectories, notes.advantages, steps, divergences)
        weights_BT = spread(weights, steps)
        log_ratio = (scores.teacher_logprobs - scores.old_logprobs) * batch.mask
        signal = log_ratio if self.adv_clamp is None else log_ratio.clamp(-self.adv_clamp, self.adv_clamp)
        opd = self.opd_coef * weights_BT * signal
        self._describe_distillation(divergences, weights, log_ratio, opd, batch.mask)
        parts = (notes.old_logprobs, notes.importance, notes.reference_logprobs)
        return SODNotes(notes.advantages + opd, *parts, weights_BT, opd)

    def weigh_steps(
        self, trajectories: Sequence[Trajectory], advantages_BT: Tensor, steps_BT: Tensor, divergences: StepDivergences
    ) -> Tensor:
        """w [B, K], 0 where a row has no such step; ``advantages_BT`` are the outcome's. Every rank must call."""
        exists = (divergences.tokens > 0).float()
        if self.opd_mode == "stepwise":
            reference = (self.reference_step, self.reference_quantile)
            return step_weights(
                divergences, self.delta, self.epsilon, *reference, self.weight_floor, ranks.gather_values
            )
        if self.opd_mode == "gated":
            gate = torch.sigmoid(-self.beta_gamma * step_means(advantages_BT, steps_BT)[0])
            return (self.beta_min + (self.beta_max - self.beta_min) * gate) * exists
        if self.opd_mode == "uniform":
            return exists
        error = exists.new_tensor([_error_step(t) for t in trajectories])[:, None]  # inf where nothing went wrong
        after = torch.arange(1, exists.shape[1] + 1, device=exists.device)[None] - error
        if self.opd_mode == "mask_after_error":
            return (after <= 0) * exists
        return self.decay ** after.clamp(min=0) * exists

    # ------------------------------------------------------------------ figures
    def _describe_distillation(
        self, divergences: StepDivergences, weights: Tensor, log_ratio: Tensor, opd: Tensor, mask: Tensor
    ) -> None:
        mean, tokens = self.metrics.mean, divergences.tokens
        mean("train/opd_log_ratio", log_ratio.sum(), mask.sum())
        mean("train/opd_advantage_abs", opd.abs().sum(), mask.sum())
        sampled = log_ratio[mask > 0]
        self.metrics.deviation("train/opd_log_ratio_std", sampled)
        if sampled.numel():
            self.metrics.minimum("train/opd_log_ratio_min", sampled.min())
            self.metrics.maximum("train/opd_log_ratio_max", sampled.max())
        if self.adv_clamp is not None:
            mean("train/opd_clamped", (log_ratio.abs() > self.adv_clamp).sum(), mask.sum())
        if self.opd_mode == "stepwise" and self.delta is not None:
            later = tokens[:, 1:] > 0  # the first step weighs 1 whatever happens
            mean("train/opd_weight_capped", ((weights[:, 1:] >= 1 + self.delta) & later).sum(), later.sum())
        for name, values in (("divergence", divergences.absolute), ("weight", weights)):
            for k in range(min(values.shape[1], SHOWN_STEPS)):
                mean(f"train/{name}/step{k + 1}", values[:, k].sum(), (tokens[:, k] > 0).sum())
            several = (tokens > 0).sum(1) > 1
            mean(f"train/{name}/last", (last_step(values, tokens)[0] * several).sum(), several.sum())


def _error_step(trajectory: Trajectory) -> float:
    """Number (from 1) of the first erroneous step, inf without one."""
    turn = first_error(trajectory)
    if turn is None:
        return float("inf")
    return 1.0 + sum(t.end > t.start for t in trajectory.turns[:turn])
