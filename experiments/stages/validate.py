"""Typing and validation by the Lightning CLI's parser, before anything is built: no model is loaded here.

Class paths and argument names are checked first, one by one, so that a message can name the nearest valid name; types
and everything else are the parser's (jsonargparse).
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import tempfile
import warnings
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml
from annotated_types import Ge, Le

from experiments.registry import hardware
from experiments.registry.compose import Config
from experiments.registry.errors import ExperimentError, nearest, require_keys
from experiments.registry.files import data_arguments
from experiments.registry.keys import MODELS, OURS, constructors
from experiments.registry.project import ROOT
from experiments.stages import option_types, requirements, startup
from experiments.stages.graph import Stage, closure, require_files, strings
from retrieval import protocols

# None of them takes a metric of torchmetrics.
WITHOUT_METRICS = ("callbacks.", "data_modules.", "experiments.", "lightning", "retrieval.", "rollout.", "torch.")
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
CLI_KEYS = ("seed_everything", "trainer", "model", "data")
# Arguments of earlier versions, and what to write instead.
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
}


@startup.no_collection()
def check(stage: Stage, root: Path) -> list[str]:
    """Check a stage without running it.

    Returns:
        the devices and packages that this machine lacks. The stage may be meant for another machine.

    Raises:
        ExperimentError: an unknown class or argument, a value of the wrong type, a missing argument or file, options
            that a module, a callback or the Trainer refuses, an unknown strategy, ranks that cannot share the prompts,
            a tool that the protocol calls and the environment lacks.
    """
    from experiments.stages.rollout_tools import check_rollouts

    require_files([stage], root)
    where = f"experiment '{stage.name}'"
    paths = [text for key, text in strings(stage.config) if key.endswith("class_path")]
    if all(path.startswith(WITHOUT_METRICS) for path in paths):
        startup.import_torchmetrics()
    config = with_arguments(stage.config, stage.arguments, where)
    check_classes(config, where)
    parsed = cli(stage.config, stage.arguments, where, instantiate=False)
    check_rollouts(parsed, where)
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
    """A run that ends before its first validation is refused here; Lightning would do so once the models are loaded."""
    interval = parsed.get("trainer.val_check_interval")
    iterations = parsed.get("data.init_args.iterations")
    epoch_wise = parsed.get("trainer.check_val_every_n_epoch", 1) is not None
    if isinstance(interval, int) and isinstance(iterations, int) and epoch_wise and interval > iterations:
        raise ExperimentError(
            f"{where}: trainer.val_check_interval is {interval}, but the run has only {iterations} iterations "
            f"(data.iterations); add --trainer.val_check_interval {iterations} or less"
        )


def check_generation_configs(stage: Stage, root: Path) -> None:
    """Raises ExperimentError where transformers would refuse to load a model because of its generation_config.json."""
    for section in ("model", "data", "task"):
        for key, text in strings(stage.config.get(section), section):
            model = key.rpartition(".")[2] in MODELS and key.rpartition(".")[2] != "tokenizer"
            if model and (root / text / "generation_config.json").is_file():
                from callbacks.model_export.checkpoints import read_generation_config

                try:
                    read_generation_config(str(root / text))
                except ValueError as error:
                    raise ExperimentError(f"experiment '{stage.name}': {key}: {error}") from None


def plays_episodes(config: Config) -> bool:
    """Whether the experiment's environment is a world that scores itself, whose tasks are no questions."""
    environment = ((data_arguments(config).get("rollouts") or {}).get("init_args") or {}).get("environment") or {}
    path = environment.get("class_path")
    return bool(path) and bool(getattr(import_class(path, "environment"), "scores_itself", False))


def instantiate(config: Config, name: str) -> Any:
    """One part of a configuration by itself, built from its class path and arguments; ``name`` is for messages."""
    from jsonargparse import ArgumentParser

    protocols.compare_by_calls()
    startup.resolve_types_as_python()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(import_class(config["class_path"], name), name, required=True)
    parsed = parser.parse_object({name: config})
    try:
        return parser.instantiate_classes(parsed)[name]
    except ValueError as error:
        if not str(error).startswith(OF_A_UNION):
            raise
        raise ValueError(constructor_message(error)) from error


def check_module(parsed: Any, where: str) -> Any:
    """Construct and return the module, if the stage has one (else None), and what it is given (skills with their bank):
    a module loads its models later, but its constructor knows which numbers, names and banks do not go together.

    Raises:
        ExperimentError: with what the constructor says.
    """
    if "model" not in parsed.config:
        return None
    from jsonargparse import Namespace

    try:
        return parsed.parser.instantiate_classes(Namespace(model=parsed.config.model)).model
    except (ValueError, TypeError, OSError) as error:
        raise ExperimentError(f"{where}: model: {constructor_message(error)}") from error


def check_callbacks(parsed: Any, stage: Stage, root: Path) -> None:
    """Construct the callbacks, whose constructors know which of their options do not agree. A callback that reads a
    file of an earlier stage, or one under ``experiment.needs``, is constructed once the file is there.

    Raises:
        ExperimentError: with what the constructor says.
    """
    expected = [s.folder for s in closure(stage.upstream)] + [root / need.path for need in stage.needs]
    for callback in parsed.config.get("trainer.callbacks") or ():
        block = callback.as_dict()
        files = [root / text for _, text in strings(block)]
        if any(path.is_relative_to(place) and not path.exists() for path in files for place in expected):
            continue
        try:
            instantiate(block, "callback")
        except (ValueError, TypeError, OSError) as error:
            why = f"{block['class_path']}: {constructor_message(error)}"
            raise ExperimentError(f"experiment '{stage.name}': {why}") from error


def check_data_options(module: Any, parsed: Any, where: str) -> None:
    """What the module cannot learn from is refused here, where ``fit`` would do so before its first rollout: a group
    too small for what is compared, tokens that are sampled from another distribution than the one that is trained, a
    teacher, reference or critic without an embedding for a token that the policy may sample."""
    samples, rounds = (parsed.config.get(f"data.init_args.{key}") for key in ("group_size", "dynamic_sampling"))
    if rounds is not None and samples == 1:
        raise ExperimentError(
            f"{where}: data.dynamic_sampling is {rounds}, but data.group_size is 1: the rewards of a group of "
            "one never differ; sample more per prompt or leave dynamic_sampling out"
        )
    options = {"check_rows": (), "check_samples": ("group_size",), "check_sampling": ("train_sampling",)}
    for method, names in options.items():
        if not hasattr(module, method):
            continue
        try:
            getattr(module, method)(*(parsed.config.get(f"data.init_args.{name}") for name in names))
        except ValueError as error:
            raise ExperimentError(f"{where}: {error}") from None


def check_lengths(parsed: Any, where: str) -> None:
    """Raises ExperimentError where a response cannot begin, or where rollouts may grow longer than the engine takes."""
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
    """Every class named exists and takes the arguments given. Raises ExperimentError."""
    for section in ("model", "data", "task"):
        check_names(config.get(section), section, where)
    fault = option_types.misfit(config.get("seed_everything", 0), Seed, "seed_everything", importlib.import_module)
    if fault is None and "task" not in config:
        fault = _check_lightning(config, where)
    if fault is not None:
        raise ExperimentError(f"{where}: {fault}")


def _check_lightning(config: Config, where: str) -> str | None:
    """Check the Trainer's options. Returns why ``model`` or ``data`` is not a module of Lightning's, or None."""
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

    from experiments.stages import trainer_options

    trainer = config.get("trainer") or {}
    require_keys(trainer, argument_names(Trainer), where, "trainer.")
    check_arguments(Trainer, "Trainer", trainer, "trainer", where, trainer_options.TYPES)
    load = partial(import_class, where=where)
    kinds = (("model", LightningModule), ("data", LightningDataModule))
    faults = (option_types.misfit(config[key], kind, key, load) for key, kind in kinds if config.get(key))
    return next(filter(None, faults), None)


def with_arguments(config: Config, arguments: Sequence[str], where: str) -> Config:
    """Put the arguments that are left for the parser into the configuration, so that they are checked, too."""
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
            names = argument_names(import_class(text, where))
            kept = {k: v for k, v in (block.get("init_args") or {}).items() if names is None or k in names}
            block |= {"class_path": text, "init_args": kept}
        else:
            node[leaf] = value
    return config


def _part(node: Any, name: str) -> Any:
    """The mapping below ``node`` of this name, of an object among its arguments; of a list's last object, as the parser
    has it."""
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


# -- names ----------------------------------------------------------------------------------------------------------


def import_class(class_path: str, where: str) -> Any:
    """The class (or function) a ``class_path`` names.

    Raises:
        ExperimentError: no such module, no such name in it, or the module fails to import.
    """
    module_name, _, name = class_path.rpartition(".")
    if not module_name:
        raise ExperimentError(f"{where}: '{class_path}' must be a full path, as rollout.system.RolloutSystem")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            hint = _elsewhere(name) or nearest(module_name, _modules_beside(module_name))
            raise ExperimentError(f"{where}: no module '{module_name}'{hint}") from None
        raise ExperimentError(f"{where}: {class_path} needs the package '{error.name}': not installed") from None
    if not hasattr(module, name):
        classes = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module_name]
        hint = _elsewhere(name) or nearest(name, classes)
        raise ExperimentError(f"{where}: no class '{name}' in {module_name}{hint}")
    return getattr(module, name)


def _elsewhere(name: str) -> str:
    """Hint with the full path of a class of this project that has this name; empty if there is none."""
    defines = re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            if defines.search(path.read_text(encoding="utf-8")):
                return f"; use '{'.'.join((*path.relative_to(ROOT).with_suffix('').parts, name))}'"
    return ""


def _modules_beside(module_name: str) -> list[str]:
    """All modules of the same top-level package, in whatever folder."""
    package = module_name.partition(".")[0]
    try:
        folders = [Path(folder) for folder in importlib.import_module(package).__path__]
    except (ImportError, AttributeError):
        return []
    found = [(folder, path) for folder in folders for path in folder.rglob("*.py") if path.stem != "__init__"]
    return [".".join((package, *path.relative_to(folder).with_suffix("").parts)) for folder, path in found]


def check_names(value: Any, path: str, where: str) -> None:
    """Walk a section. Every ``class_path`` must exist and take its ``init_args``."""
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
        raise ExperimentError(f"{where}, {path}: {value['class_path']} lacks {' and '.join(missing)}; write it")
    if extra := set(value) - {"class_path", "init_args", "dict_kwargs"}:
        raise ExperimentError(f"{where}: '{path}.{sorted(extra)[0]}' belongs under '{path}.init_args'")
    check_arguments(target, value["class_path"], value.get("init_args") or {}, path, where)


def check_arguments(
    target: Any, name: str, given: Config, path: str, where: str, narrower: Mapping[str, Any] | None = None
) -> None:
    """Compare the arguments of a class with its constructor: names, types, and that none is missing.

    Args:
        name: of the class, for messages.
        narrower: annotations that replace the constructor's.

    Raises:
        ExperimentError: the first argument that does not fit.
    """
    valid = argument_names(target)
    for key, value in given.items():
        at = f"{path}.{key}"
        if valid is not None and key not in valid:
            raise ExperimentError(
                f"{where}: unknown key '{at}': {name} has no such argument{RENAMED.get(key) or nearest(key, valid)}"
            )
        parameter, hint = parameter_of(target, key)
        hint = (narrower or {}).get(key, hint)
        if value is None:
            if parameter is not None and parameter.default is not None and not option_types.takes_null(hint):
                raise ExperimentError(f"{where}: '{at}' is null, which it cannot be; give a value or leave it out")
            continue
        if fault := option_types.misfit(value, hint, at, partial(import_class, where=f"{where}, {at}")):
            raise ExperimentError(f"{where}: {fault}")
        if option_types.names_class(value, hint):
            value = {"class_path": value}
        kind = option_types.built_from(value, hint)
        if kind is None:
            check_names(value, at, where)
        else:
            check_arguments(kind, kind.__name__, value, at, where)
    for key in required_arguments(target):
        if key not in given:
            expected = option_types.describe(parameter_of(target, key)[1])
            raise ExperimentError(f"{where}: '{path}.{key}' is missing, which {name} needs; expected {expected}")


def unwritten(target: Any) -> list[str]:
    """Abstract methods that a class has left as they are. Modules have no ABCMeta, so that Python does not refuse."""
    if not inspect.isclass(target):
        return []
    static = ((name, inspect.getattr_static(target, name, None)) for name in dir(target))
    return [f"the method '{name}'" for name, member in static if getattr(member, "__isabstractmethod__", False)]


def parameter_of(target: Any, name: str) -> tuple[inspect.Parameter | None, Any]:
    """The parameter of a constructor, its bases' included, and its annotation; (None, Any) where it is unknown."""
    for function in constructors(target):
        try:
            parameter = inspect.signature(function).parameters.get(name)
            hint = get_type_hints(function, include_extras=True).get(name, Any) if parameter else Any
        except Exception:  # a builtin without signature; names of a TYPE_CHECKING block
            return None, Any
        if parameter is not None:
            return parameter, hint
    return None, Any


def required_arguments(target: Any) -> list[str]:
    """The names that the class's own constructor cannot be called without; a base's may be given by the class."""
    try:
        parameters = inspect.signature(constructors(target)[0]).parameters.values()
    except (TypeError, ValueError, IndexError):
        return []
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self")
    return [p.name for p in named if p.default is p.empty]


def argument_names(target: Any) -> list[str] | None:
    """Names a class accepts, ``**kwargs`` followed up through its bases; None when that cannot be told."""
    names: list[str] = []
    for function in constructors(target):
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # builtins have no signature
            return None
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        names += [name for name in named if name != "self"]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None if not inspect.isclass(target) else names


# -- types ----------------------------------------------------------------------------------------------------------


def cli(config: Config, arguments: Sequence[str], where: str, *, instantiate: bool) -> Any:
    """A parsed command line: a LightningCLI for kinds fit and test, a parser of one class for kind task.

    With ``instantiate`` the result has ``trainer``, ``model`` and ``datamodule`` (or ``task``).
    """
    protocols.compare_by_calls()
    startup.resolve_types_as_python()
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            task = config["experiment"]["kind"] == "task"
            keys = ("seed_everything", "task") if task else CLI_KEYS
            yaml.safe_dump({k: config[k] for k in keys if config.get(k) is not None}, file, allow_unicode=True)
            file.flush()
            words = ["--config", file.name, *arguments]
            if task:
                return _TaskCLI(config["task"]["class_path"], words, where, instantiate)
            return _lightning_cli(words, instantiate)
    except ArgumentError as error:
        raise ExperimentError(f"{where}: {condense(str(error))}") from None
    except ValueError as error:
        if not str(error).startswith(OF_A_UNION):
            raise
        raise ExperimentError(f"{where}: {constructor_message(error)}") from error


def constructor_message(error: Exception) -> str:
    """What the constructor of a class said, without the parser's words around it: that the argument fits no type."""
    inner: BaseException | None = error
    while inner is not None and str(inner).startswith(OF_A_UNION):
        inner = inner.__cause__
    fits_another = inner is None or "does not implement protocol" in str(inner)  # the first of several in a Union
    return condense(str(error if fits_another else inner))


def _lightning_cli(words: list[str], instantiate: bool) -> Any:
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    import lightning_modules.sharding.strategies  # noqa: F401  # registers the names zero2 and zero3

    class ParsedOnly(LightningCLI):
        def instantiate_classes(self) -> None:
            pass

        def _set_seed(self) -> None:
            pass

        def _dump_config(self) -> None:  # for the hyperparameters of a module that is constructed
            self.config_dump = {}

    # It warns when `args` is given and the process has arguments of its own, as ours have.
    warnings.filterwarnings("ignore", ".*LightningCLI's args parameter is intended.*")
    return (LightningCLI if instantiate else ParsedOnly)(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        auto_configure_optimizers=False,
        parser_kwargs={"exit_on_error": False},
        seed_everything_default=0,
        run=False,
        args=words,
    )


class _TaskCLI:
    """The same, for a class with ``run(output_dir: Path) -> dict``."""

    def __init__(self, class_path: str, words: list[str], where: str, instantiate: bool) -> None:
        from jsonargparse import ArgumentParser

        target = import_class(class_path, where)
        if not callable(getattr(target, "run", None)):
            raise ExperimentError(f"{where}: {class_path} is no task: it has no method run(output_dir)")
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--config", action="config")
        parser.add_argument("--seed_everything", type=int, default=0)
        parser.add_subclass_arguments(target, "task", required=True)
        self.config = parser.parse_args(words)
        self.parser = parser
        self.task: Any = parser.instantiate_classes(self.config)["task"] if instantiate else None


OF_A_UNION = "Does not validate against any of the Union subtypes"
NOISE = re.compile(
    rf"^\s*(-\s*)?({OF_A_UNION}|Subtypes: .*|Errors:|Given value type: .*|Subclass types expect one of:"
    r"|a class path \(str\)|a dict (with|without) .*|\d+ validation errors? for .*|For further information .*"
    r"|Expected a <class 'NoneType'>.*|Given value: .*)$"
)
OF_A_RANGE = re.compile(r"Input should be (.*?) \[type=\w+, input_value=(.*), input_type=\w+\](?:\. Got value: .*)?")

# The parser's words and ours, in the order in which they are put.
REWORDED = (
    (r"': Problem with given class_path '[^']+': '", "."),  # 'model': ... 'lr': becomes 'model.lr':
    (r"(?:Does not implement protocol|Not a valid subclass of) (\w+)", r"Expected class_path and init_args of a \1"),
    (r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1"),
    (r"(?<=[^.:;]) Expected", "; expected"),
)  # fmt: skip


def condense(message: str) -> str:
    """The parser's message without what it repeats for every member of a Union, and a range's (``common.ranges``)
    without what it says of pydantic: one line. ``option_types`` finds most faults before; texts that the parser takes
    for numbers remain (``1e-3``, ``0x10``), and what constructors say."""
    lines = [re.sub(r"^-\s*", "", line.strip()) for line in message.splitlines() if not NOISE.match(line)]
    text = OF_A_RANGE.sub(r"found \2; expected \1", " ".join(line for line in lines if line))
    text = protocols.explain(re.sub(r"Parser key \"([^\"]+)\":", r"'\1':", text) or message.strip())
    for pattern, words in REWORDED:
        text = re.sub(pattern, words, text)
    return text
