"""What a stage asks of machines: strategy, devices, shares of the ranks. Known before any model loads.

Torch and Lightning are imported by the functions that need them.
"""

from __future__ import annotations

from typing import Any

from experiments.compose import Config
from experiments.errors import ExperimentError, nearest
from experiments.launch import ranks_of, require_counted

GPU_NAMES = ("cuda", "gpu")


def check_strategy(name: Any, where: str) -> None:
    """Raises ExperimentError for a name that no strategy has; Lightning would say so when the stage starts."""
    if not isinstance(name, str) or name == "auto":
        return
    from lightning.pytorch.strategies import StrategyRegistry

    import lightning_modules.strategies  # noqa: F401  # registers the names zero2 and zero3

    known = StrategyRegistry.available_strategies()
    if name not in known:
        raise ExperimentError(
            f"{where}: there is no trainer.strategy '{name}'{nearest(name, ('auto', 'ddp', 'zero2', 'zero3'))} "
            "(any other name of Lightning's or a class_path will do, too)"
        )


def check_shares(config: Config, where: str) -> None:
    """Raises ExperimentError if the ranks cannot have equal shares of a step's prompts, or cannot be counted although
    there are several nodes."""
    prompts = ((config.get("data") or {}).get("init_args") or {}).get("prompts_per_step")
    ranks = ranks_of(config)
    if ranks.nodes > 1:
        require_counted(where, config)
    world = ranks.nodes * (ranks.processes or 1)
    if isinstance(prompts, int) and prompts % world:
        raise ExperimentError(
            f"{where}: data.prompts_per_step is {prompts}, which {ranks.nodes} x {ranks.processes} = {world} ranks "
            f"cannot share equally; take a multiple of {world}, or other trainer.devices"
        )


def check_indices(config: Config, where: str) -> None:
    """Raises ExperimentError for GPUs that are named by other numbers than 0, 1, ...: a rank's engine takes the GPU of
    the rank's number, and would stand on another than its trainer."""
    trainer = config.get("trainer") or {}
    devices = trainer.get("devices", 1)
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if trainer.get("accelerator") not in GPU_NAMES or not isinstance(devices, (list, tuple)):
        return
    if [str(d).strip() for d in devices] != [str(i) for i in range(len(devices))]:
        named = ",".join(str(d).strip() for d in devices)
        raise ExperimentError(
            f"{where}: trainer.devices names the GPUs {named}, but engines take the GPUs 0 to {len(devices) - 1}; "
            f"choose by the environment instead: CUDA_VISIBLE_DEVICES={named}, and --trainer.devices {len(devices)}"
        )


def missing_devices(config: Config, where: str) -> list[str]:
    """What this machine lacks for the stage, as at most one message."""
    trainer = config.get("trainer") or {}
    if trainer.get("accelerator") not in GPU_NAMES:
        return []
    import torch

    found = torch.cuda.device_count()
    wanted = _wanted(trainer.get("devices", 1))
    if found >= wanted:
        return []
    devices = trainer.get("devices", 1)
    return [
        f"{where}: trainer.devices is {devices} with trainer.accelerator {trainer['accelerator']}, but this machine "
        f"has {found} CUDA devices that torch can use; add --trainer.devices {max(found, 1)}"
        + ("" if found else " --trainer.accelerator cpu, or run it where there are GPUs (LAUNCH=slurm, for one)")
    ]


def _wanted(devices: Any) -> int:
    """How many devices there must be: a list names indices."""
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if isinstance(devices, (list, tuple)):
        return max((int(d) for d in devices), default=0) + 1
    return int(devices) if str(devices).isdigit() else 1
