"""Skill banks in the form that SDAR puts into prompts: Markdown files, and skill_mapping.json that names them.

::

    folder/
        skill_mapping.json   {"skill_files": {"general_skills": "general_skills.md", "clean": "clean.md", ...},
                              "task_to_skill": {task type: "clean"}, "task_keywords": {task type: [keywords]}}
        general_skills.md    headings and introductions, then "1. Title: principle. Apply this when ..."
        clean.md

The form holds neither ids nor mistakes: ids are made anew (``cle_001``), mistakes are none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rollout.skills.bank import GENERAL, TASK_KEYWORDS, TASK_TO_SKILL, Skill, SkillBank, SkillBankError, read_json
from rollout.skills.render import APPLY, CATEGORY_HEADING, GENERAL_HEADING, numbered_item

MAPPING = "skill_mapping.json"
SKILL_FILES = "skill_files"
_ITEM = re.compile(rf"\d+\. (?P<title>.+?): (?P<principle>.+) {APPLY}(?P<when>.+?)\.?")


def read_markdown(folder: str | Path) -> SkillBank:
    """Raises SkillBankError that names file and line. What stands before a file's first numbered line is a heading or
    an introduction, and no part of the bank."""
    folder = Path(folder)
    mapping = _read_mapping(folder / MAPPING)
    files: dict[str, str] = mapping[SKILL_FILES]
    skills = {
        name: _read_skills(folder / file, prefix)
        for (name, file), prefix in zip(files.items(), _prefixes(files), strict=True)
    }
    metadata = {key: mapping[key] for key in (TASK_TO_SKILL, TASK_KEYWORDS) if key in mapping}
    try:
        return SkillBank(skills.pop(GENERAL, ()), skills, metadata=metadata)
    except SkillBankError as error:
        raise SkillBankError(f"{folder / MAPPING}: {error}") from error


def write_markdown(bank: SkillBank, folder: str | Path) -> None:
    """The same bank, without mistakes, ids and further metadata.

    Raises:
        SkillBankError: a text would be read back as another one (a line break, ": " in a title).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sections = {GENERAL: bank.general, **bank.by_category}
    for name, skills in sections.items():
        heading = GENERAL_HEADING if name == GENERAL else CATEGORY_HEADING.format(category=name)
        items = [_item(number, skill) for number, skill in enumerate(skills, start=1)]
        (folder / f"{name}.md").write_text("\n\n".join([heading, *items]) + "\n", encoding="utf-8")
    mapping = {SKILL_FILES: {name: f"{name}.md" for name in sections}, TASK_TO_SKILL: bank.tasks}
    if TASK_KEYWORDS in bank.metadata:
        mapping[TASK_KEYWORDS] = bank.metadata[TASK_KEYWORDS]
    (folder / MAPPING).write_text(json.dumps(mapping, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _item(number: int, skill: Skill) -> str:
    item = numbered_item(number, skill)
    read = _ITEM.fullmatch(item)
    unread = read is None or read["title"] != skill.title.strip() or APPLY in skill.when_to_apply
    if unread or len(item.splitlines()) > 1:  # more ends a line for Python than a pattern's dot thinks
        raise SkillBankError(
            f"skill {skill.id} does not fit on a line of Markdown: expected a title without ': ', texts without "
            f"line breaks, and an occasion without {APPLY!r}; found {item!r}"
        )
    return item


def _read_mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SkillBankError(f"{path}: missing; expected a JSON object with {SKILL_FILES} and {TASK_TO_SKILL}")
    try:
        mapping = read_json(path)
    except SkillBankError as error:
        raise SkillBankError(f"{path}: {error}") from error
    known = {SKILL_FILES, TASK_TO_SKILL, TASK_KEYWORDS}
    if not isinstance(mapping, dict) or not {SKILL_FILES, TASK_TO_SKILL} <= mapping.keys() <= known:
        found = sorted(mapping) if isinstance(mapping, dict) else type(mapping).__name__
        raise SkillBankError(
            f"{path}: expected {SKILL_FILES} and {TASK_TO_SKILL}, perhaps {TASK_KEYWORDS}; found {found}"
        )
    files = mapping[SKILL_FILES]
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise SkillBankError(f"{path}: {SKILL_FILES}: expected file names by category; found {files!r}")
    if GENERAL not in files:
        raise SkillBankError(f"{path}: {SKILL_FILES}: missing {GENERAL!r}; found {sorted(files)}")
    return mapping


def _read_skills(path: Path, prefix: str) -> tuple[Skill, ...]:
    if not path.is_file():
        raise SkillBankError(f"{path}: missing, but {MAPPING} names it")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SkillBankError(f"{path}: no UTF-8 text ({error})") from error
    skills: list[Skill] = []
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line or not skills and not re.match(r"\d+\.", line):
            continue
        read = _ITEM.fullmatch(line)
        if read is None:
            raise SkillBankError(f"{path}, line {number}: expected '1. Title: principle. {APPLY}...'; found {line!r}")
        skills.append(Skill(f"{prefix}_{len(skills) + 1:03d}", read["title"], read["principle"], read["when"]))
    if not skills:
        raise SkillBankError(f"{path}: no skills; expected lines such as '1. Title: principle. {APPLY}...'")
    return tuple(skills)


def _prefixes(names: dict[str, str]) -> list[str]:
    """Of ids: three letters, or the whole name where another category begins with them too."""
    short = [name[:3] for name in names]
    return [name if short.count(name[:3]) > 1 else name[:3] for name in names]
