"""Nodes, ranks, devices and strategy of a stage, checked before any model loads.

Torch and Lightning are imported by the functions that need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.registry.compose import Config
from experiments.registry.errors import ExperimentError, nearest

GPU_NAMES = ("cuda", "gpu")


@dataclass(frozen=True, slots=True)
class Ranks:
    """``processes`` on each of ``nodes`` machines; ``processes`` is None where the configuration leaves it open
    (``devices: auto``)."""

    nodes: int
    processes: int | None

    @property
    def several(self) -> bool:
        return self.nodes > 1 or (self.processes or 1) > 1


def ranks_of(config: Mapping[str, Any]) -> Ranks:
    """Of a stage's resolved configuration. A task has one process."""
    trainer = config.get("trainer") or {}
    return Ranks(int(trainer.get("num_nodes") or 1), count_devices(trainer.get("devices", 1)))


def device_indices(devices: Any) -> list[str] | None:
    """The devices that are named one by one, in a list or separated by commas; None where they are not."""
    if isinstance(devices, str) and "," in devices:
        devices = devices.split(",")
    if not isinstance(devices, (list, tuple)):
        return None
    return [text for device in devices if (text := str(device).strip())]


def count_devices(devices: Any) -> int | None:
    """As ``Trainer(devices=...)`` understands it: a number, a list of indices, either as text, or ``auto`` (None)."""
    if (indices := device_indices(devices)) is not None:
        return len(indices)
    try:
        number = int(devices)
    except (TypeError, ValueError):
        return None
    return number if number >= 0 else None


def require_counted(where: str, config: Mapping[str, Any]) -> None:
    """Raises ExperimentError where the number of processes is left to each node (``devices: auto`` or -1): torchrun
    must be told, and a rank of Lightning's counts the ranks of all nodes by its own node's devices."""
    if ranks_of(config).processes is None:
        devices = (config.get("trainer") or {}).get("devices")
        raise ExperimentError(
            f"{where}: trainer.devices is {devices!r}, but a launcher must know how many processes each node gets: "
            "NPROC=8, or --trainer.devices 8 (of a stage under it: --stages.NAME.trainer.devices 8); whole commands: "
            "make help-launch"
        )


def require_launcher(name: str, config: Mapping[str, Any], launched: int | None) -> None:
    """Raises ExperimentError for a stage on several nodes whose ranks nobody starts, or could: those here would wait
    for ever. ``launched``: the nodes that ``LAUNCH=torchrun`` was told of; None without it."""
    nodes = ranks_of(config).nodes
    if nodes == 1:
        return
    require_counted(f"'{name}'", config)
    if launched != nodes:
        here = "nothing starts the ranks of the others" if launched is None else f"{launched} are launched"
        raise ExperimentError(
            f"'{name}': trainer.num_nodes is {nodes}, but {here}. Give LAUNCH=torchrun NNODES={nodes} MASTER_ADDR=host "
            f"NODE_RANK=0, 1, ... on every node, or LAUNCH=slurm; or leave --trainer.num_nodes away; whole commands: "
            "make help-launch"
        )


def check_strategy(name: Any, where: str) -> None:
    """Raises ExperimentError for a name that no strategy has; Lightning would say so when the stage starts."""
    if not isinstance(name, str) or name == "auto":
        return
    from lightning.pytorch.strategies import StrategyRegistry

    import lightning_modules.sharding.strategies  # noqa: F401  # registers the names zero2 and zero3

    known = StrategyRegistry.available_strategies()
    if name not in known:
        raise ExperimentError(
            f"{where}: there is no trainer.strategy '{name}'{nearest(name, ('auto', 'ddp', 'zero2', 'zero3'))} "
            "(any other name of Lightning's or a class_path will do, too)"
        )


def check_shares(config: Config, where: str) -> None:
    """Raises ExperimentError if the ranks cannot have equal shares of a step's prompts, or cannot be counted although
    there are several nodes."""
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
    """Raises ExperimentError for GPUs that are named by other numbers than 0, 1, ...: a rank's engine takes the GPU of
    the rank's number, and would be on another than its trainer."""
    trainer = config.get("trainer") or {}
    indices = device_indices(trainer.get("devices", 1))
    if trainer.get("accelerator") not in GPU_NAMES or indices is None:
        return
    if indices != [str(i) for i in range(len(indices))]:
        named = ",".join(indices)
        raise ExperimentError(
            f"{where}: trainer.devices names the GPUs {named}, but engines take the GPUs 0 to {len(indices) - 1}; "
            f"choose by the environment instead: CUDA_VISIBLE_DEVICES={named}, and --trainer.devices {len(indices)}"
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
    if (indices := device_indices(devices)) is not None:
        return max(map(int, indices), default=0) + 1
    return int(devices) if str(devices).isdigit() else 1
