"""Errors and messages in one line."""

from __future__ import annotations

import signal
from typing import IO

OUTPUT_CHARACTERS = 300  # of a child process's output, in messages


def one_line(message: object) -> str:
    """Return the message as one line: each run of white space becomes one space."""
    return " ".join(str(message).split())


class FileError(ValueError):
    """Raised if an input file cannot be used. The message is always one line, even if it quotes the file."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def signal_name(number: int) -> str:
    """Return the name of a signal, as "SIGKILL"; a real-time signal has none and is named by its number, as
    "SIG40"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def end_of_output(file: IO[str]) -> str:
    """Return the end of a child process's output file, as one line for a message."""
    file.seek(0)
    return one_line(file.read())[-OUTPUT_CHARACTERS:]
