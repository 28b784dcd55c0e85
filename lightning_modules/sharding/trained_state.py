"""Read parts of the trained weights and optimiser state by name, from a checkpoint of any strategy.

DeepSpeed writes a file per rank. It holds the parameters of a group one after the other, each cut over the ranks;
every other strategy writes one file of whole tensors. This module maps the files into memory, so a rank reads only its
own parts of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import UNREADABLE

WEIGHTS = "weights"  # used beside the optimiser's names (exp_avg, ...)
SHARDS = "checkpoint"  # the folder in a DeepSpeed checkpoint that holds the ranks' files
WRAPPER = "_forward_module."  # prefix of some strategies to a module's names
LIGHTNING_ONLY = ("state_dict", "optimizer_states")
# What DeepSpeed adds to the caller's own entries in a file of model states (its engine's _common_checkpoint_state).
DEEPSPEED_ONLY = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler "
    "data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size "
    "mp_world_size ds_config ds_version".split()
)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous slice of one parameter, and where it is in a rank's flat tensor of a parameter group."""

    name: str
    start: int  # in the flattened parameter
    count: int
    at: int  # in the flat tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous slice of one parameter, with the stored values of its elements."""

    start: int
    count: int
    values: Mapping[str, Tensor]  # by WEIGHTS and the optimiser's names, [count] each


@dataclass(slots=True)
class TrainedState:
    """The contents of a checkpoint of any strategy: trained parameters, optimiser state and the rest.

    Args:
        names: of the trained parameters, group by group, in the optimiser's order.
        groups: the optimiser's settings of each group (lr, weight_decay, ...), without its parameters.
        pieces: of each parameter, in order, without gaps.
        scalars: of each parameter, what the optimiser counts (``step``).
        rest: everything else in the checkpoint: loops, schedulers, callbacks, the data's position.
        counters: DeepSpeed's own (``global_steps``, ...); empty from other strategies.
        buffers: what modules hold besides parameters, by name (parameters may be among them).
        ranks: how many wrote it.
        stage: of ZeRO; 0 for none.
    """

    names: list[list[str]]
    groups: list[dict[str, Any]]
    pieces: dict[str, list[Piece]]
    scalars: dict[str, dict[str, Any]]
    rest: dict[str, Any]
    counters: dict[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    ranks: int = 1
    stage: int = 0

    def kinds(self, name: str) -> list[str]:
        """Return the names of the optimiser's per-element states of a parameter, such as ``exp_avg``."""
        return [kind for kind in self.pieces[name][0].values if kind != WEIGHTS]

    def counted(self, name: str) -> dict[str, Any]:
        """Return copies of the optimiser's scalar states of a parameter (``scalars``), such as its step count.

        An optimiser counts in place, and torch takes tensors as they are: parameters that share a tensor would each
        count the steps of all.
        """
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.scalars[name].items()}

    def count(self, name: str) -> int:
        return sum(piece.count for piece in self.pieces[name])

    def copy(self, name: str, kind: str, start: int, out: Tensor) -> None:
        """Copy stored values of a parameter into ``out``: elements ``start`` to ``start + len(out)`` of the flattened
        parameter.

        Raises:
            ValueError: it has fewer.
        """
        if start + len(out) > self.count(name):
            raise ValueError(f"{name}: elements {start} to {start + len(out)} of {self.count(name)} were asked for")
        at, end = 0, start + len(out)
        for piece in self.pieces[name]:
            first, last = max(start, at), min(end, at + piece.count)
            if first < last:
                out[first - start : last - start].copy_(piece.values[kind][first - at : last - at])
            at += piece.count

    def whole(self, name: str, kind: str, shape: Sequence[int]) -> Tensor:
        out = torch.empty(self.count(name), dtype=self.pieces[name][0].values[kind].dtype)
        self.copy(name, kind, 0, out)
        return out.view(*shape)

    def require(self, sizes: Mapping[str, int], path: Path) -> None:
        """Raise ValueError unless the checkpoint's trained parameters have these names and numbers of elements."""
        missing, extra = sorted(sizes.keys() - self.pieces), sorted(self.pieces.keys() - sizes)
        wrong = sorted(n for n in sizes if n in self.pieces and sizes[n] != self.count(n))
        if missing or extra or wrong:
            raise ValueError(
                f"the checkpoint {path} is not from this model: {len(missing)} missing, {len(extra)} unknown, "
                f"{len(wrong)} of another size among its trained parameters, first '{(wrong or missing or extra)[0]}'; "
                "take one written by the same experiment, or start without it"
            )


# -- layouts of ZeRO ------------------------------------------------------------------------------------------------


def stage3_fragments(sizes: Mapping[str, int], rank: int, ranks: int) -> list[Fragment]:
    """Return where ZeRO-3 stores each parameter's slice in a rank's flat tensor. Each parameter is cut into ``ranks``
    equal parts, of which the last may be short or empty. A rank stores its parts one after the other, each padded to
    the width of the first rank's part."""
    found, at = [], 0
    for name, size in sizes.items():
        width = -(-size // ranks)
        start = min(rank * width, size)
        found.append(Fragment(name, start, min(width, size - start), at))
        at += width
    return found


def stage2_fragments(mappings: Sequence[Mapping[str, Any]], rank: int) -> list[Fragment]:
    """Return where ZeRO-2 stores each parameter's slice in a rank's flat tensor. ZeRO-2 joins the parameters of a
    group to one flat tensor and cuts it into equal parts, one per rank; a cut may fall inside a parameter.

    Args:
        mappings: of every rank up to this one: by name, an address with ``start`` (in the rank's part) and ``numel``.
    """
    before: dict[str, int] = {}
    for mapping in mappings[:rank]:
        for name, address in mapping.items():
            before[name] = before.get(name, 0) + address.numel
    return [Fragment(name, before.get(name, 0), a.numel, a.start) for name, a in mappings[rank].items()]


# -- readers --------------------------------------------------------------------------------------------------------


def read_state(path: Path, names: list[list[str]] | None = None) -> TrainedState:
    """Read weights and optimiser state from a DeepSpeed checkpoint folder or a Lightning checkpoint file. Pickles can
    run code: read only your own.

    A Lightning file needs ``names`` of the trained parameters in the optimiser's order, which that format does not
    keep.

    Raises:
        ValueError: neither, a rank's file is missing, or the numbers of parameters differ.
    """
    try:
        if (path / SHARDS).is_dir():
            return _read_folder(path / SHARDS)
        if names is not None and path.is_file():
            return _read_file(path, names)
    except UNREADABLE as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
    raise ValueError(f"{path} is no checkpoint; expected a .ckpt file or a folder with a folder '{SHARDS}' in it")


def flat_groups(folder: Path) -> list[list[str]]:
    """Read the names of the parameters in each of a rank's flat tensors, in order, from the ranks' files in ``folder``.

    Raises:
        ValueError: a file of model states cannot be read.
    """
    path = _model_files(folder)[0]
    try:
        return short_names(_load(path)["param_shapes"])
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _rank_files(folder: Path, what: str) -> list[Path]:
    return sorted(folder.glob(f"*zero_pp_rank_*_mp_rank_00_{what}_states.pt"), key=_rank_of)


def _model_files(folder: Path) -> list[Path]:
    return _rank_files(folder, "model") or sorted(folder.glob("mp_rank_00_model_states.pt"))


def _rank_of(path: Path) -> int:
    return int(path.name.partition("zero_pp_rank_")[2].partition("_")[0])


def _read_folder(folder: Path) -> TrainedState:
    files = _rank_files(folder, "optim")
    models = _model_files(folder)
    if not files or not models:
        raise ValueError(f"{folder} holds no files *_optim_states.pt or no *_model_states.pt")
    parts = [_load(path)["optimizer_state_dict"] for path in files]
    model = _load(models[0])
    if model["dp_world_size"] != len(parts) or [_rank_of(f) for f in files] != list(range(len(parts))):
        raise ValueError(
            f"{folder} was written by {model['dp_world_size']} ranks, but holds the optimiser's files of {len(parts)}; "
            "copy those of all nodes into one folder, or take an earlier checkpoint"
        )
    stage = int(parts[0]["zero_stage"])
    sizes = [{name: _numel(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    if stage == 3:
        flats, optimisers = [p["fp32_flat_groups"] for p in parts], [p["optimizer_state_dict"] for p in parts]
        layouts = [[stage3_fragments(g, rank, len(parts)) for g in sizes] for rank in range(len(parts))]
    else:
        if any(map(any, parts[0].get("param_alignment_paddings") or [])):
            raise ValueError(f"{folder} was written with zero_optimization.parameter_alignment, which is not read here")
        flats = [p["single_partition_of_fp32_groups"] for p in parts]
        optimisers = [p["base_optimizer_state"] for p in parts]
        mappings = [p["param_slice_mappings"] for p in parts]
        layouts = [
            [stage2_fragments([m[g] for m in mappings], rank) for g in range(len(sizes))] for rank in range(len(parts))
        ]
    pieces, scalars = _cut(layouts, flats, optimisers)
    counters = {k: model[k] for k in ("global_steps", "global_samples", "skipped_steps") if k in model}
    rest = {k: v for k, v in model.items() if k not in DEEPSPEED_ONLY}
    groups = optimisers[0]["param_groups"]
    names = [[_short(n) for flat in group["params"] for n in sizes[flat]] for group in groups]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    buffers = {_short(n): v for n, v in (model.get("module") or {}).items() if isinstance(v, Tensor)}
    return TrainedState(names, settings, pieces, scalars, rest, counters, buffers, len(parts), stage)


def _cut(
    layouts: Sequence[Sequence[Iterable[Fragment]]], flats: Sequence[Sequence[Tensor]], optimisers: Sequence[Any]
) -> tuple[dict[str, list[Piece]], dict[str, dict[str, Any]]]:
    """Cut the ranks' flat tensors into pieces of parameters. Returns pieces and counters by parameter name; the
    arguments are by rank, then by flat group."""
    pieces: dict[str, list[Piece]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for rank, layout in enumerate(layouts):
        for group, fragments in enumerate(layout):
            state = optimisers[rank]["state"].get(group, {})
            runs = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0}
            single = {k: v for k, v in state.items() if k not in runs}
            for f in fragments:
                values = {k: v[f.at : f.at + f.count] for k, v in {WEIGHTS: flats[rank][group], **runs}.items()}
                pieces.setdefault(_short(f.name), []).append(Piece(f.start, f.count, values))
                scalars.setdefault(_short(f.name), single)
    return pieces, scalars


def _read_file(path: Path, names: list[list[str]]) -> TrainedState:
    content = _load(path)
    weights = {_short(name): value for name, value in content["state_dict"].items()}
    (optimiser,) = content["optimizer_states"]
    counts = [len(group["params"]) for group in optimiser["param_groups"]]
    unknown = [name for group in names for name in group if name not in weights]
    if counts != [len(group) for group in names] or unknown:
        raise ValueError(
            f"{path} is not from this model: its optimiser has groups of {counts} parameters, this run's of "
            f"{[len(group) for group in names]}" + (f"; there is no '{unknown[0]}' in it" if unknown else "")
        )
    pieces, scalars = {}, {}
    numbers = (i for g in optimiser["param_groups"] for i in g["params"])
    for name, index in zip((n for g in names for n in g), numbers, strict=False):
        state = optimiser["state"].get(index, {})
        runs = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0}
        flat = {k: v.reshape(-1) for k, v in {WEIGHTS: weights[name], **runs}.items()}
        pieces[name] = [Piece(0, flat[WEIGHTS].numel(), flat)]
        scalars[name] = {k: v for k, v in state.items() if k not in runs}
    rest = {k: v for k, v in content.items() if k not in LIGHTNING_ONLY}
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimiser["param_groups"]]
    return TrainedState(names, settings, pieces, scalars, rest, {}, weights)


def short_names(groups: Iterable[Iterable[str]]) -> list[list[str]]:
    """Return parameter names, by group, without the prefixes that an engine adds."""
    return [[_short(name) for name in group] for group in groups]


def _short(name: str) -> str:
    return name.removeprefix(WRAPPER)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
