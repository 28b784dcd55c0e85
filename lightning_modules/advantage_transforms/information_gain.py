"""IGPO: a turn's reward is how much likelier the right answer became by what it found (arXiv 2510.14967)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from common.ranges import UnitInterval
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
from lightning_modules.advantage_transforms.teacher_prompts import positions_of
from lightning_modules.batch import token_batch
from lightning_modules.maths.turn_advantages import Pool, information_gain_advantages

if TYPE_CHECKING:
    from rollout.trajectory import Task, Trajectory

Gain = Literal["log_prob", "prob"]


class InformationGain(AdvantageTransform):
    """Replaces the advantages of whole trajectories by IGPO's advantage of each turn
    (``turn_advantages.information_gain_advantages``)::

        r_k = v(h_k) - v(h_k-1) for all turns but the last, whose reward is the trajectory's
        v(h) = mean over the gold answer's tokens of log p(token | h, opening), or its exponential

    h_0 is the prompt, h_k ends with what turn k read. The policy reads the gold answer after each h; it is the policy
    before the update, without gradient. A task without a golden answer has no gains, nor has a trajectory that would
    exceed the model's positions with it: its outcome alone counts.

    Costs a forward pass over the prompt and over every beginning of each trajectory.

    Logged: ``train/information_gain`` (mean over turns that have a gain), ``train/gold_logprob/turn<k>`` (mean v as
    log-prob after turn k, from 0, the prompt, to 7).

    Args:
        gain: differences of log_prob (the released script) or prob (the paper's first version).
        pool: separate or joint, see ``information_gain_advantages``.
        gamma: discount per turn.
        opening: text before the gold answer, as the model would begin its answer.
        closing: text after it.
    """

    needs_outcome = needs_groups = True
    replaces_credit = True
    reads_old_logprobs = False
    SHOWN = 8

    def __init__(
        self,
        gain: Gain = "log_prob",
        pool: Pool = "separate",
        gamma: UnitInterval = 1.0,
        opening: str = "<answer>",
        closing: str = "</answer>",
    ) -> None:
        self.gain: Gain = validate_choice("gain", gain, Gain)
        self.pool: Pool = validate_choice("pool", pool, Pool)
        self.gamma, self.opening, self.closing = gamma, opening, closing

    def check(self, algorithm: Algorithm) -> None:
        check_defaults(algorithm, type(self).__name__)

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        """Refuse rows that are single turns, and questions that have no answer."""
        if per_turn_prompts(data) or plays_programs(data):
            raise ValueError(
                "InformationGain compares the turns of one conversation, but every turn or conversation has its own "
                "prompt; take window: null, or TurnAdvantages"
            )
        if getattr(getattr(data, "rollouts", None), "protocol", None) is None:
            raise ValueError("InformationGain needs the tokenizer of a rollout system; train with a RolloutDataModule")
        questions = getattr(data, "training_questions", None)
        if questions is not None and not any(_gold(task) for task in questions):
            raise ValueError("no training question has a golden answer, so that InformationGain has nothing to measure")

    def assign_credit(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        trajectories, tokens, metrics = batch.trajectories, batch.tokens, batch.algorithm.metrics
        values = self.gold_logprobs(batch.algorithm, trajectories, tokens.mask.device)
        gains: list[list[float] | list[None]] = []
        known: list[float] = []
        for t, found in zip(trajectories, values, strict=True):
            shown = found if self.gain == "log_prob" else [math.exp(v) for v in found]
            own = [after - before for before, after in zip(shown, shown[1:], strict=False)]
            known += own
            gains.append(own or [None] * (len(_turns(t)) - 1))
        for k in range(self.SHOWN):
            reached = [found[k] for found in values if len(found) > k]
            metrics.mean(f"train/gold_logprob/turn{k}", sum(reached), len(reached))
        metrics.mean("train/information_gain", sum(known), len(known))
        outcomes = [t.reward.total for t in trajectories if t.reward is not None]
        groups = [t.group for t in trajectories]
        by_turn = information_gain_advantages(gains, outcomes, groups, self.gamma, self.pool)
        return spread_by_row(by_turn, trajectories, tokens)

    def gold_logprobs(
        self, algorithm: Algorithm, trajectories: Sequence[Trajectory], device: torch.device
    ) -> list[list[float]]:
        """Return for each trajectory the mean log-prob of the gold answer's tokens after the prompt, and after every
        turn but the last; nothing for a task without a golden answer. Every rank must call."""
        tokenizer, limit = algorithm.data.rollouts.protocol.tokenizer, positions_of(algorithm)
        rows: dict[tuple[tuple[int, ...], str], tuple[Sequence[int], Sequence[int], Sequence[float]]] = {}
        wanted: list[list[tuple[tuple[int, ...], str]]] = []
        for t in trajectories:
            gold, keys = _gold(t.task), []
            ends = [0, *(turn.observation_end for turn in _turns(t)[:-1])] if gold else []
            answer = self._answer(tokenizer, gold)
            longest = len(t.prompt_ids) + max(ends, default=0) + len(answer[0])
            if limit is not None and longest > limit:
                ends = []
            for end in ends:
                before = (*t.prompt_ids, *t.response_ids[:end])
                keys.append((before, gold))
                rows[before, gold] = (before, *answer)
            wanted.append(keys)
        read = token_batch([*rows.values()], device)
        logprobs = algorithm.logprobs_of(algorithm.policy, read)
        means = (logprobs.sum(1) / read.mask.sum(1).clamp(min=1.0)).tolist()
        found = dict(zip(rows, means, strict=True))
        return [[found[key] for key in keys] for keys in wanted]

    def _answer(self, tokenizer: Any, gold: str) -> tuple[list[int], list[float]]:
        """Return the ids of an answer in its frame, and a mask of those that hold characters of the answer itself."""
        text = self.opening + gold + self.closing
        read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        first, last = len(self.opening), len(self.opening) + len(gold)
        return read["input_ids"], [float(start < last and end > first) for start, end in read["offset_mapping"]]


def _gold(task: Task) -> str:
    return next((answer.strip() for answer in task.golden_answers if answer.strip()), "")


def _turns(trajectory: Trajectory) -> list[Any]:
    return [turn for turn in trajectory.turns if turn.end > turn.start]
