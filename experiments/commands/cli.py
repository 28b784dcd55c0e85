"""Command line of the experiments.

Exit codes: 0 success, 1 a stage failed, 2 wrong command or file, 75 stopped by SIGUSR1 after a checkpoint, 130 stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from callbacks.tracking.run_info import commit
from experiments import commands
from experiments.commands.command import COMMANDS
from experiments.launch.nodes import overrides_of
from experiments.registry.compose import SECTIONS
from experiments.registry.errors import ExperimentError
from experiments.registry.overrides import STAGE_PREFIX
from experiments.registry.project import Project
from experiments.stages.context import RunContext, StageFailed
from experiments.stages.stage import explain

for _module in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}."):
    importlib.import_module(_module.name)  # registers its commands

OVERRIDE_WORDS = {*SECTIONS, "config", STAGE_PREFIX}
OUTPUTS = "--paths.outputs"


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of the command line into this program's options and Lightning CLI overrides (``--model.x 1``,
    ``--config f``)."""
    ours: list[str] = []
    theirs: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        head = word[2:].partition("=")[0] if word.startswith("--") else ""
        if "." not in head and head.rstrip("+") not in OVERRIDE_WORDS:
            ours.append(word)
            continue
        theirs.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            theirs.append(rest.pop(0))
    return ours, theirs


def take_outputs(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Separate the option ``--paths.outputs`` from the overrides. Returns its last value (the output folder, or None)
    and the other overrides."""
    folder, others = None, list(overrides)
    while given := [i for i, word in enumerate(others) if word.partition("=")[0] == OUTPUTS]:
        _, joined, value = others.pop(given[0]).partition("=")
        if not joined:
            value = others.pop(given[0]) if others[given[0] :] and not others[given[0]].startswith("--") else ""
        if not value:
            raise ExperimentError(f"override '{OUTPUTS}' needs a folder, as in {OUTPUTS} /large/disk")
        folder = Path(value).absolute()
    return folder, others


class Version(argparse.Action):
    """Option that prints the version and the commit of the code, and ends the program."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"compact-agents {importlib.metadata.version('compact-agents')} (commit {commit()})")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action=Version, help="print version and commit")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for command in COMMANDS.values():
        sub = subparsers.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False)
        if command.experiment:
            sub.add_argument("name", help="experiment, as listed by `make experiments`")
            sub.add_argument("--seed", type=int, help="seed_everything of all stages without fixed_seed")
        for flags, settings in command.options:
            sub.add_argument(*flags, **settings)
    return parser


def main(argv: Sequence[str]) -> int:
    ours, overrides = split_overrides(argv)
    parser = build_parser()
    args = parser.parse_args(ours)
    command = COMMANDS[args.command]
    project = Project.from_environment()
    try:
        outputs, overrides = take_outputs(overrides)
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if overrides and not command.overrides:
        parser.error(f"'{command.name}' takes no overrides, found {overrides[0]}")
    if outputs is not None:
        project = dataclasses.replace(project, outputs=outputs)
        overrides.append(f"{OUTPUTS}={outputs}")  # for child processes and for hints
    context = RunContext(
        project=project,
        target=args.name if command.experiment else "",
        arguments=(*(overrides_of(args) if command.name == "train" else ()), *overrides),
        seed=getattr(args, "seed", None),
        fresh=getattr(args, "fresh", False),
        resume=getattr(args, "resume", None) is not None,
        compare=getattr(args, "compare", False),
    )
    try:
        return command.run(args, context) or 0
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StageFailed as error:
        if str(error):
            print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (`| head`) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's flush at exit fails
        return 0
    except OSError as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 1
