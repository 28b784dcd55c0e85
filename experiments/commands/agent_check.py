"""``make agent-check``: runs an agent program once and shows its requests as rows."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.commands.ask import asked_task, first_task, start
from experiments.commands.command import command, counted, make_graph, option
from experiments.commands.models import find_model, is_model_folder, rollouts_of
from experiments.launch import runner
from experiments.registry.errors import ExperimentError
from experiments.registry.files import Config, data_arguments
from experiments.stages.context import RunContext

if TYPE_CHECKING:
    from rollout.programs.loop import Report
    from rollout.trajectory import Task, Trajectory


@command(
    "agent-check",
    "run an agent program once and show its requests, rows and tokens",
    option("--checkpoint", help="a model folder; default: the model that training starts from"),
    option("--question", help="default: the first task of the experiment's question files"),
)
def agent_check(args: argparse.Namespace, context: RunContext) -> None:
    """Play one task with the experiment's program, and print what it asked, which requests continue a row, why others
    were rendered as a whole, and how the rollout ended.

    Raises:
        ExperimentError: the experiment has no program, or no model to start from.
    """
    from data_modules.loading.decoding import Decoding
    from experiments.stages.parser import instantiate, refusals

    target = make_graph(context).target()
    config = copy.deepcopy(target.config)
    rollouts = rollouts_of(config)
    if not rollouts["init_args"].get("program"):
        raise ExperimentError(
            f"'{context.target}' has no agent program (rollouts.program); docs/own_agent.md says how to give one"
        )
    if args.checkpoint is None:
        for stage in target.upstream:
            runner.folder_of(context, stage)
        policy = config["model"]["init_args"]["policy"] if config.get("model") else None
    else:
        policy = str(find_model(context, args.checkpoint))
        if not is_model_folder(Path(policy)):
            folder = context.command("export", CKPT=args.checkpoint, TO="folder")
            raise ExperimentError(f"CKPT={args.checkpoint} is no model folder; make one of it first: {folder}")
        runner.require_unaltered(Path(policy))
    if policy is not None:  # an expert's engine has no model
        rollouts["init_args"]["engine"]["init_args"]["model"] = policy
    task = asked_task(args.question, None) if args.question else task_to_play(config)
    with refusals("rollouts"):
        sampling = Decoding(**(data_arguments(config).get("train_sampling") or {})).params
        system = instantiate(rollouts, "rollouts")
    print(f"task {task.id}: {task.question}\nloading {policy or 'the engine'} ...", flush=True)
    try:
        start(system)
        [trajectory] = system.rollout([task], n=1, sampling=sampling, seed=context.seed or 0)
        print("\n".join(described(system.agent_loop.reports[-1], trajectory, system.failures)))
    finally:
        system.close()


def task_to_play(config: Config) -> Task:
    """Return the first task of the experiment's question files. Raises ExperimentError without files."""
    arguments: Config = data_arguments(config) | ((config.get("task") or {}).get("init_args") or {})
    task = first_task(arguments, config, ("train_files", "val_files", "test_files", "files"))
    if task is None:
        raise ExperimentError("the experiment names no question file; give a task: Q='...'")
    return task


def described(report: Report, trajectory: Trajectory, failures: Sequence[str]) -> list[str]:
    """Return the lines that describe a rollout: its requests in order, then its end."""
    place: dict[int, Any] = {
        turn.number: (row, position)
        for row, chain in enumerate(report.chains, 1)
        for position, turn in enumerate(chain, 1)
    }
    turns = sorted((turn for chain in report.chains for turn in chain), key=lambda turn: turn.number)
    lines = ["", "request  row  turn  prompt  sampled  how the prompt was made"]
    for turn in turns:
        row, position = place[turn.number]
        joined = " (joins by its ids)" if turn.why and position > 1 else ""
        how = (
            f"rendered as a whole{joined}: {turn.why}"
            if turn.why
            else "continues a turn: its ids, then the new messages"
        )
        sizes = f"{len(turn.prompt):>6}  {len(turn.generation.token_ids):>7}"
        lines.append(f"{turn.number + 1:>7}  {row:>3}  {position:>4}  {sizes}  {how}")
    merged = sum(len(chain[-1].ids) for chain in report.chains)
    single = sum(len(turn.ids) for turn in turns)
    sampled = sum(trajectory.loss_mask)
    lines += [
        "",
        f"{counted(len(turns), 'request')}, {counted(len(report.chains), 'row')}: {merged} tokens, {sampled} of them "
        f"sampled ({single} with a row per request)",
        *(
            f"the program asked for {name} {count} times; the rollout's own sampling holds"
            for name, count in report.ignored.items()
        ),
        f"ended by {trajectory.stop_reason} in {trajectory.seconds:.1f} s"
        + (f": {failures[-1]}" if trajectory.left_out and failures else ""),
    ]
    if trajectory.reward is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.reward.parts.items())
        lines.append(f"reward {trajectory.reward.total:g} ({parts})")
    return [*lines, *([f"answer {trajectory.answer}"] if trajectory.answer is not None else [])]
