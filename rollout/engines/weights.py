"""Weights on their way from the trainer to an engine's process: safetensors files in shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 512 << 20
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "compact-agents-weights-"  # then the writer's process id


class WeightFiles:
    """Safetensors files holding one complete set of weights under Hugging Face names.

    Written shard by shard, so that the writer never holds more than one shard beside its own weights, and each tensor
    is copied before the next one is asked for (a ZeRO-3 gather may free it then).
    """

    def __init__(self, paths: Collection[str]) -> None:
        self.paths = list(paths)

    @classmethod
    def write(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightFiles:
        """Copy ``tensors`` into new files. The caller deletes them with `remove`.

        Raises:
            ValueError: a name comes twice.
            OSError: neither shared memory nor the temporary folder has room.
        """
        files, shard, size, names = cls([]), {}, 0, set()
        try:
            for name, tensor in tensors:
                if name in names:
                    raise ValueError(f"weight {name!r} was given twice")
                names.add(name)
                shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
                size += shard[name].nbytes
                if size >= SHARD_BYTES:
                    files._write_shard(shard, size)
                    shard, size = {}, 0
            if shard:
                files._write_shard(shard, size)
        except BaseException:
            files.remove()
            raise
        return files

    def _write_shard(self, shard: dict[str, torch.Tensor], size: int) -> None:
        from safetensors.torch import save_file

        # Containers often have a /dev/shm of 64 MB: fall back to the disk where it is too small.
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > size + (16 << 20)
        folder = SHARED_MEMORY if roomy else Path(tempfile.gettempdir())
        _remove_leftovers(folder)
        handle, path = tempfile.mkstemp(".safetensors", f"{PREFIX}{os.getpid()}-", folder)
        os.close(handle)
        self.paths.append(path)
        save_file(shard, path)

    def remove(self) -> None:
        for path in self.paths:
            Path(path).unlink(missing_ok=True)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, from the files' headers alone."""
        from safetensors import safe_open

        found = {}
        for path in self.paths:
            with safe_open(path, framework="pt") as file:
                found.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
        return found

    def validate(self, expected: dict[str, tuple[int, ...]], optional: Collection[str] = ()) -> None:
        """Raises ValueError unless names and shapes are exactly ``expected`` (``optional`` names may be missing)."""
        found = self.shapes()
        missing = sorted(expected.keys() - found.keys() - set(optional))
        unknown = sorted(found.keys() - expected.keys())
        wrong = [f"{n}: {found[n]}, expected {expected[n]}" for n in sorted(found.keys() & expected.keys())
                 if found[n] != expected[n]]  # fmt: skip
        problems = [
            f"{len(items)} {what} ({'; '.join(items[:3])}{'; ...' if len(items) > 3 else ''})"
            for what, items in (("missing", missing), ("unknown", unknown), ("of the wrong shape", wrong))
            if items
        ]
        if problems:
            raise ValueError(
                f"the weights do not fit the engine's model: {', '.join(problems)}. Nothing was changed. Push every "
                "parameter under its Hugging Face name, from a model of the configuration the engine was started with."
            )

    def tensors(self, skip: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors but those named in ``skip``, one at a time."""
        from safetensors import safe_open

        for path in self.paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name not in skip:
                        yield name, file.get_tensor(name)


def _remove_leftovers(folder: Path) -> None:
    """Delete files whose writer was killed before it could (shared memory outlives processes)."""
    for path in folder.glob(f"{PREFIX}*.safetensors"):
        writer = path.name.removeprefix(PREFIX).split("-")[0]
        if not Path("/proc", writer).exists():
            path.unlink(missing_ok=True)
