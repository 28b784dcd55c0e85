"""SDAR, gated self-distillation from skills (arXiv 2605.15155; specs/sdar.md 1), and what it is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_modules import ranks
from lightning_modules.advantages import rlsd_advantages
from lightning_modules.batch import TokenBatch
from lightning_modules.gates import GateKind, gate, gate_figures, gate_mean, token_gap
from lightning_modules.grpo import GRPONotes
from lightning_modules.schedules import linear_decay
from lightning_modules.scoring import Outputs, Scores
from lightning_modules.self_distillation import (
    FORWARD_KL_CAP,
    SampledDivergence,
    divergence_weights,
    sdar_loss,
    signal_loss,
    skill_sd_loss,
)
from lightning_modules.skill_teacher import SkillNotes, SkillTaught

Signal = Literal["gate", "reverse_kl", "forward_kl", "jsd"]
Gate = Literal["gap", "entropy", "soft_or", "none"]


class SDAR(SkillTaught):
    """EpisodeGRPO plus, on every sampled token, a loss from the self-teacher T that has read skills::

        Delta = sg(T - S)                          S: the student of this very forward pass
        g     = sigmoid(beta Delta)                gate: gap; see ``gates.gate`` for entropy and soft_or
        l     = + g (sg(T) - S), minimised         mean over the tokens, like the policy's loss; times skills_coef

    Every sampled token is pushed up, those that the teacher likes more than others; in expectation the push that all
    have in common vanishes. With ``beta: 0`` nothing of the teacher is left: the baseline released as GRPO+OPSD.

    ``signal`` replaces the gate alone as a token's reward by the weight whose expected gradient is that of a divergence
    between student and teacher, times the gate: ``signal: reverse_kl, gate: none`` is true on-policy self-distillation,
    ``-sg(Delta) S`` (see self_distillation.py for what a gate does to a divergence).

    SDAR as published: skills_coef 0.01, beta 5, gate gap, the other defaults; in the settings of GRPO clip 0.2, kl_coef
    0.01 (search: 0.001), entropy_coef 0.001. Off, and not published: ``centred``, ``clip_signal``, ``gap_clamp``.

    The correction for what sampled (``importance_cap``, ``mask_ratio``) weighs GRPO's loss alone, not this one.

    Logged: ``train/gap``, ``train/gate``, ``train/gate_active`` (share of tokens with g > 0.5: the endorsed ones),
    each also by third of a turn (``/part1`` to ``/part3``) and by number of the turn (``/turn1`` ...).

    Args:
        policy: Hugging Face folder to start from.
        gate: gap, entropy, soft_or, or none (1).
        beta: sharpness of the gate.
        signal: gate, reverse_kl, forward_kl or jsd, see above.
        jsd_beta: the teacher's share of the JSD's mixture, between 0 and 1.
        centred: subtract the gate's mean over the iteration's batch, by which nothing is pushed for being sampled.
        gap_clamp: bound on |Delta| in nats; null for none.
        clip_signal: importance ratio and clip (``clip_low``, ``clip_high``) on this loss too, for later mini-batches.
        use_grpo: whether rewards enter; false for distillation alone.
    """

    def __init__(
        self,
        policy: str,
        gate: Gate = "gap",
        beta: float = 5.0,
        signal: Signal = "gate",
        jsd_beta: float = 0.5,
        centred: bool = False,
        gap_clamp: float | None = None,
        clip_signal: bool = False,
        use_grpo: bool = True,
        **kwargs,
    ) -> None:
        super().__init__(policy=policy, **kwargs)
        for name, value, known in (("gate", gate, get_args(Gate)), ("signal", signal, get_args(Signal))):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        if beta < 0:
            raise ValueError(f"beta is {beta}; expected 0 or more (SDAR takes 5)")
        if signal == "gate" and gate == "none":
            raise ValueError("signal is gate and gate is none: the teacher says nothing; take a gate or another signal")
        if centred and signal != "gate":
            raise ValueError(f"centred concerns the signal gate, but signal is {signal}; leave one of them out")
        if not use_grpo and self.correction.active:
            raise ValueError(
                "importance_cap and mask_ratio weigh the loss of GRPO, which use_grpo: false leaves out; the loss from "
                "the self-teacher is not weighted: leave them out as well"
            )
        if gap_clamp is not None and gap_clamp <= 0:
            raise ValueError(f"gap_clamp is {gap_clamp}; expected a number above 0 (nats) or null")
        if gap_clamp is not None and signal == "gate" and gate == "entropy":
            raise ValueError(f"gap_clamp is {gap_clamp}, but gate entropy with signal gate reads no gap; leave it out")
        if signal == "jsd" and not 0 < jsd_beta < 1:
            raise ValueError(f"jsd_beta is {jsd_beta}; expected above 0 (signal: forward_kl) and below 1 (reverse_kl)")
        self.gate, self.beta, self.signal, self.jsd_beta = gate, beta, signal, jsd_beta
        self.centred, self.gap_clamp, self.clip_signal, self.use_grpo = centred, gap_clamp, clip_signal, use_grpo

    @property
    def compares(self) -> bool:
        return self.use_grpo and super().compares

    def token_advantages(self, trajectories, batch: TokenBatch, scores: Scores) -> Tensor:
        advantages = super().token_advantages(trajectories, batch, scores)
        return advantages if self.use_grpo else torch.zeros_like(advantages)

    def taught(self, notes: SkillNotes, batch: TokenBatch, scores: Scores) -> SkillNotes:
        if not self.centred:
            return notes
        gates = self._gate(scores.old_logprobs, notes.skilled_logprobs, scores.entropy)
        centre = gate_mean(gates, batch.mask, ranks.sum_over_ranks)
        return dataclasses.replace(notes, centre=centre.expand(len(batch.lengths)))

    def loss(self, outputs: Outputs, batch: TokenBatch, notes: GRPONotes) -> Mapping[str, Tensor]:
        sums = dict(super().loss(outputs, batch, notes))
        if not isinstance(notes, SkillNotes):
            return sums
        weights = self.streams(batch, notes)["policy"]
        gates = self._gate(outputs.logprobs, notes.skilled_logprobs, outputs.entropy)
        gap = token_gap(outputs.logprobs, notes.skilled_logprobs)  # logged as it is, clamped or not
        aux = self._auxiliary(outputs.logprobs, notes, gates, weights)
        for name, (total, count) in gate_figures(gap, gates, notes.turns).items():
            self.metrics.mean(f"train/{name}", total, count)
        self.metrics.mean("train/loss_skills", aux.detach(), weights.sum())
        sums["policy"] = sums["policy"] + self.skills_coef * aux
        return sums

    def _auxiliary(self, logprobs: Tensor, notes: SkillNotes, gates: Tensor, weights: Tensor) -> Tensor:
        if self.signal == "gate":
            reward = gates if notes.centre is None else gates - notes.centre[:, None]
            if not self.clip_signal:
                return sdar_loss(logprobs, notes.skilled_logprobs, reward, weights)[0]
        else:
            kind: SampledDivergence = self.signal
            gap = token_gap(logprobs, notes.skilled_logprobs, self.gap_clamp)
            reward = gates * divergence_weights(kind, gap, self.jsd_beta, FORWARD_KL_CAP)
        old = notes.old_logprobs if self.clip_signal else None
        return signal_loss(logprobs, reward, weights, old, self.clip_low, self.clip_high, self.dual_clip)[0]

    def _gate(self, logprobs: Tensor, teacher: Tensor, entropy: Tensor | None) -> Tensor:
        if self.gate == "none":
            return torch.ones_like(logprobs)
        kind: GateKind = self.gate
        return gate(kind, token_gap(logprobs, teacher, self.gap_clamp), entropy, self.beta)


class SkillSD(SkillTaught):
    """Skill-SD (arXiv 2604.10674) as SDAR runs it: EpisodeGRPO plus ``skills_coef`` times the importance-weighted k3 to
    the self-teacher, whose ratio keeps its gradient (``self_distillation.skill_sd_loss``). Published there: 0.001. Its
    warm-down is only logged by the released code, and is not here. That ratio is to the trainer's old log-probs; the
    correction for what sampled (``importance_cap``, ``mask_ratio``) weighs GRPO's loss alone.

    Args:
        policy: Hugging Face folder to start from.
    """

    def __init__(self, policy: str, skills_coef: float = 0.001, **kwargs) -> None:
        super().__init__(policy=policy, skills_coef=skills_coef, **kwargs)

    def loss(self, outputs: Outputs, batch: TokenBatch, notes: GRPONotes) -> Mapping[str, Tensor]:
        sums = dict(super().loss(outputs, batch, notes))
        if isinstance(notes, SkillNotes):
            weights = self.streams(batch, notes)["policy"]
            aux = skill_sd_loss(outputs.logprobs, notes.old_logprobs, notes.skilled_logprobs, weights)[0]
            self.metrics.mean("train/loss_skills", aux.detach(), weights.sum())
            sums["policy"] = sums["policy"] + self.skills_coef * aux
        return sums


class RLSD(SkillTaught):
    """RLSD (arXiv 2604.03128) as SDAR runs it: the teacher's opinion shares out the advantage among the tokens of a
    turn, never against its sign (``advantages.rlsd_advantages``). No loss of its own.

    Args:
        policy: Hugging Face folder to start from.
        skills_coef: how much of an advantage the teacher shares out (lambda) at the start; published 0.5.
        decay_steps: iterations over which that falls to 0.
        rlsd_clip: how far from 1 a token's factor may be (published script: 0.2).
    """

    def __init__(
        self, policy: str, skills_coef: float = 0.5, decay_steps: int = 100, rlsd_clip: float = 0.2, **kwargs
    ) -> None:
        super().__init__(policy=policy, skills_coef=skills_coef, **kwargs)
        if skills_coef > 1:
            raise ValueError(f"skills_coef is {skills_coef}; expected at most 1: it is a share of the advantage")
        if decay_steps < 1 or not 0 <= rlsd_clip <= 1:
            raise ValueError(f"decay_steps is {decay_steps}, rlsd_clip {rlsd_clip}; expected 1 or more, and 0 to 1")
        self.decay_steps, self.rlsd_clip = decay_steps, rlsd_clip

    def taught(self, notes: SkillNotes, batch: TokenBatch, scores: Scores) -> SkillNotes:
        share = linear_decay(self.skills_coef, self.decay_steps, self.trainer.global_step)
        gap = token_gap(scores.old_logprobs, notes.skilled_logprobs)
        self.metrics.maximum("train/rlsd_share", share)
        advantages = rlsd_advantages(notes.advantages, gap, share, self.rlsd_clip)
        return dataclasses.replace(notes, advantages=advantages)
