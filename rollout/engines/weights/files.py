"""Weight updates as safetensors files in shared memory: written by the trainer, read by engines on the same host."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SHARD_BYTES = 512 << 20
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "compact-agents-weights-"  # followed by the writer's process id and its namespace of process ids
OLD_S = 24 * 3600.0  # no writer of another namespace still needs files of this age
CHECKSUMS = "checksums"  # in a file's metadata: {name: checksum} as JSON
CHECKSUM_CHUNK = 1 << 20  # elements that are converted to 64 bits at once
_MASK = (1 << 64) - 1


class WeightFiles:
    """Safetensors files with one complete set of weights under Hugging Face names.

    They are written shard by shard, so that the writer needs memory for one shard beside its own weights. Each tensor
    is copied before the next one is requested, because a ZeRO-3 gather may then free it.
    """

    def __init__(self, paths: Collection[str], verified: bool = True) -> None:
        """``verified``: an engine that loads the files compares checksums, if the files have any."""
        self.paths, self.verified = list(paths), verified
        self._written: list[str] = []

    @classmethod
    def write(cls, tensors: Iterable[tuple[str, torch.Tensor]], checksum: bool = False) -> WeightFiles:
        """Copy weights into new safetensors files, and return them as ``WeightFiles``. The caller deletes them with
        `remove`.

        Args:
            checksum: store the tensors' checksums in the files, for `verify`.

        Raises:
            ValueError: a name comes twice.
            OSError: neither shared memory nor the temporary folder has room.
        """
        files = cls([])
        for _ in files.copying(tensors, checksum):
            pass
        return files

    def copying(
        self, tensors: Iterable[tuple[str, torch.Tensor]], checksum: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights ``tensors``, and copy each into new files before the next one is requested.

        The files are complete when the iteration ends. An error, or an early end, removes them. Raises as `write`."""
        shard = _Shard(checksum)
        names: set[str] = set()
        try:
            for name, tensor in tensors:
                if name in names:
                    raise ValueError(f"weight {name!r} was given twice")
                names.add(name)
                yield name, tensor
                shard.add(name, tensor)
                if shard.size >= SHARD_BYTES:
                    self._write_shard(shard)
                    shard = _Shard(checksum)
            if shard.size:
                self._write_shard(shard)
        except BaseException:
            self.remove()
            raise

    def _write_shard(self, shard: _Shard) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        # Containers often have a /dev/shm of 64 MB. Use the disk if it is too small, or if another rank of this host
        # takes the remaining space meanwhile.
        disk = Path(tempfile.gettempdir())
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > shard.size + (16 << 20)
        if not roomy:
            _warn_of_little_room(disk)
        for folder in (SHARED_MEMORY, disk) if roomy else (disk,):
            path = new_file(folder)
            self._written.append(str(path))
            try:
                save_file(shard.tensors, path, shard.metadata)
                return self.paths.append(str(path))
            except OSError:
                if folder == disk:
                    raise
            except SafetensorError as error:
                if folder == disk:
                    raise OSError(str(error)) from error
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the weight files that this object wrote. Other files stay."""
        for path in self._written:
            Path(path).unlink(missing_ok=True)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight by name, from the files' headers."""
        found = {}
        for path in self.paths:
            with _open(path) as file:
                found.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})
        return found

    def validate(self, expected: dict[str, tuple[int, ...]], optional: Collection[str] = ()) -> None:
        """Check that names and shapes of the weights equal ``expected`` (``optional`` names may be missing). Raises
        ValueError."""
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
                f"the weights do not fit the engine's model: {', '.join(problems)}. The engine keeps its weights; push "
                "every parameter under its Hugging Face name, from a model of the engine's configuration"
            )

    def verify(self, checksums: bool = True) -> None:
        """Check that all weights are finite and, with ``checksums``, equal those that the trainer sent. Raises
        ValueError."""
        for path in self.paths:
            with _open(path) as file:
                sent = json.loads((file.metadata() or {}).get(CHECKSUMS, "{}")) if checksums else {}
                for name in file.keys():
                    tensor = file.get_tensor(name)
                    found = tensor_checksum(tensor) if sent else None
                    if found != sent.get(name):
                        raise ValueError(
                            f"the weights changed in transfer: {name} has the checksum {found}, the trainer sent "
                            f"{sent.get(name, 'none')}. The engine keeps its weights; push again, and if this recurs, "
                            "suspect the memory or the network between trainer and engine."
                        )
                    require_finite(name, tensor)

    def tensors(self, skip: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of all weights except those in ``skip``, one at a time."""
        for path in self.paths:
            with _open(path) as file:
                for name in file.keys():
                    if name not in skip:
                        yield name, file.get_tensor(name)


def in_type(tensors: Iterable[tuple[str, torch.Tensor]], dtype: str | None) -> Iterable[tuple[str, torch.Tensor]]:
    """Return weights (name, tensor) converted to the engine's dtype, if it has one. bfloat16 halves the bytes of
    float32."""
    import torch

    if dtype is None:
        return tensors
    return ((n, t.detach().to(getattr(torch, dtype)) if t.is_floating_point() else t) for n, t in tensors)


class _Shard:
    """Copies of some tensors in host memory, and the metadata of their file."""

    def __init__(self, checksum: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.size = 0  # bytes
        self._checksums: dict[str, str] | None = {} if checksum else None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self.size += self.tensors[name].nbytes
        if self._checksums is not None:
            self._checksums[name] = tensor_checksum(tensor)  # of the trainer's tensor, not of the copy

    @property
    def metadata(self) -> dict[str, str]:
        return {CHECKSUMS: json.dumps(self._checksums)} if self._checksums else {}


@contextmanager
def _open(path: str) -> Iterator[Any]:
    """Open a safetensors file. Raises ValueError if it is missing or incomplete."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be read as weights ({error}): it is incomplete or was removed; push again"
        ) from error
    with file as opened:
        yield opened


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if a weight has a nan or infinity. One sum decides, unless it overflows."""
    import torch

    if tensor.is_floating_point() and not torch.isfinite(tensor.sum()):
        count = int((~torch.isfinite(tensor)).sum())
        if count:
            raise ValueError(
                f"the weights are not finite: {count} of {tensor.numel()} numbers of {name}. The engine refuses them: "
                "training has diverged, or they were damaged in transfer; continue from an earlier checkpoint"
            )


@functools.cache  # once
def _warn_of_little_room(instead: Path) -> None:
    sizes = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    found = f"has {sizes.free / 2**20:.0f} of {sizes.total / 2**20:.0f} MiB free" if sizes else "does not exist"
    logger.warning(
        "%s %s: weights go to the engine through %s, which is slower; in Docker take --ipc=host or --shm-size=8g (at "
        "least the model's size in the engine's type)",
        SHARED_MEMORY,
        found,
        instead,
    )


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Compute a tensor's checksum: its type, its shape and two 64-bit sums of its elements read as integers.

    It is cheap enough for every weight update, and computed on the tensor's device. The first sum changes with every
    single element, the second, weighted by position, also when elements swap places. Sums wrap around, so chunks and
    order of addition do not matter, and CPU and GPU agree. Equal values of another type have another checksum.
    """
    import torch

    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    elements = tensor.detach().contiguous().view(-1).view(integer)
    positions = torch.arange(1, min(CHECKSUM_CHUNK, elements.numel()) + 1, device=elements.device, dtype=torch.int64)
    plain = weighed = 0
    for start in range(0, elements.numel(), CHECKSUM_CHUNK):
        part = elements[start : start + CHECKSUM_CHUNK].to(torch.int64)
        total = int(part.sum())
        plain += total
        weighed += int((part * positions[: len(part)]).sum()) + start * total
    shape = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]:{plain & _MASK:016x}{weighed & _MASK:016x}"


def names_and_shapes(model: str) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return the shapes of a model's weights by name, and the names of tied weights. Allocates no weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    tied: set[str] = set(getattr(skeleton, "all_tied_weights_keys", None) or ())
    return {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}, tied


def digest_of_folder(model: str) -> str | None:
    """Return a digest of the weights in a model's safetensors files, equal for any number of files. Returns None for a
    model in another format.

    Args:
        model: folder, or name of a model in the local cache of the hub.
    """
    from huggingface_hub import snapshot_download

    folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(model, local_files_only=True))
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _open(str(path)) as file:
            found |= {name: tensor_checksum(file.get_tensor(name)) for name in file.keys()}
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest() if found else None


def shared_memory_id() -> tuple[object, ...]:
    """Return an id that is equal for two processes that see each other's weight files (same host, same container)."""
    folders = [folder.stat() for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())) if folder.is_dir()]
    boot_id = Path("/proc/sys/kernel/random/boot_id")  # some sandboxes have none
    boot = boot_id.read_text().strip() if boot_id.exists() else platform.node()
    return (boot, *((found.st_dev, found.st_ino) for found in folders))


def new_file(folder: Path) -> Path:
    """Create an empty weight file in ``folder`` and return its path. Removes files that killed processes left in
    ``folder``."""
    remove_leftovers(folder)
    handle, path = tempfile.mkstemp(".safetensors", own_prefix(), folder)
    os.close(handle)
    return Path(path)


def own_prefix() -> str:
    """Return the beginning of the names of this process's weight files."""
    return f"{PREFIX}{os.getpid()}-{_namespace()}-"


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def remove_leftovers(folder: Path) -> None:
    """Delete the weight files, and folders of adapters, that killed processes left in ``folder``, because shared memory
    outlives processes.

    Containers may share the folder, but see only their own processes: files of others are deleted when they are old.
    """
    for path in folder.glob(f"{PREFIX}*"):
        writer, *rest = path.name.removeprefix(PREFIX).split("-")
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another process deletes it, or it is not ours
            if len(rest) > 1 and rest[0] != _namespace():
                left = time.time() - path.stat().st_mtime > OLD_S
            else:
                left = not Path("/proc", writer).exists()
            if left:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
