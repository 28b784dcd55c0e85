"""Python tool: runs the program that the model wrote and returns what a terminal would show."""

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
    """The program in what a model wrote: out of Markdown fences (several blocks are one program), not indented as a
    whole.

    >>> program_text("```python\\nx = 1\\n```\\nand\\n```\\nx\\n```")
    'x = 1\\nx'
    """
    code = code.replace("\r\n", "\n")
    if code.lstrip().startswith("```"):
        blocks = _FENCED.findall(code if code.startswith("`") else dedented(code).lstrip())
        code = "\n".join(dedented(block).strip("\n") for block in blocks)
    return dedented(code).strip()


class PythonTool:
    """``{"code": str}`` to what the program prints, its last expression included.

    Outcomes: OK; EMPTY when it ran and printed nothing; ERROR when it failed (the text ends with a short traceback),
    used too much, or ``code`` is missing or no string; TIMEOUT; REFUSED for an empty program, which is not run. Only
    a runner that fails by itself raises InfrastructureError.

    Under ``ToolLimits`` give a ``timeout_s`` above the runner's own. A ``max_characters`` below its ``max_output`` cuts
    errors once more in the middle, and what was printed without one at its end.

    The options after the runner are those of SOD's released tool (docs/papers/sod.md 4.2, 4.3), for comparisons.

    Args:
        runner: ``rollout.tools.python.local.LocalSandbox`` or ``rollout.tools.python.fusion.SandboxFusion``.
        print_last_line: run what ``released.last_line_printed`` makes of the text. Instead of the last expression, the
            last line is printed, whatever it is; many valid programs fail so.
        cut_at: of longer texts keep the first and last half of so many characters (released: 256); null: all.
        hide_failures: a late program and a failing service both give "no stdout here". The trajectory goes on then (the
            outcome is TIMEOUT or ERROR, and its detail says what it was), and ``ToolLimits`` has nothing to try again.
            Of other failed programs the output is given alone, without a reason.

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
        """Start the runner: a sandbox that is not tight says so here (``UnprotectedError``)."""
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
