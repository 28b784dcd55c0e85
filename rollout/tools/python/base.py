"""Protocol of a runner of programs for the Python tool, and helpers that make their output readable."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

MAX_PROGRAM_BYTES = 60_000
MAX_STDIN_BYTES = 32 << 20
LEFT_OUT = "\n[... output left out ...]\n"
TOO_LONG = f"The program is longer than {MAX_PROGRAM_BYTES} bytes and was not run."

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?", re.DOTALL)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


class RunStatus(StrEnum):
    FINISHED = "finished"  # exit code 0
    FAILED = "failed"  # an exception, another exit code, or stopped for using too much
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one program's run: status, output, and a notice for the model."""

    status: RunStatus
    output: str  # stdout and stderr, as a terminal would show them; a traceback comes last
    notice: str = ""  # a sentence for the model: why the program was stopped


class Runner(Protocol):
    max_output: int  # characters of output that are kept; a longer output loses its middle (``middle_cut``)

    async def run(self, code: str, stdin: str = "") -> Run:
        """Run one program from beginning to end, with ``stdin`` as its whole standard input, and return the result.
        Cancelling stops it.

        Raises:
            InfrastructureError: the runner itself fails; never because of the program.
            ValueError: ``stdin`` has more than MAX_STDIN_BYTES.
        """
        ...

    async def close(self) -> None: ...


def refused(code: str, stdin: str) -> Run | None:
    """Return the result for a program that is too long to run, or None for any other. Raises ValueError for too much
    input."""
    if (size := len(stdin.encode("utf-8", "replace"))) > MAX_STDIN_BYTES:
        raise ValueError(f"a program was to read {size} bytes; expected at most {MAX_STDIN_BYTES}: leave the input out")
    too_long = len(code.encode("utf-8", "replace")) > MAX_PROGRAM_BYTES
    return Run(RunStatus.FAILED, "", TOO_LONG) if too_long else None


def ended(code: int, output: str, timeout_s: float | None = None, killed: str = "") -> Run:
    """Return the result of a program that ended with exit code ``code``.

    Args:
        timeout_s: the time limit, of a program that was stopped for it.
        killed: the notice for a negative code.
    """
    if timeout_s is not None:
        return Run(RunStatus.TIMEOUT, output, f"The program did not finish within {timeout_s:g} s and was stopped.")
    if not code:
        return Run(RunStatus.FINISHED, output)
    silent = "" if output.strip() else f"The program ended with exit code {code} and printed nothing."
    return Run(RunStatus.FAILED, output, killed if code < 0 else silent)


def dedented(text: str) -> str:
    """Return a text without the common indentation of its lines, in linear time; ``textwrap.dedent`` takes a second for
    200,000 spaces."""
    lines = [line if line.strip(" \t") else "" for line in text.split("\n")]
    shared = os.path.commonprefix([line for line in lines if line])
    margin = len(shared) - len(shared.lstrip(" \t"))
    return "\n".join(line[margin:] for line in lines)


def readable(text: str) -> str:
    """Return a text without terminal escapes, control and invisible characters. Carriage returns become line ends.

    >>> readable("\\x1b[31mred\\x1b[0m\\r\\n50%\\r100%\\x00")
    'red\\n50%\\n100%'
    """
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROLS.sub("", text)


def middle_cut(text: str, limit: int) -> str:
    """Return a text cut in its middle to about ``limit`` characters, a fifth of them at the end, because errors come
    last."""
    if len(text) <= limit:
        return text
    tail = limit // 5
    return f"{text[: limit - tail]}{LEFT_OUT}{text[-tail:]}"
