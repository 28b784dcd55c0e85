"""A notebook that keeps one running total, and an expert's verdict on every turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollout.environments.notebook import Notebook
from rollout.tools.base import Tool
from rollout.trajectory import ActionKind, CallOutcome, Trajectory

TOTAL = "t"  # name of the variable
_SHOWN = re.compile(rf"^{TOTAL} = (-?\d{{1,4000}})$", re.MULTILINE)  # int() takes 4300 digits


def shown_total(text: str) -> int | None:
    """Return the total of the last line ``t = NUMBER`` in a notebook cell's result, or None."""
    found = _SHOWN.findall(text)
    return int(found[-1]) if found else None


class Ledger(Notebook):
    """Environment with a Python notebook that shows the running total ``t`` after each cell.

    ``metadata["totals"]`` of a task lists the right totals, from the first to the answer.

    Args:
        notebook: see ``Notebook``; ``watched`` is set here.
    """

    def __init__(self, tools: dict[str, Tool], **notebook: Any) -> None:
        super().__init__(tools, watched=(TOTAL,), **notebook)

    @staticmethod
    def verdicts(trajectory: Trajectory) -> Sequence[bool | None]:
        """Return for each turn of a trajectory whether it was right in its situation; None without a verdict.

        While the total is right, the next total is right, or the answer after the last one. While the total is wrong,
        the last right total is right, or the one after it. A cell that leaves a right total unchanged has no verdict
        unless it fails; neither has a last turn that was cut off.
        """
        totals = [int(total) for total in trajectory.task.metadata["totals"]]
        calls = {call.turn: call for call in trajectory.calls}
        known, sound = -1, True  # index of the last right total; whether the notebook shows it now
        found: list[bool | None] = []
        for number, turn in enumerate(trajectory.turns):
            call = calls.get(number)
            if turn.action.kind is ActionKind.INVALID and number == len(trajectory.turns) - 1:
                found.append(None)
            elif turn.action.kind is not ActionKind.CALL:
                answered = turn.action.kind is ActionKind.ANSWER and turn.action.answer == str(totals[-1])
                found.append(answered and sound and known == len(totals) - 1)
            elif call is None or not call.executed:
                found.append(None)
            else:
                value = shown_total(call.result.text)
                if known + 1 < len(totals) and value == totals[known + 1]:
                    known, sound, right = known + 1, True, True
                elif known >= 0 and value == totals[known]:
                    right = (None if call.result.outcome is CallOutcome.OK else False) if sound else True
                    sound = True
                else:
                    sound, right = sound and value is None, False  # a cell that did not run shows nothing
                found.append(right)
        return found
