"""Weights of a teacher's signal by step or trajectory: SOD's step weights, DGPO's selective KL, SOD's ablations.

Several multiply. ``Distillation`` takes them for the log-ratio that it adds to advantages, ``PPO`` for its KL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from common.ranges import FiniteFloat, NonNegativeFloat, PositiveFloat, UnitInterval
from lightning_modules import ranks
from lightning_modules.annotations.base import ConfigRepr
from lightning_modules.batch import TokenBatch, turn_starts
from lightning_modules.maths.stepwise import (
    Reference,
    StepDivergences,
    spread,
    step_divergences,
    step_index,
    step_means,
    step_weights,
)
from rollout.trajectory_metrics import first_error

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

Mode = Literal["none", "uniform", "stepwise", "gated", "decay_after_error", "mask_after_error"]


@dataclass(frozen=True, slots=True)
class Steps:
    """Inputs of a ``SignalWeight``."""

    trajectories: Sequence[Trajectory]
    divergences: StepDivergences  # of student and teacher
    outcome: Tensor | None  # mean advantage of each step [B, K]; None where advantages are not known yet (PPO)


@dataclass(frozen=True, slots=True)
class WeightedSignal:
    """How far student and teacher are apart on each step, and what the signal weighs there."""

    divergences: StepDivergences
    weights: Tensor  # [B, K], 0 where a row has no such step
    weights_BT: Tensor
    factors: tuple[Tensor, ...]  # what each SignalWeight says, [B, K] or [B, 1], whose product is weights


class SignalWeight(ConfigRepr):
    """A factor of the teacher's signal on each step of a trajectory (one turn of the model)."""

    compares_steps = False  # whether it reads several steps of a trajectory, which must then be one row
    reads_advantages = False

    def __call__(self, rows: Steps) -> Tensor:
        """[B, K] or [B, 1]. Every rank must call."""
        raise NotImplementedError


class StepWeights(SignalWeight):
    """SOD's: ``w_1 = 1, w_k = min((d_1 + epsilon) / (d_k + epsilon), 1 + delta)``, see ``stepwise.step_weights``.

    Args:
        delta: how far above 1 a step's weight may get; null for no bound.
        epsilon: keeps the ratio of divergences finite.
        reference_step: which divergence is the reference: first (d_1 of the trajectory) or batch_median (of
            d_1, over all ranks).
        floor: least weight of a step, from 0 to 1.
    """

    compares_steps = True

    def __init__(
        self,
        delta: NonNegativeFloat | None = 0.2,
        epsilon: PositiveFloat = 1e-6,
        reference_step: Reference = "first",
        floor: NonNegativeFloat = 0.0,
    ) -> None:
        _require("delta", delta, delta is None or delta >= 0, "0 or more, or null")
        _require("epsilon", epsilon, epsilon > 0, "a positive number")
        _require("weight_floor", floor, 0 <= floor <= 1, "a number from 0 to 1")
        known = get_args(Reference)
        _require("reference_step", reference_step, reference_step in known, f"one of {', '.join(known)}")
        self.delta, self.epsilon, self.floor = delta, epsilon, floor
        self.reference_step: Reference = reference_step

    def __call__(self, rows: Steps) -> Tensor:
        return step_weights(
            rows.divergences, self.delta, self.epsilon, self.reference_step, self.floor, ranks.gather_values
        )


class WrongOnly(SignalWeight):
    """DGPO's selective KL: 1 for trajectories whose reward part ``em`` (its total, if it has none) is below
    ``success_threshold``, 0 for right ones (docs/papers/dgpo.md 2.2).

    Args:
        success_threshold: score from which a trajectory counts as right.
    """

    def __init__(self, success_threshold: FiniteFloat = 0.1) -> None:
        self.success_threshold = success_threshold

    def __call__(self, rows: Steps) -> Tensor:
        rewards = [t.reward for t in rows.trajectories if t.reward is not None]
        wrong = [float(r.parts.get("em", r.total) < self.success_threshold) for r in rewards]
        return rows.divergences.tokens.new_tensor(wrong)[:, None]


class AdvantageGate(SignalWeight):
    """``beta_min + (beta_max - beta_min) sigmoid(-beta_gamma A)``: failed trajectories are pulled harder (the other
    branch of SOD's released code).

    Args:
        beta_min: weight of a trajectory that is far better than its group.
        beta_max: weight of one that is far worse.
        beta_gamma: how steeply the weight falls with the advantage.
    """

    reads_advantages = True

    def __init__(
        self, beta_min: NonNegativeFloat = 0.0, beta_max: NonNegativeFloat = 0.1, beta_gamma: NonNegativeFloat = 1.0
    ) -> None:
        _require("beta_min", beta_min, 0 <= beta_min <= beta_max, f"0 to beta_max ({beta_max})")
        self.beta_min, self.beta_max, self.beta_gamma = beta_min, beta_max, beta_gamma

    def __call__(self, rows: Steps) -> Tensor:
        if rows.outcome is None:
            raise ValueError("AdvantageGate reads advantages, which are not known where it is asked")
        gate = torch.sigmoid(-self.beta_gamma * rows.outcome)
        return self.beta_min + (self.beta_max - self.beta_min) * gate


class DecayAfterError(SignalWeight):
    """``decay`` to the power k - k_err from the first erroneous step k_err on. A step is erroneous if its turn was no
    valid action or one of its calls was refused, failed or ran out of time (``trajectory_metrics.first_error``).

    Args:
        decay: factor per step.
    """

    compares_steps = True

    def __init__(self, decay: UnitInterval = 0.9) -> None:
        _require("decay", decay, 0 <= decay <= 1, "a number from 0 to 1")
        self.decay = decay

    def __call__(self, rows: Steps) -> Tensor:
        return self.decay ** _steps_after_error(rows).clamp(min=0)


class MaskAfterError(SignalWeight):
    """0 after the first erroneous step (see ``DecayAfterError``), else 1."""

    compares_steps = True

    def __call__(self, rows: Steps) -> Tensor:
        return (_steps_after_error(rows) <= 0).float()


# Options of each mode of SOD; given with another they would have no effect.
MODES: dict[str, tuple[type[SignalWeight] | None, tuple[str, ...]]] = {
    "none": (None, ()),
    "uniform": (None, ()),
    "stepwise": (StepWeights, ("delta", "epsilon", "reference_step", "weight_floor")),
    "gated": (AdvantageGate, ("beta_min", "beta_max", "beta_gamma")),
    "decay_after_error": (DecayAfterError, ("decay",)),
    "mask_after_error": (MaskAfterError, ()),
}


def mode_weights(mode: str, changed: Mapping[str, Any]) -> list[SignalWeight]:
    """The weights of a mode.

    Args:
        mode: see ``SOD``.
        changed: options of SOD that are not at their defaults.

    Raises:
        ValueError: unknown mode, or options of another.
    """
    if mode not in MODES:
        raise ValueError(f"opd_mode is {mode!r}; expected one of {', '.join(MODES)}")
    kind, names = MODES[mode]
    for name in changed:
        if name not in names:
            owner = next(mode for mode, (_, options) in MODES.items() if name in options)
            raise ValueError(f"{name} has no effect with opd_mode {mode}; it belongs to {owner}")
    return [] if kind is None else [kind(**{name.removeprefix("weight_"): v for name, v in changed.items()})]


def check_rows(weights: Sequence[SignalWeight], by_turn: bool) -> None:
    """Refuse weights that compare steps of a trajectory where each turn is a row by itself."""
    if by_turn and (names := [type(weight).__name__ for weight in weights if weight.compares_steps]):
        raise ValueError(
            f"{', '.join(names)} compares the steps of a trajectory, but its turns have prompts of their own and are "
            "rows by themselves; take window: null (one conversation), or opd_mode: uniform"
        )


def weigh(
    weights: Sequence[SignalWeight],
    trajectories: Sequence[Trajectory],
    batch: TokenBatch,
    student: Tensor,
    teacher: Tensor,
    advantages: Tensor | None = None,
) -> WeightedSignal:
    """The product of all weights, by step and by token. Every rank must call.

    Raises:
        ValueError: steps of a trajectory are to be compared that are rows by themselves.
    """
    check_rows(weights, any(t.row is not None for t in trajectories))
    steps = step_index(batch.mask, turn_starts(trajectories, batch))
    divergences = step_divergences(student, teacher, steps)
    outcome = None if advantages is None else step_means(advantages, steps)[0]
    found = (divergences.tokens > 0).float()
    factors = tuple(weight(Steps(trajectories, divergences, outcome)) for weight in weights)
    for factor in factors:
        found = found * factor
    return WeightedSignal(divergences, found, spread(found, steps), factors)


def _steps_after_error(rows: Steps) -> Tensor:
    """[B, K]: number of the step minus that of the first erroneous one; -inf where nothing went wrong."""
    errors = rows.divergences.tokens.new_tensor([_error_step(t) for t in rows.trajectories])[:, None]
    return torch.arange(1, rows.divergences.tokens.shape[1] + 1, device=errors.device)[None] - errors


def _error_step(trajectory: Trajectory) -> float:
    """Number (from 1) of the first erroneous step, inf without one."""
    turn = first_error(trajectory)
    if turn is None:
        return float("inf")
    return 1.0 + sum(t.end > t.start for t in trajectory.turns[:turn])


def _require(name: str, value: Any, fine: bool, expected: str) -> None:
    if not fine:
        raise ValueError(f"{name} is {value if not isinstance(value, str) else repr(value)}; expected {expected}")
