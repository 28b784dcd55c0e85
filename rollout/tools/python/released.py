"""Programs and results as SOD's released tool treats them (docs/algorithms/sod.md), for comparisons.

Sources: YoungZ365/SOD, recipe/demystify/reward.py (the wrapper), verl/experimental/agent_loop/tool_agent_loop.py (the
cut), verl/tools/sandbox_fusion_tools.py (the text for failures).
"""

from __future__ import annotations

from rollout.tags import between

NO_OUTPUT = "no stdout here"
CUT = "...(truncated)..."


def last_line_printed(code: str) -> str:
    """Return a program as SOD's released tool changes it: its last line is put into ``print(...)``, unless it begins
    with "print". The program is the first closed ```python block of ``code``, if there is one; empty last lines do not
    count.

    This breaks programs whose last line is indented, a comment, an import, a closing bracket or an assignment. An added
    line ``pass`` keeps the sandbox from printing a last expression.
    """
    blocks = between(code, "```python", "```")
    lines = (blocks[0].strip() if blocks else code).split("\n")
    last = max((index for index, line in enumerate(lines) if line), default=None)
    if last is None:
        return ""
    if not lines[last].startswith("print"):
        lines[last] = f"print({lines[last]})"
    return "\n".join([*lines, "pass"])


def cut_in_the_middle(text: str, limit: int) -> str:
    """Return a text longer than ``limit`` characters as its first and last ``limit // 2``, with a mark between."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}{CUT}{text[-half:]}"
