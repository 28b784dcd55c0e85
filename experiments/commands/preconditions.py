"""``make preconditions``: measures on the initial model whether SOD, SDAR or ARPO can work."""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.make_command import make_command
from experiments.commands.command import command, make_graph, named, option
from experiments.commands.models import evaluation_stage, is_model_folder, rollouts_of
from experiments.launch import runner
from experiments.registry.errors import ExperimentError
from experiments.registry.files import Config, data_arguments
from experiments.stages.context import RunContext, StageFailed
from experiments.stages.graph import Graph, Stage, require_files

if TYPE_CHECKING:
    from experiments.reports.preconditions import Gate

QUESTIONS = 64
CALLBACKS = ("RankWatch", "Progress", "WeightSync", "Evaluation", "TrajectoryLog")  # kept in the tests
DISTILLS = (
    "lightning_modules.algorithms.sod.SOD",
    "lightning_modules.advantage_transforms.distillation.Distillation",
    "lightning_modules.advantage_transforms.divergence_loss.DivergenceLoss",
    "lightning_modules.advantage_transforms.dual_distillation.DualDistillation",
)
FORKS = "rollout.samplers.branching."
ALLOW = option("--allow", default="", metavar="GATES", help="names of gates that may fail, separated by commas")


@command(
    "preconditions",
    "measure whether SOD, SDAR or ARPO can work, before training",
    option("--questions", type=int, default=QUESTIONS, help=f"number of training questions; default {QUESTIONS}"),
    ALLOW,
)
def preconditions(args: argparse.Namespace, context: RunContext) -> None:
    """Measure on the initial model whether the algorithm can work, and print the gates (measurements with a required
    value).

    Raises:
        ExperimentError: an experiment without gates.
        StageFailed: a gate failed that ``ALLOW`` does not name.
    """
    context = named(context, "preconditions", QUESTIONS=args.questions)
    require_gates(make_graph(context), context, args.allow, args.questions)


def require_gates(
    graph: Graph, context: RunContext, allow: str, questions: int = QUESTIONS, shown: RunContext | None = None
) -> list[Gate]:
    """Measure and print the gates (preconditions of training) of the graph's target, and return them. Raises as
    ``preconditions``.

    Args:
        shown: the command in the message about failed gates; default: ``context``.
    """
    target = graph.target()
    measured(target, questions)  # refuses experiments without gates before any stage runs
    require_folders(target, graph.project.root)
    runner.make(graph, replace(context, compare=False), without_target=True)
    from experiments.reports.preconditions import gates_table

    gates = measure(graph, context, questions)
    allowed = {name.strip() for name in allow.split(",") if name.strip()}
    if unknown := sorted(allowed - {gate.name for gate in gates}):
        raise ExperimentError(
            f"ALLOW={allow}: unknown gate {', '.join(unknown)}; expected some of {', '.join(g.name for g in gates)}"
        )
    print(gates_table(gates, f"{target.name}: preconditions ({questions} training questions)"))
    failed = [gate for gate in gates if not gate.passed]
    more = context.command("preconditions", QUESTIONS=2 * questions)
    for gate in failed:
        advice = (
            f"these trajectories do not suffice to measure it; try more questions: {more}"
            if gate.found is None
            else gate.advice
        )
        print(f"  {gate.name}: {advice}{' (allowed)' if gate.name in allowed else ''}")
    if refused := [gate.name for gate in failed if gate.name not in allowed]:
        raise StageFailed(
            f"{len(refused)} of {len(gates)} gates failed: {', '.join(refused)}. Follow their advice, or continue "
            f"anyway: {(shown or context).command(ALLOW=','.join(gate.name for gate in failed))}",
            1,
        )
    return gates


def require_folders(target: Stage, root: Path) -> None:
    """Raise ExperimentError if the policy or the teacher is the name of a model on the hub: the gates read folders."""
    arguments, listed = target.config["model"]["init_args"], {need.path for need in target.needs}
    for name, model in (("policy", str(arguments["policy"])), ("teacher", find_teacher(target))):
        if model is None or model in listed or model.startswith("/") or (root / model).exists():
            continue
        if model.count("/") == 1:
            raise ExperimentError(
                f"'{target.name}': {name} is {model}, a name on the hub, and gates need a folder; fetch it, and name "
                f"the folder: hf download {model} --local-dir models/{model}"
            )


def measure(graph: Graph, context: RunContext, questions: int) -> list[Gate]:
    """Test the initial model of the graph's target in separate stages, and return the gates computed from them."""
    from callbacks.evaluation.turn_scores import TRAJECTORIES_FILE, by_trajectory, load_scores
    from experiments.reports.preconditions import distillation_gates, fork_gates, skill_gates
    from experiments.reports.results import read_evaluation

    target = graph.target()
    teacher, skills = find_teacher(target), find_skills(target)
    config, size = measured(target, questions)
    policy = str(target.config["model"]["init_args"]["policy"])

    def tested(name: str, model: str, config: Config) -> Path:
        stage = probe(target, graph, name, model, config)
        require_files([stage], graph.project.root)
        if runner.to_make([stage]):
            print(f"  measuring: {name}", flush=True)
            runner.make_stage(stage, context, fresh=False)
        return stage.folder

    if teacher is not None:
        scored = {"teacher": teacher, "max_trajectories": questions * size}
        start = tested("start", policy, watched(config, "turn_divergence.TurnDivergence", scored))
        continued = {"trajectories": str(start / TRAJECTORIES_FILE)}
        other = copy.deepcopy(config)
        data_arguments(other)["attempts"] = 1
        end = tested("teacher", teacher, watched(other, "continuations.Continuations", continued))
        return distillation_gates(
            read_evaluation(start)["test"], by_trajectory(load_scores(start) or []), read_evaluation(end)["test"], size
        )
    if skills is None:
        start = tested("start", policy, watched(config, "fork_outcomes.ForkOutcomes", {"forks": size}))
        return fork_gates(read_evaluation(start)["test"])
    arms = {"start": None, "with skills": skills, "with other skills": shuffled(skills)}
    about = json.loads((graph.project.root / policy / "config.json").read_text())
    positions = about.get("max_position_embeddings") or math.inf
    folders = [tested(name, policy, advised(config, arm, positions)) for name, arm in arms.items()]
    plain, skilled, other = (read_evaluation(folder)["test"] for folder in folders)
    return skill_gates(plain, skilled, other, size)


def find_teacher(target: Stage) -> str | None:
    """Return the folder of the teacher model that SOD, or GRPO with ``Distillation``, uses; None without a teacher."""
    for part in dictionaries(target.config.get("model")):
        if part.get("class_path") in DISTILLS:
            arguments = part.get("init_args") or {}
            if (arguments.get("teacher_server") or arguments.get("server")) is not None:
                raise ExperimentError(
                    f"'{target.name}' uses a teacher server, which cannot continue trajectories; give the teacher's "
                    "folder instead: --model.teacher FOLDER"
                )
            if arguments.get("opd_mode") != "none" and arguments.get("opd_coef", 1) and arguments.get("teacher"):
                return str(arguments["teacher"])
    return None


def find_skills(target: Stage) -> Config | None:
    """Return the configuration of the skills (advice texts) that SDAR and its relatives use; None without skills."""
    for part in dictionaries(target.config.get("model")):
        if (skills := part.get("skills")) is not None and part.get("skills_coef") != 0:
            return skills.get("init_args", skills)  # with or without their class
    return None


def find_sampler(target: Stage) -> Config | None:
    """Return the configuration of ARPO's or AEPO's branching sampler; None for other samplers."""
    sampler = rollouts_of(target.config)["init_args"].get("sampler") or {}
    if not str(sampler.get("class_path", "")).startswith(FORKS):
        return None
    if sampler["init_args"].get("variant") == "lock_step":
        raise ExperimentError(
            f"'{target.name}' branches by the tokens before a result (variant: lock_step), which has no gates; measure "
            "with variant: fixed"
        )
    return sampler["init_args"]


def dictionaries(value: object) -> Iterator[dict[str, Any]]:
    """Yield all mappings in a nested configuration, outer ones before inner ones."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from dictionaries(inner)


def measured(target: Stage, questions: int) -> tuple[Config, int]:
    """Return the configuration of the test that measures the gates, and the number of trajectories per question. The
    test samples the training questions as training would."""
    config = copy.deepcopy(target.config)
    data = data_arguments(config)
    size = data.get("group_size") or 1
    sampler = find_sampler(target)
    if (find_teacher(target), find_skills(target), sampler) == (None, None, None):
        raise ExperimentError(
            f"'{target.name}' has no gates: no teacher (SOD), no skills (SDAR), no branches (ARPO); use another EXP"
        )
    if size < 2 or not data.get("train_files"):
        raise ExperimentError(f"'{target.name}' samples no groups (group_size {size}), so its gates cannot be measured")
    data |= {
        "test_files": data["train_files"], "val_files": [], "diagnostic_prompts": [],
        "attempts": size, "max_test": questions,
        "eval_sampling": data.get("train_sampling") or {"temperature": 1.0},
        "max_eval_prompt_tokens": data.get("max_prompt_tokens"),
    }  # fmt: skip
    if data.get("splits"):
        data["splits"] = {**data["splits"], "tested": "train"}
    rollouts_of(config)["init_args"].pop("test_limits", None)
    if sampler is not None:  # record dH as the sampler computes it
        rollouts_of(config)["init_args"]["entropy_tokens"] = sampler.get("first_tokens", 20)
    callbacks = config["trainer"]["callbacks"]
    config["trainer"]["callbacks"] = [c for c in callbacks if c["class_path"].rpartition(".")[2] in CALLBACKS]
    return config, size


def watched(config: Config, callback: str, arguments: Config) -> Config:
    config = copy.deepcopy(config)
    config["trainer"]["callbacks"].append({"class_path": f"callbacks.evaluation.{callback}", "init_args": arguments})
    return config


def advised(config: Config, skills: Config | None, positions: float) -> Config:
    """Return the configuration with ``skills`` (advice texts) in the test's prompts, or without any for None. The token
    limits grow by the length of the skills, up to the model's ``positions``."""
    config = copy.deepcopy(config)
    arguments = rollouts_of(config)["init_args"]
    arguments["skills"] = None
    data_arguments(config)["eval_skills"] = skills is not None
    if skills is None:
        return config
    arguments["skills"] = {**skills, "place": "user_turn", "every_turn": False}
    for part in (arguments, arguments["engine"]["init_args"]):
        if part.get("max_length") is not None:
            part["max_length"] = min(part["max_length"] + skills.get("max_tokens", 2048), positions)
    return config


def shuffled(skills: Config | None) -> Config | None:
    if skills is None:
        return None
    other = {"class_path": "rollout.skills.retrieval.Shuffled", "init_args": {"retriever": skills["retriever"]}}
    return {**skills, "retriever": other}


def probe(target: Stage, graph: Graph, name: str, model: str, config: Config) -> Stage:
    """Return a stage that tests a model for the gates, in a separate folder next to the target's."""
    folder = graph.project.root / model
    if not is_model_folder(folder):
        fetch = make_command("download", {"EXP": target.name})
        raise ExperimentError(f"'{target.name}': no model folder at {model}; download it first: {fetch}")
    settings = json.dumps([config["data"], config["trainer"]["callbacks"]], sort_keys=True)
    return evaluation_stage(replace(target, config=config, key=f"{target.key}, {name} {settings}"), folder, graph)
