"""Handles LoRA adapters: merge them into the base model, write and read them in peft's format.

Names are those of the model that was trained: ``model.layers.0.self_attn.q_proj.lora_A.default.weight`` [rank, in] and
``...lora_B.default.weight`` [out, rank], beside the plain names of whatever was not adapted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

A, B = ".lora_A.default.weight", ".lora_B.default.weight"
FOLDER = "adapter"  # beside the merged weights of an export; transformers and vLLM look for no adapter there
CACHED = re.compile(r"/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)/?$")
PREFIX = "base_model.model."  # peft's own wrapper, in the names of its files


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


@torch.no_grad()
def merge_into(source: str, adapters: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the model at ``source`` with LoRA adapters merged in: W + alpha / rank * B A for every
    adapted W."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, settings["dtype"]))
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for module in sorted({name.removesuffix(A).removesuffix(B) for name in adapters}):
        weight, pair = f"{module}.weight", (adapters.get(module + B), adapters.get(module + A))
        if weight not in state or pair[0] is None or pair[1] is None:
            raise ValueError(
                f"the adapters are not of the model at {source}: '{module}' has {'no' if None in pair else 'an'} A and "
                f"B, and is {'' if weight in state else 'not '}in the model; name the experiment that they belong to"
            )
        b, a, base = pair[0].float(), pair[1].float(), state[weight]
        if (b.shape[0], a.shape[1]) != tuple(base.shape):
            raise ValueError(
                f"the adapters are not of the model at {source}: '{module}' is {tuple(base.shape)} there, and B A is "
                f"{(b.shape[0], a.shape[1])}; name the experiment that they belong to"
            )
        state[weight] = torch.addmm(base.float(), b, a, alpha=settings["alpha"] / settings["rank"]).to(base.dtype)
    return state


def write_adapter(folder: Path, adapters: Mapping[str, torch.Tensor], settings: Mapping[str, Any], base: str) -> None:
    """Write LoRA adapters to ``folder`` in PEFT's format, for ``peft.PeftModel.from_pretrained(base_model, folder)``.
    A base in the hub's cache is named as the hub names it, because other machines have no such folder."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    cached = CACHED.search(base)
    named = {PREFIX + name.replace(".default.", "."): tensor.contiguous() for name, tensor in adapters.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        target_modules=sorted({name.removesuffix(A).removesuffix(B) for name in adapters}),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=f"{cached['owner']}/{cached['name']}" if cached else base,
        revision=cached["revision"] if cached else None,
        inference_mode=True,
    ).save_pretrained(str(folder))


def read_adapter(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Read a LoRA adapter folder written by ``write_adapter``, yielding (name in the trained model, tensor)."""
    from safetensors.torch import load_file

    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        yield name.removeprefix(PREFIX).removesuffix(".weight") + ".default.weight", tensor
