"""Exact match and F1 of question answering, as Search-R1 (verl/utils/reward_score/qa_em.py) and FlashRAG
(flashrag/evaluator/metrics.py) define it, with their empty-string matches mended."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_YES_NO = frozenset({"yes", "no", "noanswer"})


@lru_cache(maxsize=64)  # one prediction is compared with many golds, by several scores
def normalize_answer(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and the words a, an, the, with single spaces. Accents
    stay.

    Punctuation is deleted, not replaced by a space, and only ASCII counts:

    >>> normalize_answer(" The  A-ha's “Take on Me” ")
    'ahas “take on me”'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def exact_match(prediction: str | None, golds: Iterable[str]) -> float:
    """Return 1.0 if the normalised prediction equals a normalised gold answer, else 0.0.

    A gold answer that normalisation empties ("The The") is compared as it is written, so an empty prediction never
    matches. A missing answer and an empty list of golds return 0.0.
    """
    if prediction is None:
        return 0.0
    return float(any(_equal(prediction, gold) for gold in golds))


def _equal(prediction: str, gold: str) -> bool:
    wanted = normalize_answer(gold)
    if wanted:
        return normalize_answer(prediction) == wanted
    wanted = gold.strip().lower()
    return bool(wanted) and prediction.strip().lower() == wanted


def sub_exact_match(text: str | None, golds: Iterable[str]) -> float:
    """Return 1.0 if the normalised text contains a normalised gold answer, also inside a word, else 0.0 (Search-R1's
    subEM).

    A gold answer that normalisation empties ("The The") matches no text. A missing answer and an empty list of golds
    return 0.0.
    """
    if text is None:
        return 0.0
    haystack = normalize_answer(text)
    return float(any(needle in haystack for needle in map(normalize_answer, golds) if needle))


def f1(prediction: str | None, golds: Iterable[str]) -> float:
    """Return the highest token F1 of a prediction over the gold answers, after normalisation (FlashRAG), in [0, 1].

    If either side is yes, no or noanswer, only equality scores.
    """
    if prediction is None:
        return 0.0
    said = normalize_answer(prediction)
    counts = Counter(said.split())

    def score(gold: str) -> float:
        wanted = normalize_answer(gold)
        if said != wanted and (said in _YES_NO or wanted in _YES_NO):
            return 0.0
        return token_f1(counts, Counter(wanted.split())) if wanted.split() else float(_equal(prediction, gold))

    return max(map(score, golds), default=0.0)


def token_f1(said: Counter[str], wanted: Counter[str]) -> float:
    """Return F1 = 2 precision recall / (precision + recall) of the tokens that two texts share, in [0, 1]; 0 without
    one."""
    common = (said & wanted).total()
    if not common:
        return 0.0
    precision, recall = common / said.total(), common / wanted.total()
    return 2 * precision * recall / (precision + recall)
