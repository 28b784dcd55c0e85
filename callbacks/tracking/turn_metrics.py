"""Computes metrics per turn from signals per token, for trajectory pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout.trajectory import Trajectory

LOG_RATIO = "kl"  # student's log-prob minus teacher's, as ``OnPolicyModule.last_token_values`` gives it
TOLERANCE = 1e-6  # relative


def turn_metrics(trajectory: Trajectory, signals: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """Return the metrics of each turn of a trajectory, as one {name: value} per turn, from signals with one value per
    token. A turn without tokens has no metrics.

    ``divergence`` is the mean |kl| of a turn's tokens (d_k in docs/algorithms/sod.md, eq. 6), if there is a teacher.
    Also every signal with one value per turn, such as the weight of a turn or a group's advantage.

    Args:
        signals: name -> one value per response token.
    """
    spans = [slice(turn.start, turn.end) for turn in trajectory.turns]
    steady = [name for name, values in signals.items() if all(_is_constant(values[span]) for span in spans)]
    metrics = []
    for span in spans:
        tokens = span.stop - span.start
        of_turn: dict[str, float] = {}
        if tokens and LOG_RATIO in signals:
            of_turn["divergence"] = sum(map(abs, signals[LOG_RATIO][span])) / tokens
        if tokens:
            of_turn |= {name: signals[name][span.start] for name in steady}
        metrics.append(of_turn)
    return metrics


def _is_constant(values: Sequence[float]) -> bool:
    return not values or max(values) - min(values) <= TOLERANCE * max(map(abs, values))
