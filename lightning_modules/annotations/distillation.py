"""On-policy distillation as an annotation: a teacher's weighted log-ratio of each sampled token, as an advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from common.ranges import PositiveFloat
from lightning_modules import ranks
from lightning_modules.annotations.base import Algorithm, Annotation, ConfigRepr, RolloutBatch, per_turn_prompts
from lightning_modules.annotations.signal_weights import SignalWeight, StepWeights, WeightedSignal, check_rows, weigh
from lightning_modules.batch import RowTensors, TokenBatch, aligned, with_prompts
from lightning_modules.maths.stepwise import last_step
from lightning_modules.metrics import StepMetrics
from lightning_modules.models.policy import DType
from lightning_modules.models.remote_teacher import RemoteTeacher

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

SHOWN_STEPS = 8  # steps that have metrics of their own in the log; the last step has, too


class TeacherPrompts(ConfigRepr):
    """Prompts that the teacher reads instead of the student's; the responses stay as they were sampled."""

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        """Refuse a data module whose prompts cannot be rendered."""

    def __call__(self, algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> Sequence[Sequence[int]]:
        """Ids of the prompt before each response."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class DistillationNotes(RowTensors):
    """For people to read; [B, T] float32, 0 where the mask is 0."""

    opd_weights: Tensor  # of the token's step
    opd_advantages: Tensor  # what the distillation added to the advantages


class Distillation(Annotation):
    """``A_t += coef w (T_t - S_t)``: S, T the log-probs of student (before the update) and teacher.

    The signal is an advantage without gradient: its policy gradient is that of the reverse KL, which the sampled
    log-ratio, differentiated itself, does not have (its mean gradient is 0). It stays as it is during the optimiser
    steps of an iteration, and a token gets its own log-ratio only, none of later tokens.

    Logged: ``train/divergence/step<k>`` and ``train/weight/step<k>`` (means over trajectories, k up to 8; ``last``: of
    trajectories with two steps or more), ``train/opd_log_ratio``, ``_std``, ``_min`` and ``_max`` (T - S over tokens),
    ``train/opd_advantage_abs``, ``train/opd_weight_capped`` (share of the steps after the first), ``train/opd_clamped``
    (share of tokens).

    Args:
        teacher: folder of the frozen teacher; it must share the student's tokenizer.
        server: a teacher behind HTTP, instead of ``teacher``.
        prompts: what the teacher reads before each response; null for the student's prompt.
        weights: factors of w by step; none for 1 (on-policy distillation, OPD).
        coef: weight of the signal beside the outcome's advantage.
        adv_clamp: bound on |T - S| of a token in the advantage (5 to 20 are usual); the divergences of steps use
            the log-ratios without bound. Null for none.
    """

    learns = True

    def __init__(
        self,
        teacher: str | None = None,
        server: RemoteTeacher | None = None,
        prompts: TeacherPrompts | None = None,
        weights: list[SignalWeight] | None = None,
        coef: PositiveFloat = 1.0,
        adv_clamp: PositiveFloat | None = None,
    ) -> None:
        if teacher is not None and server is not None:
            raise ValueError(f"there are two teachers, '{teacher}' and {server}; name one of them")
        if teacher is None and server is None:
            raise ValueError("there is no teacher to distil from; name one")
        if coef <= 0:
            raise ValueError(f"coef is {coef}; expected a positive number")
        if adv_clamp is not None and adv_clamp <= 0:
            raise ValueError(f"adv_clamp is {adv_clamp}; expected a positive number or null")
        self.teacher, self.server, self.prompts = teacher, server, prompts
        self.weights, self.coef, self.adv_clamp = weights or [], coef, adv_clamp

    # ------------------------------------------------------------------ the teacher
    def check(self, algorithm: Algorithm) -> None:
        if self.server is not None and algorithm.temperature != 1.0:
            raise ValueError(f"temperature is {algorithm.temperature}, but a server's log-probs are those of 1.0")
        if not algorithm.use_grpo and (gates := [w for w in self.weights if w.reads_advantages]):
            raise ValueError(f"{gates[0]} weighs by the group advantage, which use_grpo: false takes away")
        self.check_single(algorithm, Distillation, "distil from one teacher, and multiply its signal by weights")
        algorithm.teacher_path = self.teacher

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        """Refuse steps that cannot be compared, and a server of the teacher that is not there, or does not read what
        the student does."""
        check_rows(self.weights, per_turn_prompts(data))
        if self.server is not None:
            budgets = getattr(getattr(data, "rollouts", None), "budgets", None)
            with ranks.stop_together():
                self.server.check(algorithm.policy_path, getattr(budgets, "max_length", None))
        if self.prompts is not None:
            self.prompts.check_data(algorithm, data)

    def frozen_models(self, algorithm: Algorithm) -> dict[str, tuple[str, DType]]:
        return {} if self.teacher is None else {"teacher": (self.teacher, algorithm.teacher_dtype)}

    def teacher_logprobs(
        self, algorithm: Algorithm, trajectories: Sequence[Trajectory], batch: TokenBatch
    ) -> Tensor | None:
        prompts = None
        if self.prompts is not None:
            with ranks.stop_together():
                prompts = self.prompts(algorithm, trajectories)
        if self.server is not None:
            with ranks.stop_together():
                return after_prompts(self.server.score, prompts, trajectories, batch)
        if algorithm.teacher is None:
            raise RuntimeError("the teacher is not loaded; build_models comes first")
        return after_prompts(partial(algorithm.logprobs_of, algorithm.teacher), prompts, trajectories, batch)

    # ------------------------------------------------------------------ the signal
    def annotate(self, rollout: RolloutBatch, advantages: Tensor) -> tuple[Tensor, RowTensors | None]:
        student, mask = rollout.scores.known("old_logprobs"), rollout.batch.mask
        teacher = rollout.scores.known("teacher_logprobs")
        weighed = weigh(self.weights, rollout.trajectories, rollout.batch, student, teacher, advantages)
        log_ratio = (teacher - student) * mask
        signal = log_ratio if self.adv_clamp is None else log_ratio.clamp(-self.adv_clamp, self.adv_clamp)
        opd = self.coef * weighed.weights_BT * signal
        self._log(rollout.algorithm.metrics, weighed, log_ratio, opd, mask)
        return advantages + opd, DistillationNotes(weighed.weights_BT, opd)

    def _log(self, metrics: StepMetrics, weighed: WeightedSignal, log_ratio: Tensor, opd: Tensor, mask: Tensor) -> None:
        mean, tokens, weights = metrics.mean, weighed.divergences.tokens, weighed.weights
        mean("train/opd_log_ratio", log_ratio.sum(), mask.sum())
        mean("train/opd_advantage_abs", opd.abs().sum(), mask.sum())
        sampled = log_ratio[mask > 0]
        metrics.deviation("train/opd_log_ratio_std", sampled)
        if sampled.numel():
            metrics.minimum("train/opd_log_ratio_min", sampled.min())
            metrics.maximum("train/opd_log_ratio_max", sampled.max())
        if self.adv_clamp is not None:
            mean("train/opd_clamped", (log_ratio.abs() > self.adv_clamp).sum(), mask.sum())
        for weight, factor in zip(self.weights, weighed.factors, strict=True):
            if isinstance(weight, StepWeights) and weight.delta is not None:
                later = tokens[:, 1:] > 0  # the first step weighs 1 whatever happens
                mean("train/opd_weight_capped", ((factor[:, 1:] >= 1 + weight.delta) & later).sum(), later.sum())
        for name, values in (("divergence", weighed.divergences.absolute), ("weight", weights)):
            for k in range(min(values.shape[1], SHOWN_STEPS)):
                mean(f"train/{name}/step{k + 1}", values[:, k].sum(), (tokens[:, k] > 0).sum())
            several = (tokens > 0).sum(1) > 1
            mean(f"train/{name}/last", (last_step(values, tokens)[0] * several).sum(), several.sum())


def after_prompts(
    score: Any, prompts: Sequence[Sequence[int]] | None, trajectories: Sequence[Trajectory], batch: TokenBatch
) -> Tensor:
    """``score(TokenBatch)`` of the responses after other prompts (None: their own), at the columns of ``batch``."""
    if prompts is None:
        return score(batch)
    read = with_prompts(trajectories, prompts, batch)
    return aligned(score(read), read, batch)


def check_lengths(
    algorithm: Algorithm, prompts: Sequence[Sequence[int]], trajectories: Sequence[Trajectory], told: str, option: str
) -> None:
    """Raise ValueError where a response after its prompt for the teacher is longer than the model has positions.

    Args:
        told: what the teacher is told, for the message.
        option: the option that bounds what it is told.
    """
    known = getattr(getattr(algorithm.policy, "config", None), "max_position_embeddings", None)
    lengths = [len(p) + len(t.response_ids) for p, t in zip(prompts, trajectories, strict=True)]
    if known is not None and max(lengths, default=0) > known:
        worst = trajectories[lengths.index(max(lengths))]
        raise ValueError(
            f"task {worst.task.id}: with {told} the teacher reads {max(lengths)} tokens, but the model has positions "
            f"for {known}; lower {option}, or the rollouts' max_length"
        )
