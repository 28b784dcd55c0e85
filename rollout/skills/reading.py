"""Reads skill banks: built-in ones by name, a user's by path, as JSON in SkillRL's form or as SDAR's Markdown files
with a skill_mapping.json that names them.

::

    folder/
        skill_mapping.json   {"skill_files": {"general_skills": "general_skills.md", "clean": "clean.md", ...},
                              "task_to_skill": {task type: "clean"}, "task_keywords": {task type: [keywords]}}
        general_skills.md    headings and introductions, then "1. Title: principle. Apply this when ..."
        clean.md

The Markdown form has no ids; they are generated (``cle_001``).
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from common.validation import first_problem
from rollout.skills.bank import GENERAL, Skill, SkillBank, SkillBankError, read_json
from rollout.skills.render import APPLY

OWN_BANKS = Path(__file__).parent / "banks"
MAPPING = "skill_mapping.json"
_ITEM = re.compile(rf"\d+\. (?>(?P<title>.+?): )(?P<principle>.+) {APPLY}(?P<when>.+?)\.?")


def read_bank(path: str | Path) -> SkillBank:
    """Read a skill bank: a ``.json`` file in SkillRL's form, a folder of SDAR's Markdown, or a built-in bank by name.

    Raises:
        SkillBankError: no such bank, or a faulty one; names the file and the location.
    """
    own = sorted(file.stem for file in OWN_BANKS.glob("*.json"))
    file = OWN_BANKS / f"{path}.json" if str(path) in own else Path(path)
    if file.is_dir():
        return read_markdown(file)
    if not file.is_file():
        raise SkillBankError(
            f"no skill bank {str(path)!r}: expected a .json file, a folder of Markdown, or one of {own}"
        )
    try:
        return SkillBank.from_json(read_json(file))
    except SkillBankError as error:
        raise SkillBankError(f"skill bank {file}: {error}") from error
    except ValidationError as error:
        raise SkillBankError(f"skill bank {file}: {first_problem(error)}") from error


class _Mapping(BaseModel):
    """Content of the file skill_mapping.json. ``SkillBank`` checks its last two fields."""

    model_config = ConfigDict(extra="forbid")

    skill_files: dict[str, str]
    task_to_skill: dict[str, str]
    task_keywords: dict[str, list[str]] = {}


def read_markdown(folder: str | Path) -> SkillBank:
    """Read a skill bank from a folder of Markdown files. The text before a file's first numbered line is not part of
    the bank. Raises SkillBankError that names file and line."""
    path = Path(folder) / MAPPING
    if not path.is_file():
        raise SkillBankError(f"{path}: missing; expected a JSON object with skill_files and task_to_skill")
    try:
        mapping = _Mapping.model_validate(read_json(path))
        files = mapping.skill_files
        if GENERAL not in files:
            raise SkillBankError(f"skill_files: missing {GENERAL!r}; found {sorted(files)}")
    except SkillBankError as error:
        raise SkillBankError(f"{path}: {error}") from error
    except ValidationError as error:
        raise SkillBankError(f"{path}: {first_problem(error)}") from error
    skills = {
        name: _read_skills(path.parent / file, prefix)
        for (name, file), prefix in zip(files.items(), _prefixes(files), strict=True)
    }
    metadata = mapping.model_dump(include={"task_to_skill", "task_keywords"}, exclude_unset=True)
    try:
        return SkillBank(skills.pop(GENERAL), skills, metadata)  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        raise SkillBankError(f"{path}: {first_problem(error)}") from error


def _read_skills(path: Path, prefix: str) -> tuple[Skill, ...]:
    if not path.is_file():
        raise SkillBankError(f"{path}: missing, but {MAPPING} names it")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # other line ends are text
    except UnicodeDecodeError as error:
        raise SkillBankError(f"{path}: not UTF-8 text ({error})") from error
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
    """Return a prefix of skill ids per category: three letters, or the whole name if another category begins with the
    same letters."""
    short = [name[:3] for name in names]
    return [name if short.count(name[:3]) > 1 else name[:3] for name in names]
