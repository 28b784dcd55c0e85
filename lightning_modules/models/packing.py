"""Micro-batches without padding: the rows of a batch as one row of real tokens, through a transformer body.

::

    padded [3, 4]      a0 a1 a2 a3  /  b0 b1 -- --  /  c0 c1 c2 --
    packed [1, 9]      a0 a1 a2 a3 b0 b1 c0 c1 c2
    position_ids       0  1  2  3  0  1  0  1  2
    cu_seqlens         0           4     6        9

All parts of a body except attention work on each token separately. Attention gets the sequence boundaries by the
keywords of transformers' varlen kernels (``FlashAttentionKwargs``), and never forms an N x N mask:

* half precision on CUDA: ``torch.nn.attention.varlen`` (flash attention, part of torch), or the flash-attn package;
* everything else (CPU, float32): scaled dot-product attention, one call per sequence, as in the padded form.

A body is packed if it was loaded with one of the attention implementations in ``NAMES``. A module passes
``self.attention`` to every model it loads, so policy, critic, reference and teacher are all packed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_modules.batch import TokenBatch

NAMES = {"sdpa": "packed", "flash_attention_2": "packed_fa2", "flash_attention_3": "packed_fa3"}
BUILT_IN = ("sdpa", "eager", "flex_attention")
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
LAYERS = {"full_attention", "sliding_attention"}  # other layers carry information from token to token besides attention
BENDS = ("softcap", "s_aux", "position_bias")  # arguments of attention that these kernels ignore


def packed_name(attention: str) -> str:
    """Return the name of the packed attention implementation (rows without padding) that corresponds to ``attention``.

    Raises:
        ValueError: no packed implementation exists.
    """
    if attention not in NAMES:
        raise ValueError(f"attention is {attention!r}; with packing: true expected one of {', '.join(NAMES)}")
    return NAMES[attention]


def check_unpacked(attention: str) -> None:
    """Refuse the internal name of a packed attention implementation: without ``packing`` micro-batches would count
    padding.

    Raises:
        ValueError: the name is a packed one.
    """
    if attention in NAMES.values():
        plain = next(name for name, packed in NAMES.items() if packed == attention)
        raise ValueError(f"attention is {attention!r}, an internal name; set packing: true and attention: {plain}")


def check_available(attention: str) -> None:
    """Refuse an attention implementation of transformers that is not available here. A name with a slash is a kernel of
    the hub.

    Raises:
        ValueError: the name is unknown, or its package is not installed.
    """
    name = next((plain for plain, packed in NAMES.items() if packed == attention), attention)
    package = "kernels" if "/" in name else PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        raise ValueError(f"attention is {name!r}, whose package {package} is not installed; install it, or take 'sdpa'")
    if package is None and name not in BUILT_IN and name not in _registered():
        known = ", ".join((*BUILT_IN, *PACKAGES))
        raise ValueError(f"attention is {name!r}; expected one of {known}, or the name of a kernel on the hub")


def _registered() -> Collection[str]:
    """Return the names of attention implementations registered with transformers, which include the user's own."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return () if transformers is None else transformers.ALL_ATTENTION_FUNCTIONS.keys()


def register(name: str) -> None:
    """Register the packed attention implementation ``name`` with transformers, before a model is loaded with it.

    It has no mask function, so transformers builds no mask. Raises ValueError like ``check_available``.
    """
    check_available(name)
    if name not in NAMES.values():
        return
    from transformers import AttentionInterface

    kernel = next(plain for plain, packed in NAMES.items() if packed == name)
    AttentionInterface.register(name, partial(packed_attention, kernel=kernel))


def check_body(model: Any, path: str) -> None:
    """Refuse to pack a model in which anything but attention carries information from token to token.

    Raises:
        ValueError: it has such layers, or does not let attention be exchanged.
    """
    others = set(getattr(model.config, "layer_types", None) or ()) - LAYERS
    if others or not model._supports_attention_backend:
        found = f"layers of type {', '.join(sorted(others))}" if others else "attention that cannot be exchanged"
        raise ValueError(
            f"the model at '{path}' ({model.config.model_type}) has {found}, in which packed sequences would see each "
            "other; set packing: false"
        )


def packed_states(body: nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Run a transformer body over a batch without padding: b rows, one after the other, as one row of N tokens.

    A row without tokens (the stand-in of an empty micro-batch) counts as one token.

    Returns:
        hidden states [N, H]; for each of them its row [N] and column [N] in the batch. Row i begins at the number of
        tokens before it: ``lengths.cumsum - lengths``.
    """
    lengths = batch.lengths.clamp(min=1)
    column = torch.arange(batch.input_ids.shape[1], device=lengths.device)[None]
    rows, columns = (column < lengths[:, None]).nonzero(as_tuple=True)
    boundaries = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    hidden = body(
        input_ids=batch.input_ids[rows, columns][None],
        position_ids=columns[None],
        use_cache=False,
        cu_seq_lens_q=boundaries,
        cu_seq_lens_k=boundaries,
        max_length_q=longest,
        max_length_k=longest,
    ).last_hidden_state
    return hidden[0], rows, columns


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kernel: str = "sdpa",
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence of a packed row, with the interface of transformers' attention
    functions.

    Args:
        query: [1, heads, N, D].
        key: [1, key heads, N, D]; fewer heads than the query's are shared (GQA).
        value: as ``key``.
        attention_mask: must be null.
        kernel: the attention implementation of transformers that it stands for.
        scaling: of the scores.
        dropout: must be 0.
        sliding_window: tokens that a token sees, itself included; null for all.
        cu_seq_lens_q: [sequences + 1] int32, where sequences begin, and N.
        max_length_q: of the longest sequence.

    Returns:
        [1, N, heads, D], and no weights.

    Raises:
        ValueError: boundaries are missing, or the model uses a feature that the kernels lack.
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise ValueError(
            "a model that was loaded for packing was called without sequence boundaries or with a mask; call it "
            "through lightning_modules.models.policy (token_logprobs, hidden_before, ValueModel), or load it with sdpa"
        )
    asked = [name for name in BENDS if kwargs.get(name) is not None] + ["dropout"] * (dropout > 0)
    if asked:
        raise ValueError(
            f"{type(module).__name__} uses {', '.join(asked)}, which packed attention does not apply; set packing: "
            "false"
        )
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotary embeddings leave query and key in float32
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    if device != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return _sequence_by_sequence(module, query, key, value, scaling, window, cu_seq_lens_q.diff().tolist()), None
    boundaries = (cu_seq_lens_q, max_length_q)
    if kernel == "sdpa":
        return _varlen(query, key, value, scaling, window, *boundaries), None
    return _flash_package(kernel, query, key, value, scaling, window, *boundaries), None


def _sequence_by_sequence(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    lengths: list[int],
) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    parts = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        mask = None if window is None or q.shape[2] <= window else _band(q.shape[2], window, q.device)
        parts.append(sdpa_attention_forward(module, q, k, v, mask, scaling=scaling)[0])
    return torch.cat(parts, dim=1)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Return a mask [1, 1, length, length] bool of the keys that each query sees within its window."""
    whole = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return whole.triu(1 - window)[None, None]


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    boundaries: Tensor,
    longest: int,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    size = (-1, 0) if window is None else (window - 1, 0)  # seen to the left of a query's own token, and to its right
    options: dict[str, Any] = {"scale": scaling, "window_size": size, "enable_gqa": q.shape[1] != k.shape[1]}
    return cast("Tensor", varlen_attn(q, k, v, boundaries, boundaries, longest, longest, **options))[None]


def _flash_package(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    boundaries: Tensor,
    longest: int,
) -> Tensor:
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [1, N, heads, D]
    lengths: dict[str, Any] = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    lengths |= {"max_length_q": longest, "max_length_k": longest}
    options: dict[str, Any] = {"softmax_scale": scaling, "sliding_window": window, "attn_implementation": kernel}
    return _flash_attention_forward(q, k, v, None, query_length=q.shape[1], is_causal=True, **options, **lengths)
