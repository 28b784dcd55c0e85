"""Renders skills as prompt text.

Forms:
    released   as SDAR's Markdown files: a heading for each section, then "1. Title: principle. Apply this when ..."
    sentences  the principles alone, one a line, without headings: for tiny models that have read no markup
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from rollout.skills.bank import Selection, Skill

Form = Literal["released", "sentences"]
CountTokens = Callable[[str], int]

GENERAL_HEADING = "### GENERAL SKILLS ###"
CATEGORY_HEADING = "### TASK: {category} ###"
APPLY = "Apply this "


def token_counter(tokenizer: Any) -> CountTokens:
    """Return a function that counts the tokens of a text with a Hugging Face tokenizer, without added special
    tokens."""
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def render(selection: Selection, form: Form = "released", header: str = "") -> str:
    """Return the selected skills as prompt text, general ones first, then each category. Returns "" for an empty
    selection, even with a ``header``."""
    sections = _sections(selection, form)
    if not sections:
        return ""
    if form == "sentences":
        return "\n".join([header, *(body for _, body in sections)] if header else [body for _, body in sections])
    return (header + "\n" if header else "") + "\n\n".join(f"{heading}\n{body}" for heading, body in sections)


def too_long(selection: Selection, form: Form, tokens: int, max_tokens: int, count: CountTokens) -> ValueError:
    """Return the ValueError for skills of ``tokens`` tokens, more than ``max_tokens``. Its message names the size of
    each category."""
    parts = [("general", Selection(selection.general))]
    parts += [(name, Selection((), ((name, skills),))) for name, skills in selection.by_category]
    sizes = ", ".join(
        f"{name}: {len(one.skills)} of {count(render(one, form))} tokens" for name, one in parts if one.skills
    )
    return ValueError(
        f"the skills take {tokens} tokens, max_tokens is {max_tokens} ({sizes}); raise max_tokens, or take fewer skills"
    )


def numbered_item(number: int, skill: Skill) -> str:
    """Return one skill as a numbered line, as SDAR released it.

    >>> numbered_item(2, Skill("gen_002", "Take at Sight", "Take the object at once", "When it is seen."))
    '2. Take at Sight: Take the object at once. Apply this when it is seen.'
    """
    when = skill.when_to_apply.strip()
    return f"{number}. {skill.title.strip()}: {_sentence(skill.principle)} {APPLY}{_sentence(_lower_first(when))}"


def _sections(selection: Selection, form: Form) -> list[tuple[str, str]]:
    """Return (heading, body) of each section of the selected skills that is not empty."""
    found = [(GENERAL_HEADING, selection.general)]
    found += [(CATEGORY_HEADING.format(category=name), skills) for name, skills in selection.by_category]
    return [(heading, "\n".join(_items(skills, form))) for heading, skills in found if skills]


def _items(skills: Sequence[Skill], form: Form) -> list[str]:
    if form == "released":
        return [numbered_item(number, skill) for number, skill in enumerate(skills, start=1)]
    return [_sentence(skill.principle) for skill in skills]


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else text + "."


def _lower_first(text: str) -> str:
    """Return a text with its first letter in lower case, for the middle of a sentence. A text that begins with two
    capitals ("ID ...") stays."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]
