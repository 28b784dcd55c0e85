"""Resume on another number of ranks, other sub-groups or another strategy than those of the checkpoint.

Each rank cuts its parts out of the files, in the layout that DeepSpeed's ordinary loading expects of a rank's file.

DeepSpeed's own conversion (ds_to_universal, then ``load_universal``) is not used. At stage 3 it gives every parameter
group the settings of the first: learning rate and weight decay of the critic become the policy's (deepspeed 0.19.8,
runtime/zero/stage3.py, ``load_hp_checkpoint_state_from_checkpoint_dir_stage3``). It supports Adam's state only, and it
writes the whole checkpoint to disk again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from common import ranks
from common.files import replacing
from lightning_modules.sharding.trained_state import (
    SHARDS,
    WEIGHTS,
    Fragment,
    TrainedState,
    flat_groups,
    read_state,
    short_names,
    stage3_fragments,
)

if TYPE_CHECKING:
    import lightning as L

logger = logging.getLogger(__name__)


# -- into a DeepSpeed engine ----------------------------------------------------------------------------------------


def written_otherwise(path: Path, engine: Any) -> bool:
    """Return whether a checkpoint was written with other ranks or another strategy, so that DeepSpeed cannot load it.

    That is a single file, or shards of another number of ranks, another stage or other sub-groups (another
    ``sub_group_size``). Reads the first file of model states.

    Raises:
        ValueError: that cannot be read.
    """
    folder = path / SHARDS
    if not folder.is_dir():
        return path.is_file()
    own = len(list(folder.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"))) == ranks.world_size()
    sharded_weights = any(folder.glob("*zero_pp_rank_*_mp_rank_00_model_states.pt"))
    stage3 = engine.zero_optimization_stage() == 3
    if not own or sharded_weights != stage3:
        return True
    return stage3 and flat_groups(folder) != short_names(engine._get_zero_param_shapes())


def load_into_engine(engine: Any, path: Path) -> dict[str, Any]:
    """Load a checkpoint's weights and optimiser state into a DeepSpeed engine (ZeRO-2 or 3) on any number of ranks.

    Frozen models keep the weights of their folders. Every rank must call.

    Returns:
        What else the checkpoint holds, for Lightning.

    Raises:
        ValueError: it cannot be read, or is of another model.
        RuntimeError: the same, on several ranks: what each of them says.
    """
    sizes = [{n: torch.Size(shape).numel() for n, shape in g.items()} for g in engine._get_zero_param_shapes()]
    owners = getattr(engine.optimizer, "sub_group_to_group_id", None) or {i: i for i in range(len(sizes))}
    names: list[list[str]] = [[] for _ in engine.optimizer.optimizer.param_groups]
    for flat, group in enumerate(sizes):
        names[owners[flat]] += group
    with ranks.stop_together():  # a file that only one node lacks
        state = read_state(path, names)
        state.require({name: size for group in sizes for name, size in group.items()}, path)
    log_origin(state, path, f"ZeRO-{engine.zero_optimization_stage()} on {ranks.world_size()} ranks")
    optimizer = engine.optimizer
    if engine._optimizer_has_ckpt_event_prologue():
        optimizer.checkpoint_event_prologue()
    flats = _flat_layout(engine, sizes)
    weights = [_flat(state, fragments, WEIGHTS, size) for fragments, size in flats]
    own = optimizer.state_dict()
    stage3 = engine.zero_optimization_stage() == 3
    own["optimizer_state_dict" if stage3 else "base_optimizer_state"] = _torch_state(state, flats, owners)
    own["fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"] = weights
    optimizer.load_state_dict([own] * ranks.world_size(), load_optimizer_states=True, load_from_fp32_weights=True)
    if not stage3:
        optimizer.update_lp_params()
    if engine._optimizer_has_ckpt_event_epilogue():
        optimizer.checkpoint_event_epilogue()
    for name, buffer in engine.module.named_buffers():
        if name in state.buffers:
            buffer.copy_(state.buffers[name])
    for name, value in state.counters.items():
        setattr(engine, name, value)
    return state.rest


def _flat_layout(engine: Any, sizes: Sequence[Mapping[str, int]]) -> list[tuple[list[Fragment], int]]:
    """Return, for each of this rank's flat tensors, the slices of parameters that it contains and its length."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        layout = [stage3_fragments(group, ranks.rank(), ranks.world_size()) for group in sizes]
        return list(zip(layout, (flat.numel() for flat in optimizer.fp32_partitioned_groups_flat), strict=True))
    found = []
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        fragments = []
        for parameter in group:
            if (mapping := parameter._hp_mapping) is not None:  # None: other ranks hold it
                here, there = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
                fragments.append(Fragment(optimizer.param_names[parameter], there.start, here.numel, here.start))
        found.append((fragments, flat.numel()))
    return found


def _flat(state: TrainedState, fragments: Sequence[Fragment], kind: str, size: int) -> Tensor:
    out = torch.zeros(size)
    for f in fragments:
        state.copy(f.name, kind, f.start, out[f.at : f.at + f.count])
    return out


def _torch_state(
    state: TrainedState, flats: Sequence[tuple[list[Fragment], int]], owners: Mapping[int, int]
) -> dict[str, Any]:
    """Return a torch optimiser's ``state_dict`` in which the parameters are this rank's flat tensors."""
    found: dict[int, dict[str, Any]] = {}
    for flat, (fragments, size) in enumerate(flats):
        # A rank may hold no part of a small group: then any parameter of that group names the optimiser's values.
        sample = fragments[0].name if fragments else state.names[owners[flat]][0]
        runs = {kind: _flat(state, fragments, kind, size) for kind in state.kinds(sample)}
        if runs or state.scalars[sample]:
            found[flat] = {**state.counted(sample), **runs}
    members = [[flat for flat in range(len(flats)) if owners[flat] == group] for group in range(len(state.groups))]
    groups = [{**settings, "params": params} for settings, params in zip(state.groups, members, strict=True)]
    return {"state": found, "param_groups": groups}


# -- into a module under any other strategy -------------------------------------------------------------------------


class ShardsToo(CheckpointIO):
    """Lets any strategy read DeepSpeed checkpoint folders, too, and writes checkpoints straight to a file.

    Lightning writes them into memory first (2.6.6, ``_atomic_save``): 12 bytes of host memory per parameter.

    Args:
        own: what it does otherwise.
        module: the module that a folder is read for, its models built.
    """

    def __init__(self, own: CheckpointIO, module: L.LightningModule) -> None:
        self.own, self.module = own, module

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with replacing(Path(path)) as temporary:
            torch.save(checkpoint, temporary)

    def remove_checkpoint(self, path: Any) -> None:
        self.own.remove_checkpoint(path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if (Path(path) / SHARDS).is_dir():
            return whole_checkpoint(self.module, Path(path))
        return self.own.load_checkpoint(path, map_location, weights_only)


def accept_shards(module: L.LightningModule) -> None:
    """Let the trainer's strategy resume from a DeepSpeed checkpoint folder, unless it is a DeepSpeed strategy.
    Idempotent."""
    strategy = module.trainer.strategy
    if not isinstance(strategy, DeepSpeedStrategy) and not isinstance(strategy.checkpoint_io, ShardsToo):
        strategy.checkpoint_io = ShardsToo(strategy.checkpoint_io, module)


def whole_checkpoint(module: nn.Module, path: Path) -> dict[str, Any]:
    """Convert a DeepSpeed checkpoint folder to the checkpoint that Lightning writes with one process: weights and
    optimiser state.

    Raises:
        ValueError: it cannot be read, or is of another model.
    """
    state = read_state(path)
    parameters = dict(module.named_parameters())
    state.require({name: p.numel() for name, p in parameters.items() if p.requires_grad}, path)
    log_origin(state, path, "whole weights")
    shapes = {name: parameters[name].shape for group in state.names for name in group}
    weights = {name: state.whole(name, WEIGHTS, shape) for name, shape in shapes.items()}
    own_name = {id(p): name for name, p in parameters.items()}
    for name, p in module.named_parameters(remove_duplicate=False):  # a state_dict has tied ones under each name
        if own_name[id(p)] in weights:
            weights[name] = weights[own_name[id(p)]]
    weights |= {name: state.buffers[name] for name, _ in module.named_buffers() if name in state.buffers}
    order = [name for group in state.names for name in group]
    optimiser = {
        i: {**state.counted(name), **{kind: state.whole(name, kind, shapes[name]) for kind in state.kinds(name)}}
        for i, name in enumerate(order)
    }
    groups, at = [], 0
    for settings, group in zip(state.groups, state.names, strict=True):
        groups.append({**settings, "params": list(range(at, at + len(group)))})
        at += len(group)
    kept = {i: values for i, values in optimiser.items() if values}
    return {**state.rest, "state_dict": weights, "optimizer_states": [{"state": kept, "param_groups": groups}]}


def log_origin(state: TrainedState, path: Path, here: str) -> None:
    if ranks.rank() == 0:
        there = f"ZeRO-{state.stage} on {state.ranks} ranks" if state.stage else "whole weights"
        logger.info("resuming from %s, written as %s, as %s", path, there, here)
