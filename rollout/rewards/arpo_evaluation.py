r"""Answers as ARPO's released evaluation reads and scores them (RUC-NLPIR/ARPO, evaluation/src: utils.py, evaluator.py,
metrics.py; docs/papers/arpo.md section 7)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from retrieval.ranges import PositiveFloat
from rollout.protocols.boxed import boxed
from rollout.rewards.arpo import is_math
from rollout.rewards.mathematics import DEADLINE_SECONDS, math_equal
from rollout.tokenizer import load_tokenizer

LAST_LINES = 5
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def released_answer(response: str) -> str | None:
    r"""What the released evaluation takes for the answer of a whole response; None only if the response is blank.

    The last ``<answer>`` block's last ``\boxed{}``, or all of the block; without a block the last box of the response;
    without either, or where it is empty, the response's last five lines, empty ones not counted. ``\text{}`` is taken
    off inside of a box. Blocks and boxes that a tool returned count like the model's own, so that a program which
    prints one after the model's answer, or without any, is paid for it.

    >>> released_answer(r"<answer> It is \boxed{\text{Grey} Harbor} </answer>"), released_answer("no idea\n\nnone\n")
    ('Grey Harbor', 'no idea\nnone')
    """
    blocks = _ANSWER.findall(response)
    content = boxed(blocks[-1] if blocks else response)
    found = "" if content is None else _TEXT.sub(r"\1", content)
    if blocks and content is None:
        found = blocks[-1]
    if not found.strip():
        found = "\n".join(response.replace("\n\n", "\n").strip().split("\n")[-LAST_LINES:])
    return found.strip() or None


def released_f1(answer: str, golds: Iterable[str], articles: bool = False) -> float:
    """Highest F1 over the golds of the words between spaces, in lower case and with their punctuation: "Paris." is not
    "Paris". ``articles``: a, an and the count, too (mathematics)."""
    said = Counter(_words(answer, articles))
    best = 0.0
    for gold in golds:
        wanted = Counter(_words(gold, articles))
        common = (said & wanted).total()
        if common:
            precision, recall = common / said.total(), common / wanted.total()
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def _words(text: str, articles: bool) -> list[str]:
    text = text.lower().strip()
    return (text if articles else _ARTICLES.sub(" ", text)).split()


class ArpoReleasedAnswers:
    """The released evaluation's answers and scores, for ``Evaluation.answers``: ``released_answer``, ``released_f1``,
    and an exact match that keeps punctuation, too. Mathematics is math-verify's (released: MATH's comparison of
    strings, which is stricter).

    Args:
        tokenizer: Hugging Face folder, to read the response.
        math_timeout_s: see ``mathematics.math_equal``.
    """

    def __init__(self, tokenizer: str, math_timeout_s: PositiveFloat = DEADLINE_SECONDS) -> None:
        self.tokenizer, self.math_timeout_s = load_tokenizer(tokenizer), math_timeout_s

    def score(self, trajectory: Any) -> Any:
        """(answer, {em, f1 and, of a mathematical task, math}) of a ``Trajectory`` (``evaluation.AnswersProtocol``)."""
        task, math = trajectory.task, is_math(trajectory.task)
        response = self.tokenizer.decode(
            list(trajectory.response_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        answer = released_answer(response)
        said = answer or ""
        words = _words(said, math)
        parts = {
            "em": float(bool(words) and any(words == _words(gold, math) for gold in task.golden_answers)),
            "f1": released_f1(said, task.golden_answers, math),
        }
        if math:
            parts["math"] = float(math_equal(answer, task.golden_answers, self.math_timeout_s))
        return answer, parts
