"""Liger's Triton kernels in place of transformers' RMSNorm, rotary embedding and SwiGLU.

Its fused losses are not used: log-probs, entropies and divergences are computed in chunks by projection.py. The kernels
replace classes and functions of transformers' modules, so that every model of these types that this process builds
afterwards has them: policy, critic, reference and teacher alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

import torch

APPLY = {name: f"apply_liger_kernel_to_{name}" for name in ("llama", "qwen2", "qwen3")}  # in liger_kernel.transformers


def use_liger(folders: Iterable[str], device: torch.device) -> None:
    """Make transformers use Liger's Triton kernels for the models in these folders. Call this before any of them is
    loaded.

    Raises:
        ValueError: the device is not CUDA, the package is not installed, or it is not used here for a type of model.
    """
    from transformers import AutoConfig

    if device.type != "cuda":
        raise ValueError(f"liger: true runs on CUDA only, and this trainer is on {device.type}; set liger: false")
    if find_spec("liger_kernel") is None:
        raise ValueError(
            "liger: true needs the package liger-kernel, which is not installed; make setup installs it on a machine "
            "with an NVIDIA GPU (or: pip install -e '.[liger]'), or set liger: false"
        )
    from liger_kernel import transformers as kernels  # pyright: ignore[reportMissingImports]  # CUDA machines only

    for folder in folders:
        kind = AutoConfig.from_pretrained(folder).model_type
        if kind not in APPLY:
            raise ValueError(f"'{folder}' is of type {kind}; liger: true expects one of {', '.join(APPLY)}")
        getattr(kernels, APPLY[kind])(
            rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
        )
