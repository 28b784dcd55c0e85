"""All signals below the trajectory: their formula, the class that adds them, and the function that computes them.

To add a signal, write its class and its row here:

* a weight of a teacher's signal by turn: a ``TurnWeighting``; its ``__call__`` gets ``TurnInputs``;
* an advantage by turn: ``turn_values`` of a ``TurnAdvantages``;
* another advantage of a token: ``assign_credit`` or ``transform`` of an ``AdvantageTransform``;
* a loss beside the policy's: ``auxiliary`` of a ``SkillLoss``, or ``loss`` of an ``AdvantageTransform``.

``docs/new_algorithm.md`` shows the table, as ``python -m lightning_modules.advantage_transforms.signals`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_modules.advantage_transforms import attribution, distillation, skill_signals, turns
from lightning_modules.maths import advantages, gates, self_distillation, turn_advantages


class Signal(NamedTuple):
    """One row of the table."""

    per: str  # turn or token
    formula: str
    added_by: type
    computed_in: Callable[..., Any]


SIGNALS: dict[str, Signal] = {
    "turn advantage": Signal(
        "turn",
        "(return - penalty - mean) / (std + 1e-6), over the group's turns",
        turns.TurnAdvantages,
        turn_advantages.turn_advantages,
    ),
    "state advantage": Signal(
        "turn",
        "turn advantage + turn_weight (G_k - penalty - mean), over turns from the same state",
        turns.StateAdvantages,
        turn_advantages.gigpo_advantages,
    ),
    "shared tokens": Signal(
        "token",
        "mean A over the branches that share the token",
        attribution.HardAttribution,
        advantages.shared_token_advantages,
    ),
    "entropy": Signal(
        "token", "A (1 + weight z), z the whitened entropy of pi_old", attribution.EntropyScaling, advantages.whiten
    ),
    "log-ratio": Signal("token", "A + coef w (T - S)", distillation.Distillation, distillation.Distillation.transform),
    "divergence ratio": Signal(
        "turn",
        "w_1 = 1, w_k = min((d_1 + epsilon) / (d_k + epsilon), 1 + delta), d_k = mean abs(S - T)",
        distillation.DivergenceRatio,
        distillation.divergence_ratios,
    ),
    "incorrect only": Signal(
        "turn",
        "w = 1 if the score is below the threshold, else 0",
        distillation.IncorrectOnly,
        distillation.IncorrectOnly.__call__,
    ),
    "advantage gate": Signal(
        "turn",
        "w = beta_min + (beta_max - beta_min) sigmoid(-beta_gamma A)",
        distillation.AdvantageGate,
        distillation.AdvantageGate.__call__,
    ),
    "decay after error": Signal(
        "turn",
        "w = decay^(k - k_err) from the first erroneous turn on, else 1",
        distillation.DecayAfterError,
        distillation.turns_after_error,
    ),
    "mask after error": Signal(
        "turn",
        "w = 0 after the first erroneous turn, else 1",
        distillation.MaskAfterError,
        distillation.turns_after_error,
    ),
    "gated skills": Signal(
        "token",
        "loss g (T - S), g = sigmoid(beta x), x the gap T - S, the entropy or both",
        skill_signals.GatedSkills,
        gates.gate,
    ),
    "gated divergence": Signal(
        "token",
        "loss -g w S, w = u f'(u) - f(u) of the divergence f, u = exp(T - S)",
        skill_signals.GatedSkills,
        self_distillation.divergence_weights,
    ),
    "skill importance KL": Signal(
        "token",
        "loss rho (exp(T - S) - 1 + S - T), rho = exp(S - S_old)",
        skill_signals.SkillImportanceKL,
        self_distillation.skill_sd_loss,
    ),
    "skill shares": Signal(
        "token",
        "A [(1 - lam) + lam clip(exp(sign(A) (T - S)), 1 - eps, 1 + eps)]",
        skill_signals.SkillShares,
        advantages.rlsd_advantages,
    ),
}


def table() -> str:
    """Print ``SIGNALS`` as a Markdown table. T and S are the log-probs of teacher and student, A the advantage."""
    lines = ["| signal | per | formula | class | computed in |", "|---|---|---|---|---|"]
    for name, signal in SIGNALS.items():
        where = f"{signal.computed_in.__module__.removeprefix('lightning_modules.')}.{signal.computed_in.__qualname__}"
        lines.append(f"| {name} | {signal.per} | `{signal.formula}` | `{signal.added_by.__name__}` | `{where}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
