"""Errors and messages in one line."""

from __future__ import annotations


def one_line(message: object) -> str:
    """Return the message with each run of white space as one space."""
    return " ".join(str(message).split())


class FileError(ValueError):
    """A file cannot be used. The message is always one line, also if it quotes the file."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))
