"""AT2PO: the value of a turn from what followed it in a tree of trajectories (arXiv 2601.04767)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_modules.advantage_transforms.attribution import forks_of
from lightning_modules.advantage_transforms.base import (
    AdvantageTransform,
    Algorithm,
    RolloutBatch,
    check_defaults,
    per_turn_prompts,
    plays_programs,
    validate_choice,
)
from lightning_modules.advantage_transforms.distillation import spread_turns, turn_index, turn_starts
from lightning_modules.maths.turn_advantages import TreeWeighting, tree_values

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

Member = tuple[str, int]
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
        trajectories, tokens = batch.trajectories, batch.tokens
        forks = forks_of([*batch.algorithm.rolled_out, *trajectories])
        paths = [path_of(t, forks) for t in trajectories]
        surprisals: dict[Any, float] = {}
        for t, path in zip(trajectories, paths, strict=True):
            for node, turn in zip(path, (turn for turn in t.turns if turn.end > turn.start), strict=True):
                surprisals[node] = -sum(t.logprobs[turn.start : turn.end]) / (turn.end - turn.start)
        rewards = [t.reward.total for t in trajectories if t.reward is not None]
        values = tree_values(paths, rewards, [t.group for t in trajectories], surprisals, self.weighting)
        met = Counter(node for path in paths for node in path)
        batch.algorithm.metrics.mean("train/shared_turns", sum(n for n in met.values() if n > 1), sum(met.values()))
        index = turn_index(tokens.mask, turn_starts(trajectories, tokens))
        table = torch.zeros((len(trajectories), int(index.max()) if index.numel() else 0))
        for row, path in enumerate(paths):
            table[row, : len(path)] = torch.tensor([values[node] for node in path])
        return spread_turns(table.to(tokens.mask.device), index) * tokens.mask


def path_of(trajectory: Trajectory, forks: Mapping[Member, tuple[int, int]]) -> list[Node]:
    """Return the turns (with tokens) of a trajectory, each named by the member of the group that sampled it.

    Args:
        trajectory: whole.
        forks: (group, index) -> (parent's index, number of copied response tokens), see ``forks_of``.
    """
    found: list[Node] = []
    for number, turn in enumerate(trajectory.turns):
        if turn.end > turn.start:
            member = trajectory.index
            while (trajectory.group, member) in forks and turn.start < forks[trajectory.group, member][1]:
                member = forks[trajectory.group, member][0]
            found.append((trajectory.group, member, number))
    return found
