"""Rewards of question answering: the parsed answer against the gold answers."""

from __future__ import annotations

from retrieval.ranges import FiniteFloat, PositiveFloat
from rollout.rewards.scoring import exact_match, f1, sub_exact_match
from rollout.trajectory import Reward, Trajectory


def answer_parts(trajectory: Trajectory) -> dict[str, float]:
    """em, f1, sub_em and answered (1.0 if there was an answer at all), each in [0, 1]. ``Trajectory.answer`` comes from
    sampled tokens only, so an answer that stood in a retrieved passage is never scored."""
    golds, answer = trajectory.task.golden_answers, trajectory.answer
    return {
        "em": exact_match(answer, golds),
        "f1": f1(answer, golds),
        "sub_em": sub_exact_match(answer, golds),
        "answered": float(answer is not None),
    }


class ExactMatchReward:
    """``score`` for a correct answer, ``format_score`` for any other answer, 0 for none.

    DGPO and Search-R1 use 1 and 0 (verl/trainer/main_ppo.py).
    """

    def __init__(self, score: PositiveFloat = 1.0, format_score: FiniteFloat = 0.0) -> None:
        self.correct, self.format_score = score, format_score

    def score(self, trajectory: Trajectory) -> Reward:
        parts = answer_parts(trajectory)
        if parts["em"]:
            return Reward(self.correct, parts)
        return Reward(self.format_score if parts["answered"] else 0.0, parts)


class F1Reward:
    """Token F1 of the answer, 0 without one."""

    def score(self, trajectory: Trajectory) -> Reward:
        parts = answer_parts(trajectory)
        return Reward(parts["f1"], parts)
