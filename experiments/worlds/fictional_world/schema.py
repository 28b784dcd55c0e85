"""Word pools, kinds of entities, relations and quantities of the fictional world. The words are in ``schema.json``.

Names combine words of a small pool, each one token, and entities share words. So retrieval must distinguish similar
entities, while a tiny model copies only two or three tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter


class Kind(StrEnum):
    PERSON = "person"
    TOWN = "town"
    COMPANY = "company"
    BOOK = "book"
    FESTIVAL = "festival"


@dataclass(frozen=True, slots=True)
class Relation:
    """A functional relation ``subject -> object`` between two kinds of entities, such as a town and a person.

    Passages name it only by ``keyword``, and no entry of ``phrases`` contains that word. So a query that repeats the
    question finds the wrong passage, and the agent must rewrite it.
    """

    keyword: str
    subject: Kind
    object: Kind
    phrases: tuple[str, ...]  # noun phrases with {x} for the subject


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number that every entity of a kind has. As with ``Relation``, no phrase of a question contains the keyword
    under which passages name the number."""

    keyword: str
    kind: Kind
    phrases: tuple[str, ...]  # noun phrases with {x} for the entity


_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

WORDS: dict[str, list[str]] = _TABLES["words"]  # parts of names
RELATIONS = TypeAdapter(tuple[Relation, ...]).validate_python(_TABLES["relations"])
RELATIONS_OF: dict[Kind, tuple[Relation, ...]] = {
    kind: tuple(r for r in RELATIONS if r.subject is kind) for kind in Kind
}
QUANTITIES = TypeAdapter(tuple[Quantity, ...]).validate_python(_TABLES["quantities"])
QUANTITIES_OF: dict[Kind, tuple[Quantity, ...]] = {
    kind: tuple(q for q in QUANTITIES if q.kind is kind) for kind in Kind
}
