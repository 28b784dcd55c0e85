"""Environment variables of child processes: an engine's threads and GPU, and the PATH of commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# These mark a rank of the trainer's process group. The engine is not part of it.
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
)  # fmt: skip
TORCHRUN_PREFIX = "TORCHELASTIC_"


def child_environment(environment: Mapping[str, str], threads: int, *, several_devices: bool = False) -> dict[str, str]:
    """Return the environment variables for an engine's process: its number of threads, no rank variables, and only the
    GPU of the trainer's rank.

    Otherwise the engines of all ranks would load on the first GPU. An engine over ``several_devices`` gets all GPUs of
    the trainer.

    Raises:
        ValueError: several ranks of this host would each start an engine over the same devices.
    """
    ranks = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("WORLD_SIZE") or 1)
    if several_devices and ranks > 1:
        raise ValueError(
            f"tensor_parallel_size is above 1, and each of {ranks} ranks would start such an engine on the same first "
            "GPUs; serve it on other GPUs (make engine) and give the ranks VLLMServers, or take "
            "tensor_parallel_size: 1 (docs/scaling/engines.md)"
        )
    child = {
        name: value
        for name, value in environment.items()
        if name not in RANK_VARIABLES and not name.startswith(TORCHRUN_PREFIX)
    }
    child |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if "LOCAL_RANK" in environment and not several_devices:
        rank = int(environment["LOCAL_RANK"])
        visible = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        if not visible:
            child["CUDA_VISIBLE_DEVICES"] = str(rank)
        elif rank < len(visible):
            child["CUDA_VISIBLE_DEVICES"] = visible[rank]
    return child


def command_path() -> str:
    """Return the PATH for commands of users: ``python`` is the trainer's."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
