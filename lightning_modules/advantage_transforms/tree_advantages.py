"""AT2PO: the value of a turn from what followed it in a tree of trajectories (arXiv 2601.04767)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_modules.advantage_transforms.base import (
    AdvantageTransform,
    Algorithm,
    RolloutBatch,
    check_defaults,
    per_turn_prompts,
    plays_programs,
    validate_choice,
)
from lightning_modules.advantage_transforms.distillation import spread_by_row
from lightning_modules.maths.turn_advantages import TreeWeighting, tree_values
from rollout.samplers.entropy_tree import path_of, surprisal

if TYPE_CHECKING:
    from rollout.trajectory import Fork, Trajectory

Node = tuple[str, int, int]  # group, member that sampled the turn, number of the turn


class TreeAdvantages(AdvantageTransform):
    """Replaces the advantages of whole trajectories by AT2PO's value of each turn (``turn_advantages.tree_values``): a
    turn that several trajectories share has one value, from those that follow it. Take it with a sampler that forks,
    such as ``EntropyTreeSampler``.

    Logged: ``train/shared_turns`` (share of the trajectories' turns that others share).

    Args:
        weighting: weights of the turns that follow: surprisal (softmax of their mean -log p, as released) or equal.
    """

    needs_outcome = needs_groups = True
    replaces_credit = True
    reads_old_logprobs = False

    def __init__(self, weighting: TreeWeighting = "surprisal") -> None:
        self.weighting: TreeWeighting = validate_choice("weighting", weighting, TreeWeighting)

    def check(self, algorithm: Algorithm) -> None:
        check_defaults(algorithm, type(self).__name__)

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        if per_turn_prompts(data) or plays_programs(data):
            raise ValueError(
                "TreeAdvantages compares whole conversations that share turns, but every turn or conversation has its "
                "own prompt; take window: null, or TurnAdvantages"
            )

    def assign_credit(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        trajectories = batch.trajectories
        paths, surprisals = tree_paths(trajectories, batch.algorithm.rolled_out)
        rewards = [t.reward.total for t in trajectories if t.reward is not None]
        values = tree_values(paths, rewards, [t.group for t in trajectories], surprisals, self.weighting)
        met = Counter(node for path in paths for node in path)
        batch.algorithm.metrics.mean("train/shared_turns", sum(n for n in met.values() if n > 1), sum(met.values()))
        return spread_by_row([[values[node] for node in path] for path in paths], trajectories, batch.tokens)


def tree_paths(
    trajectories: Sequence[Trajectory], rolled_out: Sequence[Trajectory]
) -> tuple[list[list[Node]], dict[Hashable, float]]:
    """Return the turns (with tokens) of each trajectory, and the mean -log p of each turn.

    Args:
        trajectories: whole.
        rolled_out: all trajectories of the groups: a turn may have been sampled by one that failed.
    """
    forks: dict[str, dict[int, Fork]] = {}
    for t in (*rolled_out, *trajectories):
        if t.fork is not None:
            forks.setdefault(t.group, {})[t.index] = t.fork
    paths: list[list[Node]] = []
    surprisals: dict[Hashable, float] = {}
    for t in trajectories:
        places = path_of(t, forks.get(t.group, {}))
        paths.append([(t.group, *place) for place in places])
        surprisals |= {(t.group, *place): surprisal(t, t.turns[place[1]]) for place in places}
    return paths, surprisals
