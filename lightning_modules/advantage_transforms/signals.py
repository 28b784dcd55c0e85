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

from lightning_modules.advantage_transforms.attribution import EntropyScaling, HardAttribution, OutcomeScale
from lightning_modules.advantage_transforms.distillation import (
    AdvantageGate,
    DecayAfterError,
    Distillation,
    DivergenceRatio,
    IncorrectOnly,
    MaskAfterError,
    UncertainTurns,
    divergence_ratios,
    turns_after_error,
)
from lightning_modules.advantage_transforms.divergence_loss import DivergenceLoss
from lightning_modules.advantage_transforms.dual_distillation import DualDistillation, regimes_of
from lightning_modules.advantage_transforms.guided_turns import GuidedTurns
from lightning_modules.advantage_transforms.information_gain import InformationGain
from lightning_modules.advantage_transforms.skill_signals import GatedSkills, SkillImportanceKL, SkillShares
from lightning_modules.advantage_transforms.tree_advantages import TreeAdvantages
from lightning_modules.advantage_transforms.turns import StateAdvantages, TurnAdvantages
from lightning_modules.maths.advantages import rlsd_advantages, shared_token_advantages, whiten
from lightning_modules.maths.divergences import make_divergence
from lightning_modules.maths.gates import gate
from lightning_modules.maths.self_distillation import divergence_weights, skill_sd_loss
from lightning_modules.maths.turn_advantages import (
    gigpo_advantages,
    information_gain_advantages,
    tree_values,
    turn_advantages,
)


class Signal(NamedTuple):
    """One row of the table of learning signals. T and S are the log-probs of teacher and student, A is the advantage, w
    a weight."""

    formula: str
    added_by: type
    computed_in: Callable[..., Any]


BY_TURN = {
    "turn advantage": Signal("A = (return - penalty - mean) / (std + 1e-6)", TurnAdvantages, turn_advantages),
    "state advantage": Signal("A += turn_weight (G_k - penalty - mean)", StateAdvantages, gigpo_advantages),
    "divergence ratio": Signal("w_k = min((d_1 + e) / (d_k + e), 1 + delta)", DivergenceRatio, divergence_ratios),
    "incorrect only": Signal("w = [score < threshold]", IncorrectOnly, IncorrectOnly.__call__),
    "advantage gate": Signal("w = b0 + (b1 - b0) sigmoid(-gamma A)", AdvantageGate, AdvantageGate.__call__),
    "decay after error": Signal("w = decay^max(k - k_err, 0)", DecayAfterError, turns_after_error),
    "uncertain turns": Signal(
        "w_k = 1 - (1 - d_k) (1 - h_k), scaled in the trajectory", UncertainTurns, UncertainTurns.__call__
    ),
    "information gain": Signal(
        "A = sum of gamma^j z, z: gains of log p(gold)", InformationGain, information_gain_advantages
    ),
    "tree": Signal("A = V(turn), a mean over the turns that follow", TreeAdvantages, tree_values),
    "mask after error": Signal("w = [k <= k_err]", MaskAfterError, turns_after_error),
}
BY_TOKEN = {
    "log-ratio": Signal("A += coef w (T - S)", Distillation, Distillation.transform),
    "divergence": Signal("loss coef w D(T, S), of top-k or all tokens", DivergenceLoss, make_divergence),
    "dual": Signal("loss coef w D(T or P, S), T or P by |T - P| and who is surer", DualDistillation, regimes_of),
    "shared tokens": Signal("A = mean A of the branches that share it", HardAttribution, shared_token_advantages),
    "entropy": Signal("A *= 1 + weight z, z = whitened entropy", EntropyScaling, whiten),
    "guided turns": Signal("A = 0, loss -coef log p(y) on turns of a guide", GuidedTurns, GuidedTurns.loss),
    "outcome scale": Signal("A *= coef, such as a schedule", OutcomeScale, OutcomeScale.assign_credit),
    "skill shares": Signal("A *= 1 - lam + lam clip(exp(sign(A) (T - S)))", SkillShares, rlsd_advantages),
    "gated skills": Signal("loss g (T - S), g = sigmoid(beta (T - S))", GatedSkills, gate),
    "gated divergence": Signal("loss -g w S, w = u f'(u) - f(u), u = exp(T - S)", GatedSkills, divergence_weights),
    "skill KL": Signal("loss exp(S - S_old) (exp(T - S) - 1 + S - T)", SkillImportanceKL, skill_sd_loss),
}
SIGNALS: dict[str, Signal] = BY_TURN | BY_TOKEN


def table() -> str:
    """Return the table of all learning signals (``SIGNALS``) as Markdown text."""
    lines = ["| signal | per | formula | class | computed in |", "|---|---|---|---|---|"]
    for name, signal in SIGNALS.items():
        per = "turn" if name in BY_TURN else "token"
        where = f"{signal.computed_in.__module__.removeprefix('lightning_modules.')}.{signal.computed_in.__qualname__}"
        lines.append(f"| {name} | {per} | `{signal.formula}` | `{signal.added_by.__name__}` | `{where}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
