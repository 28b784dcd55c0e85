"""Checks that the parts of a stage's rollout system fit together, from their class paths and arguments.

``RolloutSystem`` compares the objects themselves once they are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.registry.compose import Config
from experiments.stages.classes import import_class
from experiments.stages.parser import instantiate, refusals


def check_rollouts(parsed: Any, where: str, upstream: Sequence[Path] = ()) -> None:
    """Check that the protocol, environment, sampler and engine of a stage's rollouts fit together.

    Args:
        upstream: folders of the stages before it, which may be missing yet. Tools from a file there are unknown.

    Raises:
        ExperimentError: the environment lacks a tool that the protocol calls, the sampler forks trajectories whose
            prompt is rewritten every turn, or the engine cannot sleep.
    """
    for section in ("data", "task"):
        options = parsed.config.get(f"{section}.init_args") or {}
        rollouts = options.get("rollouts.init_args")
        if rollouts is not None and rollouts.get("program.class_path"):
            check_agent_program(rollouts, where)
        if rollouts is None or not (rollouts.get("protocol.class_path") and rollouts.get("environment.class_path")):
            continue
        from rollout.environments.base import check_tools
        from rollout.samplers.base import check_forks
        from rollout.system import check_guide, check_sleep

        protocol = import_class(rollouts.protocol.class_path, where)
        given_tools = rollouts.get("protocol.init_args.tools")
        unknown = to_be_written(given_tools, upstream)
        called = () if unknown else called_tools(protocol, given_tools)
        environment = environment_tools(rollouts.environment.class_path, rollouts.get("environment.init_args.tools"))
        sampler = rollouts.get("sampler.class_path")
        with refusals(where):
            if rollouts.get("guide.engine.class_path"):
                check_guide(import_class(sampler, where) if sampler else None, None, bool(rollouts.get("sleep_mode")))
            if called and environment is not None:
                check_tools(environment, called, protocol.__name__)
            given = rollouts.get("protocol.init_args") or {}
            if sampler and (given.get("window") is not None or given.get("history") == "template"):
                check_forks(import_class(sampler, where), protocol.__name__)
            if rollouts.get("sleep_mode"):
                engine = import_class(rollouts.engine.class_path, where)
                ahead = options.get("max_off_policy_iterations") or 0
                check_sleep(engine, bool(rollouts.get("in_flight_updates")), ahead)
        if not unknown:
            check_protocol(protocol, rollouts.protocol.as_dict(), where)


def check_agent_program(rollouts: Any, where: str) -> None:
    """Check an agent program by constructing it, and that nothing else in the rollouts needs to write prompts. Raises
    ExperimentError with the message."""
    from rollout.programs.protocol import check_program
    from rollout.samplers.base import IndependentSampler

    protocol, sampler = import_class(rollouts.protocol.class_path, where), rollouts.get("sampler.class_path")
    with refusals(where):
        forks = import_class(sampler, where) if sampler else IndependentSampler
        check_program(protocol, rollouts.get("environment.class_path"), forks)
        instantiate(rollouts.program.as_dict(), "program")
    check_protocol(protocol, rollouts.protocol.as_dict(), where)


def check_protocol(protocol: type, block: Config, where: str) -> None:
    """Check a protocol that reads tool calls by constructing it, if its tokenizer folder exists. The constructor
    renders calls with the chat template and parses them again. Raises ExperimentError with its message."""
    from rollout.programs.protocol import ProgramProtocol
    from rollout.protocols.hermes import HermesProtocol

    folder = Path(str((block.get("init_args") or {}).get("tokenizer", "")))
    if not issubclass(protocol, HermesProtocol | ProgramProtocol) or not (folder / "tokenizer_config.json").is_file():
        return
    with refusals(where):
        instantiate(block, "protocol")


def to_be_written(tools: Any, upstream: Sequence[Path]) -> bool:
    """Return whether a file of tools is missing that an earlier stage will write."""
    files = [Path(tool).absolute() for tool in tools or () if isinstance(tool, str)]
    return any(file.is_relative_to(folder.absolute()) and not file.exists() for file in files for folder in upstream)


def called_tools(protocol: type, option: Any) -> tuple[str, ...]:
    """Return the names of the tools that a protocol class calls, given its option ``tools``; () if they are unknown."""
    from rollout.protocols.arpo_tags import ARPOProtocol
    from rollout.protocols.hermes import HermesProtocol
    from rollout.tools.schemas import read_schemas, tool_names

    if option and issubclass(protocol, ARPOProtocol):
        return tuple(option)
    if option and issubclass(protocol, HermesProtocol):
        return tool_names(read_schemas(option))
    named = getattr(protocol, "tools", ())
    return tuple(named) if isinstance(named, tuple | list) else ()


def environment_tools(class_path: str, option: Any) -> Any:
    """Return an object whose ``tools`` are those of the environment, or None if the tools are unknown. This is the
    environment's class, or for question answering an object with its option ``tools``."""
    from rollout.environments.question_answering import QuestionAnswering

    environment = import_class(class_path, "environment")
    if isinstance(environment, type) and issubclass(environment, QuestionAnswering):
        return SimpleNamespace(tools=option)
    return environment if isinstance(getattr(environment, "tools", None), tuple | list) else None
