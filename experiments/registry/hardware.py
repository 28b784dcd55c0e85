"""Nodes, ranks, devices and strategy of a stage, checked before any model loads.

Torch and Lightning are imported by the functions that need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.registry.errors import ExperimentError, nearest
from experiments.registry.files import Config

GPU_NAMES = ("cuda", "gpu")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The number of machines, and of processes on each. ``processes`` is None for ``devices: auto``."""

    nodes: int
    processes: int | None

    @property
    def several(self) -> bool:
        return self.nodes > 1 or (self.processes or 1) > 1


def ranks_of(config: Mapping[str, Any]) -> Ranks:
    """Return the number of nodes, and of processes on each, from a stage's resolved configuration. A task has one
    process."""
    trainer = config.get("trainer") or {}
    return Ranks(int(trainer.get("num_nodes") or 1), count_devices(trainer.get("devices", 1)))


def device_indices(devices: Any) -> list[str] | None:
    """Return the device indices in ``trainer.devices`` if they are listed one by one; None for a number or ``auto``."""
    if isinstance(devices, str) and "," in devices:
        devices = devices.split(",")
    if not isinstance(devices, (list, tuple)):
        return None
    return [text for device in devices if (text := str(device).strip())]


def count_devices(devices: Any) -> int | None:
    """Return the number of devices that ``Trainer(devices=...)`` would use, or None for ``auto`` and -1."""
    if (indices := device_indices(devices)) is not None:
        return len(indices)
    try:
        number = int(devices)
    except (TypeError, ValueError):
        return None
    return number if number >= 0 else None


def require_counted(where: str, config: Mapping[str, Any]) -> None:
    """Raise ExperimentError for ``devices: auto`` or -1, because a launcher needs a number. torchrun cannot count, and
    Lightning would assume that all nodes have as many devices as this one."""
    if ranks_of(config).processes is None:
        devices = (config.get("trainer") or {}).get("devices")
        raise ExperimentError(
            f"{where}: trainer.devices is {devices!r}, but a launcher must know how many processes each node gets: "
            "NPROC=8, or --trainer.devices 8 (for a stage it depends on: --stages.NAME.trainer.devices 8); see: "
            "make help-launch"
        )


def require_launcher(name: str, config: Mapping[str, Any], launched: int | None) -> None:
    """Raise ExperimentError for a stage on several nodes without a launcher for all of them, whose ranks would wait
    forever.

    Args:
        launched: nodes given to ``LAUNCH=torchrun``, or None without it.
    """
    nodes = ranks_of(config).nodes
    if nodes == 1:
        return
    require_counted(f"'{name}'", config)
    if launched != nodes:
        here = "nothing starts the ranks of the others" if launched is None else f"{launched} are launched"
        raise ExperimentError(
            f"'{name}': trainer.num_nodes is {nodes}, but {here}. Give LAUNCH=torchrun NNODES={nodes} MASTER_ADDR=host "
            f"NODE_RANK=0, 1, ... on every node, or LAUNCH=slurm; or drop --trainer.num_nodes; see: "
            "make help-launch"
        )


def check_strategy(name: Any, where: str) -> None:
    """Raise ExperimentError for an unknown strategy name, before Lightning would when the stage starts."""
    if not isinstance(name, str) or name == "auto":
        return
    from lightning.pytorch.strategies import StrategyRegistry

    import lightning_modules.sharding.strategies  # noqa: F401  # registers the names zero2 and zero3

    known = StrategyRegistry.available_strategies()
    if name not in known:
        raise ExperimentError(
            f"{where}: unknown trainer.strategy '{name}'{nearest(name, ('auto', 'ddp', 'zero2', 'zero3'))} "
            "(or another name that Lightning registers, or a class_path)"
        )


def check_shares(config: Config, where: str) -> None:
    """Raise ExperimentError if the ranks cannot share an iteration's prompts equally, or if several nodes have an
    unknown number of ranks."""
    prompts = ((config.get("data") or {}).get("init_args") or {}).get("prompts_per_iteration")
    ranks = ranks_of(config)
    if ranks.nodes > 1:
        require_counted(where, config)
    world = ranks.nodes * (ranks.processes or 1)
    if isinstance(prompts, int) and prompts % world:
        raise ExperimentError(
            f"{where}: data.prompts_per_iteration is {prompts}, which {ranks.nodes} x {ranks.processes} = {world} "
            f"ranks cannot share equally; take a multiple of {world}, or other trainer.devices"
        )


def check_indices(config: Config, where: str) -> None:
    """Raise ExperimentError for GPU indices other than 0, 1, ... A rank's engine uses the GPU with the rank's number,
    and would be on another GPU than its trainer."""
    trainer = config.get("trainer") or {}
    indices = device_indices(trainer.get("devices", 1))
    if trainer.get("accelerator") not in GPU_NAMES or indices is None:
        return
    if indices != [str(i) for i in range(len(indices))]:
        named = ",".join(indices)
        raise ExperimentError(
            f"{where}: trainer.devices names the GPUs {named}, but engines take the GPUs 0 to {len(indices) - 1}; "
            f"use the environment instead: CUDA_VISIBLE_DEVICES={named}, and --trainer.devices {len(indices)}"
        )


def missing_devices(config: Config, where: str) -> list[str]:
    """Return a message if this machine has too few GPUs for the stage, else an empty list."""
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
        f"has {found} CUDA devices that torch can use; use --trainer.devices {max(found, 1)}"
        + ("" if found else " --trainer.accelerator cpu, or run it where there are GPUs (LAUNCH=slurm, for one)")
    ]


def _wanted(devices: Any) -> int:
    """Return how many GPUs the machine must have for ``trainer.devices``. For a list of indices this is the highest
    index plus one."""
    if (indices := device_indices(devices)) is not None:
        return max(map(int, indices), default=0) + 1
    return int(devices) if str(devices).isdigit() else 1
