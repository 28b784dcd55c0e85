r"""Parses answers: the letter of a choice, the program of a solution, the box as SOD's released code reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollout.tags import between, closing_brace
from rollout.tools.python.base import dedented

BOX = "\\boxed{"
QUOTES = "'\""
STRICT_CHARACTERS = (300, 100)  # at the response's end that the reward passes on, and that the checker reads
CHOICE_CHARACTERS = 10_000  # a longer answer chooses no option
STYLES = 8  # fonts that may be nested around a letter

_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")
_DECORATION = re.compile(r"\\[()\[\] ,;]|[$*~]")
_CHOICE = re.compile(
    r"(?:(?:(?:the )?(?:correct |final )?(?:answer|option|choice))(?: is)?:? *)?"  # Option B, the answer is: B
    r"(?:\(([A-J])\)|([A-J])[.):]?)(?:(?<=[.):])\s.*)?",  # (B), B, B., B), B:; after a mark the option's own words
    re.IGNORECASE | re.DOTALL,
)
# A line of three backticks opens a block if only a language follows it; otherwise it closes one.
_FENCE = re.compile(r"^[ \t]*+```([ \t]*+[\w+#.-]++[ \t]*+$)?", re.MULTILINE)
_PYTHON = re.compile("python[0-9]*", re.IGNORECASE)
# The first closing line that is not part of a Python comment or string. Possessive: the pattern never backtracks.
_CLOSING = re.compile(
    r"""(?P<line>^[ \t]*```)|#[^\n]*|(?P<long>\"{3}|'{3})(?:[^\\"']++|\\.|(?!(?P=long)).)*+(?P=long)?"""
    r"""|(?P<short>["'])(?:[^\\"'\n]++|\\.|(?!(?P=short))[^\\\n])*+(?P=short)?""",
    re.MULTILINE | re.DOTALL,
)


def without_quotes(answer: str) -> str:
    r"""Return an answer without a pair of quotes around the whole of it. The prompts show ``\boxed{'The final answer
    goes here.'}``.

    >>> without_quotes("'42'"), without_quotes("f'"), without_quotes("'a' or 'b'")
    ('42', "f'", "'a' or 'b'")
    """
    text = answer.strip()
    whole = len(text) > 2 and text[0] == text[-1] and text[0] in QUOTES and text.count(text[0]) == 2
    return text[1:-1].strip() if whole else answer


def choice_letter(answer: str | None) -> str | None:
    r"""Return the letter, A to J, that an answer chooses, or None if it chooses several or no letter.

    >>> [choice_letter(a) for a in (r"\text{B}", "(B)", "B.", "b", "B. 42 m", "Option B", "B or C", "Bob", None)]
    ['B', 'B', 'B', 'B', 'B', 'B', None, None, None]
    """
    if answer is None or len(answer) > CHOICE_CHARACTERS:
        return None
    text = answer
    for _ in range(STYLES):  # from the inside
        text = _STYLED.sub(r"\1", text)
    found = _CHOICE.fullmatch(without_quotes(_DECORATION.sub("", text)).strip())
    return (found[1] or found[2]).upper() if found else None


def strict_box(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{`` in a response's last 100 characters, or None if its braces do not
    match, even if an earlier box is complete. White space stays.

    The response includes tool results, so a box that a program prints at the very end counts as the model's answer.
    ``ReasoningReward(math: equal)`` reads only the model's words.

    Source: SOD, verl/utils/reward_score/math_dapo.py with ``strict_box_verify=True``.
    """
    for characters in STRICT_CHARACTERS:
        response = response[-characters:]
    start = response.rfind(BOX)
    box = response[start + len(BOX) - 1 :] if start >= 0 else ""
    end = closing_brace(box)
    return None if end is None else box[1:end]


def submitted_program(text: str) -> str | None:
    """Return the last closed ```python block of a turn's text, after its thoughts, or None without one.

    A block ends at its first closing line outside of Python's strings, or at its first closing line if all are inside.
    Three backticks in a docstring therefore do not cut a program. Thoughts end at the last ``</think>`` outside of
    blocks.
    """
    text = text.replace("\r\n", "\n")
    blocks = list(_blocks(text))
    gaps = zip([0, *(end for _, _, end in blocks)], [*(start for _, start, _ in blocks), len(text)], strict=True)
    thoughts = max(text.rfind("</think>", *gap) for gap in gaps)
    last = (text[a:b] for language, a, b in reversed(blocks) if a >= thoughts and _PYTHON.fullmatch(language))
    program = dedented(next(last, "")).strip("\n")
    return program if program.strip() else None


def released_program(response: str) -> str | None:
    """Return the last ```python block anywhere in the response, tool results included, or None without one. If the
    response has a ``</think>``, only the text between the first and the second counts.

    Source: SOD, verl/utils/reward_score/livecodebench/code_math.py (compute_score).
    """
    _, *rest = response.split("</think>", 2)
    programs = between(rest[0] if rest else response, "```python\n", "```")
    return programs[-1] if programs else None


def _blocks(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (language, start, end) of the content of every closed code block whose opening line names a language."""
    fences = [(fence.start(), fence.end(), fence[1]) for fence in _FENCE.finditer(text)]
    index = 0
    while index < len(fences):
        _, opened, language = fences[index]
        first = index = index + 1
        if not language:
            continue
        while index < len(fences) and not fences[index][2]:
            index += 1
        if index > first:
            start = opened + 1  # the line break
            several = _CLOSING.finditer(text, start, fences[index - 1][1]) if index > first + 1 else ()
            yield language.strip(), start, next((found.start() for found in several if found["line"]), fences[first][0])
