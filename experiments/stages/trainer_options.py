"""Checks Lightning's Trainer options: unusable values, options without effect here, contradictions."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.profilers import Profiler

from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, UnitInterval
from experiments.registry import hardware
from experiments.registry.compose import Config
from experiments.registry.errors import ExperimentError
from experiments.stages import requirements
from experiments.stages.parser import refusals

Duration = str | dict[str, int]
Limit = NonNegativeInt | UnitInterval | None
Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "bf16", "32", "16", 32, 16]
# Narrower than Lightning's annotations.
TYPES: dict[str, Any] = {
    "accelerator": Literal["auto", "cpu", "gpu", "cuda"] | Accelerator,
    "num_nodes": PositiveInt,
    "precision": Precision | None,
    "fast_dev_run": bool | NonNegativeInt,
    "max_epochs": PositiveInt | Literal[-1] | None,
    "min_epochs": PositiveInt | None,
    "max_steps": PositiveInt | Literal[-1],
    "min_steps": PositiveInt | None,
    "limit_train_batches": PositiveInt | PositiveShare | None,
    "limit_val_batches": Limit,
    "limit_test_batches": Limit,
    "val_check_interval": PositiveInt | PositiveShare | Duration | None,
    "check_val_every_n_epoch": PositiveInt | None,
    "num_sanity_val_steps": NonNegativeInt | Literal[-1] | None,
    "log_every_n_steps": NonNegativeInt | None,
    "accumulate_grad_batches": PositiveInt,
    "gradient_clip_val": NonNegativeFloat | None,
    "gradient_clip_algorithm": Literal["norm", "value"] | None,
    "profiler": Literal["simple", "advanced", "pytorch"] | Profiler | None,
}
# Option -> class path prefix and name of the callback that it disables.
SWITCHES = {
    "enable_progress_bar": ("callbacks.training.progress.", "progress"),
    "enable_checkpointing": ("callbacks.training.resume.", "resume"),
}
# Option -> the values without effect, and what to do instead.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "barebones": ((False,), "a stage needs its logger and its checkpoints; leave it out"),
    "overfit_batches": ((0,), "the data modules order their batches themselves; take limit_train_batches"),
    "limit_predict_batches": ((None,), "nothing is predicted; take limit_test_batches"),
    "reload_dataloaders_every_n_epochs": ((0,), "the position in the data would be lost; leave it out"),
    "use_distributed_sampler": ((False,), "the data modules share the data among the ranks; leave it out"),
    "sync_batchnorm": ((False,), "language models have no batch norm; leave it out"),
    "default_root_dir": ((None,), "a stage writes into its own folder; take --paths.outputs FOLDER"),
    "model_registry": ((None,), "checkpoints stay in the stage's folder; leave it out"),
}
# Option of automatic optimisation -> the value without effect, and what to use here.
MANUAL = {
    "accumulate_grad_batches": (
        1,
        "a step adds up as many micro-batches of model.max_tokens_per_micro_batch as it takes",
    ),
    "gradient_clip_val": (None, "take model.max_grad_norm"),
    "gradient_clip_algorithm": (None, "take model.max_grad_norm"),
}


def check_values(trainer: Config, where: str) -> None:
    """Raise ExperimentError for Trainer options that have no effect in this project, or contradict each other."""
    for option, (neutral, instead) in UNSUPPORTED.items():
        if (value := trainer.get(option, neutral[0])) not in neutral:
            raise ExperimentError(f"{where}: trainer.{option} is {value!r}, which is not supported; {instead}")
    for option in ("max_time", "val_check_interval"):
        if isinstance(value := trainer.get(option), (str, dict)) and not _is_duration(value):
            raise ExperimentError(
                f"{where}: trainer.{option} is {value!r}; expected a duration such as 00:12:00:00 (days, hours, "
                "minutes, seconds) or {hours: 12}"
            )
    for kind in ("epochs", "steps"):
        least, most = trainer.get(f"min_{kind}"), trainer.get(f"max_{kind}")
        if least and most and 0 < most < least:
            raise ExperimentError(f"{where}: trainer.min_{kind} is {least}, above trainer.max_{kind} {most}")
    if trainer.get("max_epochs") == -1 and trainer.get("max_steps", -1) == -1 and trainer.get("max_time") is None:
        raise ExperimentError(f"{where}: trainer.max_epochs is -1, so the run never ends; add --trainer.max_steps N")
    for callback in trainer.get("callbacks") or ():
        for option, (prefix, name) in SWITCHES.items():
            if trainer.get(option) is False and callback.get("class_path", "").startswith(prefix):
                drop = f"drop the callback, too: --trainer.callbacks.{name} null"
                raise ExperimentError(f"{where}: trainer.{option} is False beside {callback['class_path']}; {drop}")
    if trainer.get("accelerator") == "cpu" and str(trainer.get("precision")).startswith("16"):
        raise ExperimentError(f"{where}: trainer.precision is {trainer['precision']}, which needs a GPU; take 32-true")
    _check_devices(trainer, where)


def check_manual(trainer: Config, where: str) -> None:
    """Raise ExperimentError for Trainer options without effect under manual optimisation, such as gradient_clip_val.
    The message names this project's option with the same effect."""
    for option, (neutral, instead) in MANUAL.items():
        if (value := trainer.get(option, neutral)) != neutral:
            raise ExperimentError(f"{where}: trainer.{option} is {value}, which does nothing here; {instead}")


def check_precision(module: Any, trainer: Config, where: str) -> None:
    """Raise ExperimentError if the trained weights would be in half precision. DeepSpeed may, because it keeps float32
    masters beside them."""
    from lightning_modules.models.precision import check_master_weights

    if requirements.is_sharded(trainer.get("strategy")):
        return
    single: Any = SimpleNamespace(precision=trainer.get("precision"), strategy=None)
    with refusals(where):
        check_master_weights(single, module.dtype_name, module.lora is not None)


def _is_duration(value: str | dict[str, Any]) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"\d+:\d\d:\d\d:\d\d", value) is not None and set(value) - set("0:") != set()
    try:
        return timedelta(**value) > timedelta(0)
    except (TypeError, OverflowError):
        return False


def _check_devices(trainer: Config, where: str) -> None:
    """Raise ExperimentError unless ``trainer.devices`` is a number or ``auto``; on GPUs also -1 or a list of different
    GPUs."""
    devices, indices = trainer.get("devices", 1), hardware.device_indices(trainer.get("devices", 1))
    if indices is not None:
        good = bool(indices) and all(map(str.isdigit, indices)) and len(set(indices)) == len(indices)
    else:
        good = str(devices) in ("auto", "-1") or bool(hardware.count_devices(devices))
    on_cpu = trainer.get("accelerator") == "cpu"
    if not good or (on_cpu and (indices is not None or str(devices) == "-1")):
        expected = "a number from 1 on" if on_cpu else "a number from 1 on, auto, or numbers of GPUs such as 0,1"
        raise ExperimentError(f"{where}: trainer.devices is {devices!r}; expected {expected}")


def check_by_lightning(trainer: Config, where: str) -> None:
    """Let Lightning check the Trainer's plain options, by constructing a bare Trainer on the CPU. Raises
    ExperimentError with Lightning's message."""
    skipped = ("accelerator", "devices", "num_nodes", "logger", "callbacks", "strategy", "plugins")
    scalars = {key: value for key, value in trainer.items() if isinstance(value, (str, int, float, type(None)))}
    plain: dict[str, Any] = {key: value for key, value in scalars.items() if key not in skipped}
    lightning = logging.getLogger("lightning.pytorch")
    level = lightning.level
    lightning.setLevel(logging.ERROR)
    try:
        Trainer(**plain, accelerator="cpu", devices=1, logger=False)
    except Exception as error:  # MisconfigurationException derives from Exception
        raise ExperimentError(f"{where}: trainer: {' '.join(str(error).split())}") from error
    finally:
        lightning.setLevel(level)
