"""Validates a stage without loading a model.

Checks class paths, argument names and types first, so that a message can name the nearest valid name or the values that
an option takes. Then the parser (jsonargparse) reads the configuration, and constructors check their options.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from experiments.registry import hardware
from experiments.registry.compose import Config
from experiments.registry.constructors import arguments_of
from experiments.registry.errors import ExperimentError, nearest, require_keys
from experiments.registry.keys import MODELS
from experiments.stages import option_types, requirements, startup
from experiments.stages.classes import import_class, unwritten
from experiments.stages.graph import Stage, closure, require_files, strings
from experiments.stages.parser import cli, instantiate, refusals
from experiments.stages.rollout_tools import check_rollouts

# Packages that use no metric of torchmetrics.
WITHOUT_METRICS = ("callbacks.", "data_modules.", "experiments.", "lightning", "retrieval.", "rollout.", "torch.")
LIGHTNING = ("callbacks.", "data_modules.", "lightning")  # their modules import Lightning
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
# Argument of an earlier version -> what to write instead.
RENAMED = {
    "show_tools": "; now tools_in: leave it out for show_tools: true, tools_in: trained for show_tools: false",
    "dead_after_s": "; leave it out: the process group's timeout ends a run that has lost a host",
    "colocate": "; now sleep_mode: true for colocate: sleep, sleep_mode: false for colocate: share",
    "in_flight": "; now in_flight_updates: true for in_flight: continue, false for in_flight: finish",
    "staleness": "; now max_off_policy_iterations, with the same number",
    "failure_patience": "; now max_consecutive_failures, with the same number",
    "hang_s": "; now heartbeat_timeout_s, with the same number",
    "prompts_per_step": "; now prompts_per_iteration",
    "samples_per_prompt": "; now group_size",
    "mini_batches": "; now num_mini_batches",
    "micro_batch_tokens": "; now max_tokens_per_micro_batch",
    "faulty_rows": "; now on_invalid_row",
    "correct_from": "; now success_threshold",
    "probes": "; now diagnostic_prompts",
    "max_probe": "; now max_diagnostic_prompts",
    "slip": "; now error_rate",
    "annotations": "; now advantage_transforms",
    "kl_estimator": "; now reference_kl_estimator, and only with a kl_coef above 0",
    "lone": "; now singleton_advantage",
    "reference_step": "; now reference_turn",
    "step_weight": "; now turn_weight",
    "step_norm": "; now turn_norm",
    "decay_steps": "; now decay_iterations",
    "weight_transfer": "; leave it out: make engine ARGS='--transport nccl' starts a server for NCCL",
}
# The same for (argument, value).
RENAMED_VALUES = {("opd_mode", "stepwise"): "; now divergence_ratio", ("transport", "shared_memory"): "; now files"}


@startup.no_collection()
def check(stage: Stage, root: Path, *, only: bool = False) -> list[str]:
    """Check a stage's configuration without running it or loading a model.

    Args:
        only: this process runs no stage afterwards, so that it need not import all of Lightning.

    Returns:
        devices and packages that this machine lacks. Another machine may have them.

    Raises:
        ExperimentError: an unknown class or argument, a value of the wrong type, a missing argument or file, options
            that a module, a callback or the Trainer refuses, an unknown strategy, ranks that cannot share the prompts,
            a tool that the protocol calls and the environment lacks.
    """
    require_files([stage], root)
    where = f"experiment '{stage.name}'"
    paths = [text for key, text in strings(stage.config) if key.endswith("class_path")]
    if all(path.startswith(WITHOUT_METRICS) for path in paths) and any(path.startswith(LIGHTNING) for path in paths):
        startup.import_lightning() if only else startup.import_torchmetrics()
    config = with_arguments(stage.config, stage.arguments, where)
    check_classes(config, where)
    parsed = cli(stage.config, stage.arguments, where, instantiate=False)
    check_rollouts(parsed, where, [made.folder for made in closure(stage.upstream)])
    check_generation_configs(stage, root)
    module = check_module(parsed, where)
    notes = requirements.check_packages(config, where)
    if stage.kind != "task":
        _check_trainer(module, parsed, config, where)
    check_data_options(module, parsed, where)
    check_callbacks(parsed, stage, root)
    check_lengths(parsed, where)
    return [*hardware.missing_devices(config, where), *notes]


def _check_trainer(module: Any, parsed: Any, config: Config, where: str) -> None:
    from experiments.stages import trainer_options

    trainer = config.get("trainer") or {}
    trainer_options.check_values(trainer, where)
    hardware.check_strategy(trainer.get("strategy"), where)
    trainer_options.check_by_lightning(trainer, where)
    hardware.check_shares(config, where)
    hardware.check_indices(config, where)
    check_validation_interval(parsed.config, where)
    if not getattr(module, "automatic_optimization", True):
        trainer_options.check_manual(trainer, where)
    if config["experiment"]["kind"] == "fit" and hasattr(module, "dtype_name"):
        trainer_options.check_precision(module, trainer, where)


def check_validation_interval(parsed: Any, where: str) -> None:
    """Raise ExperimentError if the run would end before its first validation. Lightning would refuse it after loading
    the models."""
    interval = parsed.get("trainer.val_check_interval")
    iterations = parsed.get("data.init_args.iterations")
    epoch_wise = parsed.get("trainer.check_val_every_n_epoch", 1) is not None
    if isinstance(interval, int) and isinstance(iterations, int) and epoch_wise and interval > iterations:
        raise ExperimentError(
            f"{where}: trainer.val_check_interval is {interval}, but the run has only {iterations} iterations "
            f"(data.iterations); add --trainer.val_check_interval {iterations} or less"
        )


def check_generation_configs(stage: Stage, root: Path) -> None:
    """Raise ExperimentError for a model whose generation_config.json transformers would refuse."""
    for section in ("model", "data", "task"):
        for key, text in strings(stage.config.get(section), section):
            model = key.rpartition(".")[2] in MODELS and key.rpartition(".")[2] != "tokenizer"
            if model and (root / text / "generation_config.json").is_file():
                from callbacks.model_export.checkpoints import read_generation_config

                with refusals(f"experiment '{stage.name}': {key}"):
                    read_generation_config(str(root / text))


def check_module(parsed: Any, where: str) -> Any:
    """Construct a stage's Lightning module without loading its models, and return it; None for a stage without a
    module.

    Its constructor checks options against each other.

    Raises:
        ExperimentError: with the message of the constructor.
    """
    if "model" not in parsed.config:
        return None
    from jsonargparse import Namespace

    with refusals(f"{where}: model"):
        return parsed.parser.instantiate_classes(Namespace(model=parsed.config.model)).model


def check_callbacks(parsed: Any, stage: Stage, root: Path) -> None:
    """Check a stage's callbacks by constructing them. Their constructors check options against each other.

    Skips a callback that reads a missing file of an earlier stage, or of ``experiment.needs``.

    Raises:
        ExperimentError: with the message of the constructor.
    """
    expected = [s.folder for s in closure(stage.upstream)] + [root / need.path for need in stage.needs]
    for callback in parsed.config.get("trainer.callbacks") or ():
        block = callback.as_dict()
        files = [root / text for _, text in strings(block)]
        if any(path.is_relative_to(place) and not path.exists() for path in files for place in expected):
            continue
        with refusals(f"experiment '{stage.name}': {block['class_path']}"):
            instantiate(block, "callback")


def check_data_options(module: Any, parsed: Any, where: str) -> None:
    """Raise ExperimentError for data options that the Lightning module cannot train on, as ``fit`` would before its
    first rollout.

    Examples: a group too small to compare, tokens sampled from another distribution than the trained one, a teacher,
    reference or critic without an embedding for a token that the policy may sample.
    """
    data = parsed.config.get("data.init_args") or {}
    with refusals(where):
        if data.get("dynamic_sampling") is not None:
            from data_modules.rollout_data_module import check_groups

            check_groups(data.get("group_size"), data.get("dynamic_sampling"))
        options = {"check_rows": (), "check_samples": ("group_size",), "check_sampling": ("train_sampling",)}
        for method, names in options.items():
            if hasattr(module, method):
                getattr(module, method)(*map(data.get, names))


def check_lengths(parsed: Any, where: str) -> None:
    """Raise ExperimentError for token limits that leave no token for a response, or that exceed the engine's."""
    for section in ("data", "task"):
        options = parsed.config.get(f"{section}.init_args") or {}
        engine = options.get("rollouts.init_args.engine.init_args.max_length")
        rollouts = options.get("rollouts.init_args.max_length")
        if engine and rollouts and rollouts > engine:
            raise ExperimentError(
                f"{where}: {section}.rollouts.max_length is {rollouts}, but {section}.rollouts.engine.max_length is "
                f"{engine}; take {engine} or less, or raise the engine's"
            )
        longest, prompt = rollouts or engine, options.get("max_prompt_tokens")
        if longest and prompt and prompt >= longest:
            raise ExperimentError(
                f"{where}: {section}.max_prompt_tokens is {prompt}, which leaves no token for a response in max_length "
                f"{longest}; take less than {longest}, or raise rollouts.engine.max_length"
            )


def check_classes(config: Config, where: str) -> None:
    """Check that every class in a configuration exists and accepts its arguments. Raises ExperimentError."""
    for section in ("model", "data", "task"):
        check_names(config.get(section), section, where)
    fault = option_types.misfit(config.get("seed_everything", 0), Seed, "seed_everything", importlib.import_module)
    if fault is None and "task" not in config:
        fault = _check_lightning(config, where)
    if fault is not None:
        raise ExperimentError(f"{where}: {fault}")


def _check_lightning(config: Config, where: str) -> str | None:
    """Check the Trainer's options. Return why ``model`` or ``data`` is not a Lightning module, or None if both are."""
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

    from experiments.stages import trainer_options

    trainer = config.get("trainer") or {}
    require_keys(trainer, arguments_of(Trainer).known, where, "trainer.")
    check_arguments(Trainer, "Trainer", trainer, "trainer", where, trainer_options.TYPES)
    load = partial(import_class, where=where)
    kinds = (("model", LightningModule), ("data", LightningDataModule))
    faults = (option_types.misfit(config[key], kind, key, load) for key, kind in kinds if config.get(key))
    return next(filter(None, faults), None)


def with_arguments(config: Config, arguments: Sequence[str], where: str) -> Config:
    """Return a copy of the configuration with the parser's remaining ``--key=value`` arguments set in it, so that
    validation sees them."""
    config = copy.deepcopy(config)
    for argument in arguments:
        path, _, text = argument.removeprefix("--").partition("=")
        *parents, leaf = path.removesuffix("+").split(".")
        node: Any = config
        for part in parents:
            node = _part(node, part)
        value = option_types.read(text)
        if "class_path" in node and leaf not in ("class_path", "init_args"):
            node = node.setdefault("init_args", {})
        old = node.get(leaf)
        if path.endswith("+"):
            node[leaf] = [*(old or ()), *(value if isinstance(value, list) else [value])]
        elif leaf == "class_path" or (isinstance(old, dict) and isinstance(value, str) and "." in value):
            block = node if leaf == "class_path" else old
            new = arguments_of(import_class(text, where))
            kept = {k: v for k, v in (block.get("init_args") or {}).items() if k in new.known or not new.complete}
            block |= {"class_path": text, "init_args": kept}
        else:
            node[leaf] = value
    return config


def _part(node: Any, name: str) -> Any:
    """Return the mapping called ``name`` in a configuration's ``node``, or in its arguments if ``node`` is an object.
    For a list, return its last object, as the parser does."""
    if "class_path" in node and name not in ("class_path", "init_args"):
        node = node.setdefault("init_args", {})
    part = node.setdefault(name, {})
    if isinstance(part, str):
        part = node[name] = {"class_path": part}
    if not isinstance(part, list):
        return part if isinstance(part, dict) else {}
    if part and isinstance(part[-1], str):
        part[-1] = {"class_path": part[-1]}
    return part[-1] if part else {}


def check_names(value: Any, path: str, where: str) -> None:
    """Check that every ``class_path`` in a configuration's section exists and accepts its ``init_args``. Raises
    ExperimentError."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            check_names(item, f"{path}[{i}]", where)
    if not isinstance(value, dict):
        return
    if not isinstance(value.get("class_path"), str):
        for key, item in value.items():
            check_names(item, f"{path}.{key}", where)
        return
    target = import_class(value["class_path"], f"{where}, {path}")
    if missing := unwritten(target):
        raise ExperimentError(f"{where}, {path}: {value['class_path']} lacks {' and '.join(missing)}; implement it")
    if extra := set(value) - {"class_path", "init_args", "dict_kwargs"}:
        raise ExperimentError(f"{where}: '{path}.{sorted(extra)[0]}' belongs under '{path}.init_args'")
    check_arguments(target, value["class_path"], value.get("init_args") or {}, path, where)


def check_arguments(
    target: Any, name: str, given: Config, path: str, where: str, narrower: Mapping[str, Any] | None = None
) -> None:
    """Check the arguments of a class against its constructor: names, types, and that none is missing.

    Args:
        name: name of the class in messages.
        narrower: annotations that replace those of the constructor.

    Raises:
        ExperimentError: the first argument that does not fit.
    """
    arguments = arguments_of(target)
    for key, value in given.items():
        at, parameter = f"{path}.{key}", arguments.known.get(key)
        if parameter is None and arguments.complete:
            instead = RENAMED.get(key) or nearest(key, arguments.known)
            raise ExperimentError(f"{where}: unknown key '{at}': {name} has no such argument{instead}")
        hint = (narrower or {}).get(key, Any if parameter is None else parameter.annotation)
        if value is None:
            if parameter is not None and parameter.default is not None and not option_types.takes_null(hint):
                raise ExperimentError(f"{where}: '{at}' is null; expected a value; give one or leave the option out")
            continue
        if fault := option_types.misfit(value, hint, at, partial(import_class, where=f"{where}, {at}")):
            now = RENAMED_VALUES.get((key, value)) if isinstance(value, str) else None
            raise ExperimentError(f"{where}: " + (f"'{at}' is {value!r}{now}" if now else fault))
        if option_types.names_class(value, hint):
            value = {"class_path": value}
        kind = option_types.built_from(value, hint)
        if kind is None:
            check_names(value, at, where)
        else:
            check_arguments(kind, kind.__name__, value, at, where)
    for key in arguments.required:
        if key not in given:
            expected = option_types.describe(arguments.known[key].annotation)
            raise ExperimentError(f"{where}: '{path}.{key}' is missing, which {name} needs; expected {expected}")
