"""Commands on the pages: make knows their targets and variables, the command line their words, the experiments their
overrides. What they do is tested where it is made, and what is marked "not run here" is not claimed to work."""

import importlib.util
import re
import shlex
import subprocess

import pytest

from experiments.commands.cli import build_parser, split_overrides, take_outputs
from experiments.commands.command import COMMANDS
from experiments.launch.nodes import overrides_of
from experiments.registry.overrides import parse
from experiments.registry.project import ROOT, Project
from experiments.stages.graph import Graph, require_files
from experiments.stages.validate import check_classes, with_arguments

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = "# not run here"
EXECUTED = {  # pages that stand on files of the reader's own, and the tests that execute them
    "combining.md": "end_to_end/test_combining.py",
    "new_algorithm.md": "lightning_modules/algorithms/test_new_algorithm_page.py",
    "new_environment.md": "rollout/environments/test_own_environment.py",
    "new_retriever.md": "retrieval/test_retrieval_backends.py",
    "new_tool.md": "rollout/tools/test_new_tool_page.py",
    "own_engine.md": "rollout/engines/test_own_engine_page.py",
    "own_reward.md": "rollout/rewards/test_own_reward_page.py",
}


def commands(text):
    """The lines of code fences and the inline code that begin with a command; not those that name no experiment."""
    fences = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.M | re.S)
    inline = re.findall(r"`((?:make|python -m) [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    found = re.findall(r"^(?:make|python|vllm) .*$", "\n".join(fences), re.M) + inline
    return [command for command in found if "..." not in command and "EXP=NAME" not in command]


ON_PAGES = [
    (page.relative_to(ROOT).as_posix(), command)
    for page in PAGES
    for command in dict.fromkeys(commands(page.read_text()))
]


def by_make(words):
    """What make would run, without running it, away from the variables of a make that may run this test."""
    done = subprocess.run(
        ["make", "-n", *words], cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def validated(page, line, outputs):
    """Takes the words after ``python -m experiments`` as the command line would, and checks their names and types."""
    ours, overrides = split_overrides(shlex.split(line))
    args = build_parser().parse_args(ours)
    command = COMMANDS[args.command]
    _, overrides = take_outputs(overrides)
    assert command.overrides or not overrides
    if not command.experiment or page.rpartition("/")[2] in EXECUTED:
        return
    own = overrides_of(args) if args.command == "train" else ()
    stage = Graph(Project(outputs=outputs), args.name, parse((*own, *overrides)), args.seed).target()
    if overrides:
        require_files([stage], ROOT)
        check_classes(with_arguments(stage.config, stage.arguments, page), page)


@pytest.mark.slow
def test_every_command_is_valid_or_marked(tmp_path, monkeypatch):
    seen, faults = set(), []
    for page, command in ON_PAGES:
        first, *words = shlex.split(command, comments=True)
        if NOT_RUN in command or (key := (page in EXECUTED, *words)) in seen:
            continue
        seen.add(key)
        try:
            if first == "make":
                for line in re.findall(r"-m experiments (.*)", by_make(words)):
                    validated(page, line, tmp_path)
            elif words[0] == "-m":
                assert importlib.util.find_spec(words[1]), f"no module {words[1]}"
            else:
                assert page.rpartition("/")[2] in EXECUTED, f"neither executed, nor validated, nor marked {NOT_RUN}"
        except (Exception, SystemExit) as error:
            faults.append(f"{page}: {command}\n    {error}")
    assert len(seen) > 60
    assert not faults, "\n".join(faults)


def test_pages_of_own_files_are_executed():
    for name, test in EXECUTED.items():
        assert name in (ROOT / "tests" / test).read_text()
