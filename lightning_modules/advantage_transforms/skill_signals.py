"""Signals of a self-teacher with skills: SDAR's gated loss, Skill-SD's k3, RLSD's shares (docs/algorithms/sdar.md)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from common import ranks
from common.ranges import NonNegativeFloat, OpenUnitInterval, PositiveFloat, PositiveInt, UnitInterval
from common.schedules import Coefficient, Schedule
from lightning_modules.advantage_transforms.base import MicroBatch, RolloutBatch, current, validate_choice
from lightning_modules.advantage_transforms.skill_teacher import SkillInputs, SkillTeacher, TeacherWeights
from lightning_modules.batch import RowTensors
from lightning_modules.maths.advantages import rlsd_advantages
from lightning_modules.maths.gates import GateKind, gate, gate_mean, gate_metrics, token_gap
from lightning_modules.maths.self_distillation import (
    FORWARD_KL_CAP,
    SampledDivergence,
    divergence_weights,
    sdar_loss,
    signal_loss,
    skill_sd_loss,
)
from rollout.skills.injection import Skills

Signal = Literal["gate", "reverse_kl", "forward_kl", "jsd"]
Gate = Literal["gap", "entropy", "soft_or", "none"]


class SkillLoss(SkillTeacher):
    """Base of auxiliary losses from a self-teacher: the policy with skills (advice texts) in its prompt. The loss is
    averaged over the tokens like the policy's loss, and multiplied by ``skills_coef``.

    The correction for the sampler (``importance_cap``, ``mask_ratio``) applies to GRPO's loss only.
    """

    reads_old_logprobs = False

    def loss(self, micro: MicroBatch, inputs: RowTensors | None) -> Tensor | None:
        if not isinstance(inputs, SkillInputs):
            return None
        aux = self.auxiliary(micro, inputs)
        micro.algorithm.metrics.mean("train/loss_skills", aux.detach(), micro.weights.aggregation.sum())
        return current(micro.algorithm, self.skills_coef) * aux

    def auxiliary(self, micro: MicroBatch, inputs: SkillInputs) -> Tensor:
        """Return the auxiliary loss, with gradient: a sum over the micro-batch's tokens times ``weights.aggregation``
        [B, T]."""
        raise NotImplementedError


class GatedSkills(SkillLoss):
    """SDAR's gated loss on every sampled token, from a self-teacher T with skills (advice texts) in its prompt::

        Delta = sg(T - S)                          S: the student of this forward pass
        g     = sigmoid(beta Delta)                gate: gap; see ``gates.gate`` for entropy and soft_or
        l     = + g (sg(T) - S), minimised         mean over the tokens, like the policy's loss; times skills_coef

    The loss pushes up every sampled token, and tokens that the teacher prefers more; the common push vanishes in
    expectation. With ``beta: 0`` the teacher has no effect: the baseline released as GRPO+OPSD.

    By default the gate is the token's reward. ``signal`` multiplies it by the weight whose expected gradient is that of
    a divergence between student and teacher. ``signal: reverse_kl, gate: none`` is on-policy self-distillation,
    ``-sg(Delta) S``; self_distillation.py derives the effect of a gate on a divergence.

    Logged: ``train/gap``, ``train/gate``, ``train/gate_active`` (share of tokens with g > 0.5), each also by third of a
    turn (``/part1`` to ``/part3``) and by number of the turn (``/turn1`` ...).

    Args:
        skills: see ``SkillTeacher``, as the next three.
        teacher_weights: current, ema or fixed.
        ema_decay: of the moving average, per iteration.
        skills_coef: weight of the loss.
        gate: gap, entropy, soft_or, or none (1).
        beta: sharpness of the gate.
        signal: gate, reverse_kl, forward_kl or jsd, see above.
        jsd_beta: the teacher's share of the JSD's mixture, between 0 and 1.
        centred: subtract the gate's mean over the iteration's batch, which removes the common push.
        gap_clamp: bound on |Delta| in nats; null for none.
        clip_signal: apply the importance ratio and clip (``clip_low``, ``clip_high``) to this loss, too.
    """

    def __init__(
        self,
        skills: Skills | None = None,
        teacher_weights: TeacherWeights = "current",
        ema_decay: OpenUnitInterval = 0.99,
        skills_coef: Coefficient = 0.01,
        gate: Gate = "gap",
        beta: NonNegativeFloat = 5.0,
        signal: Signal = "gate",
        jsd_beta: UnitInterval = 0.5,
        centred: bool = False,
        gap_clamp: PositiveFloat | None = None,
        clip_signal: bool = False,
    ) -> None:
        super().__init__(skills, teacher_weights, ema_decay, skills_coef)
        self.gate: Gate = validate_choice("gate", gate, Gate)
        self.signal: Signal = validate_choice("signal", signal, Signal)
        if signal == "gate" and gate == "none":
            raise ValueError("signal is gate and gate is none: the teacher has no effect; change one of them")
        if gate == "none" and beta != 5.0:
            raise ValueError(f"beta is {beta}: no effect with gate none; leave it out")
        if centred and signal != "gate":
            raise ValueError(f"centred concerns the signal gate, but signal is {signal}; leave one of them out")
        if gap_clamp is not None and signal == "gate" and gate == "entropy":
            raise ValueError(f"gap_clamp is {gap_clamp}, but gate entropy with signal gate reads no gap; leave it out")
        if signal != "jsd" and jsd_beta != 0.5:
            raise ValueError(f"jsd_beta is {jsd_beta}: no effect with signal {signal}; leave it out")
        if signal == "jsd" and not 0 < jsd_beta < 1:
            raise ValueError(f"jsd_beta is {jsd_beta}; expected above 0 (signal: forward_kl) and below 1 (reverse_kl)")
        self.beta, self.jsd_beta, self.centred = beta, jsd_beta, centred
        self.reads_old_logprobs = centred
        self.gap_clamp, self.clip_signal = gap_clamp, clip_signal

    def with_teacher(self, batch: RolloutBatch, advantages: Tensor, inputs: SkillInputs) -> tuple[Tensor, SkillInputs]:
        if not self.centred:
            return advantages, inputs
        scores = batch.scores
        gates = self._gate(scores.require("old_logprobs"), inputs.skill_teacher_logprobs, scores.entropy)
        mean = gate_mean(gates, batch.tokens.mask, ranks.sum_over_ranks)
        return advantages, dataclasses.replace(inputs, gate_mean=mean.expand(len(batch.trajectories)))

    def auxiliary(self, micro: MicroBatch, inputs: SkillInputs) -> Tensor:
        algorithm, student, teacher = micro.algorithm, micro.outputs.logprobs, inputs.skill_teacher_logprobs
        weights = micro.weights.aggregation
        gates = self._gate(student, teacher, micro.outputs.entropy)
        gap = token_gap(student, teacher)  # logged as it is, clamped or not
        for name, (total, count) in gate_metrics(gap, gates, inputs.turns).items():
            algorithm.metrics.mean(f"train/{name}", total, count)
        if self.signal == "gate":
            reward = gates if inputs.gate_mean is None else gates - inputs.gate_mean[:, None]
            if not self.clip_signal:
                return sdar_loss(student, teacher, reward, weights)[0]
        else:
            kind: SampledDivergence = self.signal
            gap = token_gap(student, teacher, self.gap_clamp)
            reward = gates * divergence_weights(kind, gap, self.jsd_beta, FORWARD_KL_CAP)
        old = micro.old_logprobs if self.clip_signal else None
        clip = (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)
        return signal_loss(student, reward, weights, old, *clip)[0]

    def _gate(self, logprobs: Tensor, teacher: Tensor, entropy: Tensor | None) -> Tensor:
        if self.gate == "none":
            return torch.ones_like(logprobs)
        kind: GateKind = self.gate
        return gate(kind, token_gap(logprobs, teacher, self.gap_clamp), entropy, self.beta)


class SkillImportanceKL(SkillLoss):
    """Skill-SD's loss: an importance-weighted k3 estimate of the KL to the self-teacher (arXiv 2604.10674, as SDAR runs
    it).

    The ratio to the trainer's old log-probs keeps its gradient (``self_distillation.skill_sd_loss``). The released code
    only logs its warm-down, which is left out here.
    """

    def auxiliary(self, micro: MicroBatch, inputs: SkillInputs) -> Tensor:
        logprobs = (micro.outputs.logprobs, micro.old_logprobs, inputs.skill_teacher_logprobs)
        return skill_sd_loss(*logprobs, micro.weights.aggregation)[0]


class SkillShares(SkillTeacher):
    """Lets the self-teacher share out the advantage among the tokens of a turn (RLSD, arXiv 2604.03128, as SDAR runs
    it).

    A token never changes the sign of its advantage (``advantages.rlsd_advantages``). It adds no loss.

    Args:
        skills: see ``SkillTeacher``, as the next two.
        teacher_weights: current, ema or fixed.
        ema_decay: of the moving average, per iteration.
        skills_coef: share of an advantage that the teacher distributes (lambda) at the start; published 0.5.
        decay_iterations: lambda falls linearly to 0 in this iteration. The first iteration is 1, as in the released
            code, and has ``skills_coef`` times 1 - 1 / ``decay_iterations``.
        rlsd_clip: how far from 1 a token's factor may be (published script: 0.2).
    """

    needs_outcome = True

    def __init__(
        self,
        skills: Skills | None = None,
        teacher_weights: TeacherWeights = "current",
        ema_decay: OpenUnitInterval = 0.99,
        skills_coef: UnitInterval = 0.5,
        decay_iterations: PositiveInt = 100,
        rlsd_clip: UnitInterval = 0.2,
    ) -> None:
        super().__init__(skills, teacher_weights, ema_decay, skills_coef)
        self.start, self.decay_iterations, self.rlsd_clip = skills_coef, decay_iterations, rlsd_clip
        self.reads_old_logprobs = self.learns

    def with_teacher(self, batch: RolloutBatch, advantages: Tensor, inputs: SkillInputs) -> tuple[Tensor, SkillInputs]:
        iteration = batch.algorithm.trainer.global_step + 1  # the released trainer counts from 1
        share = Schedule(self.start, 0.0, self.decay_iterations)(iteration)
        gap = token_gap(batch.scores.require("old_logprobs"), inputs.skill_teacher_logprobs)
        batch.algorithm.metrics.maximum("train/rlsd_share", share)
        return rlsd_advantages(advantages, gap, share, self.rlsd_clip), inputs
