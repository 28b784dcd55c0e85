"""Using what has been trained: evaluate a checkpoint, ask a model a question."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import runner
from experiments.compose import Config
from experiments.errors import ExperimentError
from experiments.graph import Graph, Stage, require_files
from experiments.overrides import Overrides
from experiments.request import Request

if TYPE_CHECKING:
    from rich.console import Console

    from rollout.engines.base import Generation
    from rollout.running_trajectory import RunningTrajectory
    from rollout.sampling import GroupRunner
    from rollout.trajectory import Task, Trajectory

EVALUATE_ONLY = "lightning_modules.policy_module.EvaluateOnly"


def trained_stage(request: Request) -> Stage:
    """The experiment's stage without command-line overrides: where its model lies."""
    return Graph(request.project, request.target, Overrides(), request.seed).target()


def find_model(request: Request, checkpoint: str | None) -> Path:
    """The file or folder named, or else the experiment's own model.

    Raises:
        ExperimentError: it is not there, or is neither a checkpoint nor a model folder.
    """
    if checkpoint is None:
        return runner.folder_of(request.project, trained_stage(request)) / "model"
    path = Path(checkpoint)
    if not path.exists():
        raise ExperimentError(f"no checkpoint at {checkpoint}")
    if path.is_dir() and (path / "model" / "config.json").is_file():
        return path / "model"  # a stage's folder
    if not is_model_folder(path) and path.suffix != ".ckpt":
        raise ExperimentError(f"{checkpoint} is neither a .ckpt nor a Hugging Face folder (no config.json in it)")
    return path


def is_model_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


# -- evaluate -------------------------------------------------------------------------------------------------------


def evaluate(graph: Graph, request: Request, checkpoint: str | None) -> None:
    """Run Trainer.test for a checkpoint as a stage of its own, and print its line of the table.

    Raises:
        ExperimentError: no such checkpoint, or one whose tokenizer is not the experiment's.
    """
    target = graph.target()
    if target.kind == "task":
        raise ExperimentError(f"'{target.name}' is of kind task: there is no model to evaluate")
    path = find_model(request, checkpoint)
    request = replace(request, verb="evaluate", variables=(f"CKPT={checkpoint}",) if checkpoint else ())
    stage = evaluation_stage(target, path, graph)
    for upstream in target.upstream:
        runner.folder_of(request.project, upstream)  # the world, the index: made by train
    require_files([stage], request.project.root)
    if is_model_folder(path):
        require_same_tokenizer(path, rollouts_of(stage.config)["init_args"]["protocol"]["init_args"]["tokenizer"])
    print(f"{target.name}: testing {request.project.relative(path.absolute())}", flush=True)
    runner.make_stage(stage, request, fresh=request.fresh, checkpoint=None if is_model_folder(path) else path)
    from callbacks.report import closing_table

    print(closing_table([(path.name, stage.folder)], target.config["experiment"].get("columns")))
    print(f"  figures: {request.project.relative(stage.folder / 'evaluation.json')}")


def evaluation_stage(target: Stage, path: Path, graph: Graph) -> Stage:
    """A stage of kind test over ``path``: a model folder is loaded in the place of the experiment's policy, a .ckpt
    into the experiment's own module."""
    digest = hashlib.sha256(f"{target.key} {graph.hasher(path)}".encode()).hexdigest()[:12]
    graph.hasher.save()
    folder = target.folder.parent / f"evaluate-{digest}"
    config = copy.deepcopy(target.config)
    config["experiment"] |= {"kind": "test", "folder": graph.project.relative(folder)}
    config["trainer"].pop("num_nodes", None)  # a test takes one node, and no launcher
    logger = (config["trainer"].get("logger") or {}).get("init_args")
    if logger is not None:
        logger |= {"run_name": f"{target.name}-{path.name}", "save_dir": str(folder)}
    if is_model_folder(path):
        config["model"] = {"class_path": EVALUATE_ONLY, "init_args": {"policy": str(path)}}
        rollouts_of(config)["init_args"]["engine"]["init_args"]["model"] = str(path)
    return replace(target, kind="test", key=digest, folder=folder, config=config)


def rollouts_of(config: Config) -> Config:
    """The rollout system's part of a configuration. Raises ExperimentError if there is none."""
    section = config.get("data") or config.get("task") or {}
    rollouts = (section.get("init_args") or {}).get("rollouts")
    if not rollouts:
        raise ExperimentError(f"'{config['experiment']['name']}' has no rollout system, so it cannot search or answer")
    return rollouts


def require_same_tokenizer(model: Path, tokenizer: str) -> None:
    """Raises ExperimentError when the model reads other ids than the experiment writes."""
    from transformers import AutoTokenizer

    theirs, ours = (AutoTokenizer.from_pretrained(str(p)).get_vocab() for p in (model, tokenizer))
    if theirs != ours:
        raise ExperimentError(
            f"{model} has another tokenizer ({len(theirs)} entries) than this experiment ({tokenizer}, {len(ours)} "
            "entries): it is a checkpoint of another model. Name the experiment that it belongs to: EXP=..."
        )


# -- ask ------------------------------------------------------------------------------------------------------------


def ask(graph: Graph, request: Request, question: str | None, temperature: float) -> None:
    """Roll out questions with the experiment's model, each turn printed as soon as it is there."""
    from rich.console import Console

    from rollout.protocols.text import shows_task_prompts

    config = copy.deepcopy(graph.target().config)
    model = find_model(request, None)
    rollouts = rollouts_of(config)
    rollouts["init_args"]["engine"]["init_args"]["model"] = str(model)
    console = Console(highlight=False)
    console.print(f"[dim]loading {request.project.relative(model)} and its search engine ...[/dim]")
    system = build_rollouts(rollouts)
    system.sampler = WatchedSampler(console, system.protocol)
    example = example_task(config) if shows_task_prompts(system.protocol) else None
    try:
        system.start()
        if question is not None:
            answer(system, console, asked_task(question, example), temperature, request.seed or 0)
            return
        while text := console.input("\n[bold]question[/bold] (empty to end): ").strip():
            answer(system, console, asked_task(text, example), temperature, request.seed or 0)
    except EOFError:
        pass  # the end of a piped list of questions
    finally:
        system.close()


def build_rollouts(config: Config) -> Any:
    """Instantiate a rollout system from its part of a configuration."""
    from jsonargparse import ArgumentParser

    from experiments.validate import import_class

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(import_class(config["class_path"], "rollouts"), "rollouts", required=True)
    return parser.instantiate_classes(parser.parse_object({"rollouts": config})).rollouts


def example_task(config: Config) -> Task:
    """The first question of the experiment's files, whose prompt shows how a question is put."""
    from data_modules.datasets.questions import load_tasks
    from data_modules.question_loading import QuestionLoading

    arguments = (config.get("data") or config["task"])["init_args"]
    files = [path for key in ("test_files", "val_files", "train_files", "files") for path in arguments.get(key) or ()]
    if not files:
        raise ExperimentError("the prompt template is 'dataset', and the experiment names no question file to show one")
    wording = {key: arguments[key] for key in ("prompts", "lcb_examples") if key in arguments}
    return QuestionLoading(None, **wording).worded(load_tasks(files[0])[:1])[0]


def asked_task(question: str, example: Task | None) -> Task:
    """The question as a task; where the data set words the prompts, in the prompt of ``example``."""
    from rollout.trajectory import Task

    text = question.strip()
    if not text:
        raise ExperimentError('the question is empty: make ask Q="Who wrote ...?"')
    prompt = ()
    if example is not None:
        text += "" if text.endswith("?") else "?"
        prompt = tuple((role, content.replace(example.question, text)) for role, content in example.prompt)
        if prompt == example.prompt and text != example.question:
            raise ExperimentError(f"the prompt of task {example.id} does not hold its question; no place for another")
    return Task(id="asked", question=text, golden_answers=(), data_source="asked", prompt=prompt)


def answer(system: Any, console: Console, task: Task, temperature: float, seed: int) -> None:
    from rich.markup import escape

    from data_modules.decoding import Decoding

    [trajectory] = system.rollout([task], n=1, sampling=Decoding(temperature=temperature).params, seed=seed)
    if trajectory.failed_by_infrastructure:
        raise ExperimentError(f"the search engine or the model failed: {'; '.join(system.failures)}")
    found = trajectory.answer if trajectory.answer is not None else "(none)"
    calls = Counter(call.request.name for call in trajectory.executed_calls)
    made = ", ".join(f"{count} x {tool}" for tool, count in calls.items()) or "no call"
    console.print(f"\n[bold green]answer:[/bold green] {escape(found)}", markup=True)
    console.print(
        f"[dim]{len(trajectory.turns)} turns, {made}, {len(trajectory.response_ids)} tokens, "
        f"{trajectory.seconds:.1f} s, ended by {trajectory.stop_reason}[/dim]"
    )


@dataclass
class WatchedSampler:
    """One trajectory, shown as it grows: the model's text in colour, what it reads dimmed."""

    console: Console
    protocol: Any

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        from rollout.sampling import Watch

        shown = 0

        def show(trajectory: RunningTrajectory | Trajectory) -> None:
            nonlocal shown
            while shown < len(trajectory.response_ids):
                role, end = trajectory.loss_mask[shown], shown
                while end < len(trajectory.response_ids) and trajectory.loss_mask[end] == role:
                    end += 1
                text = self.protocol.decode(trajectory.response_ids[shown:end])
                self.console.print(text, style="cyan" if role else "dim", markup=False, end="")
                shown = end

        async def on_turn(running: RunningTrajectory, generation: Generation) -> None:
            show(running)

        trajectory = await group.run(0, watch=Watch(on_turn=on_turn))
        show(trajectory)
        self.console.print()
        return [trajectory]
