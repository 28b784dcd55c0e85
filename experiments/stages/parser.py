"""Parses and builds configurations with jsonargparse and the Lightning CLI, and shortens their messages."""

from __future__ import annotations

import re
import tempfile
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import yaml

from experiments.registry.compose import Config
from experiments.registry.errors import ExperimentError
from experiments.stages import startup
from experiments.stages.classes import import_class
from retrieval import protocols

CLI_KEYS = ("seed_everything", "trainer", "model", "data")


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """Context manager that turns the error of a constructor or a check into an ExperimentError."""
    try:
        yield
    except ExperimentError:
        raise
    except (ValueError, TypeError, OSError, ArgumentError) as error:
        raise ExperimentError(f"{where}: {constructor_message(error)}") from error


def instantiate(config: Config, name: str) -> Any:
    """Construct and return one object from its configuration (``class_path`` and ``init_args``). ``name`` names the
    object in messages."""
    from jsonargparse import ArgumentParser

    protocols.compare_by_calls()
    startup.speed_up_parser()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(import_class(config["class_path"], name), name, required=True)
    parsed = parser.parse_object({name: config})
    try:
        return parser.instantiate_classes(parsed)[name]
    except ValueError as error:
        raise ValueError(constructor_message(error)) from error


def cli(config: Config, arguments: Sequence[str], where: str, *, instantiate: bool) -> Any:
    """Parse a stage's configuration: with a LightningCLI for kinds fit and test, with a parser of one class for kind
    task.

    Args:
        instantiate: build the objects, too. The result then has ``trainer``, ``model`` and ``datamodule``, or ``task``.
    """
    protocols.compare_by_calls()
    startup.speed_up_parser()
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
    except (ArgumentError, ValueError) as error:
        if isinstance(error, ValueError) and not str(error).startswith(OF_A_UNION):
            raise
        raise ExperimentError(f"{where}: {constructor_message(error)}") from error


def constructor_message(error: Exception) -> str:
    """Return the message of the constructor that failed, without the parser's messages around it."""
    inner: BaseException | None = error
    while inner is not None and str(inner).startswith(OF_A_UNION):
        inner = inner.__cause__
    fits_another = inner is None or "does not implement protocol" in str(inner)  # a member of a Union
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

        def _dump_config(self) -> None:  # a module reads it for its hyperparameters
            self.config_dump = {}

    # It warns because the process has arguments, too.
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
    """Parses the configuration of a task: a class with ``run(output_dir: Path) -> dict``."""

    def __init__(self, class_path: str, words: list[str], where: str, instantiate: bool) -> None:
        from jsonargparse import ArgumentParser

        target = import_class(class_path, where)
        if not callable(getattr(target, "run", None)):
            raise ExperimentError(f"{where}: {class_path} is not a task; expected a class with run(output_dir)")
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

# The parser's words and ours, replaced in this order.
REWORDED = (
    (r"': Problem with given class_path '[^']+': '", "."),  # 'model': ... 'lr': becomes 'model.lr':
    (r"(?:Does not implement protocol|Not a valid subclass of) (\w+)", r"Expected class_path and init_args of a \1"),
    (r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1"),
    (r"(?<=[^.:;]) Expected", "; expected"),
)  # fmt: skip


def condense(message: str) -> str:
    """Return the parser's error message as one line, without its repetitions for every member of a Union.

    ``option_types`` finds most faults first. The parser still finds numbers written as text (``1e-3``, ``0x10``).
    """
    lines = [re.sub(r"^-\s*", "", line.strip()) for line in message.splitlines() if not NOISE.match(line)]
    text = OF_A_RANGE.sub(r"found \2; expected \1", " ".join(line for line in lines if line))
    text = protocols.explain(re.sub(r"Parser key \"([^\"]+)\":", r"'\1':", text) or message.strip())
    for pattern, words in REWORDED:
        text = re.sub(pattern, words, text)
    return text
