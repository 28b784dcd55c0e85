"""Names of the known evaluation sets, and references to them as ``name:path``. Imports no data library."""

from __future__ import annotations

# Name -> the published field of the question, in ARPO's and SOD's evaluation files.
BENCHMARKS = {
    "aime24": "question",
    "aime25": "problem",
    "math500": "question",
    "gsm8k": "question",
    "math": "problem",
    "webwalker": "question",
    "hotpotqa": "question",
    "2wiki": "question",
    "bamboogle": "question",
    "musique": "question",
    "hle": "question",
    "gaia": "Question",
    "simpleqa": "question",
    "xbench": "question",
    "gpqa_diamond": "problem",
    "livecodebench_v6": "problem",
}


def split_reference(text: str) -> tuple[str | None, str]:
    """Split a reference such as "gsm8k:data/gsm8k.jsonl" into (name, path). A text without a known evaluation set
    before a colon becomes (None, text).

    >>> split_reference("gsm8k:data/gsm8k.jsonl")
    ('gsm8k', 'data/gsm8k.jsonl')
    >>> split_reference("data/train.parquet")
    (None, 'data/train.parquet')
    """
    name, colon, path = text.partition(":")
    return (name, path) if colon and path and name in BENCHMARKS else (None, text)
