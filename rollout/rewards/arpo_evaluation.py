r"""Reads and scores answers as ARPO's released evaluation does (RUC-NLPIR/ARPO, evaluation/src: utils.py, evaluator.py,
metrics.py; docs/algorithms/arpo.md)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from common.ranges import PositiveFloat
from rollout.rewards.arpo import is_math
from rollout.rewards.mathematics import DEADLINE_SECONDS, math_equal
from rollout.rewards.scoring import token_f1
from rollout.tags import closing_brace
from rollout.tokenizer import decode, load_tokenizer

LAST_LINES = 5
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def released_answer(response: str) -> str | None:
    r"""Return the answer that ARPO's released evaluation takes from a whole response, or None only for a blank
    response.

    It is the last box of the last ``<answer>`` block, or the whole block if the box is missing or empty. Without a
    block, or with an empty one, it is the last box of the response. Without a box it is the last five lines that are
    not empty. Blocks and boxes in tool results count like the model's.

    >>> released_answer(r"<answer> It is \boxed{\text{Grey Harbor}} </answer>"), released_answer("no idea\n\nnone\n")
    ('Grey Harbor', 'no idea\nnone')
    """
    before, _, _ = response.rpartition("</answer>")
    _, opened, block = before.rpartition("<answer>")
    found = _last_box(block.strip()) or block if opened and block else _last_box(response.strip())
    if not found:
        found = "\n".join(response.replace("\n\n", "\n").strip().split("\n")[-LAST_LINES:]) or None
    return found and found.strip()


def _last_box(text: str) -> str:
    r"""Return the content of the last ``\boxed{}`` without a ``\text{}`` around it; "" without a box. A box without
    braces (``\boxed 12``), an unclosed one, and the last ``\fbox`` of a text without ``\boxed`` keep their command and
    end at the next closing brace or the end."""
    start = text.rfind("\\boxed" if "\\boxed" in text else "\\fbox")
    box = text[start:] if start >= 0 else ""
    end = closing_brace(box)
    box = box if end is None else box[: end + 1]
    for command in ("\\boxed{", "\\text{"):
        if not (box.startswith(command) and box.endswith("}")):
            break
        box = box[len(command) : -1]
    return box


def released_f1(answer: str, golds: Iterable[str], articles: bool = False) -> float:
    """Return an answer's highest word F1 over the gold answers. Words are in lower case and keep their punctuation:
    "Paris." is not "Paris".

    Args:
        articles: count a, an and the as words (mathematics).
    """
    said = Counter(_words(answer, articles))
    return max((token_f1(said, Counter(_words(gold, articles))) for gold in golds), default=0.0)


def _words(text: str, articles: bool) -> list[str]:
    text = text.lower().strip()
    return (text if articles else _ARTICLES.sub(" ", text)).split()


class ArpoReleasedAnswers:
    """Scores trajectories as ARPO's released evaluation does, for ``Evaluation.answers``. Uses ``released_answer``,
    ``released_f1``, and an exact match that keeps punctuation. Math-verify compares mathematics; the released code
    compares MATH's strings, which is stricter.

    Args:
        tokenizer: Hugging Face folder, to read the response.
        math_timeout_s: see ``mathematics.math_equal``.
    """

    def __init__(self, tokenizer: str, math_timeout_s: PositiveFloat = DEADLINE_SECONDS) -> None:
        self.tokenizer, self.math_timeout_s = load_tokenizer(tokenizer), math_timeout_s

    def score(self, trajectory: Any) -> Any:
        """Return (answer, {em, f1 and, for mathematics, math}) of a ``Trajectory`` (``evaluation.AnswersProtocol``)."""
        task, math = trajectory.task, is_math(trajectory.task)
        answer = released_answer(decode(self.tokenizer, trajectory.response_ids, skip_special=True))
        said = answer or ""
        words = _words(said, math)
        parts = {
            "em": float(answer is not None and any(words == _words(gold, math) for gold in task.golden_answers)),
            "f1": released_f1(said, task.golden_answers, math),
        }
        if math:
            parts["math"] = float(math_equal(answer, task.golden_answers, self.math_timeout_s))
        return answer, parts
