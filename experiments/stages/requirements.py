"""Checks that the packages that a stage needs are installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from experiments.registry.compose import Config
from experiments.registry.errors import ExperimentError
from experiments.registry.files import init_args_of
from experiments.registry.hardware import GPU_NAMES

ENGINE = "rollout.engines.vllm_engine.VLLMEngine"


def check_packages(config: Config, where: str) -> list[str]:
    """Return messages about optional packages that this machine lacks for a stage. Another machine may have them.

    Raises:
        ExperimentError: a package is not installed, or an option needs a GPU and the trainer is on the CPU.
    """
    trainer = config.get("trainer") or {}
    engines = list(init_args_of([config.get("data"), config.get("task")], ENGINE))
    for needed, package, option in (
        (is_sharded(trainer.get("strategy")), "deepspeed", "this trainer.strategy"),
        (engines, "vllm", "VLLMEngine"),
    ):
        if needed and find_spec(package) is None:
            raise ExperimentError(f"{where}: {option} needs the package {package}, which is not installed: make setup")
    model = (config.get("model") or {}).get("init_args") or {}
    flash = str(model.get("attention")).startswith("flash_attention")
    if trainer.get("accelerator") == "cpu" and (flash or model.get("liger")):
        option, instead = ("attention", "sdpa") if flash else ("liger", "false")
        found = str(model[option]).lower()
        raise ExperimentError(
            f"{where}: model.{option} is {found}, which needs CUDA, and trainer.accelerator is cpu; "
            f"set --model.{option} {instead}"
        )
    if model.get("liger") and trainer.get("accelerator") in GPU_NAMES and find_spec("liger_kernel") is None:
        return [f"{where}: model.liger needs the package liger-kernel, which is not installed: make setup"]
    return []


def is_sharded(strategy: Any) -> bool:
    """Return whether a ``trainer.strategy``, a name or an object, is one of DeepSpeed's."""
    name = strategy.get("class_path", "") if isinstance(strategy, dict) else str(strategy)
    return name.rpartition(".")[2].lower().startswith(("zero", "deepspeed"))
