"""Reads the paragraphs with the answer from the ``metadata`` of published multi-hop questions.

=========  ===========================================================================================
set        where (FlashRAG's files, which Search-R1's are made of; docs/algorithms/dgpo.md)
=========  ===========================================================================================
HotpotQA   supporting_facts {title, sent_id} of context {title, sentences}
2Wiki      supporting_facts {title, sent_id} of context {title, content}
MuSiQue    question_decomposition [{support_paragraph {title, paragraph_text}}], or one level deeper
=========  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Passages = tuple[tuple[str, str], ...]  # (title, text) per hop, in order
NOT_THERE = "supporting paragraphs that are not among those of the question"


class NoParagraphs(ValueError):
    """A question's row names supporting paragraphs, but some of them have no text."""


def gold_paragraphs(metadata: Any) -> Passages:
    """Return the supporting paragraphs that a question's metadata names, as (title, text), each once, in order. () if
    it names none.

    Raises NoParagraphs.
    """
    if not isinstance(metadata, Mapping):
        return ()
    inner = metadata.get("metadata")
    if isinstance(inner, Mapping):  # MuSiQue's, in some files
        metadata = {**metadata, **inner}
    if metadata.get("question_decomposition"):
        return _of_hops(metadata["question_decomposition"])
    facts, context = metadata.get("supporting_facts"), metadata.get("context")
    if isinstance(facts, Mapping) and isinstance(context, Mapping) and facts.get("title"):
        return _of_facts(facts["title"], context)
    return ()


def _of_hops(hops: Any) -> Passages:
    if not isinstance(hops, list):
        raise NoParagraphs(NOT_THERE)
    found = [(hop.get("support_paragraph") or {}) if isinstance(hop, Mapping) else {} for hop in hops]
    return _checked([(p.get("title"), p.get("paragraph_text")) for p in found])


def _of_facts(titles: Any, context: Mapping[str, Any]) -> Passages:
    sentences = context.get("sentences") or context.get("content") or ()
    texts = {title: _joined(part) for title, part in zip(context.get("title") or (), sentences, strict=False)}
    return _checked([(title, texts.get(title)) for title in titles])


def _joined(sentences: Any) -> str:
    return " ".join(str(s).strip() for s in sentences if s) if isinstance(sentences, list) else str(sentences or "")


def _checked(pairs: list[tuple[Any, Any]]) -> Passages:
    if not all(isinstance(title, str) and isinstance(text, str) and text.strip() for title, text in pairs):
        raise NoParagraphs(NOT_THERE)
    return tuple(dict.fromkeys((title.strip(), text.strip()) for title, text in pairs))
