"""On-policy distillation: a teacher's log-ratio of each sampled token as an advantage, weighted by turn.

``Distillation`` adds the signal to the advantages. ``TurnWeighting`` classes weight the signal of each turn (SOD's
divergence ratio, DGPO's incorrect trajectories, SOD's ablations); several multiply. ``PPO`` uses the same weights for
its KL.

A turn is one message of the model. ``turns_BT`` holds the number of each token's turn; values of turns are [B, K],
K the largest number of turns in a row, column k - 1 for turn k::

    mask      0 1 1 1 0 0 1 1 0 1 0        prompt, turn, observation, turn, observation, turn, padding
    turns     0 1 1 1 0 0 2 2 0 3 0

Source: SOD (arXiv 2605.07725, eq. 6 and 7; the paper calls a turn a step), docs/algorithms/sod.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from common import ranks
from common.ranges import FiniteFloat, NonNegativeFloat, PositiveFloat, UnitInterval
from common.schedules import Coefficient, Schedule, is_zero
from lightning_modules.advantage_transforms.base import (
    Algorithm,
    ConfigRepr,
    RolloutBatch,
    current,
    per_turn_prompts,
    validate_choice,
)
from lightning_modules.advantage_transforms.teacher_prompts import TeacherPrompts
from lightning_modules.advantage_transforms.teachers import SelfTeacher, TaughtTransform
from lightning_modules.batch import RowTensors, TokenBatch
from lightning_modules.metrics import StepMetrics
from lightning_modules.models.remote_teacher import RemoteTeacher
from rollout.trajectory_metrics import first_error

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

Reference = Literal["first", "batch_median"]
Gather = Callable[[Tensor], Tensor]  # [n] of this rank -> [N] of all ranks
SHOWN_TURNS = 8  # turns that have metrics; the last turn has metrics, too


# ---------------------------------------------------------------------- values of turns: torch only, no gradient
def turn_starts(trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor:
    """Return a mask [B, T] bool of the first sampled token of each turn. It keeps adjacent turns separate."""
    starts = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
    for row, t in enumerate(trajectories):
        starts[row, [len(t.prompt_ids) + turn.start for turn in t.turns if turn.end > turn.start]] = True
    return starts.to(batch.input_ids.device)


def turn_index(mask_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
    """Return the number of each token's turn [B, T] int64: 1..K for sampled tokens, 0 where the mask is 0.

    A turn begins where the mask changes from 0 to 1, and at every token marked by ``starts_BT``. Without
    ``starts_BT``, adjacent turns count as one.

    >>> turn_index(torch.tensor([[0, 1, 1, 0, 1, 1]]), torch.tensor([[0, 1, 0, 0, 1, 1]])).tolist()
    [[0, 1, 1, 0, 2, 3]]
    """
    on = mask_BT != 0
    begins = on.clone()
    begins[:, 1:] &= ~on[:, :-1]
    if starts_BT is not None:
        begins |= on & (starts_BT != 0)
    return begins.long().cumsum(1) * on


def turn_means(values_BT: Tensor, turns_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean value and the number of tokens of each turn, both [B, K] float32, summed in float64.

    Values outside of turns may be anything, NaN included.
    """
    most = int(turns_BT.max()) if turns_BT.numel() else 0
    on = turns_BT > 0
    sums = torch.zeros((len(turns_BT), most + 1), dtype=torch.float64, device=values_BT.device)
    counts = sums.clone()
    sums.scatter_add_(1, turns_BT, values_BT.double().masked_fill(~on, 0.0))
    counts.scatter_add_(1, turns_BT, on.double())
    sums, counts = sums[:, 1:], counts[:, 1:]
    return (sums / counts.clamp(min=1.0)).float(), counts.float()


def spread_turns(values_BK: Tensor, turns_BT: Tensor) -> Tensor:
    """Copy the value of each turn [B, K] to all of its tokens. Returns [B, T], 0 outside of turns."""
    return torch.nn.functional.pad(values_BK, (1, 0)).gather(1, turns_BT)


def spread_by_row(values: Sequence[Sequence[float]], trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor:
    """Copy values of the turns with tokens of each row, one list per row, to the policy's tokens. Returns [B, T], 0
    outside of turns and in those of a guide."""
    index = turn_index(batch.mask, turn_starts(trajectories, batch))
    table = torch.zeros((len(values), int(index.max()) if index.numel() else 0))
    for row, (found, t) in enumerate(zip(values, trajectories, strict=True)):
        turns = [turn for turn in t.turns if turn.end > turn.start]
        own = [value for value, turn in zip(found, turns, strict=False) if not turn.guided]
        table[row, : len(own)] = torch.tensor(own)
    return spread_turns(table.to(index.device), index) * batch.mask


def last_turn(values_BK: Tensor, tokens_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of each row's last turn [B], and a mask of the rows that have a turn [B] bool."""
    count = (tokens_BK > 0).sum(1)
    if tokens_BK.shape[1] == 0:
        return tokens_BK.new_zeros(len(tokens_BK)), count > 0
    return values_BK.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], count > 0


@dataclass(frozen=True, slots=True)
class TurnDivergences:
    """Distances between the log-probs of student S and teacher T on each turn; [B, K] float32, 0 where a row has no
    such turn."""

    absolute: Tensor  # d_k: mean |S - T| of log-probs, nats
    signed: Tensor  # mean T - S, nats; above 0 where the teacher prefers the tokens
    tokens: Tensor  # number of tokens of the turn; 0: the row has no such turn


def turn_divergences(student_BT: Tensor, teacher_BT: Tensor, turns_BT: Tensor) -> TurnDivergences:
    """Compute the divergence of student and teacher on each turn (SOD eq. 6): d_k = mean over the tokens of turn k of
    |log pi_S - log pi_T|, on the tokens the student sampled."""
    difference = teacher_BT - student_BT
    absolute, tokens = turn_means(difference.abs(), turns_BT)
    return TurnDivergences(absolute, turn_means(difference, turns_BT)[0], tokens)


def divergence_ratios(
    divergences: TurnDivergences,
    delta: float | None = 0.2,
    epsilon: float = 1e-6,
    reference: Reference = "first",
    floor: float = 0.0,
    gather: Gather = lambda values: values,
) -> Tensor:
    """Return SOD's weight of each turn [B, K], which falls as student and teacher diverge (eq. 7, telescoped). It is 0
    where a row has no such turn::

        w_1 = 1        w_k = max(floor, min((d_ref + epsilon) / (d_k + epsilon), 1 + delta))

    The paper writes a running product of neighbours' ratios. The product itself is not clipped, so it equals the ratio
    to turn 1 (docs/algorithms/sod.md). Without a bound, w_k d_k is d_ref: every turn has the same mean |w (T - S)|.

    Args:
        divergences: of whole rows: every turn of a trajectory.
        delta: how far above 1 a weight may get; None for no bound.
        epsilon: keeps the ratio finite.
        reference: d_ref. ``first``: d_1 of the same row (the paper). ``batch_median``: the median of d_1 over the
            batch. A short first turn has a noisy d_1, which scales the whole trajectory (docs/algorithms/sod.md).
        floor: smallest weight; 0 for the paper's.
        gather: collects the first turns' divergences of all ranks; every rank must call.

    Raises:
        ValueError: unknown reference.
    """
    d, exists = divergences.absolute, divergences.tokens > 0
    validate_choice("reference_turn", reference, Reference)
    level: Tensor | float = 0.0
    if reference != "first":  # a collective: before any return
        everywhere = gather(d[:, :1][exists[:, :1]])
        if len(everywhere):
            level = torch.quantile(everywhere, 0.5)
    if d.shape[1] == 0:
        return d
    first = d[:, :1]
    if reference != "first":
        first = torch.full_like(first, float(level))
    weights = ((first + epsilon) / (d + epsilon)).clamp(min=floor, max=None if delta is None else 1.0 + delta)
    weights[:, 0] = 1.0
    return weights * exists


# ---------------------------------------------------------------------- weights of turns
@dataclass(frozen=True, slots=True)
class TurnInputs:
    """What a ``TurnWeighting`` (factor of the teacher's signal on each turn) may read."""

    trajectories: Sequence[Trajectory]
    divergences: TurnDivergences  # of student and teacher
    surprisal: Tensor  # mean -S of the student's log-probs of each turn, nats [B, K], 0 where a row has no such turn
    outcome: Tensor | None  # mean advantage of each turn [B, K], or None where advantages are not known yet (PPO)


class TurnWeighting(ConfigRepr):
    """Base of weightings: factors of the teacher's signal on each turn of a trajectory."""

    compares_turns = False  # whether it reads several turns of a trajectory, which must then be one row
    reads_advantages = False

    def __call__(self, inputs: TurnInputs) -> Tensor:
        """Return the factor of each turn [B, K], or one for all turns of a row [B, 1]. Every rank must call."""
        raise NotImplementedError


class DivergenceRatio(TurnWeighting):
    """Weights the teacher's signal on each turn by SOD's ratio of divergences (``divergence_ratios``): ``w_1 = 1, w_k =
    min((d_1 + epsilon) / (d_k + epsilon), 1 + delta)``.

    Args:
        delta: how far above 1 a turn's weight may get; null for no bound.
        epsilon: keeps the ratio of divergences finite.
        reference_turn: divergence in the numerator: first (d_1 of the trajectory) or batch_median (of d_1, over all
            ranks).
        floor: smallest weight of a turn, from 0 to 1.
    """

    compares_turns = True

    def __init__(
        self,
        delta: NonNegativeFloat | None = 0.2,
        epsilon: PositiveFloat = 1e-6,
        reference_turn: Reference = "first",
        floor: UnitInterval = 0.0,
    ) -> None:
        self.delta, self.epsilon, self.floor = delta, epsilon, floor
        self.reference_turn: Reference = validate_choice("reference_turn", reference_turn, Reference)

    def __call__(self, inputs: TurnInputs) -> Tensor:
        return divergence_ratios(
            inputs.divergences, self.delta, self.epsilon, self.reference_turn, self.floor, ranks.gather_values
        )


class IncorrectOnly(TurnWeighting):
    """Applies the teacher's signal to incorrect trajectories only: weight 0 for correct trajectories, 1 for the others.
    This is DGPO's selective KL (docs/algorithms/dgpo.md).

    A trajectory is correct if its reward part ``em`` (without one, its total reward) is at least ``success_threshold``.

    Args:
        success_threshold: smallest score of a correct trajectory.
    """

    def __init__(self, success_threshold: FiniteFloat = 0.1) -> None:
        self.success_threshold = success_threshold

    def __call__(self, inputs: TurnInputs) -> Tensor:
        rewards = [t.reward for t in inputs.trajectories if t.reward is not None]
        wrong = [float(r.parts.get("em", r.total) < self.success_threshold) for r in rewards]
        return inputs.divergences.tokens.new_tensor(wrong)[:, None]


class AdvantageGate(TurnWeighting):
    """Weights the teacher's signal more where the advantage A is low: ``beta_min + (beta_max - beta_min)
    sigmoid(-beta_gamma A)``. This is the other branch of SOD's released code.

    Args:
        beta_min: weight of a trajectory that is far better than its group.
        beta_max: weight of a trajectory that is far worse.
        beta_gamma: how steeply the weight falls with the advantage.
    """

    reads_advantages = True

    def __init__(
        self, beta_min: NonNegativeFloat = 0.0, beta_max: NonNegativeFloat = 0.1, beta_gamma: NonNegativeFloat = 1.0
    ) -> None:
        if beta_min > beta_max:
            raise ValueError(f"beta_min is {beta_min}; expected 0 to beta_max ({beta_max})")
        self.beta_min, self.beta_max, self.beta_gamma = beta_min, beta_max, beta_gamma

    def __call__(self, inputs: TurnInputs) -> Tensor:
        if inputs.outcome is None:
            raise ValueError("AdvantageGate reads advantages, which are not known here; take another weighting")
        gate = torch.sigmoid(-self.beta_gamma * inputs.outcome)
        return self.beta_min + (self.beta_max - self.beta_min) * gate


class DecayAfterError(TurnWeighting):
    """Lets the teacher's signal decay after the first erroneous turn k_err. The weight of turn k is ``decay`` to the
    power k - k_err, and 1 before the error.

    A turn is erroneous if its action is invalid, or if one of its calls was refused, failed or timed out
    (``trajectory_metrics.first_error``).

    Args:
        decay: factor per turn.
    """

    compares_turns = True

    def __init__(self, decay: UnitInterval = 0.9) -> None:
        self.decay = decay

    def __call__(self, inputs: TurnInputs) -> Tensor:
        return self.decay ** turns_after_error(inputs).clamp(min=0)


class MaskAfterError(TurnWeighting):
    """Removes the teacher's signal after the first erroneous turn (see ``DecayAfterError``): weight 0 there, else 1."""

    compares_turns = True

    def __call__(self, inputs: TurnInputs) -> Tensor:
        return (turns_after_error(inputs) <= 0).float()


class UncertainTurns(TurnWeighting):
    """Weights the teacher's signal more on turns where the models differ or the student is unsure. This is ATOD's
    weight (arXiv 2606.27814, eq. 13 to 16)::

        w_k = 1 - (1 - d_k) (1 - h_k)        d_k: mean |S - T| of turn k, h_k: mean -S of turn k

    Both are scaled to [0, 1] over the turns of the trajectory; 0.5 where they do not differ (by 1e-8), as in a
    trajectory of one turn. SOD's ``DivergenceRatio`` goes the other way.
    """

    compares_turns = True

    def __call__(self, inputs: TurnInputs) -> Tensor:
        exists = inputs.divergences.tokens > 0
        d, h = (_scaled(values, exists) for values in (inputs.divergences.absolute, inputs.surprisal))
        return (1.0 - (1.0 - d) * (1.0 - h)) * exists


def _scaled(values_BK: Tensor, exists_BK: Tensor) -> Tensor:
    """Scale the values of each row to [0, 1] over its turns that exist; 0.5 if they differ by less than 1e-8."""
    if values_BK.shape[1] == 0:
        return values_BK
    low = values_BK.masked_fill(~exists_BK, torch.inf).amin(1, keepdim=True)
    size = values_BK.masked_fill(~exists_BK, -torch.inf).amax(1, keepdim=True) - low
    return torch.where(size < 1e-8, torch.full_like(values_BK, 0.5), (values_BK - low) / size.clamp(min=1e-8))


def turns_after_error(inputs: TurnInputs) -> Tensor:
    """Return the signed distance of each turn of the policy, in turns, from the trajectory's first erroneous turn [B,
    K]: 0 at that turn, negative before it, -inf in rows without an error. Turns of a guide count as turns."""
    distances = torch.full_like(inputs.divergences.tokens, -torch.inf)
    for row, t in enumerate(inputs.trajectories):
        with_tokens = [k for k, turn in enumerate(t.turns) if turn.end > turn.start]
        error = first_error(t)
        if error is not None:
            first = sum(k < error for k in with_tokens)
            own = [number - first for number, k in enumerate(with_tokens) if not t.turns[k].guided]
            own = own[: distances.shape[1]]  # a row that no teacher has judged may have more turns than the others
            distances[row, : len(own)] = distances.new_tensor(own)
    return distances


@dataclass(frozen=True, slots=True)
class WeightedTurns:
    """Distances between student and teacher on each turn, and the weights of the teacher's signal."""

    divergences: TurnDivergences
    weights: Tensor  # [B, K], 0 where a row has no such turn
    weights_BT: Tensor
    factors: tuple[Tensor, ...]  # of each TurnWeighting, [B, K] or [B, 1]; their product is ``weights``


def weigh_turns(
    weights: Sequence[TurnWeighting],
    trajectories: Sequence[Trajectory],
    batch: TokenBatch,
    student: Tensor,
    teacher: Tensor,
    advantages: Tensor | None = None,
) -> WeightedTurns:
    """Compute the weight of the teacher's signal on each turn and token: the product of all ``weights``. Every rank
    must call.

    Turns are those of a row: of a whole trajectory, or of one conversation of a program.
    """
    turns = turn_index(batch.mask, turn_starts(trajectories, batch))
    divergences = turn_divergences(student, teacher, turns)
    outcome = None if advantages is None else turn_means(advantages, turns)[0]
    surprisal = turn_means(-student, turns)[0]
    found = (divergences.tokens > 0).float()
    factors = tuple(weight(TurnInputs(trajectories, divergences, surprisal, outcome)) for weight in weights)
    for factor in factors:
        found = found * factor
    return WeightedTurns(divergences, found, spread_turns(found, turns), factors)


def check_rows(weights: Sequence[TurnWeighting], by_turn: bool) -> None:
    """Raise ValueError if a weighting compares the turns of a trajectory, but each turn is a row of the batch."""
    if by_turn and (names := [type(weight).__name__ for weight in weights if weight.compares_turns]):
        raise ValueError(
            f"{', '.join(names)} compares the turns of a conversation, but every turn has its own prompt and is a row; "
            "take window: null (one conversation), or opd_mode: uniform"
        )


def check_gates(weights: Sequence[TurnWeighting], algorithm: Algorithm) -> None:
    """Raise ValueError if a weighting reads the group advantage, but the algorithm has none."""
    if not algorithm.use_grpo and (gates := [weight for weight in weights if weight.reads_advantages]):
        raise ValueError(f"{gates[0]} weighs by the group advantage, which use_grpo: false takes away")


# ---------------------------------------------------------------------- the signal
@dataclass(frozen=True, slots=True)
class DistillationInputs(RowTensors):
    """Values per token that ``Distillation`` keeps for trajectory pages; [B, T] float32, 0 where the mask is 0."""

    opd_weights: Tensor  # of the token's turn
    opd_advantages: Tensor  # what the distillation added to the advantages


class Distillation(TaughtTransform):
    """Adds a teacher's log-ratio of each sampled token to its advantage: ``A_t += coef w (T_t - S_t)``. S and T are the
    log-probs of student (before the update) and teacher.

    The signal is an advantage without gradient. Its policy gradient is that of the reverse KL; the gradient of the
    sampled log-ratio itself is 0 on average. The signal stays fixed during the optimiser steps of an iteration, and a
    token gets only its own log-ratio, not those of later tokens. ``DivergenceLoss`` sees more of the teacher's
    distribution.

    Logged: ``train/divergence/turn<k>`` and ``train/weight/turn<k>`` (means over trajectories, k up to 8; ``last``: of
    trajectories with at least two turns), ``train/opd_log_ratio``, ``_std``, ``_min`` and ``_max`` (T - S over tokens),
    ``train/opd_advantage_abs``, ``train/opd_weight_capped`` (share of the turns after the first), ``train/opd_clamped``
    (share of tokens), ``train/opd_coef`` (of a schedule). With a name they are ``train/NAME/...``.

    Args:
        teacher: folder of the frozen teacher; it must share the student's tokenizer.
        server: a teacher behind HTTP, instead of ``teacher``.
        prompts: the prompt that the teacher reads before each response; null for the student's prompt.
        weights: factors of w by turn; none for 1 (on-policy distillation, OPD).
        coef: weight of the signal beside the outcome's advantage: a number, or a ``Schedule``.
        adv_clamp: bound on |T - S| of a token in the advantage (5 to 20 are usual); the divergences of turns use the
            log-ratios without bound. Null for none.
        self_teacher: the policy itself, instead of ``teacher``.
        tasks: what the teacher judges, see ``TaughtTransform``; null for all tasks.
        name: of several teachers, see ``TaughtTransform``.
    """

    learns = True

    def __init__(
        self,
        teacher: str | None = None,
        server: RemoteTeacher | None = None,
        prompts: TeacherPrompts | None = None,
        weights: list[TurnWeighting] | None = None,
        coef: Coefficient = 1.0,
        adv_clamp: PositiveFloat | None = None,
        self_teacher: SelfTeacher | None = None,
        tasks: dict[str, list[str]] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(teacher, server, self_teacher, prompts, tasks, name)
        if is_zero(coef):
            raise ValueError("coef is 0, so that the teacher has no effect; expected above 0, or no Distillation")
        self.weights, self.coef, self.adv_clamp = weights or [], coef, adv_clamp

    def check(self, algorithm: Algorithm) -> None:
        super().check(algorithm)
        check_gates(self.weights, algorithm)

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        """Refuse a data module whose turns cannot be compared, and what the base class refuses."""
        check_rows(self.weights, per_turn_prompts(data))
        super().check_data(algorithm, data)

    def transform(self, batch: RolloutBatch, advantages: Tensor) -> tuple[Tensor, RowTensors | None]:
        judged = batch.judged(self)
        tokens = dataclasses.replace(batch.tokens, mask=batch.tokens.mask * judged.rows_judged[:, None])
        student, teacher, mask = batch.scores.require("old_logprobs"), judged.logprobs, tokens.mask
        weighted = weigh_turns(self.weights, batch.trajectories, tokens, student, teacher, batch.outcome)
        log_ratio = (teacher - student) * mask
        signal = log_ratio if self.adv_clamp is None else log_ratio.clamp(-self.adv_clamp, self.adv_clamp)
        coef = current(batch.algorithm, self.coef)
        opd = coef * weighted.weights_BT * signal
        if isinstance(self.coef, Schedule):
            batch.algorithm.metrics.maximum(self.metric("opd_coef"), coef)
        self._log(batch.algorithm.metrics, weighted, log_ratio, opd, mask)
        return advantages + opd, DistillationInputs(weighted.weights_BT, opd)

    def _log(self, metrics: StepMetrics, weighted: WeightedTurns, log_ratio: Tensor, opd: Tensor, mask: Tensor) -> None:
        mean, tokens, weights = metrics.mean, weighted.divergences.tokens, weighted.weights
        mean(self.metric("opd_log_ratio"), log_ratio.sum(), mask.sum())
        mean(self.metric("opd_advantage_abs"), opd.abs().sum(), mask.sum())
        sampled = log_ratio[mask > 0]
        metrics.deviation(self.metric("opd_log_ratio_std"), sampled)
        if sampled.numel():
            metrics.minimum(self.metric("opd_log_ratio_min"), sampled.min())
            metrics.maximum(self.metric("opd_log_ratio_max"), sampled.max())
        if self.adv_clamp is not None:
            mean(self.metric("opd_clamped"), (log_ratio.abs() > self.adv_clamp).sum(), mask.sum())
        for weight, factor in zip(self.weights, weighted.factors, strict=True):
            if isinstance(weight, DivergenceRatio) and weight.delta is not None:
                later = tokens[:, 1:] > 0  # the first turn always weighs 1
                capped = ((factor[:, 1:] >= 1 + weight.delta) & later).sum()
                mean(self.metric("opd_weight_capped"), capped, later.sum())
        for name, values in (("divergence", weighted.divergences.absolute), ("weight", weights)):
            for k in range(min(values.shape[1], SHOWN_TURNS)):
                mean(self.metric(f"{name}/turn{k + 1}"), values[:, k].sum(), (tokens[:, k] > 0).sum())
            several = (tokens > 0).sum(1) > 1
            mean(self.metric(f"{name}/last"), (last_turn(values, tokens)[0] * several).sum(), several.sum())
