"""A device that this machine does not have, for what only shows where models are not in the host's memory.

Tensors on ``pretended:0`` hold their numbers in the host's memory but say that they are elsewhere. As on CUDA, an
operation on tensors of both places is an error (numbers without dimension, and indices into a tensor on the device,
are not), and so are a host's generator and ``numpy()`` on the device. Importing this changes torch for the whole
process: tests start one of their own for it.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend("pretended", _Backend())
DEVICE = torch.device("pretended", 0)
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}  # from one place to the other
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Elsewhere(torch.Tensor):
    """A tensor on the pretended device; ``held`` has its numbers."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), device=DEVICE, **layout)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"Elsewhere({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a tensor on the device has no numpy(); copy it to the host first")

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        return _tensor(data, dtype=dtype or self.dtype).to(self.device if device is None else device)


def _without_lists(index: Any) -> Any:
    """Lists as tensors: torch makes them on the device past every dispatch."""
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    return torch.tensor(index, dtype=torch.int64) if isinstance(index, list) else index


def _check(func: Any, args: Any, kwargs: Any) -> None:
    leaves = tree_leaves((args, kwargs))
    host = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, Elsewhere) and x.dim() > 0]
    if any(isinstance(x, torch.Generator) for x in leaves):
        raise RuntimeError(f"{func}: a generator of the host for a tensor on the device")
    if func in INDEXING:
        if not isinstance(args[0], Elsewhere):
            raise RuntimeError(f"{func}: indices on the device into a tensor of the host")
        return  # indices of the host are taken; a value without dimension, too
    if host and func not in COPIES:
        shapes = [tuple(x.shape) for x in host]
        raise RuntimeError(f"{func}: tensors of the host, of the shapes {shapes}, among tensors on the device")


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    there = any(isinstance(x, Elsewhere) for x in tree_leaves((args, kwargs)))
    if there:
        _check(func, args, kwargs)
    plain_args, plain = tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
    if (device := kwargs.get("device")) is not None:
        there, plain["device"] = torch.device(device).type == DEVICE.type, "cpu"
    result = func(*plain_args, **plain)
    if func._schema.is_mutable:
        written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        changed = [x for x, is_written in zip(args, written, strict=False) if is_written]
        changed += [kwargs[a.name] for a in func._schema.arguments if a.is_out]
        if isinstance(result, torch.Tensor) and changed:
            return changed[0]
    return tree_map_only(torch.Tensor, Elsewhere, result) if there else result


class Pretending(TorchDispatchMode):
    """Makes what is asked for on the pretended device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


_host_tensor, _host_as_tensor = torch.tensor, torch.as_tensor


def _tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    made = _host_tensor(data, **options)
    return made if device is None else made.to(device)


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    made = data if isinstance(data, torch.Tensor) else _host_as_tensor(data, dtype=dtype)
    return made.to(device=made.device if device is None else device, dtype=dtype or made.dtype)


_device_constructors()  # kept from now on: with torch's own functions, else `with torch.device("meta")` misses them
torch.tensor, torch.as_tensor = _tensor, _as_tensor  # both reach the device past every dispatch


class _AnyDevice(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        pass


def strategy() -> SingleDeviceStrategy:
    """Trains on the pretended device; for ``Trainer(strategy=..., accelerator="auto")`` inside of ``Pretending``."""
    return SingleDeviceStrategy(DEVICE, accelerator=_AnyDevice())
