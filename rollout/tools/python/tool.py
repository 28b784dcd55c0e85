"""Python tool: runs the model's program and returns the text that a terminal would show."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

from common.ranges import PositiveInt
from common.text import whole
from rollout.tools.base import Bounded, Startable
from rollout.tools.python.base import Run, Runner, RunStatus, dedented
from rollout.tools.python.released import NO_OUTPUT, cut_in_the_middle, last_line_printed
from rollout.trajectory import CallOutcome, InfrastructureError, ToolResult

NOTHING_PRINTED = "The program printed nothing."
EMPTY_PROGRAM = "The program was empty, so nothing was run."

_FENCED = re.compile(r"^```[ \t]*+[\w+-]*+[ \t]*+\n(.*?)(?:^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


def program_text(code: str) -> str:
    """Return the program in a model's text: without Markdown fences (several blocks are one program) and without a
    common indentation.

    >>> program_text("```python\\nx = 1\\n```\\nand\\n```\\nx\\n```")
    'x = 1\\nx'
    """
    code = code.replace("\r\n", "\n")
    if code.lstrip().startswith("```"):
        blocks = _FENCED.findall(code if code.startswith("`") else dedented(code).lstrip())
        code = "\n".join(dedented(block).strip("\n") for block in blocks)
    return dedented(code).strip()


class PythonTool:
    """Runs the model's Python program. Takes ``{"code": str}`` and returns the output of the program, with the value of
    its last expression.

    Outcomes: OK; EMPTY when it printed nothing; ERROR when it failed (the text ends with a short traceback), used too
    much, or ``code`` is missing or not a string; TIMEOUT; REFUSED for an empty program, which is not run. Only a
    failing runner raises InfrastructureError.

    Give ``ToolLimits`` a ``timeout_s`` above the runner's. A ``max_characters`` below the runner's ``max_output`` cuts
    errors again in the middle, and other output at its end.

    The options after the runner follow SOD's released tool (docs/algorithms/sod.md), for comparisons.

    Args:
        runner: ``rollout.tools.python.local.LocalSandbox`` or ``rollout.tools.python.fusion.SandboxFusion``.
        print_last_line: run the program of ``released.last_line_printed``. It prints the last line, whatever it is,
            instead of the last expression, and breaks many valid programs.
        cut_at: keep the first and last half of this many characters of a longer text (released: 256); null: keep all.
        hide_failures: return "no stdout here" for a late program and for a failing service. The trajectory goes on
            (outcome TIMEOUT or ERROR, with the reason as its detail), and ``ToolLimits`` has nothing to retry. Other
            failed programs return their output without a reason.

    Raises:
        ValueError: ``cut_at`` is below 2.
    """

    name = "python"

    def __init__(
        self,
        runner: Runner,
        print_last_line: bool = False,
        cut_at: PositiveInt | None = None,
        hide_failures: bool = False,
    ) -> None:
        if cut_at is not None and cut_at < 2:
            raise ValueError(f"cut_at is {cut_at}; expected at least 2 characters, or null")
        self.runner, self.print_last_line = runner, print_last_line
        self.cut_at, self.hide_failures = cut_at, hide_failures

    @property
    def concurrency(self) -> int:
        return self.runner.concurrency if isinstance(self.runner, Bounded) else sys.maxsize

    async def start(self) -> None:
        """Start the runner of programs. A sandbox that cannot protect the machine fails here (``UnprotectedError``)."""
        if isinstance(self.runner, Startable):
            await self.runner.start()

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        code = arguments.get("code")
        if not isinstance(code, str):
            message = f"python expects a program text as its code; found {type(code).__name__}"
            return ToolResult(message, CallOutcome.ERROR, detail=message)
        code = whole(code)  # JSON can write half of a surrogate pair, which no program can hold
        program = last_line_printed(code) if self.print_last_line else program_text(code)
        if not program.strip():
            return ToolResult(EMPTY_PROGRAM, CallOutcome.REFUSED, detail="empty program")
        result = await self._run(program)
        if self.cut_at is not None:
            result = dataclasses.replace(result, text=cut_in_the_middle(result.text, self.cut_at))
        return result

    async def _run(self, program: str) -> ToolResult:
        try:
            run = await self.runner.run(program)
        except InfrastructureError as error:
            if not self.hide_failures:
                raise
            return ToolResult(NO_OUTPUT, CallOutcome.ERROR, detail=f"hidden failure of the runner: {error}")
        result = _result(run)
        if not self.hide_failures or run.status is RunStatus.FINISHED:
            return result
        return dataclasses.replace(result, text=NO_OUTPUT if run.status is RunStatus.TIMEOUT else run.output.rstrip())

    async def close(self) -> None:
        await self.runner.close()


def _result(run: Run) -> ToolResult:
    text = "\n".join(part for part in (run.output.rstrip(), run.notice) if part)
    if run.status is RunStatus.TIMEOUT:
        return ToolResult(text, CallOutcome.TIMEOUT, detail=run.notice)
    if run.status is RunStatus.FAILED:
        return ToolResult(text or "The program failed.", CallOutcome.ERROR, detail=run.notice or None)
    return ToolResult(text, CallOutcome.OK) if text.strip() else ToolResult(NOTHING_PRINTED, CallOutcome.EMPTY)
