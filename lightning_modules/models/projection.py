"""Log-probs, entropies and divergences from hidden states, computed without holding all logits at once.

``[tokens, 151936]`` float32 logits of 16k tokens are 10 GB, and a softmax with its gradient holds several of them.
This module applies the output matrix to a chunk of tokens at a time, and a function turns the chunk's logits into a few
columns per token. One buffer [chunk, V], in the type of the product, holds the logits and then their gradient; the
function sees some of its rows at a time. The backward pass recomputes a chunk's logits, except those of the last chunk,
which the buffer still holds.

Liger's fused losses compute the gradient in the forward pass, which saves the recomputation. They must know the loss
then; here an algorithm computes any loss from the log-probs of a whole micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ChunkFunction = Callable[..., Tensor]  # (logits [n, V], *rows [n, ...]) -> [n, K] float32
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a loss reads of the policy's distribution at each of its own tokens, in the same forward pass: log-probs of
    given tokens [N, K], or the columns [N, K] of a function of the logits. With gradient."""

    ids: Tensor | None = None  # [N, K] int64, in the order of ``policy.positions``
    function: ChunkFunction | None = None  # instead of ids, see ``LMHead``
    rows: tuple[Tensor, ...] = ()
    context: Context | None = None


LOGITS_CHUNK = 2048  # tokens whose logits exist at once, by default: 1.2 GB in float32 at a vocabulary of 151,936
FUNCTION_ROWS = 256  # rows per call of a function; a divergence holds some 10 times their logits
# Elements per block of the statistics, by device: on a CPU rows that fit its cache, elsewhere enough to keep the device
# busy. Two float32 copies of a block exist beside the logits.
BLOCK = {"cpu": 2**19}
LARGE_BLOCK = 2**24


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Computes statistics of target tokens from logits: log-probs, entropy (both in nats), and whether the first target
    is the likeliest token. The distribution is softmax(logits / temperature).

    Returns [n, M + 0 to 2] in float32 (float64 for float64), for targets [n] (M = 1) or [n, M]. Accuracy, the last
    column, has no gradient.

    Differentiated by hand, in place; of the entropy only where something depends on it. More targets of a token take no
    further matrix of logits.

    Args:
        temperature: divides the logits.
        entropy: whether there is a column of it.
        accuracy: whether there is a column of it.
    """

    temperature: float = 1.0
    entropy: bool = False
    accuracy: bool = False

    def columns(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the statistics of each token [n, K], and a shift [n, 1] for ``gradient_``. The log-probs are (logits -
        shift) / temperature."""
        exact = torch.promote_types(logits.dtype, torch.float32)
        targets = _by_token(targets)
        m = targets.shape[1]
        found = logits.new_empty((len(logits), m + self.entropy + self.accuracy), dtype=exact)
        shift = logits.new_empty((len(logits), 1), dtype=exact)
        rows = _block_rows(logits)
        moved, powers = logits.new_empty((2, rows, logits.shape[-1]), dtype=exact)
        for s in _slices(len(logits), rows):
            z = logits[s]
            a, b = moved[: len(z)], powers[: len(z)]
            top = z.amax(-1, keepdim=True).to(exact)
            torch.sub(z, top, out=a)  # reads half precision and writes float32 in one pass
            if self.temperature != 1.0:
                a.div_(self.temperature)
            torch.exp(a, out=b)
            total = b.sum(-1)
            chosen, norm = a.gather(-1, targets[s]), total.log()
            shift[s] = top + self.temperature * norm[:, None]
            found[s, :m] = chosen - norm[:, None]
            if self.entropy:
                # A sum is faster on CUDA. On CPU the product keeps the rounding of earlier runs.
                mean = a.mul_(b).sum(-1) if a.is_cuda else (b[:, None] @ a[:, :, None])[:, 0, 0]
                found[s, m] = norm - mean / total
            if self.accuracy:
                found[s, -1] = (chosen[:, 0] >= 0).to(exact)
        return found, shift

    def gradient_(self, logits: Tensor, found: Tensor, shift: Tensor, grad: Tensor, targets: Tensor) -> Tensor:
        """Overwrite the logits by their gradient, divided by a factor per row, and return the factors [n, 1].

        Values of about 1 lose nothing in half precision. With p = softmax, entropy H, and gradients a_m of the log-prob
        of target m and b of H::

            d/dz = -[p (sum_m a_m + b (log p + H)) - sum_m a_m onehot_m] / temperature
        """
        exact, rows, targets = shift.dtype, _block_rows(logits), _by_token(targets)
        m = targets.shape[1]
        scale, b = grad[:, :1], grad[:, m : m + 1] if self.entropy else None
        if b is not None and not b.any():  # the entropy is absent or only logged
            b = None
        if m == 1 and b is None:
            a = total = torch.ones_like(scale)
        else:
            largest = grad[:, :m].abs().amax(-1, keepdim=True)
            scale = (largest if b is None else torch.maximum(largest, b.abs())).clamp(min=torch.finfo(exact).tiny)
            a, b = grad[:, :m] / scale, None if b is None else b / scale
            total = a.sum(-1, keepdim=True)
        powers = None if b is None else logits.new_empty((rows, logits.shape[-1]), dtype=exact)
        for s in _slices(len(logits), rows):
            z = logits[s]
            z = z.sub_(shift[s]) if z.dtype == exact else z - shift[s]
            if self.temperature != 1.0:
                z.div_(self.temperature)
            if b is None or powers is None:
                z.exp_()
                if m > 1:
                    z.mul_(total[s])
            else:
                p = torch.exp(z, out=powers[: len(z)])
                torch.addcmul(total[s] + b[s] * found[s, m : m + 1], z, b[s], out=z).mul_(p)
            z.scatter_add_(-1, targets[s], -a[s])
            if z.dtype != logits.dtype:
                logits[s] = z
        return scale / -self.temperature


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Computes the k likeliest tokens from logits, without gradient. The distribution is softmax(logits / temperature)
    of the first ``vocabulary`` tokens.

    A call returns [n, 1 + 2 k] float32: the log-prob of the target, the log-probs of the k tokens, and their ids (exact
    below 2^24).

    Args:
        k: number of tokens, at most ``vocabulary``.
        vocabulary: number of tokens that count; those beyond it are padding.
        temperature: divides the logits.
    """

    k: int
    vocabulary: int
    temperature: float = 1.0

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        logprobs = (logits[:, : self.vocabulary].float() / self.temperature).log_softmax(-1)
        top, ids = logprobs.topk(self.k, sorted=True)
        return torch.cat([logprobs.gather(-1, targets[:, None]), top, ids.to(top.dtype)], dim=-1)


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """Computes log-probs [n, M] float32 of given tokens [n, M] from logits, over the first ``vocabulary`` tokens; see
    ``TopTokens``."""

    vocabulary: int
    temperature: float = 1.0

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (logits[:, : self.vocabulary].float() / self.temperature).log_softmax(-1).gather(-1, targets)


@dataclass(frozen=True, slots=True)
class _Differentiated:
    """Gives any function of logits the interface of ``TokenStatistics``. Autograd takes its gradient, some rows at a
    time."""

    function: ChunkFunction

    def columns(self, logits: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        slices = _slices(len(logits), FUNCTION_ROWS)
        found = torch.cat([self.function(logits[s], *(r[s] for r in rows)) for s in slices])
        return found, found.new_empty((len(found), 0))

    def gradient_(self, logits: Tensor, found: Tensor, shift: Tensor, grad: Tensor, *rows: Tensor) -> Tensor:
        for s in _slices(len(logits), FUNCTION_ROWS):
            with torch.enable_grad():
                leaf = logits[s].detach().requires_grad_()
                out = self.function(leaf, *(r[s] for r in rows))
            (logits[s],) = torch.autograd.grad(out, leaf, grad[s])
            del leaf, out
        return grad.new_ones((len(logits), 1))


class _ChunkedProjection(torch.autograd.Function):
    """Computes columns [N, K] (such as log-probs) from hidden states without holding all logits; see the module
    docstring."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        function: TokenStatistics | _Differentiated,
        chunk: int,
        context: Context | None,
        keep: bool,
        *rows: Tensor,
    ) -> Tensor:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        ctx.compute_dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        ctx.function, ctx.chunk, ctx.context = function, chunk, context
        with (context or nullcontext)(), torch.autocast(device, enabled=False):
            h, w, b = _cast(ctx.compute_dtype, hidden, weight, bias)
            buffer = _buffer(h, w, chunk)
            parts = [
                function.columns(_project(h[s], w, b, buffer), *(r[s] for r in rows)) for s in _slices(len(h), chunk)
            ]
        found, shift = (torch.cat(values) for values in zip(*parts, strict=True))
        ctx.kept = buffer if keep else None
        ctx.save_for_backward(hidden, weight, bias, found, shift, *rows)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, found, shift, *rows = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # overwritten here: a second backward pass makes it again
        total = torch.promote_types(ctx.compute_dtype, torch.float32)  # sums over chunks, never in bfloat16
        grad_hidden = torch.empty_like(hidden, dtype=total) if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        with (ctx.context or nullcontext)(), torch.autocast(hidden.device.type, enabled=False):
            h, w, b = _cast(ctx.compute_dtype, hidden, weight, bias)
            buffer = _buffer(h, w, ctx.chunk) if kept is None else kept
            for s in reversed(_slices(len(h), ctx.chunk)):
                logits = _project(h[s], w, b, buffer) if kept is None else buffer[: len(h[s])]
                kept = None
                factor = ctx.function.gradient_(logits, found[s], shift[s], grad[s], *(r[s] for r in rows))
                if grad_hidden is not None:
                    grad_hidden[s] = (logits @ w) * factor
                if ctx.needs_input_grad[1]:
                    grad_weight = _add_product(grad_weight, logits, (hidden[s] * factor).to(w.dtype), total)
                if b is not None and ctx.needs_input_grad[2]:
                    part = (logits.T @ factor.to(logits.dtype))[:, 0]
                    grad_bias = part if grad_bias is None else grad_bias + part
        grads = (
            _as(grad_hidden, hidden),
            _as(grad_weight, weight),
            _as(grad_bias, bias),
        )
        return (*grads, None, None, None, None, *(None for _ in rows))


def _by_token(targets: Tensor) -> Tensor:
    """Return the targets as [n, M]."""
    return targets[:, None] if targets.dim() == 1 else targets


def _buffer(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """Return an empty tensor for the logits of a chunk, or of all tokens if these are fewer."""
    return hidden.new_empty((min(chunk, len(hidden)), len(weight)))


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Compute the logits [n, V] of hidden states in the first rows of the buffer, and return these rows."""
    logits = torch.mm(hidden, weight.T, out=buffer[: len(hidden)])
    return logits if bias is None else logits.add_(bias)


def _add_product(total: Tensor | None, grad_logits: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total`` [V, H] (None: 0) plus grad_logits^T hidden, in place if the types allow: a second [V, H] takes
    hundreds of MiB."""
    if total is None:
        return (grad_logits.T @ hidden).to(dtype)
    if dtype == hidden.dtype:
        return total.addmm_(grad_logits.T, hidden)
    return total.add_(grad_logits.T @ hidden)


def _slices(total: int, chunk: int) -> list[slice]:
    """Return the slices that cut ``total`` tokens into chunks. There is at least one, so that a micro-batch without
    tokens has a result and a gradient."""
    return [slice(i, min(i + chunk, total)) for i in range(0, max(total, 1), chunk)]


def _block_rows(logits: Tensor) -> int:
    return max(1, min(len(logits), BLOCK.get(logits.device.type, LARGE_BLOCK) // logits.shape[-1]))


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.to(dtype) for t in tensors]


def _as(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if grad is None or like is None else grad.to(like.dtype)


class LMHead(nn.Linear):
    """Output layer that also computes functions of its logits, chunk by chunk.

    Without ``function`` it is the ``nn.Linear`` it was made from (generation and export see no difference).  It stays
    a module call, so that ZeRO-3's hooks gather the partitioned matrix once for all chunks, forward and backward.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch names it input
        self,
        hidden: Tensor,
        function: ChunkFunction | TokenStatistics | None = None,
        rows: tuple[Tensor, ...] = (),
        chunk: int = LOGITS_CHUNK,
        context: Context | None = None,
    ) -> Tensor:
        """Return the logits [..., V] of hidden states, or, with ``function``, its columns [N, K] float32 for hidden [N,
        H].

        Args:
            hidden: hidden states.
            function: ``(logits [n, V], *rows [n, ...]) -> [n, K]``, differentiable in the logits; or the statistics of
                targets, which are then the only one of ``rows``.
            rows: per-token tensors [N, ...] handed to the function in the same chunks; they get no gradient.
            chunk: how many tokens' logits exist at once.
            context: entered around forward and around backward (to gather a teacher's partitioned matrix).
        """
        if function is None:
            return super().forward(hidden)
        form = function if isinstance(function, TokenStatistics) else _Differentiated(function)
        if isinstance(form, _Differentiated) and len(hidden) <= min(chunk, FUNCTION_ROWS) and context is None:
            if not torch.is_autocast_enabled(hidden.device.type):
                logits = F.linear(hidden, self.weight, self.bias)
                return form.function(logits, *rows)  # no need to compute it twice
        keep = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
        return _ChunkedProjection.apply(hidden, self.weight, self.bias, form, chunk, context, keep, *rows)
