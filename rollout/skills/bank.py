"""Skill banks: the skills of an environment, and their tasks.

Source of the form: SkillRL's skill banks (memory_data/*/claude_style_skills.json)::

    {"general_skills": [{"skill_id", "title", "principle", "when_to_apply"}],
     "task_specific_skills": {category: [the same]},
     "common_mistakes": [...],  # not read: SDAR's prompts show none
     "metadata": {...}}

The ``metadata`` has the content of SDAR's skill_mapping.json, beside its Markdown files
(``rollout/skills/reading.py``): ``task_to_skill`` (task type or data source to category) and ``task_keywords``
(category or task type to keywords).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # pydantic wants it before Python 3.12

from common.errors import FileError

GENERAL = "general_skills"
SPECIFIC = "task_specific_skills"
MISTAKES = "common_mistakes"
METADATA = "metadata"
TASK_TO_SKILL = "task_to_skill"
TASK_KEYWORDS = "task_keywords"


class SkillBankError(FileError):
    """A skill bank (collection of advice texts) is faulty. The message names the file and the location in it."""


def _text(value: str) -> str:
    """Return a text after checking that it is not empty and valid UTF-8: JSON can contain half of a surrogate pair."""
    if not value.strip() or re.search("[\ud800-\udfff]", value):
        raise ValueError("expected a text that is not empty")
    return value


def _category(value: str) -> str:
    if not re.fullmatch("[A-Za-z0-9_-]+", value) or value == GENERAL:
        raise ValueError(f"a category's name: expected letters, digits, _ and -, and not {GENERAL!r}")
    return value


Text = Annotated[str, AfterValidator(_text)]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Skill:
    """One skill: a piece of advice for the model, and when to apply it."""

    id: Annotated[Text, Field(alias="skill_id")]  # "gen_001"
    title: Text
    principle: Text
    when_to_apply: Text  # completes "Apply this ...": "when the microwave is in sight"

    @property
    def text(self) -> str:
        """Title, principle and occasion of the skill in one line, as an encoder reads them."""
        return f"{self.title}. {self.principle} {self.when_to_apply}"


class _Metadata(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]  # pydantic's way

    task_to_skill: dict[Text, str]
    task_keywords: dict[str, list[Text]]  # never " ", which every text contains


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class SkillBank:
    """Skills (advice texts) for an environment: general ones, and others by category of task.

    Raises:
        ValidationError: on construction, for a duplicate id, an empty text or one that is not UTF-8, a category whose
            name is not a plain word, or a mapping of a nameless task or to an unknown category. It is a ValueError.
    """

    general: Annotated[tuple[Skill, ...], Field(alias=GENERAL)]
    by_category: Annotated[
        dict[Annotated[str, AfterValidator(_category)], Annotated[tuple[Skill, ...], Field(min_length=1)]],
        Field(alias=SPECIFIC),
    ]
    metadata: _Metadata = Field(default_factory=_Metadata)

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        for location, skill in self.entries():
            if skill.id in owners:
                raise ValueError(f"{location}: the id {skill.id!r} is taken by {owners[skill.id]}; ids are unique")
            owners[skill.id] = location
        for task, category in self.tasks.items():
            if category not in self.by_category:
                known = sorted(self.by_category)
                raise ValueError(f"{METADATA}.{TASK_TO_SKILL}.{task}: no category {category!r}; there are {known}")
        for name in self.metadata.get(TASK_KEYWORDS, {}):
            if self.category_of(name) is None:
                raise ValueError(
                    f"{METADATA}.{TASK_KEYWORDS}.{name}: neither a category nor a task type of {TASK_TO_SKILL}; "
                    f"there are {sorted({*self.by_category, *self.tasks})}"
                )

    def entries(self) -> Iterator[tuple[str, Skill]]:
        """Yield (location in the skill bank's file, skill) for every skill."""
        sections = [(GENERAL, self.general)]
        sections += [(f"{SPECIFIC}.{name}", skills) for name, skills in self.by_category.items()]
        for section, skills in sections:
            for number, skill in enumerate(skills):
                yield f"{section}[{number}]", skill

    @property
    def tasks(self) -> dict[str, str]:
        """Dict from task type or data source to skill category, in the order of the skill bank's file."""
        return dict(self.metadata.get(TASK_TO_SKILL, {}))

    def category_of(self, task_type: str) -> str | None:
        """Return the name of a task type's skill category, or None for an unknown type. A category's name is returned
        unchanged."""
        if task_type in self.tasks:
            return self.tasks[task_type]
        return task_type if task_type in self.by_category else None

    @property
    def keywords(self) -> dict[str, tuple[str, ...]]:
        """Dict from skill category to its keywords in lower case, in the order of ``task_keywords``. Leaves out
        categories without keywords."""
        found: dict[str, list[str]] = {}
        for name, words in self.metadata.get(TASK_KEYWORDS, {}).items():
            found.setdefault(str(self.category_of(name)), []).extend(word.lower() for word in words)
        return {category: tuple(words) for category, words in found.items() if words}

    @classmethod
    def from_json(cls, values: Any) -> SkillBank:
        """Make a skill bank from parsed JSON. Raises ValidationError that names the location."""
        if isinstance(values, dict):
            values = {name: value for name, value in values.items() if name != MISTAKES}
        return _BANK.validate_python(values)


_BANK = TypeAdapter(SkillBank)


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Skills (advice texts) that a retriever chose for one task, in reading order."""

    general: tuple[Skill, ...] = ()
    by_category: tuple[tuple[str, tuple[Skill, ...]], ...] = ()  # (category, its chosen skills)

    @property
    def skills(self) -> tuple[Skill, ...]:
        """All selected skills: the general ones first, then category by category."""
        return self.general + tuple(skill for _, skills in self.by_category for skill in skills)

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(category for category, _ in self.by_category)


def read_json(path: Path) -> Any:
    """Return the parsed content of a JSON file. Raises SkillBankError (without the path) if it is not JSON in UTF-8, or
    an object has a key twice."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object_without_doubles)
    except SkillBankError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too many nested brackets
        raise SkillBankError(f"not JSON ({error})") from error


def _object_without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if doubled := sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1):
        raise SkillBankError(f"one object holds {doubled} twice; json would keep only the last")
    return dict(pairs)
