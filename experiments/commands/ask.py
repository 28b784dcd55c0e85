"""``make ask``: asks a trained model a question and shows how it searches."""

from __future__ import annotations

import argparse
import copy
import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import one_line
from experiments.commands.command import command, counted, make_graph, option
from experiments.commands.models import find_model, is_served_elsewhere, rollouts_of
from experiments.launch import runner
from experiments.launch.shared_secret import share_secret
from experiments.registry.errors import ExperimentError
from experiments.registry.files import Config, data_arguments
from experiments.stages.context import RunContext

if TYPE_CHECKING:
    from rich.console import Console

    from rollout.engines.base import Generation, SamplingParams
    from rollout.samplers.base import GroupRunner, RunningView
    from rollout.trajectory import Task, Trajectory, TrajectoryPrefix


@command(
    "ask",
    "ask a trained model a question and watch it search",
    option("--question", help="default: read questions from the terminal"),
    option("--temperature", type=float, default=0.0, help="0 is greedy"),
)
def ask(args: argparse.Namespace, context: RunContext) -> None:
    """Answer the user's questions with the experiment's model, and print each turn as soon as it is complete."""
    from rich.console import Console

    from data_modules.loading.decoding import Decoding
    from experiments.stages.classes import plays_episodes
    from experiments.stages.parser import instantiate, refusals
    from rollout.protocols.text_protocol import shows_task_prompts

    question = args.question
    try:
        sampling = Decoding(temperature=args.temperature).params
    except ValueError as error:
        raise ExperimentError(f"--temperature: {error}") from None
    config = copy.deepcopy(make_graph(context).target().config)
    if plays_episodes(config):
        raise ExperimentError(
            f"the world of '{context.target}' takes tasks, not questions; its episodes are in the stage's "
            f"trajectories/; run new ones: {context.command('evaluate')}"
        )
    rollouts = rollouts_of(config)
    console = Console(highlight=False)
    if not is_served_elsewhere(config):
        model = find_model(context, None)
        runner.require_unaltered(model)
        rollouts["init_args"]["engine"]["init_args"]["model"] = str(model)
        console.print(f"[dim]loading {context.project.relative(model)} and its search engine ...[/dim]")
    share_secret(context.project.outputs)
    with refusals("rollouts"):
        system = instantiate(rollouts, "rollouts")
    system.sampler = WatchedSampler(console, system.protocol)
    example = example_task(config) if shows_task_prompts(system.protocol) else None
    task = asked_task(question, example) if question is not None else None
    try:
        start(system)
        if task is not None:
            answer(system, console, task, sampling, context.seed or 0)
            return
        while text := console.input("\n[bold]question[/bold] (empty to end): ").strip():
            answer(system, console, asked_task(text, example), sampling, context.seed or 0)
    except EOFError:
        pass  # the end of a piped list of questions
    finally:
        system.close()


def start(system: Any) -> None:
    """Start a rollout system. Raises ExperimentError if its model or its search engine does not start."""
    from experiments.stages.parser import refusals
    from retrieval.types import RetrievalFailure
    from rollout.trajectory import InfrastructureError

    with refusals("rollouts"):
        try:
            system.start()
        except (InfrastructureError, RetrievalFailure) as error:
            raise ExperimentError(one_line(error)) from error


def example_task(config: Config) -> Task:
    """Return the first question of the experiment's question files. Its prompt is the template for the user's
    questions."""
    task = first_task(data_arguments(config), config, ("test_files", "val_files", "train_files", "files"))
    if task is None:
        raise ExperimentError(
            "the prompt template is 'dataset', but the experiment names no question file; add one, as data.test_files"
        )
    return task


def first_task(arguments: Config, config: Config, options: Sequence[str]) -> Task | None:
    """Return the first task of the first question file that one of the ``options`` in ``arguments`` names, worded as
    in the experiment; None without a file."""
    from data_modules.datasets.questions import load_tasks
    from experiments.stages.data_files import listed, loading
    from experiments.stages.parser import refusals

    files = [path for option in options for path in listed(arguments.get(option))]
    if not files:
        return None
    invalid, columns = arguments.get("on_invalid_row", "refuse"), arguments.get("columns")
    with refusals("questions"):
        return loading(config).worded(load_tasks(files[0], invalid, answers=False, columns=columns)[:1])[0]


def asked_task(question: str, example: Task | None) -> Task:
    """Return the user's question as a task. If the data set writes the prompts, use the prompt of the task ``example``
    with its question replaced."""
    from rollout.trajectory import Task

    text = question.strip()
    if not text:
        raise ExperimentError("the question is empty; give one, as in Q='Who wrote Middlemarch?'")
    prompt = ()
    if example is not None:
        text += "" if text.endswith("?") else "?"
        prompt = tuple((role, content.replace(example.question, text)) for role, content in example.prompt)
        if prompt == example.prompt and text != example.question:
            raise ExperimentError(
                f"the prompt of task {example.id} does not contain its question, so no other can replace it"
            )
    return Task(id="asked", question=text, golden_answers=(), data_source="asked", prompt=prompt)


def answer(system: Any, console: Console, task: Task, sampling: SamplingParams, seed: int) -> None:
    from rich.markup import escape

    from rollout.trajectory import StopReason

    [trajectory] = system.rollout([task], n=1, sampling=sampling, seed=seed)
    if trajectory.stop_reason is StopReason.INFRASTRUCTURE:
        raise ExperimentError(f"the search engine or the model failed: {'; '.join(system.failures)}")
    found = trajectory.answer if trajectory.answer is not None else "(none)"
    calls = Counter(call.request.name for call in trajectory.executed_calls)
    made = ", ".join(f"{count} x {tool}" for tool, count in calls.items()) or "no call"
    console.print(f"\n[bold green]answer:[/bold green] {escape(found)}", markup=True)
    console.print(
        f"[dim]{counted(len(trajectory.turns), 'turn')}, {made}, {len(trajectory.response_ids)} tokens, "
        f"{trajectory.seconds:.1f} s, ended by {trajectory.stop_reason}"
        f"{f': {escape(system.failures[-1])}' if trajectory.left_out else ''}[/dim]"
    )


@dataclass
class WatchedSampler:
    """Samples one trajectory and prints it turn by turn: the model's text in colour, observations dimmed."""

    console: Console
    protocol: Any

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        from rollout.samplers.base import Hooks

        shown = 0

        def show(trajectory: TrajectoryPrefix) -> None:
            nonlocal shown
            new = zip(trajectory.loss_mask[shown:], trajectory.response_ids[shown:], strict=True)
            for role, tokens in itertools.groupby(new, key=operator.itemgetter(0)):
                text = self.protocol.decode([token for _, token in tokens])
                self.console.print(text, style="cyan" if role else "dim", markup=False, end="")
            shown = len(trajectory.response_ids)

        async def on_turn(running: RunningView, generation: Generation) -> None:
            show(running)

        trajectory = await group.run(0, hooks=Hooks(on_turn=on_turn))
        show(trajectory)
        self.console.print()
        return [trajectory]
