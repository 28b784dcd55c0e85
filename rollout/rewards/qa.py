"""Rewards of question answering: compare the parsed answer with the gold answers."""

from __future__ import annotations

from dataclasses import replace

from common.ranges import FiniteFloat, PositiveFloat
from rollout.rewards.scoring import exact_match, f1, normalize_answer, sub_exact_match
from rollout.tags import between
from rollout.tokenizer import decode, load_tokenizer
from rollout.trajectory import Reward, Trajectory


def answer_parts(trajectory: Trajectory) -> dict[str, float]:
    """Return the scores of a trajectory's answer: em, f1, sub_em and answered (1.0 with an answer), each in [0, 1].
    ``Trajectory.answer`` is read from sampled tokens only, so an answer in a retrieved passage never scores."""
    golds, answer = trajectory.task.golden_answers, trajectory.answer
    return {
        "em": exact_match(answer, golds),
        "f1": f1(answer, golds),
        "sub_em": sub_exact_match(answer, golds),
        "answered": float(answer is not None),
    }


class ExactMatchReward:
    """Reward for exact match: ``score`` for a correct answer, ``format_score`` for any other answer, 0 for no answer.

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
    """Reward of the answer's token F1; 0 without an answer."""

    def score(self, trajectory: Trajectory) -> Reward:
        parts = answer_parts(trajectory)
        return Reward(parts["f1"], parts)


class SearchR1ReleasedAnswers:
    """Finds answers as Search-R1's released scorer does (verl/utils/reward_score/qa_em.py), for ``Evaluation.answers``.

    It takes the last ``<answer>`` pair in the text of prompt and response, whoever wrote it, if there are at least two.
    A pair begins at the first ``<answer>``, so a tag that an earlier turn mentions swallows all text up to the answer.
    Without an answer, the published prompt's example or a quoted answer in a passage counts.

    Args:
        tokenizer: Hugging Face folder, to read prompt and response.
    """

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = load_tokenizer(tokenizer)

    def score(self, trajectory: Trajectory) -> tuple[str | None, dict[str, float]]:
        """Return the answer's text and its scores (``answer_parts``). em is also 1 for two texts that normalisation
        empties."""
        ids = [*trajectory.prompt_ids, *trajectory.response_ids]
        pairs = between(decode(self.tokenizer, ids), "<answer>", "</answer>")
        answer = pairs[-1].strip() if len(pairs) > 1 else None
        golds = map(normalize_answer, trajectory.task.golden_answers)
        equal = answer is not None and normalize_answer(answer) in golds
        return answer, answer_parts(replace(trajectory, answer=answer)) | {"em": float(equal)}


class SearchR1ReleasedReward:
    """Reward of 1 or 0 for exact match with the answer that ``SearchR1ReleasedAnswers`` finds, as in the released
    training.

    Args:
        tokenizer: Hugging Face folder.
    """

    def __init__(self, tokenizer: str) -> None:
        self.answers = SearchR1ReleasedAnswers(tokenizer)

    def score(self, trajectory: Trajectory) -> Reward:
        _, parts = self.answers.score(trajectory)
        return Reward(parts["em"], parts)
