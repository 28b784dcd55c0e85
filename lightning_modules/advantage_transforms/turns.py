"""Advantages by turn, as verl-agent computes them on episodes: EpisodeGRPO and GiGPO (docs/algorithms/grpo.md)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.ranges import NonNegativeFloat, UnitInterval
from lightning_modules.advantage_transforms.base import (
    AdvantageTransform,
    Algorithm,
    RolloutBatch,
    plays_programs,
    validate_choice,
)
from lightning_modules.advantage_transforms.distillation import spread_turns, turn_index, turn_starts
from lightning_modules.batch import TokenBatch
from lightning_modules.maths.turn_advantages import (
    Statistics,
    TurnNorm,
    gigpo_advantages,
    similar_states,
    turn_advantages,
)
from rollout.trajectory import ActionKind, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A turn with at least one sampled token, and its place in the batch and in its episode."""

    row: int  # of the batch
    column: int | None  # its number among the row's turns with the policy's tokens, from 0; None for a guide's turn
    number: int  # its number among all turns of the episode, from 0
    turn: Turn
    episode: Trajectory

    @property
    def invalid(self) -> bool:
        """Whether the turn's action breaks the protocol's format. As released, an inadmissible action is valid."""
        return self.turn.action.kind is ActionKind.INVALID or not self.turn.action.well_formed

    @property
    def reward(self) -> float:
        """The environment's reward for this turn; for the last turn, plus all reward that came afterwards."""
        if self.number < len(self.episode.turns) - 1 or self.episode.reward is None:
            return self.turn.reward
        return self.episode.reward.total - sum(turn.reward for turn in self.episode.turns[:-1])

    @property
    def anchor(self) -> str:
        """The environment's text before this turn, without history: the state by which GiGPO compares turns."""
        if self.number == 0:
            return self.episode.task.question
        before = [call.result.text for call in self.episode.calls if call.turn == self.number - 1]
        if not before:  # no call: the model read a correction, not a state of the environment
            return f"{self.episode.index}: after invalid turn {self.number}"
        return "\n".join(before)


def turns_by_row(trajectories: Sequence[Trajectory]) -> Iterator[TurnRow]:
    """Yield a ``TurnRow`` for each turn with tokens, row by row. A row is a trajectory or some of its turns."""
    for row, t in enumerate(trajectories):
        columns = itertools.count()
        for k, turn in enumerate(t.turns):
            if turn.end > turn.start:
                yield TurnRow(row, None if turn.guided else next(columns), k + (t.row or 0), turn, t.episode or t)


def turn_numbers(trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor:
    """Return the number of each token's turn in its episode, from 1 [B, T] int64; 0 where the mask is 0."""
    index = turn_index(batch.mask, turn_starts(trajectories, batch))
    numbers = torch.zeros((len(trajectories), int(index.max()) + 1 if index.numel() else 1), dtype=torch.int64)
    for turn in turns_by_row(trajectories):
        if turn.column is not None:
            numbers[turn.row, turn.column + 1] = turn.number + 1
    return numbers.to(index.device).gather(1, index)


class TurnAdvantages(AdvantageTransform):
    """Replaces the advantages of whole trajectories by one advantage per turn::

        score = return of the episode - invalid_coef [the turn's action was invalid]
        A     = (score - mean) / (unbiased std + 1e-6)        of its group; the same on every token of the turn

    The advantages are the same whether every turn has its own prompt (a row each, as published) or all turns are one
    conversation.

    A guide's turns are compared like the others and get no advantage.

    Logged: ``train/invalid_actions`` (share of the policy's turns).

    Args:
        group_statistics: mean and std over ``rows`` (all turns of the group, so long trajectories weigh more: as
            released) or ``trajectories`` (each weighs 1).
        invalid_coef: penalty of a turn for an invalid action, in units of the reward (published: 0.1 household and
            shopping, 0.01 search).
    """

    needs_groups = True
    replaces_credit = True
    reads_old_logprobs = False

    def __init__(self, group_statistics: Statistics = "rows", invalid_coef: NonNegativeFloat = 0.0) -> None:
        self.group_statistics: Statistics = validate_choice("group_statistics", group_statistics, Statistics)
        self.invalid_coef = invalid_coef

    def check(self, algorithm: Algorithm) -> None:
        if algorithm.advantage != "std":
            raise ValueError(f"advantage is {algorithm.advantage!r}; turns are compared by std, see group_statistics")

    def assign_credit(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        trajectories, tokens = batch.trajectories, batch.tokens
        turns = list(turns_by_row(trajectories))
        invalid = torch.tensor([float(turn.invalid) for turn in turns])
        own = [i for i, turn in enumerate(turns) if turn.column is not None]
        batch.algorithm.metrics.mean("train/invalid_actions", invalid[own].sum(), len(own))
        values = self.turn_values(batch.algorithm, turns, self.invalid_coef * invalid)[own]
        index = turn_index(tokens.mask, turn_starts(trajectories, tokens))
        table = torch.zeros((len(trajectories), int(index.max()) if index.numel() else 0))
        places = torch.tensor([(turns[i].row, turns[i].column) for i in own], dtype=torch.int64).reshape(-1, 2)
        table[places[:, 0], places[:, 1]] = values.float()
        return spread_turns(table.to(tokens.mask.device), index) * tokens.mask

    def turn_values(self, algorithm: Algorithm, turns: Sequence[TurnRow], penalties: Tensor) -> Tensor:
        """Return the advantage of each turn [R]. Override this method for another comparison."""
        rewards = [turn.episode.reward.total for turn in turns if turn.episode.reward is not None]
        returns = torch.tensor(rewards, dtype=torch.float64)  # whole numbers would become integers
        groups = [turn.episode.group for turn in turns]
        members = [turn.episode.index for turn in turns]
        return turn_advantages(
            returns, penalties, groups, members, self.group_statistics, singleton=algorithm.singleton_advantage
        )


class StateAdvantages(TurnAdvantages):
    """Compares each turn with its group, and with the group's other turns from the same state. This is GiGPO (arXiv
    2505.10978), see ``turn_advantages.gigpo_advantages``.

    Also logged: ``train/states_met_again`` (share of turns whose state another turn of the group shares).

    Args:
        group_statistics: see ``TurnAdvantages``.
        invalid_coef: see ``TurnAdvantages``.
        turn_weight: weight of the comparison by state (published: 1).
        gamma: discount per turn of later rewards (published: 0.95).
        turn_norm: mean_norm (no std) or mean_std_norm; also applies to the episode's advantage.
        similarity: difflib ratio from which two states count as equal; 1 for equal texts (verl-agent's search script:
            0.9), see ``turn_advantages.similar_states``.
    """

    def __init__(
        self,
        group_statistics: Statistics = "rows",
        invalid_coef: NonNegativeFloat = 0.0,
        turn_weight: NonNegativeFloat = 1.0,
        gamma: UnitInterval = 0.95,
        turn_norm: TurnNorm = "mean_norm",
        similarity: UnitInterval = 1.0,
    ) -> None:
        super().__init__(group_statistics, invalid_coef)
        self.turn_weight, self.gamma = turn_weight, gamma
        self.turn_norm: TurnNorm = validate_choice("turn_norm", turn_norm, TurnNorm)
        self.similarity = similarity

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        """Refuse agent programs, whose turns have no states of an environment."""
        super().check_data(algorithm, data)
        if plays_programs(data):
            raise ValueError("GiGPO compares states of an environment, which a program does not have; take GRPO")

    def turn_values(self, algorithm: Algorithm, turns: Sequence[TurnRow], penalties: Tensor) -> Tensor:
        groups = [turn.episode.group for turn in turns]
        members, numbers = [turn.episode.index for turn in turns], [turn.number for turn in turns]
        anchors: Sequence[str | int] = [turn.anchor for turn in turns]
        if self.similarity < 1:
            anchors = similar_states([turn.anchor for turn in turns], groups, members, numbers, self.similarity)
        states = list(zip(groups, anchors, strict=True))
        met = Counter(states)
        algorithm.metrics.mean("train/states_met_again", sum(met[s] > 1 for s in states), len(states))
        return gigpo_advantages(
            torch.tensor([turn.reward for turn in turns], dtype=torch.float64),
            penalties,
            groups,
            members,
            numbers,
            anchors,
            self.turn_weight,
            self.gamma,
            self.turn_norm,
            self.group_statistics,
            singleton=algorithm.singleton_advantage,
        )
