"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft: W x becomes W x + alpha / rank * B (A x), and W stays.

The layers are injected into the model, which keeps its class, its output layer and its signature, so no algorithm sees
a difference. B starts at 0: an untrained adapted model is the base model, bit for bit. It has no
dropout: a ratio of probabilities is meaningless if each has other units dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from common.ranges import PositiveFloat, PositiveInt
from lightning_modules.models.policy import Combine, gathered, in_buckets, partitioned

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
ADAPTER = "default"  # peft's name of the only adapter, part of the parameters' names
BASE = ".base_layer"  # in the name of every parameter that peft wraps


@dataclass(frozen=True, slots=True)
class LoRA:
    """Low-rank adapters, trained instead of the whole policy and the critic's body. The critic's head is trained whole.

    Embeddings and output matrix are never adapted. Adapters are float32 whatever the type of the base; under DeepSpeed
    with 16-bit floats they have the engine's type, with float32 masters. A teacher from the policy's own folder is the
    base with its adapters off: no second copy is loaded, and ``teacher_dtype`` has no effect.

    Use about ten times the learning rate of full fine-tuning (1e-5 instead of 1e-6).

    Args:
        rank: of the adapters.
        alpha: the adapters' output is multiplied by alpha / rank.
        target: names of the linear modules to adapt, whole or from a dot on (q_proj, mlp.up_proj), or all-linear.

    Raises:
        ValueError: no target.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    target: str | list[str] = ALL_LINEAR

    def __post_init__(self) -> None:
        if not self.targets or not all(self.targets):
            raise ValueError(f"lora.target is {self.target!r}; expected {ALL_LINEAR}, or names of linear modules")

    @property
    def targets(self) -> list[str]:
        return [self.target] if isinstance(self.target, str) else list(self.target)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Return the full names of the linear modules of ``model`` that get adapters.

        Raises:
            ValueError: the model has no module of a requested name.
        """
        head = model.get_output_embeddings()
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
        if self.targets == [ALL_LINEAR]:
            chosen, unknown = linear, []
        else:
            chosen = [n for n in linear if any(_ends(n, target) for target in self.targets)]
            unknown = [target for target in self.targets if not any(_ends(n, target) for n in linear)]
        if unknown or not chosen:
            there = ", ".join(sorted({n.rpartition(".")[2] for n in linear})) or "none"
            raise ValueError(
                f"lora.target names {', '.join(unknown) or ALL_LINEAR}, and {type(model).__name__} has no such linear "
                f"module; expected one of: {there} (embeddings and output matrix are not adapted)"
            )
        return chosen

    def check(self, folder: str) -> None:
        """Check that the model at ``folder`` (or owner/name) has the linear modules to adapt, without loading its
        weights."""
        import peft  # noqa: F401  # not first under ZeRO-3's patched constructors, where ``attach`` would import it
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            self.modules(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)))

    def attach(self, model: PreTrainedModel) -> None:
        """Freeze the model and inject trainable LoRA adapters into it.

        A is drawn like nn.Linear's weights, from a separate generator with torch's seed: the same under
        every strategy. Under ZeRO-3 a collective.
        """
        from peft import LoraConfig, inject_adapter_in_model

        names = self.modules(model)
        config = LoraConfig(
            r=self.rank,
            lora_alpha=cast("int", self.alpha),  # any number works
            target_modules=names,
            lora_dropout=0.0,
            init_lora_weights=False,  # peft would draw in place, which ZeRO-3's empty pieces cannot
        )
        inject_adapter_in_model(config, model, ADAPTER)
        pairs = [_matrices(layer) for _, layer in layers(model)]
        if not partitioned(p for pair in pairs for p in pair):
            for parameter in (p for pair in pairs for p in pair):
                parameter.data = parameter.data.float()
        generator = torch.Generator().manual_seed(torch.initial_seed())
        with torch.no_grad(), gathered((p for pair in pairs for p in pair), modifier_rank=0):
            for a, b in pairs:
                bound = 1.0 / math.sqrt(a.shape[-1])
                # ZeRO-3 makes what names no device on the GPU, where this generator is not, and in the weights' type.
                drawn = torch.empty(a.shape, device="cpu").float()
                a.copy_(drawn.uniform_(-bound, bound, generator=generator))
                b.zero_()


def _matrices(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the adapter matrices A and B of a layer with LoRA."""
    a, b = (cast("Any", adapters[ADAPTER]).weight for adapters in (layer.lora_A, layer.lora_B))
    return a, b


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    """Return (name, layer) of every linear module that has a LoRA adapter."""
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def frozen_names(model: nn.Module, prefix: str = "") -> set[str]:
    """Return the names of the parameters that LoRA freezes. A tied matrix appears under each of its names."""
    every = model.named_parameters(prefix=prefix, remove_duplicate=False)
    return {name for name, parameter in every if not parameter.requires_grad}


def counts(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of trained and of all parameters. Under ZeRO-3 whole parameters count."""
    sizes = [(p.requires_grad, getattr(p, "ds_numel", p.numel())) for p in model.parameters()]
    return sum(n for trained, n in sizes if trained), sum(n for _, n in sizes)


# -- weights out of an adapted model -----------------------------------------------------------------------------------


def merged_weights(model: nn.Module, bucket_elements: int = 50_000_000) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model with its LoRA adapters merged: (Hugging Face name, W + alpha / rank * B A), in W's
    type. See ``policy.named_weights``.

    The sum is made in float32 while the bucket is gathered, into a new tensor: the trained model is not touched.
    """
    adapted = {id(layer.base_layer.weight): layer for _, layer in layers(model)}

    def weights() -> Iterator[tuple[str, list[nn.Parameter], Combine | None]]:
        for name, parameter in model.named_parameters():
            layer = adapted.get(id(parameter))
            if layer is not None:
                yield name.replace(BASE, ""), [parameter, *_matrices(layer)], partial(_merged, layer.scaling[ADAPTER])
            elif ".lora_" not in name:
                yield name.replace(BASE, ""), [parameter], None

    return in_buckets(weights(), bucket_elements)


def _merged(scale: float, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(base.float(), b.float(), a.float(), alpha=scale).to(base.dtype)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the model, whole tensor) of all LoRA adapters. All ranks must iterate to the end."""
    named = [(name, p) for name, p in model.named_parameters() if ".lora_" in name]
    with gathered(p for _, p in named):  # a percent of the model: one bucket
        yield from [(name, p.detach().clone()) for name, p in named]


def scaled_adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name of the module + ".lora_A.weight" or ".lora_B.weight", whole tensor) of all LoRA
    adapters, with alpha / rank multiplied into B. All ranks must iterate to the end."""
    scales = {name: layer.scaling[ADAPTER] for name, layer in layers(model)}
    for name, tensor in adapter_weights(model):
        module, _, matrix = name.rpartition(".lora_")
        scale = scales[module] if matrix.startswith("B") else 1.0
        yield f"{module}.lora_{matrix[0]}.weight", tensor * scale


# -- the base with its adapters off ------------------------------------------------------------------------------------


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch LoRA adapters off inside the block, which restores the model before training. For forward passes without
    gradient."""
    switched = [layer for _, layer in layers(model)]
    for layer in switched:
        layer._disable_adapters = True  # enable_adapters() would also freeze them, in the optimiser's sight
    try:
        yield
    finally:
        for layer in switched:
            layer._disable_adapters = False


class InitialPolicy(nn.Module):
    """A frozen teacher that is the policy before its training: the policy's own weights with LoRA adapters off.

    Args:
        policy: the adapted model; stays where it is, and is no submodule here.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self._policy = (policy,)

    @property
    def config(self) -> Any:
        return self._policy[0].config

    @property
    def base_model(self) -> Any:
        """The transformer body with LoRA adapters off, as a function with the signature of a transformers body."""
        return self._body

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), adapters_off(self._policy[0]):
            return self._policy[0].base_model(*args, **kwargs)

    def get_output_embeddings(self) -> nn.Module | None:
        return self._policy[0].get_output_embeddings()  # never adapted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), adapters_off(self._policy[0]):
            return self._policy[0](*args, **kwargs)


# -- what is said of it ------------------------------------------------------------------------------------------------


def summary(lora: LoRA, parts: dict[str, nn.Module], lr: float | None) -> str:
    """Return a line of text that says how many parameters LoRA trains. It has a hint if the learning rate is that of
    full fine-tuning."""
    sums = [counts(part) for part in parts.values()]
    trained, whole = sum(t for t, _ in sums), sum(n for _, n in sums)
    adapted = sum(len(layers(part)) for part in parts.values())
    text = (
        f"LoRA of rank {lora.rank} (alpha {lora.alpha:g}) on {adapted} linear modules of {', '.join(parts)}: "
        f"{trained:,} of {whole:,} parameters are trained ({100 * trained / whole:.2f} %)"
    )
    if lr is not None and 0 < lr < 1e-5:
        text += f". lr is {lr:g}: adapters usually want about ten times the rate of full fine-tuning, 1e-5 and more"
    return text
