"""Rewards of question answering: the parsed answer against the gold answers."""

from __future__ import annotations

from dataclasses import replace

from common.ranges import FiniteFloat, PositiveFloat
from rollout.rewards.scoring import exact_match, f1, normalize_answer, sub_exact_match
from rollout.tags import between
from rollout.tokenizer import decode, load_tokenizer
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


class SearchR1ReleasedAnswers:
    """Answers as Search-R1's released scorer finds them (verl/utils/reward_score/qa_em.py), for ``Evaluation.answers``:
    the last ``<answer>`` pair of prompt and response as text, whoever wrote it, from two pairs on. A pair begins at the
    first ``<answer>``, so that one which an earlier turn mentions swallows all up to the answer; without an answer the
    published prompt's example is taken; a passage that quotes an answer pays where none follows.

    Args:
        tokenizer: Hugging Face folder, to read prompt and response.
    """

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = load_tokenizer(tokenizer)

    def score(self, trajectory: Trajectory) -> tuple[str | None, dict[str, float]]:
        """(answer, its ``answer_parts``); em is 1 of two texts of which nothing is left, too ("the" for "The The")."""
        ids = [*trajectory.prompt_ids, *trajectory.response_ids]
        pairs = between(decode(self.tokenizer, ids), "<answer>", "</answer>")
        answer = pairs[-1].strip() if len(pairs) > 1 else None
        golds = map(normalize_answer, trajectory.task.golden_answers)
        equal = answer is not None and normalize_answer(answer) in golds
        return answer, answer_parts(replace(trajectory, answer=answer)) | {"em": float(equal)}


class SearchR1ReleasedReward:
    """1 or 0 for exact match with the answer that ``SearchR1ReleasedAnswers`` finds: as released, training is paid by
    the same text.

    Args:
        tokenizer: Hugging Face folder.
    """

    def __init__(self, tokenizer: str) -> None:
        self.answers = SearchR1ReleasedAnswers(tokenizer)

    def score(self, trajectory: Trajectory) -> Reward:
        _, parts = self.answers.score(trajectory)
        return Reward(parts["em"], parts)
