"""``make check-data``: reads all questions and passages of an experiment before training or indexing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.commands.command import builds_index, command, make_graph
from experiments.registry.errors import ExperimentError
from experiments.registry.files import data_arguments
from experiments.stages.context import RunContext
from experiments.stages.data_files import PartOfData, PromptWriters, read_data_files
from experiments.stages.graph import Stage

if TYPE_CHECKING:
    from data_modules.datasets.splits import Part
    from rollout.loop.agent_loop import FirstPrompts
    from rollout.trajectory import Task

EXAMPLES = 3
COUNTED = 2000  # evenly spaced prompts whose lengths are counted; a thousand take about a second


@command("check-data", "read questions and corpus, list all faults, show prompts and their lengths; loads no model")
def check_data(args: argparse.Namespace, context: RunContext) -> None:
    """Check all questions and passages of an experiment. Prints counts, three complete prompts, and prompt lengths
    against the token limits.

    Raises:
        ExperimentError: lists all faults of all files.
    """
    graph = make_graph(context)
    stage, plan = graph.target(), graph.plan(compare=False)
    faults: list[str] = []
    for other in plan:
        if builds_index(other):
            faults += check_corpus(other.config["task"]["init_args"])
    found = read_data_files(plan, context.project.root, absent=True)
    print(*found.lines(), sep="\n")
    faults += found.faults
    if parts := found.parts.get(stage.name):
        faults += check_parts(parts, stage)
    if faults:
        raise ExperimentError("\n  ".join([f"the data of '{stage.name}' cannot be used:", *dict.fromkeys(faults)]))
    print("\nno fault found")


def check_corpus(arguments: dict[str, Any]) -> list[str]:
    """Count the passages of a corpus that is to be indexed, and return messages about malformed ones."""
    from data_modules.datasets.files import listed
    from retrieval.corpus import RowError, passages, require_corpus
    from retrieval.types import CorpusError

    corpus, good = arguments["corpus"], 0
    faults: dict[int, list[str]] = {}  # by line
    unit = "line"
    form: list[str] = []
    try:
        for number, passage in passages(require_corpus(corpus), arguments.get("columns"), form.append):
            if isinstance(passage, RowError):
                faults[number], unit = [passage.fault], passage.unit
            else:
                good += 1
    except CorpusError as error:
        return [str(error)]
    bad = len(faults)
    read = "".join(f", read as {recognised}" for recognised in form)
    print(f"{corpus}: {good} passages" + (f", {bad} malformed {unit}{'s'[: bad > 1]}" if bad else "") + read)
    if not good and not faults:
        return [f"{corpus}: no passages"]
    said = listed(faults, unit, lambda lines, fault: f"{corpus}, {lines}: {fault}")
    if good and arguments.get("skip_malformed"):
        print("\n  ".join(["  left out (skip_malformed):", *said]) if said else "  no passage is left out")
        return []
    return said


def check_parts(parts: Sequence[PartOfData], stage: Stage) -> list[str]:
    """Print the number of questions in each part of the data (train, val, test), some prompts, and prompt lengths.
    Return messages about refused questions and exceeded limits."""
    arguments, counts = data_arguments(stage.config), {part.part: len(part.tasks) for part in parts}
    print("  " + ", ".join(f"{part} {count}" for part, count in counts.items()))
    faults = check_prompts([(part.part, task) for part in parts for task in part.tasks], stage)
    if (size := arguments.get("prompts_per_iteration") or 0) > counts.get("train", size):
        faults.append(f"{counts['train']} questions to train on, but prompts_per_iteration is {size}; lower it")
    return faults


def check_prompts(questions: Sequence[tuple[Part, Task]], stage: Stage) -> list[str]:
    """Print some prompts and a summary of prompt lengths. Return messages about questions that the protocol refuses."""
    from data_modules.datasets.files import listed, spread

    writers = PromptWriters(stage)
    faults: list[list[str]] = []
    lengths: list[int] = []
    for part, task in spread(questions, COUNTED):
        try:
            writer = writers.of(part)
        except ValueError as error:
            return [str(error)]
        if writer is None:
            return []
        try:
            ids = writer.prompt_ids(task)
        except ValueError as error:
            faults.append([str(error)])
            continue
        lengths.append(len(ids))
        if len(lengths) <= EXAMPLES:
            answers = ", ".join(task.golden_answers) or "(tests)"
            text = writer.protocol.decode(ids)
            print(f"\n--- {task.id}: {len(ids)} tokens {_ends(ids)}, answer: {answers}\n{text}")
    if lengths:
        _say_lengths(sorted(lengths), writers.of("train"))
    numbered = dict(enumerate(faults))
    return listed(numbered, "question", lambda which, fault: f"{which}: {fault}" if "more" in which else fault)


def _ends(ids: Sequence[int]) -> str:
    return (
        str(list(ids)) if len(ids) <= 8 else f"[{', '.join(map(str, ids[:5]))}, ..., {', '.join(map(str, ids[-3:]))}]"
    )


def _say_lengths(lengths: list[int], writer: FirstPrompts | None) -> None:
    """Print a summary of the sorted prompt lengths, and how many prompts leave too little space for a full response."""
    middle, high = lengths[len(lengths) // 2], lengths[len(lengths) * 95 // 100]
    print(f"\nprompts, of {len(lengths)}: median {middle} tokens, 95 % up to {high}, longest {lengths[-1]}")
    if writer is not None and (whole := writer.budgets.max_length):
        response = writer.budgets.max_response_tokens
        short = sum(length + response > whole for length in lengths)
        print(f"  with less than max_response_tokens ({response}) left of max_length ({whole}): {short}")
