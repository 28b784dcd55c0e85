r"""Parsing of answers: the letter of a choice, the program of a solution, the box as SOD's released code reads it."""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Iterator

from rollout.protocols.boxed import closing_brace

BOX = "\\boxed{"
QUOTES = "'\""
STRICT_CHARACTERS = (300, 100)  # of the response's end: what the reward passes on, and what the checker looks at

_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")
_DECORATION = re.compile(r"\\[()\[\] ,;]|[$*~]")
_CHOICE = re.compile(
    r"(?:(?:(?:the )?(?:correct |final )?(?:answer|option|choice))(?: is)?:? *)?"  # Option B, the answer is: B
    r"(?:\(([A-J])\)|([A-J])[.):]?)(?:(?<=[.):])\s.*)?",  # (B), B, B., B), B:; after a mark the option's own words
    re.IGNORECASE | re.DOTALL,
)
# A line of three backticks opens a block if nothing but a language follows, and else closes one.
_FENCE = re.compile(r"^[ \t]*```([ \t]*[\w+#.-]+[ \t]*$)?", re.MULTILINE)
_PYTHON = re.compile("python[0-9]*", re.IGNORECASE)
_THOUGHT = re.compile("</think>")
_RELEASED_BLOCK = re.compile("```python\n(.*?)```", re.DOTALL)


def without_quotes(answer: str) -> str:
    r"""Out of a pair of quotes around all of it: the prompts show ``\boxed{'The final answer goes here.'}``.

    >>> without_quotes("'42'"), without_quotes("f'"), without_quotes("'a' or 'b'")
    ('42', "f'", "'a' or 'b'")
    """
    text = answer.strip()
    whole = len(text) > 2 and text[0] == text[-1] and text[0] in QUOTES and text.count(text[0]) == 2
    return text[1:-1].strip() if whole else answer


def choice_letter(answer: str | None) -> str | None:
    r"""The letter, A to J, that an answer chooses; None where it chooses none or several.

    >>> [choice_letter(a) for a in (r"\text{B}", "(B)", "B.", "b", "B. 42 m", "Option B", "B or C", "Bob", None)]
    ['B', 'B', 'B', 'B', 'B', 'B', None, None, None]
    """
    if answer is None:
        return None
    text, styled = answer, 1
    while styled:  # from the inside
        text, styled = _STYLED.subn(r"\1", text)
    found = _CHOICE.fullmatch(without_quotes(_DECORATION.sub("", text)).strip())
    return (found[1] or found[2]).upper() if found else None


def strict_box(response: str) -> str | None:
    r"""Content of the last ``\boxed{``, looked for in the last 100 characters only; None without one, or where its
    braces do not match (an earlier box is not taken then). Nothing is stripped.

    The response holds what tools returned: a box that a program printed at the very end pays as if the model had
    written it, to whoever lets its last program print one. ``ReasoningReward(math: equal)`` reads the model's words.

    Source: SOD, verl/utils/reward_score/math_dapo.py with ``strict_box_verify=True``.
    """
    for characters in STRICT_CHARACTERS:
        response = response[-characters:]
    start = response.rfind(BOX)
    box = response[start + len(BOX) - 1 :] if start >= 0 else ""
    end = closing_brace(box)
    return None if end is None else box[1:end]


def submitted_program(text: str) -> str | None:
    """The last closed ```python block of a turn, after its thoughts; None without one.

    A block ends at the first closing line at which it is Python, or at the first at all where it is none: three
    backticks in a docstring do not cut a program, and the output shown in a block after it does not lengthen it.
    Thoughts end at the last ``</think>`` outside of blocks.
    """
    text = text.replace("\r\n", "\n")
    blocks = list(_blocks(text))
    ends = [m.end() for m in _THOUGHT.finditer(text) if not any(a <= m.start() < b for _, a, b in blocks)]
    thoughts = max(ends, default=0)
    programs = [text[a:b] for language, a, b in blocks if a >= thoughts and _PYTHON.fullmatch(language)]
    program = textwrap.dedent(programs[-1]).strip("\n") if programs else ""
    return program if program.strip() else None


def released_program(response: str) -> str | None:
    """Content of the last ```python block anywhere in the response, tool results included; None without one. Where the
    response has a ``</think>``, only the text behind the first one, up to the second, counts.

    Source: SOD, verl/utils/reward_score/livecodebench/code_math.py (compute_score).
    """
    _, *rest = response.split("</think>", 2)
    programs = _RELEASED_BLOCK.findall(rest[0] if rest else response)
    return programs[-1] if programs else None


def _blocks(text: str) -> Iterator[tuple[str, int, int]]:
    """(language, start, end) of the content of every closed block whose opening line names a language."""
    fences = [(m, (m[1] or "").strip()) for m in _FENCE.finditer(text)]
    index = 0
    while index < len(fences):
        opening, language = fences[index]
        index += 1
        if not language:
            continue
        following = itertools.takewhile(lambda fence: not fence[1], fences[index:])
        ends = [fence.start() for fence, _ in following]
        if ends:
            start = opening.end() + 1  # the line break
            known = next((i for i, end in enumerate(ends) if _is_python(text[start:end])), 0) if len(ends) > 1 else 0
            yield language, start, ends[known]
            index += known + 1


def _is_python(text: str) -> bool:
    try:
        ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
