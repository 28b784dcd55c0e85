"""Quotes ``make`` commands so that the shell, make and the recipe's shell see the values unchanged."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

COMMAND_VARIABLE = "COMPACT_AGENTS_COMMAND"  # in a stage's process: the command that made it
CONTINUE_VARIABLE = "COMPACT_AGENTS_CONTINUE"  # in a stage's process: the command that continues it
IN_QUOTES = ("CKPT", "INDEX", "TO", "LIKE", "ALGORITHM", "HARDWARE", "SBATCH")  # in the Makefile: "$(CKPT)"
EXPORTED = ("Q",)  # read from the environment, not by make's shell


def make_command(target: str, variables: Mapping[str, object], arguments: Sequence[str] = ()) -> str:
    """Return a ``make`` command that a user can paste into a shell. Values may contain quotes, blanks and dollar signs.

    Args:
        target: a target of the Makefile.
        variables: make variables, in order.
        arguments: the words of ``ARGS``.

    >>> make_command("ask", {"EXP": "x", "SEED": 3}, ["--model.lr", "1"])
    'make ask EXP=x SEED=3 ARGS="--model.lr 1"'
    """
    words = [_assignment(name, str(value)) for name, value in variables.items()]
    if arguments:
        words.append(_word("ARGS", shlex.join(arguments)))
    return " ".join(["make", target, *words])


def same_run(target: str, *names: str) -> str:
    """Return a ``make`` command for another target, with the variables of the command that started this process.

    Args:
        names: the variables to keep besides EXP and ARGS.
    """
    words = shlex.split(os.environ.get(COMMAND_VARIABLE, ""))[2:]
    given = {name: value for name, equals, value in (word.partition("=") for word in words) if equals}
    kept = {name: given[name] for name in ("EXP", *names, "ARGS") if name in given}
    return " ".join(["make", target, *(_quoted(f"{name}={value}") for name, value in kept.items())])


def continue_command() -> str:
    """Return the command that continues this run, or "the same command again" if no launcher has set
    ``CONTINUE_VARIABLE``."""
    return os.environ.get(CONTINUE_VARIABLE, "the same command again")


def _assignment(name: str, value: str) -> str:
    if name in IN_QUOTES:
        value = _escaped(value)
    elif name not in EXPORTED:
        value = shlex.quote(value)
    return _word(name, value)


def _word(name: str, value: str) -> str:
    empty = "$()" if value[:1].isspace() else ""  # make drops blanks before a value
    return _quoted(f"{name}={empty}{value.replace('$', '$$')}")


def _quoted(word: str) -> str:
    """Quote a word for the user's shell, with double quotes if possible: nested single quotes are hard to read."""
    name, _, value = word.partition("=")
    if shlex.quote(value) == value:
        return word
    return shlex.quote(word) if re.search("[!$`]", value) else f'{name}="{_escaped(value)}"'


def _escaped(value: str) -> str:
    """Escape backslashes, quotes, dollar signs and backticks for use between double quotes."""
    return re.sub(r'([\\"$`])', r"\\\1", value)
