"""One optimiser step under any strategy: loss scale, gradient clipping, and which step Lightning counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from lightning_modules import ranks

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.core.optimizer import LightningOptimizer


def backward(module: L.LightningModule, loss: torch.Tensor) -> None:
    """Accumulate the gradient of a loss that was divided by *global* counts.

    DDP, FSDP and DeepSpeed average gradients over ranks; multiplying by the world size makes that average the sum.
    """
    module.manual_backward(loss * ranks.world_size())


def only(module: L.LightningModule) -> tuple[LightningOptimizer, torch.optim.lr_scheduler.LambdaLR]:
    """The module's one optimiser and its scheduler, of ``adamw``."""
    return cast("Any", (module.optimizers(), module.lr_schedulers()))


def under_deepspeed(module: L.LightningModule) -> bool:
    return hasattr(module.trainer.strategy, "deepspeed_engine")


def set_clipping(module: L.LightningModule, max_norm: float) -> None:
    """DeepSpeed clips inside its step, by its configuration; must be told before the engine is made."""
    config = getattr(module.trainer.strategy, "config", None)
    if isinstance(config, dict):
        config["gradient_clipping"] = max_norm


def clip_gradients(module: L.LightningModule, parts: Mapping[str, nn.Module], max_norm: float) -> dict[str, Any]:
    """Clip each part's gradient to ``max_norm`` (0 or less: measure only), returning the norms before clipping.

    Under DeepSpeed the engine clips all parts jointly during its step, and its norm is only known afterwards: then
    nothing is returned, see ``engine_norm``.
    """
    if under_deepspeed(module):
        return {}
    limit = max_norm if max_norm > 0 else float("inf")
    return {
        name: nn.utils.clip_grad_norm_([p for p in part.parameters() if p.grad is not None], limit)
        for name, part in parts.items()
    }


def engine_norm(module: L.LightningModule) -> dict[str, Any]:
    """Joint gradient norm of DeepSpeed's last step, under the name of the policy; empty under other strategies."""
    if not under_deepspeed(module):
        return {}
    strategy: Any = module.trainer.strategy
    norm = strategy.deepspeed_engine.get_global_grad_norm()
    return {} if norm is None else {"policy": float(norm)}


@contextmanager
def paused(optimizer: LightningOptimizer, idle: bool) -> Iterator[None]:
    """Let a step without a single loss token move nothing: its gradient is zero, but momentum and weight decay would
    still move the weights. A learning rate of zero stops both, and keeps counters and collectives in step."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if idle:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


@contextmanager
def counted(optimizer: LightningOptimizer, count: bool) -> Iterator[None]:
    """Whether an optimiser step in this block raises ``trainer.global_step``.

    Lightning counts every step of manual optimisation; we count rollout batches, so only the last step of each does.
    """
    before, after = optimizer._on_before_step, optimizer._on_after_step
    if not count:
        optimizer._on_before_step = optimizer._on_after_step = _nothing
    try:
        yield
    finally:
        optimizer._on_before_step, optimizer._on_after_step = before, after


def _nothing() -> None:
    pass


def decay_groups(part: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: matrices decay, biases and norms (fewer than two dimensions) do not
    (docs/papers/dgpo.md 1.3). Under ZeRO-3 a parameter is a flat piece, and its own shape is in ``ds_shape``."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in part.parameters():
        if parameter.requires_grad:
            groups[len(getattr(parameter, "ds_shape", parameter.shape)) >= 2].append(parameter)
    rates = {True: weight_decay, False: 0.0}
    return [{"params": params, "weight_decay": rates[decays]} for decays, params in groups.items() if params]


def adamw(
    groups: list[dict[str, Any]],
    factors: list[Callable[[int], float]],
    *,
    betas: tuple[float, float],
    weight_decay: float,
) -> dict[str, Any]:
    """One AdamW with a learning rate and a schedule per group, in the form Lightning expects.

    ``eps`` is torch's 1e-8. The scheduler is stepped by the modules, once per iteration.
    """
    optimizer = torch.optim.AdamW(groups, betas=betas, weight_decay=weight_decay)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factors)}
