"""Log-probs, entropies and divergences from hidden states, without ever holding all logits.

``[tokens, 151936]`` float32 logits of 16k tokens are 10 GB, and a softmax with its gradient holds several of them.
Here the output matrix is applied to a chunk of tokens at a time, a function turns the chunk's logits into a few
columns per token, and the backward pass does the chunk again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.maths.divergences import finite_log_softmax

ChunkFunction = Callable[..., Tensor]  # (logits [n, V], *rows [n, ...]) -> [n, K] float32
Context = Callable[[], AbstractContextManager[Any]]


class _ChunkedProjection(torch.autograd.Function):
    """Forward keeps hidden states and weights; backward recomputes one chunk's logits at a time."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        function: ChunkFunction,
        chunk: int,
        context: Context | None,
        *rows: Tensor,
    ) -> Tensor:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        ctx.compute_dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        ctx.function, ctx.chunk, ctx.context = function, chunk, context
        ctx.save_for_backward(hidden, weight, bias, *rows)
        with (context or nullcontext)(), torch.autocast(device, enabled=False):
            h, w, b = _cast(ctx.compute_dtype, hidden, weight, bias)
            parts = [function(F.linear(h[s], w, b), *(r[s] for r in rows)) for s in _slices(len(h), chunk)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, *rows = ctx.saved_tensors
        with (ctx.context or nullcontext)(), torch.autocast(hidden.device.type, enabled=False):
            h, w, b = _cast(ctx.compute_dtype, hidden, weight, bias)
            grad_hidden = torch.empty_like(h) if ctx.needs_input_grad[0] else None
            total = torch.promote_types(ctx.compute_dtype, torch.float32)  # sums over chunks, never in bfloat16
            grad_weight = torch.zeros_like(w, dtype=total) if ctx.needs_input_grad[1] else None
            grad_bias = torch.zeros_like(b, dtype=total) if b is not None and ctx.needs_input_grad[2] else None
            for s in _slices(len(h), ctx.chunk):
                with torch.enable_grad():
                    logits = F.linear(h[s], w, b).detach().requires_grad_()
                    out = ctx.function(logits, *(r[s] for r in rows))
                (grad_logits,) = torch.autograd.grad(out, logits, grad[s])
                del logits, out
                if grad_hidden is not None:
                    grad_hidden[s] = grad_logits @ w
                if grad_weight is not None:
                    _add_product(grad_weight, grad_logits, h[s])
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
        grads = (
            _as(grad_hidden, hidden),
            _as(grad_weight, weight),
            _as(grad_bias, bias),
        )
        return (*grads, None, None, None, *(None for _ in rows))


def _add_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """total [V, H] += grad_logits^T hidden; in place where the types allow, as a second [V, H] is hundreds of MiB."""
    if total.dtype == hidden.dtype:
        total.addmm_(grad_logits.T, hidden)
    else:
        total += grad_logits.T @ hidden


def _slices(total: int, chunk: int) -> list[slice]:
    """At least one slice, so that a micro-batch without tokens still has a result (and a gradient) to return."""
    return [slice(i, min(i + chunk, total)) for i in range(0, max(total, 1), chunk)]


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.to(dtype) for t in tensors]


def _as(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if grad is None or like is None else grad.to(like.dtype)


class LMHead(nn.Linear):
    """An output layer that can also be asked for a function of its logits, chunk by chunk.

    Without ``function`` it is the ``nn.Linear`` it was made from (generation and export see no difference).  It stays
    a module call, so that ZeRO-3's hooks gather the partitioned matrix once for all chunks, forward and backward.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch calls it input, of which it is no more
        self,
        hidden: Tensor,
        function: ChunkFunction | None = None,
        rows: tuple[Tensor, ...] = (),
        chunk: int = 1024,
        context: Context | None = None,
    ) -> Tensor:
        """Logits [..., V], or, with ``function``, its columns for hidden [N, H]: [N, K] float32.

        Args:
            hidden: hidden states.
            function: ``(logits [n, V], *rows [n, ...]) -> [n, K]``, differentiable in the logits.
            rows: per-token tensors [N, ...] handed to the function in the same chunks; they get no gradient.
            chunk: how many tokens' logits exist at once.
            context: entered around forward and around backward (to gather a teacher's partitioned matrix).
        """
        if function is None:
            return super().forward(hidden)
        if len(hidden) <= chunk and context is None and not torch.is_autocast_enabled(hidden.device.type):
            return function(super().forward(hidden), *rows)  # one chunk anyway: no need to compute it twice
        return _ChunkedProjection.apply(hidden, self.weight, self.bias, function, chunk, context, *rows)


def token_statistics(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """[n, 2]: log-prob of the target and entropy in nats, of softmax(logits / temperature) in float32."""
    logprobs = finite_log_softmax(logits.float() / temperature)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return torch.stack([logprobs.gather(-1, targets[:, None])[:, 0], entropy], dim=-1)
