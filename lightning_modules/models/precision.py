"""Half precision with float32 master weights: settings that keep small updates, and settings that lose them.

bfloat16 has 8 significant bits: next to a weight w it has steps of |w| / 256 to |w| / 128, and a sum that changes it by
less than half of one is rounded back. At lr 1e-6 AdamW moves a weight of 0.02 by 5e-5 of itself: kept in bfloat16 it
never moves. So the weights that the optimiser moves, its two moments and the sums of gradients over micro-batches are
float32, whatever the type of the products. Bytes per trained parameter:

======================  =====================  ========================================================================
strategy                trainer.precision      kept
======================  =====================  ========================================================================
one device, DDP         bf16-mixed             weights 4, gradients 4, moments 8 = 16; and a bfloat16 copy of the
                                               weights (2) while a graph holds it, with gradient checkpointing of
                                               one layer
ZeRO-2, n ranks         bf16-mixed             weights 2 whole; masters 4, gradients 4, moments 8 sharded:
                                               2 + 16 / n
ZeRO-3, n ranks         bf16-mixed             the same, the weights sharded, too: 18 / n
one device, DDP         32-true                weights 4, gradients 4, moments 8 = 16
ZeRO-2, n ranks         32-true                weights 4 whole; masters (a copy), gradients, moments sharded: 4 + 16 / n
ZeRO-3, n ranks         32-true                weights 4, masters (a copy), gradients, moments, all sharded: 20 / n
======================  =====================  ========================================================================

Parameters in bfloat16 with masters beside them on one device would take 2 + 4 + 4 + 8 = 18 with float32 gradients (16
with bfloat16 ones, whose sums over micro-batches lose what is small): no less than autocast over float32 weights, whose
checkpoints, clipping and DDP need no second copy. Hence ``bf16-mixed``. Under DeepSpeed ``bf16-true`` is the same as
``bf16-mixed``: the engine casts the models and keeps the masters, and its checkpoints hold them.

In float32 DeepSpeed means to spare stage 3 the copy, but compares a torch.device with a string, which are never equal
(0.19.8, stage3.py, ``_create_fp32_partitions``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

if TYPE_CHECKING:
    import lightning as L
    from transformers import PreTrainedModel

HALF = {"bfloat16", "float16"}


def check_master_weights(trainer: L.Trainer, dtype: str, adapters: bool = False) -> None:
    """Refuse to train weights that are kept in half precision without float32 masters.

    Args:
        trainer: its strategy and ``precision``.
        dtype: type that the module loads the trained models in.
        adapters: only adapters (and a critic's head) are trained: float32 beside a base of any type (lora.py).

    Raises:
        ValueError: small updates would be lost.
    """
    precision = str(trainer.precision)
    if isinstance(trainer.strategy, DeepSpeedStrategy) and precision.startswith(("bf16", "16")):
        return  # the engine keeps masters
    if adapters and not isinstance(trainer.strategy, DeepSpeedStrategy):
        dtype = "float32"
    if dtype in HALF or precision in ("bf16-true", "16-true"):
        raise ValueError(
            f"the trained weights would be kept in half precision (model.dtype: {dtype}, trainer.precision: "
            f"{precision}), where updates below some 0.2% of a weight are rounded away and little is learnt at a small "
            "learning rate; set model.dtype: float32 and trainer.precision: bf16-mixed (bfloat16 products over float32 "
            "master weights), or take ZeRO with bf16-mixed, whose engine keeps the masters"
        )


def keep_rotary_exact(model: PreTrainedModel) -> None:
    """Recompute a model's rotary frequencies in float32, whatever the type of the weights.

    ZeRO-3 makes all floating-point tensors of a model that is being built in the type of the weights. A frequency in
    bfloat16 is off by up to 1/256, which turns a head by radians after some hundred tokens: the trainer would compute
    another function than the engine.
    """
    rounded = [m for m in model.modules() if any(b.dtype != torch.float32 for b in _frequencies(m).values())]
    if not rounded:
        return
    from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context

    shutdown_init_context()  # torch keeps the requested type again
    try:
        for module in rounded:
            for name, buffer in _frequencies(module).items():
                setattr(module, name, buffer.float())
            model._init_weights(module)  # recomputes the frequencies of a rotary module
    finally:
        restore_init_context()


def _frequencies(module: nn.Module) -> dict[str, Tensor]:
    """Return a rotary module's frequency buffers by name, one pair (frequencies and a copy) per kind of layer (Gemma 3,
    OLMo 3: ``sliding_attention_inv_freq`` ...)."""
    return {name: buffer for name, buffer in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
