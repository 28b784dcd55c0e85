"""What is known about a world before the first action: skills, common mistakes, and which of them belong to which task.

Source of the form: SkillRL's skill banks (memory_data/*/claude_style_skills.json)::

    {"general_skills": [{"skill_id", "title", "principle", "when_to_apply"}],
     "task_specific_skills": {category: [the same]},
     "common_mistakes": [{"mistake_id", "description", "why_it_happens", "how_to_avoid"}],
     "metadata": {...}}

In ``metadata``, ``task_to_skill`` (task type or data source to category) and ``task_keywords`` (category or task type
to keywords) say what SDAR's skill_mapping.json says beside its Markdown files (``rollout/skills/markdown.py``).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GENERAL = "general_skills"
SPECIFIC = "task_specific_skills"
MISTAKES = "common_mistakes"
METADATA = "metadata"
TASK_TO_SKILL = "task_to_skill"
TASK_KEYWORDS = "task_keywords"
_CATEGORY = re.compile(r"[A-Za-z0-9_-]+")


class SkillBankError(ValueError):
    """A skill bank cannot be used as it is. The message names the file and the place in it."""


@dataclass(frozen=True, slots=True)
class Skill:
    """One rule, and when it holds."""

    id: str  # "gen_001"
    title: str
    principle: str
    when_to_apply: str  # completes "Apply this ...": "when the microwave is in sight"

    @property
    def text(self) -> str:
        """Title, principle and occasion in one line, as an encoder reads them."""
        return f"{self.title}. {self.principle} {self.when_to_apply}"


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something that agents do wrong, and what to do instead."""

    id: str  # "err_001"
    description: str
    why_it_happens: str
    how_to_avoid: str


# In SkillRL's files the id has another name; all keys are needed, and no others are known.
_KEYS: dict[type, dict[str, str]] = {
    Skill: {"skill_id": "id", "title": "title", "principle": "principle", "when_to_apply": "when_to_apply"},
    Mistake: {
        "mistake_id": "id",
        "description": "description",
        "why_it_happens": "why_it_happens",
        "how_to_avoid": "how_to_avoid",
    },
}


@dataclass(frozen=True, slots=True)
class SkillBank:
    """Skills that always hold, skills by category of task, and mistakes.

    Raises:
        SkillBankError: on construction, for a doubled id, an empty text or one that is no UTF-8, a category whose name
            is no plain word, or a mapping of a nameless task or to a category that is not there.
    """

    general: tuple[Skill, ...]
    by_category: dict[str, tuple[Skill, ...]]
    mistakes: tuple[Mistake, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, skills in self.by_category.items():
            if not _CATEGORY.fullmatch(name) or name == GENERAL:
                raise SkillBankError(f"category {name!r}: expected letters, digits, _ and -, and not {GENERAL!r}")
            if not skills:
                raise SkillBankError(f"category {name}: no skills; expected at least one, or no such category")
        places: dict[str, str] = {}
        for place, entry in self.entries():
            if entry.id in places:
                raise SkillBankError(f"{place}: the id {entry.id!r} is taken by {places[entry.id]}; ids are unique")
            places[entry.id] = place
        self._check_mapping()

    def entries(self) -> Iterator[tuple[str, Skill | Mistake]]:
        """(place, entry) of every skill and mistake, its texts checked."""
        sections: list[tuple[str, tuple[Skill, ...] | tuple[Mistake, ...]]] = [(GENERAL, self.general)]
        sections += [(f"{SPECIFIC}.{name}", skills) for name, skills in self.by_category.items()]
        for section, entries in [*sections, (MISTAKES, self.mistakes)]:
            for number, entry in enumerate(entries):
                place = f"{section}[{number}]"
                for key, name in _KEYS[type(entry)].items():
                    value = getattr(entry, name)
                    if not _is_text(value):
                        raise SkillBankError(f"{place}.{key}: expected a text that is not empty; found {value!r:.80}")
                yield place, entry

    def _check_mapping(self) -> None:
        mapping, keywords = self.metadata.get(TASK_TO_SKILL, {}), self.metadata.get(TASK_KEYWORDS, {})
        for name, value in ((TASK_TO_SKILL, mapping), (TASK_KEYWORDS, keywords)):
            if not isinstance(value, dict):
                raise SkillBankError(f"{METADATA}.{name}: expected an object; found {type(value).__name__}")
        for task, category in mapping.items():
            if not _is_text(task):  # it would be a part of every path
                raise SkillBankError(f"{METADATA}.{TASK_TO_SKILL}: a task type is {task!r}; expected a word")
            if not isinstance(category, str) or category not in self.by_category:
                raise SkillBankError(
                    f"{METADATA}.{TASK_TO_SKILL}.{task}: no category {category!r}; there are {sorted(self.by_category)}"
                )
        for name, words in keywords.items():
            place = f"{METADATA}.{TASK_KEYWORDS}.{name}"
            if self.category_of(name) is None:
                raise SkillBankError(
                    f"{place}: neither a category nor a task type of {TASK_TO_SKILL}; "
                    f"there are {sorted({*self.by_category, *mapping})}"
                )
            if not isinstance(words, list) or not all(map(_is_text, words)):  # " " stands in every text
                raise SkillBankError(f"{place}: expected a list of texts that are not empty; found {words!r}")

    @property
    def tasks(self) -> dict[str, str]:
        """Task type or data source to category, in the file's order."""
        return dict(self.metadata.get(TASK_TO_SKILL, {}))

    def category_of(self, task_type: str) -> str | None:
        """The category of a task type, by ``task_to_skill``; a category's own name is one too. None: unknown."""
        if task_type in self.tasks:
            return self.tasks[task_type]
        return task_type if task_type in self.by_category else None

    @property
    def keywords(self) -> dict[str, tuple[str, ...]]:
        """Keywords in lower case by category, in the order of ``task_keywords``; those without any are left out."""
        found: dict[str, list[str]] = {}
        for name, words in self.metadata.get(TASK_KEYWORDS, {}).items():
            found.setdefault(str(self.category_of(name)), []).extend(word.lower() for word in words)
        return {category: tuple(words) for category, words in found.items() if words}

    def to_json(self) -> dict[str, Any]:
        """SkillRL's form; ``from_json`` of it is the same bank."""
        values: dict[str, Any] = {
            GENERAL: [_as_object(skill) for skill in self.general],
            SPECIFIC: {name: [_as_object(skill) for skill in skills] for name, skills in self.by_category.items()},
            MISTAKES: [_as_object(mistake) for mistake in self.mistakes],
        }
        return values | ({METADATA: self.metadata} if self.metadata else {})

    @classmethod
    def from_json(cls, values: Any) -> SkillBank:
        """Raises SkillBankError that names the place."""
        if not isinstance(values, dict):
            raise SkillBankError(f"expected an object with {GENERAL}, {SPECIFIC}, {MISTAKES}; found {_kind(values)}")
        needed = {GENERAL, SPECIFIC, MISTAKES}
        if missing := sorted(needed - values.keys()):
            raise SkillBankError(f"missing {missing}; expected {sorted(needed)}, and {METADATA} if there is any")
        if unknown := sorted(values.keys() - needed - {METADATA}):
            raise SkillBankError(f"unknown {unknown}; expected {sorted({*needed, METADATA})}")
        for name, kind in ((SPECIFIC, dict), (METADATA, dict)):
            if not isinstance(values.get(name, {}), kind):
                raise SkillBankError(f"{name}: expected an object; found {_kind(values[name])}")
        return cls(
            _read_entries(Skill, values[GENERAL], GENERAL),
            {
                name: _read_entries(Skill, skills, f"{SPECIFIC}.{name}")
                for name, skills in values[SPECIFIC].items()
            },
            _read_entries(Mistake, values[MISTAKES], MISTAKES),
            values.get(METADATA, {}),
        )


def read_json(path: Path) -> Any:
    """Raises SkillBankError (without the path) when it is not JSON in UTF-8, or an object holds a key twice."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object_without_doubles)
    except SkillBankError:
        raise
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, brackets within brackets without end
        raise SkillBankError(f"not JSON ({error})") from error


def _object_without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if doubled := sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1):
        raise SkillBankError(f"one object holds {doubled} twice; json would keep only the last")
    return dict(pairs)


def _read_entries(kind: type, values: Any, section: str) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise SkillBankError(f"{section}: expected a list; found {_kind(values)}")
    keys, entries = _KEYS[kind], []
    for number, value in enumerate(values):
        found = sorted(value) if isinstance(value, dict) else _kind(value)
        if found != sorted(keys):
            raise SkillBankError(f"{section}[{number}]: found {found}; expected an object with the keys {sorted(keys)}")
        entries.append(kind(**{name: value[key] for key, name in keys.items()}))
    return tuple(entries)


def _as_object(entry: Skill | Mistake) -> dict[str, str]:
    return {key: getattr(entry, name) for key, name in _KEYS[type(entry)].items()}


def _is_text(value: Any) -> bool:
    """Something to be read, in UTF-8: JSON can write half of a surrogate pair, which no tokenizer takes."""
    return isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)


def _kind(value: Any) -> str:
    return type(value).__name__
