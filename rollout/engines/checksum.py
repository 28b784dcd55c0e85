"""A checksum of a tensor's bits, cheap enough to be taken at every weight update, wherever the tensor lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 20  # elements whose 64-bit copies exist at once
_MASK = (1 << 64) - 1


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Type, shape and two 64-bit sums of a tensor's elements, read as integers: plain, and weighed by position.

    Of another type it is another checksum, also where the values are the same: it is of what crosses. The first sum
    changes with every single element, the second also when elements change places. Sums wrap around, so neither the
    chunks nor the order of addition matter, and CPU and GPU agree.
    """
    import torch

    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    words = tensor.detach().contiguous().view(-1).view(integer)
    places = torch.arange(1, min(CHUNK, words.numel()) + 1, device=words.device, dtype=torch.int64)
    plain = weighed = 0
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64)
        total = int(part.sum())
        plain += total
        weighed += int((part * places[: len(part)]).sum()) + start * total
    shape = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]:{plain & _MASK:016x}{weighed & _MASK:016x}"
