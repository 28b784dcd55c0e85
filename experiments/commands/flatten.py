"""`flatten`: prints an experiment as one file, without `inherits:`, with a comment at each option.

``examples/`` holds the output for one experiment of each algorithm.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from experiments.commands.command import command
from experiments.registry.compose import resolve
from experiments.registry.constructors import constructors
from experiments.registry.listing import load
from experiments.registry.project import Project
from experiments.stages.classes import import_class
from experiments.stages.context import RunContext

WIDTH = 120
ORDER = ("seed_everything", "task", "model", "data", "trainer")
NOT_SHOWN = (
    "name",
    "family",
    "folder",
    "columns",
    "group",
    "compare",
    "ablations",
    "ablations_once",
    "needs",
    "preconditions",
)  # of `experiment`


@command("flatten", "print an experiment as one commented file", overrides=False)
def flatten(args: argparse.Namespace, context: RunContext) -> None:
    print(flattened(args.name, context.project), end="")


def flattened(name: str, project: Project) -> str:
    """Return an experiment's configuration as YAML text without inheritance. References to stages and folders stay
    references.

    Raises:
        ExperimentError: the experiment does not exist, or its configuration cannot be resolved.
    """
    config = load(name, project)
    config["experiment"] |= {"family": "@{experiment.family}", "folder": "@{experiment.folder}"}
    config["paths"]["outputs"] = "@{paths.outputs}"
    config = resolve(config, lambda stage: f"@{{stage:{stage}}}", project.experiment_dirs)
    about = {key: value for key, value in config.pop("experiment").items() if key not in NOT_SHOWN}
    head = f"# Made by `python -m experiments flatten {name}`: the experiment with all that it inherits, in one file.\n"
    sections = {"experiment": about} | {key: config[key] for key in ORDER if config.get(key)}
    return head + "\n".join(_lines(sections, {}, "")).replace("@{", "${") + "\n"


def _lines(block: Mapping[str, Any], comments: Mapping[str, str], indent: str) -> Iterator[str]:
    for key, value in block.items():
        comment = comments.get(key, "")
        if isinstance(value, Mapping) and value:
            yield from _commented(f"{indent}{key}:", comment, indent)
            inner = comments_of(value["class_path"]) if "class_path" in value else {}
            for name, part in sorted(value.items(), key=lambda item: item[0] != "class_path"):
                if name == "init_args" and part:
                    yield f"{indent}  init_args:"
                    yield from _lines(part, inner, f"{indent}    ")
                else:
                    yield from _lines({name: part}, {}, f"{indent}  ")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from _commented(f"{indent}{key}:", comment, indent)
            for item in value:
                _, first, *rest = _lines({"item": item}, {}, "")
                yield f"{indent}  - {first.strip()}"
                yield from (f"{indent}  {line}" for line in rest)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).strip()
            yield from _commented(f"{indent}{key}: {text.removesuffix('...').strip()}", comment, indent)


def _commented(line: str, comment: str, indent: str) -> Iterator[str]:
    if comment and len(line) + len(comment) + 4 > WIDTH:
        yield from textwrap.wrap(comment, WIDTH - 2, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        comment = ""
    yield f"{line}  # {comment}" if comment else line


def comments_of(class_path: str) -> dict[str, str]:
    """Return the first sentence about each argument of a class, by argument name, from the docstrings of the class and
    its bases."""
    found: dict[str, str] = {}
    for function in constructors(import_class(class_path, "flatten")):
        owner = inspect.getmodule(function)
        names = function.__qualname__.rpartition(".")[0]
        text = inspect.getdoc(getattr(owner, names, function)) or ""
        for name, about in re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", text, re.MULTILINE):
            found.setdefault(name, _first_sentence(" ".join(about.split())))
    return found


def _first_sentence(text: str) -> str:
    """Return the text up to its first full stop, semicolon or colon outside brackets.

    >>> _first_sentence("tokens (without packing: with padding) a batch; see above.")
    'tokens (without packing: with padding) a batch'
    """
    depth = 0
    for k, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and sign in ".;:" and text[k - 1 : k] != "." and text[k + 1 : k + 2] == " ":
            return text[:k]
    return text.rstrip(".")
