"""``make check-data``: reads all questions and passages of an experiment before anything is trained or indexed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.commands.command import builds_index, command, make_graph
from experiments.registry.errors import ExperimentError
from experiments.registry.files import data_arguments
from experiments.stages.context import RunContext
from experiments.stages.data_files import read_data_files, references
from experiments.stages.graph import Stage

if TYPE_CHECKING:
    from rollout.protocols.base import ChatProtocol
    from rollout.trajectory import Task

EXAMPLES = 3
COUNTED = 2000  # prompts whose lengths are counted, evenly spaced: a thousand take about a second
SHOWN_FAULTS = 200  # kinds of them in a corpus; a file of another format has one in every line
PARTS = ("train", "val", "test")


@command("check-data", "read questions and corpus, name all faults, show prompts and their lengths; loads no model")
def check_data(args: argparse.Namespace, context: RunContext) -> None:
    """Print counts, three prompts as the model will see them, and the lengths of prompts against the limits.

    Raises:
        ExperimentError: with all faults of all files.
    """
    graph = make_graph(context)
    stage, plan = graph.target(), graph.plan(compare=False)
    faults: list[str] = []
    for other in plan:
        if builds_index(other):
            faults += check_corpus(other.config["task"]["init_args"])
    files, wrong = read_data_files(plan, context.project.root, absent=True)
    faults += wrong
    for file in files:
        print(file)
    arguments = data_arguments(stage.config)
    own = references(stage)
    tasks = [task for file in files if file.reference in own for task in file.tasks]
    if tasks and not wrong and arguments.get("splits"):
        faults += check_splits(tasks, arguments)
    if tasks and arguments.get("rollouts"):
        faults += check_prompts(tasks, arguments, stage)
    if faults:
        raise ExperimentError("\n  ".join([f"the data of '{stage.name}' cannot be used:", *faults]))
    print("\nno fault found")


def check_corpus(arguments: dict[str, Any]) -> list[str]:
    """Count the passages of an index that is to be built; returns what is wrong with the others."""
    from data_modules.datasets.files import ranges
    from retrieval.corpus import passages, require_corpus
    from retrieval.types import CorpusError

    corpus, good = arguments["corpus"], 0
    kinds: dict[str, list[int]] = {}  # lines, by what is wrong with them
    form: list[str] = []
    unit = "row" if corpus.endswith(".parquet") else "line"
    try:
        for number, passage in passages(require_corpus(corpus), arguments.get("columns"), form.append):
            if isinstance(passage, CorpusError):
                kinds.setdefault(str(passage).removeprefix(f"{corpus}, {unit} {number}: "), []).append(number)
            else:
                good += 1
    except CorpusError as error:
        return [str(error)]
    bad = sum(map(len, kinds.values()))
    read = "".join(f", read as {recognised}" for recognised in form)
    print(f"{corpus}: {good} passages" + (f", {bad} malformed {unit}{'s'[: bad > 1]}" if bad else "") + read)
    if not good and not kinds:
        return [f"{corpus}: no passages"]
    said = [f"{corpus}, {unit}{'s'[: len(at) > 1]} {ranges(at)}: {fault}" for fault, at in kinds.items()]
    more = len(said) - SHOWN_FAULTS
    said = said[:SHOWN_FAULTS] + ([f"{corpus}: and {more} more kinds of faults"] if more > 0 else [])
    if good and arguments.get("skip_malformed"):
        print("\n  ".join(["  left out (skip_malformed):", *said]) if said else "  none is left out")
        return []
    return said


def check_splits(tasks: Sequence[Task], arguments: dict[str, Any]) -> list[str]:
    """Print how many questions each part has; returns why they cannot be shared so."""
    from data_modules.datasets.files import DatasetError
    from data_modules.datasets.splits import Splits

    try:
        splits = Splits(**arguments["splits"])
        counts = {part: len(splits.part(tasks, part)) for part in PARTS}
    except (DatasetError, ValueError) as error:
        return [str(error)]
    print("  " + ", ".join(f"{part} {count}" for part, count in counts.items()))
    if (step := arguments.get("prompts_per_step") or 0) > counts["train"]:
        return [f"{counts['train']} questions to train on, but prompts_per_step is {step}; lower it"]
    return []


def check_prompts(tasks: Sequence[Task], arguments: dict[str, Any], stage: Stage) -> list[str]:
    """Show prompts and their lengths; returns which questions the protocol refuses, and limits that no prompt keeps."""
    from data_modules.datasets.files import spread
    from experiments.stages.validate import instantiate

    rollouts = arguments["rollouts"]["init_args"]
    try:
        protocol: ChatProtocol = instantiate(rollouts["protocol"], "protocol")
    except (ValueError, TypeError, OSError, argparse.ArgumentError) as error:
        return [f"the prompts of '{stage.name}' cannot be written: {error}"]
    faults: list[str] = []
    lengths: list[int] = []
    for task in spread(tasks, COUNTED):
        try:
            ids = protocol.prompt_ids(task)
        except ValueError as error:
            faults.append(str(error))
            continue
        lengths.append(len(ids))
        if len(lengths) <= EXAMPLES:
            answers = ", ".join(task.golden_answers) or "(tests)"
            print(f"\n--- {task.id}: {len(ids)} tokens {_ends(ids)}, answer: {answers}\n{protocol.decode(ids)}")
    return faults + (_check_lengths(sorted(lengths), arguments, rollouts) if lengths else [])


def _ends(ids: Sequence[int]) -> str:
    return (
        str(list(ids)) if len(ids) <= 8 else f"[{', '.join(map(str, ids[:5]))}, ..., {', '.join(map(str, ids[-3:]))}]"
    )


def _check_lengths(lengths: list[int], arguments: dict[str, Any], rollouts: dict[str, Any]) -> list[str]:
    """Print the sorted ``lengths`` against max_prompt_tokens, and what the longest leaves for a response."""
    middle, high = lengths[len(lengths) // 2], lengths[len(lengths) * 95 // 100]
    print(f"\nprompts, of {len(lengths)}: median {middle} tokens, 95 % up to {high}, longest {lengths[-1]}")
    faults = []
    if limit := arguments.get("max_prompt_tokens"):
        over = sum(length > limit for length in lengths)
        print(f"  longer than max_prompt_tokens ({limit}), which training leaves out: {over}")
        if over == len(lengths):
            faults.append(f"every prompt is longer than max_prompt_tokens ({limit}); raise it")
    whole = (rollouts["engine"].get("init_args") or {}).get("max_length")
    if whole and (response := rollouts.get("max_response_tokens")):
        short = sum(length + response > whole for length in lengths)
        print(f"  that leave less than max_response_tokens ({response}) of max_length ({whole}): {short}")
        if lengths[0] >= whole:
            faults.append(f"no prompt is shorter than max_length ({whole}); raise it")
    return faults
