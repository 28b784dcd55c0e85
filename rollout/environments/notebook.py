"""Question answering with a Python interpreter that persists within a trajectory, like a notebook.

The tool stays stateless: before each cell, the earlier cells of its trajectory run again silently in the same program.
Equal histories are equal programs, which the tool's cache (``cache_size``) holds unless they failed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from rollout.environments.base import Environment, StepResult
from rollout.environments.question_answering import QuestionAnswering, QuestionAnsweringEnvironment, one_by_one
from rollout.tools.base import Tool
from rollout.tools.limits import LimitedTool
from rollout.tools.python.tool import program_text
from rollout.trajectory import Action, CallOutcome, Task, ToolCall, ToolRequest, ToolResult, Turn

# Runs in front of a cell and leaves no name behind. Watched variables are printed at the end of the program, also of a
# program that fails.
REPLAY = """\
def _replay(cells, watched):
    import atexit, builtins, contextlib, io
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for cell in cells:
            with contextlib.suppress(BaseException):
                builtins.exec(cell, builtins.globals())
    shown, show, text = builtins.globals(), builtins.print, builtins.repr
    atexit.register(lambda: [show(name, '=', text(shown[name])) for name in watched if name in shown])
_replay({cells!r}, {watched!r})
del _replay
"""
_FRAMES = re.compile(r"^(?:Traceback \(most recent call last\):\n|(?=[ \t]+File ))(?:[ \t].*\n)*", re.MULTILINE)


class Notebook(QuestionAnswering):
    """Question answering where the calls of one tool are the cells of a notebook.

    Later cells of the trajectory have the definitions of earlier cells, also those made before a failure. The model
    reads the output of its last cell, then the watched variables. Of an error it reads only the last lines, because
    frames would count the lines of the replay.

    Cells must be deterministic: random draws are repeated for every later cell. A cell that was stopped (time, memory)
    leaves no definitions. All cells of a trajectory together have the time and length of one program, and only the
    first may have ``from __future__``. The calls of one action run in order.

    Args:
        tools: see ``QuestionAnswering``.
        cells: name of the tool with an argument ``code`` whose calls are cells.
        watched: variables shown after each cell, as ``t = 4``, if they exist.
        limits: ``limits``, ``tool_limits`` and ``max_calls`` of ``QuestionAnswering``.

    Raises:
        ValueError: the tools lack ``cells``; as ``QuestionAnswering``.
    """

    def __init__(
        self, tools: dict[str, Tool], cells: str = "python", watched: tuple[str, ...] = (), **limits: Any
    ) -> None:
        super().__init__(tools, **limits)
        if cells not in tools:
            raise ValueError(f"cells is '{cells}', but the tools are {sorted(tools)}; name one of them")
        self.cells, self.watched = cells, tuple(watched)

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Environment:
        return NotebookEnvironment(self.tools, tools_enabled, self.max_calls, self.cells, self.watched)


class NotebookEnvironment(QuestionAnsweringEnvironment):
    """One question-answering episode whose Python calls are cells of a notebook."""

    def __init__(
        self,
        tools: dict[str, LimitedTool],
        tools_enabled: bool,
        max_calls: int | None,
        cells: str,
        watched: tuple[str, ...],
    ) -> None:
        super().__init__(tools, tools_enabled, max_calls)
        self._tool, self._watched = cells, watched
        self._cells: list[str] = []

    async def resume(self, turns: Sequence[Turn], calls: Sequence[ToolCall]) -> float | None:
        for call in calls:
            self._keep(call.request, call.result)
        return await super().resume(turns, calls)

    async def step(self, action: Action) -> StepResult:
        return await one_by_one(super().step, action)

    async def _run(self, request: ToolRequest, refusal: ToolResult | None) -> tuple[ToolResult, float]:
        result, seconds = await super()._run(self._with_history(request), refusal)
        self._keep(request, result)
        if result.outcome is CallOutcome.ERROR:
            result = dataclasses.replace(result, text=_FRAMES.sub("", result.text))
        return result, seconds

    def _with_history(self, request: ToolRequest) -> ToolRequest:
        """Return a tool request with the code of earlier cells in front of its cell; unchanged if it has no program."""
        cell = self._cell(request)
        if cell is None:
            return request
        before = REPLAY.format(cells=self._cells, watched=self._watched)
        return ToolRequest(request.name, {**request.arguments, "code": before + cell})

    def _cell(self, request: ToolRequest) -> str | None:
        code = request.arguments.get("code")
        return (program_text(code) or None) if request.name == self._tool and isinstance(code, str) else None

    def _keep(self, request: ToolRequest, result: ToolResult) -> None:
        """Add an executed cell's code to the notebook's history. A stopped cell (timeout, or an ERROR with ``detail``)
        is left out, because it would stop every later cell, too."""
        failed = result.outcome is CallOutcome.ERROR and result.detail is None
        cell = self._cell(request)
        if cell is not None and (failed or result.outcome in (CallOutcome.OK, CallOutcome.EMPTY)):
            self._cells.append(cell)
