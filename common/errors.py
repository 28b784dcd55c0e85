"""Errors and messages in one line."""

from __future__ import annotations


def one_line(message: object) -> str:
    """Return the message as one line: each run of white space becomes one space."""
    return " ".join(str(message).split())


class FileError(ValueError):
    """Raised if an input file cannot be used. The message is always one line, even if it quotes the file."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))
