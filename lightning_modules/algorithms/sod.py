"""SOD, step-wise on-policy distillation (arXiv 2605.07725; docs/algorithms/sod.md), OPD and the paper's ablations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from common.ranges import NonNegativeFloat, PositiveFloat, UnitInterval
from common.schedules import Coefficient, is_zero
from lightning_modules.advantage_transforms.base import AdvantageTransform, validate_choice
from lightning_modules.advantage_transforms.distillation import (
    AdvantageGate,
    DecayAfterError,
    Distillation,
    DivergenceRatio,
    MaskAfterError,
    Reference,
    TurnWeighting,
)
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.models.remote_teacher import RemoteTeacher

Mode = Literal["none", "uniform", "divergence_ratio", "gated", "decay_after_error", "mask_after_error"]

# The weighting of each mode, and its options; given with another mode they would have no effect.
MODES: dict[str, tuple[type[TurnWeighting] | None, tuple[str, ...]]] = {
    "none": (None, ()),
    "uniform": (None, ()),
    "divergence_ratio": (DivergenceRatio, ("delta", "epsilon", "reference_turn", "weight_floor")),
    "gated": (AdvantageGate, ("beta_min", "beta_max", "beta_gamma")),
    "decay_after_error": (DecayAfterError, ("decay",)),
    "mask_after_error": (MaskAfterError, ()),
}


class SOD(GRPO):
    """GRPO plus a teacher's log-ratio of every sampled token, weighted by turn (eq. 9 and 10)::

        A_t = A_i + opd_coef w_k (T_t - S_t)        S, T: log-probs of student (before the update) and teacher
        w_1 = 1,  w_k = min((d_1 + epsilon) / (d_k + epsilon), 1 + delta)      d_k: mean |S - T| over turn k

    The paper calls a turn of the model a step. Both models read tool results, which no sum contains. See
    ``Distillation`` for the signal and its metrics. For other weights, or several, use ``Distillation`` as an advantage
    transform of ``GRPO``.

    ``opd_mode`` selects w: ``divergence_ratio`` (SOD), ``uniform`` (1: on-policy distillation, OPD), ``gated``
    (``AdvantageGate``), ``decay_after_error``, ``mask_after_error``, ``none`` (GRPO; no teacher is loaded, and the same
    with ``opd_coef: 0``).

    SOD as released: clip_high 0.28, num_mini_batches 4, the other defaults. Not in the paper, and off: ``adv_clamp``,
    ``weight_floor``, ``reference_turn`` (docs/algorithms/sod.md).

    Args:
        policy: Hugging Face folder to start from.
        teacher: folder of the frozen teacher; it must share the student's tokenizer.
        teacher_server: a teacher behind HTTP, instead of ``teacher``.
        opd_mode: weights of the signal by turn, see above.
        opd_coef: weight of the distillation signal beside the group advantage: a number, or a ``Schedule``.
        delta: how far above 1 a turn's weight may get; null for no bound.
        epsilon: keeps the ratio of divergences finite.
        adv_clamp: bound on |T - S| of a token in the advantage, see ``Distillation``. Null for none.
        weight_floor: smallest weight of a turn, from 0 to 1.
        reference_turn: divergence that the others are compared with, see ``DivergenceRatio``.
        decay: factor per turn from the first erroneous turn on.
        beta_min: weight of a trajectory that is far better than its group, in mode gated.
        beta_max: weight of a trajectory that is far worse.
        beta_gamma: how steeply the weight falls with the advantage.
    """

    def __init__(
        self,
        policy: str,
        teacher: str | None = None,
        teacher_server: RemoteTeacher | None = None,
        opd_mode: Mode = "divergence_ratio",
        opd_coef: Coefficient = 1.0,
        delta: NonNegativeFloat | None = 0.2,
        epsilon: PositiveFloat = 1e-6,
        adv_clamp: PositiveFloat | None = None,
        weight_floor: UnitInterval = 0.0,
        reference_turn: Reference = "first",
        decay: UnitInterval = 0.9,
        beta_min: NonNegativeFloat = 0.0,
        beta_max: NonNegativeFloat = 0.1,
        beta_gamma: NonNegativeFloat = 1.0,
        **kwargs,
    ) -> None:
        given, defaults = dict(locals()), inspect.signature(SOD.__init__).parameters
        options = [name for _, names in MODES.values() for name in names]
        changed = {name: given[name] for name in options if given[name] != defaults[name].default}
        weights = mode_weights(opd_mode, changed)
        transforms: list[AdvantageTransform] = []
        if opd_mode != "none" and not is_zero(opd_coef):
            if teacher is None and teacher_server is None:
                raise ValueError(f"opd_mode is {opd_mode}, but there is no teacher; name one, or take opd_mode: none")
            transforms = [Distillation(teacher, teacher_server, None, weights, opd_coef, adv_clamp)]
        elif changed or adv_clamp is not None:  # a teacher may stay named: none is loaded
            names = sorted([*changed] if adv_clamp is None else [*changed, "adv_clamp"])
            raise ValueError(f"{', '.join(names)}: no effect with opd_coef {opd_coef} and opd_mode {opd_mode}")
        super().__init__(policy=policy, advantage_transforms=transforms, **kwargs)
        if teacher_server is not None:  # checkpoints hold plain types only
            self.save_hyperparameters({"teacher_server": repr(teacher_server)})


def mode_weights(mode: str, changed: Mapping[str, Any]) -> list[TurnWeighting]:
    """Return the turn weightings (factors of the teacher's signal by turn) that belong to SOD's ``opd_mode``.

    Args:
        mode: see ``SOD``.
        changed: options of SOD that are not at their defaults.

    Raises:
        ValueError: unknown mode, or options of another mode.
    """
    kind, names = MODES[validate_choice("opd_mode", mode, Mode)]
    for name in changed:
        if name not in names:
            owner = next(mode for mode, (_, options) in MODES.items() if name in options)
            raise ValueError(f"{name} has no effect with opd_mode {mode}; it belongs to {owner}")
    return [] if kind is None else [kind(**{name.removeprefix("weight_"): v for name, v in changed.items()})]
