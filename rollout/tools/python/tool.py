"""Python as a tool: what the model writes in, what a terminal would show out."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from rollout.tools.base import Startable
from rollout.tools.python.base import Run, Runner, RunStatus
from rollout.trajectory import CallOutcome, ToolResult

NOTHING_PRINTED = "The program printed nothing."
EMPTY_PROGRAM = "The program was empty, so nothing was run."

_FENCED = re.compile(r"^```[ \t]*[\w+-]*[ \t]*\n(.*?)(?:^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


def program_text(code: str) -> str:
    """The program in what a model wrote: out of Markdown fences (several blocks are one program), not indented as a
    whole.

    >>> program_text("```python\\nx = 1\\n```\\nand\\n```\\nx\\n```")
    'x = 1\\nx'
    """
    code = code.replace("\r\n", "\n")
    if code.lstrip().startswith("```"):
        blocks = _FENCED.findall(textwrap.dedent(code).lstrip())
        code = "\n".join(textwrap.dedent(block).strip("\n") for block in blocks)
    return textwrap.dedent(code).strip()


class PythonTool:
    """``{"code": str}`` to what the program prints, its last expression included.

    Outcomes: OK; EMPTY when it ran and printed nothing; ERROR when it failed (the text ends with a short traceback),
    used too much, or ``code`` is missing or no string; TIMEOUT; REFUSED for an empty program, which is not run. Only
    a runner that fails by itself raises InfrastructureError.

    Under ``ToolLimits`` give a ``timeout_s`` above the runner's own. A ``max_characters`` below its ``max_output`` cuts
    errors once more in the middle, and what was printed without one at its end.

    Args:
        runner: ``rollout.tools.python.local.LocalSandbox`` or ``rollout.tools.python.fusion.SandboxFusion``.
    """

    name = "python"

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    async def start(self) -> None:
        """Start the runner: a sandbox that is not tight says so here (``UnprotectedError``)."""
        if isinstance(self.runner, Startable):
            await self.runner.start()

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        code = arguments.get("code")
        if not isinstance(code, str):
            message = f"python expects a program text as its code; found {type(code).__name__}"
            return ToolResult(message, CallOutcome.ERROR, detail=message)
        program = program_text(code)
        if not program:
            return ToolResult(EMPTY_PROGRAM, CallOutcome.REFUSED, detail="empty program")
        return _result(await self.runner.run(program))

    async def close(self) -> None:
        await self.runner.close()


def _result(run: Run) -> ToolResult:
    text = "\n".join(part for part in (run.output.rstrip(), run.notice) if part)
    if run.status is RunStatus.TIMEOUT:
        return ToolResult(text, CallOutcome.TIMEOUT, detail=run.notice)
    if run.status is RunStatus.FAILED:
        return ToolResult(text or "The program failed.", CallOutcome.ERROR, detail=run.notice or None)
    return ToolResult(text, CallOutcome.OK) if text.strip() else ToolResult(NOTHING_PRINTED, CallOutcome.EMPTY)
