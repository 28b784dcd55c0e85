"""One optimiser step under any strategy: finite numbers, clipping, and the step count of Lightning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from common import ranks
from common.make_command import continue_command
from lightning_modules.metrics import StepMetrics

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.core.optimizer import LightningOptimizer

    from rollout.trajectory import Trajectory

# The trajectories of a micro-batch, and its losses by the name under which they are logged.
MicroLosses = tuple[Sequence["Trajectory"], Mapping[str, torch.Tensor]]
SHOWN = 8  # trajectories and parameters that an error names


class NonFiniteError(ValueError):
    """Raised when a loss or a gradient norm is NaN or infinite, on every rank with the same message."""


def backward(module: L.LightningModule, loss: torch.Tensor) -> None:
    """Accumulate the gradient of a loss that was divided by counts over all ranks: multiply it by the number of
    ranks first.

    DDP, FSDP and DeepSpeed average gradients over ranks; the factor makes that average the sum.
    """
    module.manual_backward(loss * ranks.world_size())


def only(module: L.LightningModule) -> tuple[LightningOptimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Return the module's only optimiser and its learning-rate scheduler, as ``adamw`` made them."""
    return cast("Any", (module.optimizers(), module.lr_schedulers()))


def under_deepspeed(module: L.LightningModule) -> bool:
    return hasattr(module.trainer.strategy, "deepspeed_engine")


def set_clipping(module: L.LightningModule, max_norm: float) -> None:
    """Write the gradient-clipping norm into DeepSpeed's configuration, before the engine exists. DeepSpeed clips inside
    its optimiser step."""
    config = getattr(module.trainer.strategy, "config", None)
    if isinstance(config, dict):
        config["gradient_clipping"] = max_norm


def step(
    module: L.LightningModule,
    parts: Mapping[str, nn.Module],
    max_norm: float,
    losses: Sequence[MicroLosses],
    metrics: StepMetrics,
    idle: bool,
) -> None:
    """Take one optimiser step: clip the accumulated gradient, apply it and clear it. Every rank must call.

    The gradient norm before clipping is logged as ``train/grad_norm`` (the policy, or all parts under DeepSpeed) and
    ``train/grad_norm_<part>``.

    Args:
        parts: the trained models by name.
        max_norm: norm above which a part's gradient is scaled down; 0 for never. DeepSpeed clips all parts jointly.
        losses: of each micro-batch.
        idle: no rank has a loss token, see ``paused``.

    Raises:
        NonFiniteError: a loss or norm of any rank is not finite. The weights are those before the step.
    """
    optimizer, _ = only(module)
    norms = clip_gradients(module, parts, max_norm)
    _require_finite(module, losses, norms)
    with paused(optimizer, idle):
        optimizer.step()
    optimizer.zero_grad()
    if under_deepspeed(module):  # the norm is known now; the engine has left the step out where it is not finite
        norms = engine_norm(module)
        _require_finite(module, [(rows, {}) for rows, _ in losses], norms)
    for name, norm in norms.items():
        metrics.maximum(_logged(name), norm)


def clip_gradients(module: L.LightningModule, parts: Mapping[str, nn.Module], max_norm: float) -> dict[str, Any]:
    """Clip each part's gradient to ``max_norm`` (0 or less: only measure) and return the norms before clipping.

    Under float16 with a loss scaler the gradients are still scaled, so the limit is, too. Returns nothing under
    DeepSpeed, whose engine clips all parts jointly during its step; see ``engine_norm``.
    """
    if under_deepspeed(module):
        return {}
    limit = max_norm if max_norm > 0 else float("inf")
    scaler: Any = getattr(module.trainer.precision_plugin, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale()
    return {
        name: nn.utils.clip_grad_norm_([p for p in part.parameters() if p.grad is not None], limit * scale) / scale
        for name, part in parts.items()
    }


def engine_norm(module: L.LightningModule) -> dict[str, Any]:
    """Return the joint gradient norm of DeepSpeed's last step as {"policy": norm}; empty without a norm."""
    strategy: Any = module.trainer.strategy
    norm = strategy.deepspeed_engine.get_global_grad_norm()
    return {} if norm is None else {"policy": torch.as_tensor(float(norm))}


def _logged(part: str) -> str:
    return "train/grad_norm" if part == "policy" else f"train/grad_norm_{part}"


def _require_finite(
    module: L.LightningModule, losses: Sequence[MicroLosses], norms: Mapping[str, torch.Tensor]
) -> None:
    """Raise NonFiniteError on all ranks if any rank has a loss or norm that is not finite (one small collective)."""
    if str(module.trainer.precision).startswith("16"):
        norms = {}  # the loss scaler of float16 expects infinite gradients now and then, and leaves out such steps
    numbers = [*(named for _, named in losses), {_logged(part): norm for part, norm in norms.items()}]
    values = [torch.zeros(()), *(value for named in numbers for value in named.values())]
    wrong = torch.stack([~value.isfinite().to(module.device) for value in values]).sum()
    if not int(ranks.sum_over_ranks(wrong)):
        return
    found = [f"{name} is {float(v)}" for named in numbers for name, v in named.items() if not v.isfinite()]
    suspects = [t.name for rows, named in losses if not all(v.isfinite() for v in named.values()) for t in rows]
    batch = [t.name for rows, _ in losses for t in rows]
    parameters = ((name, getattr(p, "ds_tensor", p)) for name, p in module.named_parameters())  # ZeRO-3: its shard
    damaged = [name for name, parameter in parameters if not parameter.isfinite().all()]
    by_rank = ranks.gather_objects((found, suspects, batch, damaged))
    merged = (list(dict.fromkeys(itertools.chain(*lists))) for lists in zip(*by_rank, strict=True))
    raise NonFiniteError(_explain(module.trainer.fit_loop.total_batch_idx + 1, *merged))


def _explain(iteration: int, found: list[str], suspects: list[str], batch: list[str], damaged: list[str]) -> str:
    advice = "all parameters are finite: look at these trajectories, lower model.lr or set trainer.precision to 32-true"
    if damaged:
        advice = f"not finite are the parameters {_first(damaged)}: start from an undamaged model"
    return (
        f"iteration {iteration}: {', '.join(found)}; expected finite numbers, so the optimiser step was left out. "
        f"Trajectories {_first(suspects or batch)}; {advice}, or continue from an earlier checkpoint: "
        f"{continue_command()}"
    )


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@contextmanager
def paused(optimizer: LightningOptimizer, idle: bool) -> Iterator[None]:
    """Set the learning rate to 0 inside the block if the step has no loss tokens (``idle``).

    Its gradient is zero, but momentum and weight decay would still move the weights. The step itself still runs
    (AdamW's moments decay), which keeps counters and collectives of all ranks equal.
    """
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
    """Choose whether an optimiser step in this block raises ``trainer.global_step``.

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
    """Return two optimiser groups of the trainable parameters: matrices decay, biases and norms (fewer than two
    dimensions) do not.

    Source: docs/algorithms/kd.md. Under ZeRO-3 a parameter is a flat piece, and ``ds_shape`` has its shape.
    """
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
    """Make one AdamW with a learning rate and a schedule per group, in the form that Lightning expects.

    ``eps`` is torch's 1e-8. The scheduler is stepped by the modules, once per iteration.
    """
    optimizer = torch.optim.AdamW(groups, betas=betas, weight_decay=weight_decay)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factors)}
