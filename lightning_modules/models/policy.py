"""Hugging Face models for training: token log-probs, entropies, values.

All results follow the convention of batch.py: [B, T], entry t belongs to token t given the tokens before it.
No attention mask is passed: rows are padded on the right and attention is causal, so no real token can see padding,
and SDPA takes its fast path. Models loaded for packing (packing.py) read rows without padding, to the same results.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from lightning_modules.batch import TokenBatch
from lightning_modules.models import packing
from lightning_modules.models.precision import keep_rotary_exact
from lightning_modules.models.projection import LOGITS_CHUNK, LMHead, Reading, TokenStatistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Combine = Callable[..., Tensor]  # of whole parameters
DType = Literal["float32", "bfloat16", "float16"]
# Configuration entries that bend the logits after the output matrix; LMHead would leave them out.
UNSUPPORTED = (
    "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logits_scaling", "logit_scale",
    "output_multiplier_scale", "lm_head_multiplier",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Log-probs and entropies of a batch's tokens; 0 where the mask is 0."""

    logprobs: Tensor  # [B, T] float32
    entropy: Tensor  # [B, T] float32, nats
    read: tuple[Tensor | None, ...] = ()  # [N, K] float32 for each ``Reading``


class _Zero3Config:
    """Replaces transformers' HfDeepSpeedConfig, which needs accelerate."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def zero3_notice(config: dict[str, Any]) -> Iterator[None]:
    """Tell transformers that ZeRO-3 partitions the parameters of models built in this block.

    Without it transformers silently initialises them wrong. Models that are built later belong to no engine, and are
    whole.

    Args:
        config: DeepSpeed's.
    """
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    notice = _Zero3Config(config)  # transformers keeps a weak reference only
    set_hf_deepspeed_config(notice)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()


def _check_folder(path: str) -> None:
    if not Path(path).is_dir() and path.count("/") != 1:
        raise FileNotFoundError(
            f"no model folder at '{path}'; expected a Hugging Face folder (config.json, *.safetensors) or owner/name"
        )


def require_plain_logits(path: str) -> None:
    """Raise ValueError if a model bends its logits after the output matrix, which the chunked log-probs would miss. Its
    configuration may be nested in that of a model that also reads images."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except ValueError:  # of an unknown type, which loading says
        return
    for name in UNSUPPORTED:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"the model at '{path}' sets {name}, which the chunked log-probs do not apply")


def require_loadable(policy: str, frozen: Iterable[str]) -> None:
    """Refuse, before an engine or a model loads, what loading would refuse. Models that are not on this machine yet are
    left to it.

    Raises:
        ValueError: a model bends its logits, or a frozen one has another tokenizer than the policy.
    """
    here = [folder for folder in dict.fromkeys((policy, *frozen)) if (Path(folder) / "config.json").is_file()]
    for folder in here:
        require_plain_logits(folder)
        if here[0] == policy != folder:
            require_same_tokenizer(policy, folder)


def require_same_tokenizer(student: str, teacher: str) -> None:
    """Refuse a teacher with another tokenizer: it would judge other tokens than the student sampled.

    Raises:
        ValueError: the vocabularies differ, with the first token that does.
    """
    from transformers import AutoTokenizer

    ours, theirs = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (student, teacher))
    if ours == theirs:
        return
    token = min(ours.keys() ^ theirs.keys() or {t for t in ours if ours[t] != theirs[t]})
    raise ValueError(
        f"the teacher at '{teacher}' has another tokenizer than the student at '{student}' ({len(theirs)} and "
        f"{len(ours)} tokens; {token!r} is {theirs.get(token, 'missing')} there, {ours.get(token, 'missing')} here); "
        "take a teacher of the same family"
    )


def embedding_rows(path: str) -> int | None:
    """Return the number of token ids that have an embedding, read from a model's configuration.

    Returns None if the configuration is not on this machine, or cannot be read.
    """
    file = Path(path) / "config.json"
    with contextlib.suppress(OSError, ValueError):
        if not file.is_file() and path.count("/") == 1:
            from huggingface_hub import try_to_load_from_cache

            file = Path(str(try_to_load_from_cache(path, file.name)))
        config = json.loads(file.read_text())
        return (config.get("text_config") or config).get("vocab_size")
    return None


def require_rows(student: str, teacher: str, sampled: bool = True) -> None:
    """Refuse a model whose embedding has fewer rows than the student has token ids, if both numbers are known.

    Args:
        student: folder (or owner/name) of the policy.
        teacher: folder of a model that reads the policy's token ids.
        sampled: whether the student samples the ids: it may sample any of its rows. Otherwise only the tokenizer's ids
            count, which may be fewer, because rows are often padded.

    Raises:
        ValueError: the model would fail at a token id, with an IndexError on a CPU.
    """
    ours, theirs = embedding_rows(student), embedding_rows(teacher)
    if ours is None or theirs is None or theirs >= ours:
        return
    needed = ours if sampled else min(ours, _tokenizer_ids(student))
    if theirs < needed:
        raise ValueError(
            f"the model at '{teacher}' has {theirs} embedding rows, but the policy at '{student}' has token ids up to "
            f"{needed - 1}; take a model with at least {needed} rows, or enlarge its embeddings "
            f"(resize_token_embeddings({needed}))"
        )


def _tokenizer_ids(path: str) -> int:
    from transformers import AutoTokenizer

    return max(AutoTokenizer.from_pretrained(path).get_vocab().values()) + 1


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout to 0: a ratio of probabilities is meaningless if each has other units dropped."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        attention: Any = module
        if isinstance(getattr(attention, "attention_dropout", None), float):
            attention.attention_dropout = 0.0


def load_causal_lm(
    path: str,
    dtype: DType = "float32",
    attention: str = "sdpa",
    gradient_checkpointing: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in training mode, with an output layer that works in chunks.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: the model bends its logits after the output matrix, which the chunked log-probs would miss, or
            cannot be packed.
    """
    from transformers import AutoModelForCausalLM

    _check_folder(path)
    require_plain_logits(path)
    packing.register(attention)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention)
    keep_rotary_exact(model)
    if is_packed(model):
        packing.check_body(model, path)
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(f"the output layer of '{path}' is {type(head).__name__}; expected torch.nn.Linear")
    head.__class__ = LMHead
    disable_dropout(model)
    model.train()  # from_pretrained leaves evaluation mode, and gradient checkpointing then does nothing
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def load_frozen_lm(path: str, dtype: DType = "float32", attention: str = "sdpa") -> PreTrainedModel:
    """Load a frozen language model (teacher or reference): evaluation mode, no gradient."""
    return load_causal_lm(path, dtype, attention).eval().requires_grad_(False)


class ValueModel(nn.Module):
    """The critic: a transformer body with a linear head. The value V_t is read at the token before t.

    The body starts from the policy's folder (DGPO: from the cold-started student). The head starts at 0 rather than
    random, so that the first advantages are plain returns.
    """

    def __init__(
        self,
        path: str,
        dtype: DType = "float32",
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
    ) -> None:
        from transformers import AutoModel

        super().__init__()
        _check_folder(path)
        packing.register(attention)
        self.body = AutoModel.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention)
        keep_rotary_exact(self.body)
        if is_packed(self.body):
            packing.check_body(self.body, path)
        disable_dropout(self.body)
        self.body.train()
        if gradient_checkpointing:
            self.body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.head = nn.Linear(self.body.config.get_text_config().hidden_size, 1, dtype=getattr(torch, dtype))
        with gathered(self.head.parameters(), modifier_rank=0):
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return the critic's values [B, T] float32. Entry t is read before token t is known; entry 0 is 0. Entries
        after the end of a row are meaningless (packed: 0)."""
        if is_packed(self.body):
            hidden, rows, columns = packing.packed_states(self.body, batch)
            values = self._read(hidden)[:, 0]
            read = columns + 1 < batch.lengths[rows]  # nothing is predicted from a row's last token
            tied = scatter(values[read], (rows[read], columns[read] + 1), batch.mask)
            return tied + 0.0 * values[-1]  # ties 1-token rows to the graph
        hidden = self.body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        values = self._read(hidden)[..., 0]
        return torch.nn.functional.pad(values[:, :-1], (1, 0)) + 0.0 * values[:, -1:]  # ties a 1-token row to the graph

    def _read(self, hidden: Tensor) -> Tensor:
        return self.head(hidden.to(self.head.weight.dtype)).float()  # with LoRA the body may be in half precision


def is_packed(body: Any) -> bool:
    """Return whether a transformers model was loaded for packing (rows without padding)."""
    return body.config._attn_implementation in packing.NAMES.values()


def hidden_before(model: PreTrainedModel, batch: TokenBatch, at: tuple[Tensor, Tensor]) -> Tensor:
    """Return the hidden states [N, H] that predict the tokens at positions ``at`` (rows [N], columns [N])."""
    if is_packed(model):
        hidden, _, _ = packing.packed_states(model.base_model, batch)
        starts = batch.lengths.cumsum(0) - batch.lengths
        return hidden[starts[at[0]] + at[1] - 1]
    hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return hidden[at[0], at[1] - 1]


def output_head(model: PreTrainedModel) -> LMHead:
    """Return the model's output layer, which ``load_causal_lm`` has replaced by an ``LMHead``."""
    return cast("LMHead", model.get_output_embeddings())


def positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions (rows [N], columns [N]) where the mask is not 0. Raises ValueError if column 0 is among
    them."""
    rows, columns = mask.nonzero(as_tuple=True)
    if columns.numel() and int(columns.min()) == 0:
        raise ValueError("the mask counts the first token of a row, which nothing predicts; put a prompt before it")
    return rows, columns


def scatter(values: Tensor, at: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    """Put values [N] at positions ``at`` of a tensor [B, T] float32 shaped as ``like``, 0 elsewhere; differentiable."""
    return torch.zeros(like.shape, device=values.device, dtype=torch.float32).index_put(at, values.float())


def token_columns(
    model: PreTrainedModel,
    batch: TokenBatch,
    statistics: TokenStatistics,
    chunk: int = LOGITS_CHUNK,
    mask: Tensor | None = None,
) -> list[Tensor]:
    """Compute statistics (log-prob, ...) of the tokens where the mask is 1, each [B, T] float32, 0 elsewhere. The
    default mask is that of the policy's own tokens.

    One pass through the body; the vocabulary is only touched at those positions, ``chunk`` tokens at a time, forward
    and backward.  Prompts and observations cost no logits.

    Args:
        model: from ``load_causal_lm`` or ``load_frozen_lm``.
        batch: the tokens.
        statistics: log-prob, and what else is wanted.
        chunk: tokens whose logits exist at once: chunk * V * 4 bytes, or 2 where products are in half precision.
        mask: [B, T], which tokens are wanted.
    """
    mask = batch.mask if mask is None else mask
    at = positions(mask)
    hidden = hidden_before(model, batch, at)
    columns = output_head(model)(hidden, function=statistics, rows=(batch.input_ids[at],), chunk=chunk)
    return [scatter(column, at, mask) for column in columns.unbind(1)]


def token_logprobs(
    model: PreTrainedModel,
    batch: TokenBatch,
    chunk: int = LOGITS_CHUNK,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    readings: Sequence[Reading | None] = (),
) -> TokenStats:
    """Return log-probs and entropies of the policy's own tokens (or of ``mask``), see ``token_columns``.
    ``temperature`` divides the logits, as in the sampler. Log-probs of further tokens come from the same logits."""
    mask = batch.mask if mask is None else mask
    at = positions(mask)
    hidden, head = hidden_before(model, batch, at), output_head(model)
    ids = [reading.ids for reading in readings if reading is not None and reading.ids is not None]
    targets = batch.input_ids[at] if not ids else torch.cat([batch.input_ids[at][:, None], *ids], dim=1)
    found = head(hidden, function=TokenStatistics(temperature, entropy=True), rows=(targets,), chunk=chunk)
    sizes = [1, *(one.shape[1] for one in ids), 1]
    logprobs, *others, entropy = found.split(sizes, dim=1)
    read: list[Tensor | None] = []
    for reading in readings:
        if reading is None or reading.function is None:
            read.append(None if reading is None else others.pop(0))
        else:
            read.append(head(hidden, reading.function, reading.rows, chunk, reading.context))
    return TokenStats(scatter(logprobs[:, 0], at, mask), scatter(entropy[:, 0], at, mask), tuple(read))


def partitioned(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether ZeRO-3 has partitioned any of these parameters."""
    return any(hasattr(p, "ds_id") for p in parameters)


def gathered(
    parameters: Iterable[nn.Parameter],
    modifier_rank: int | None = None,
) -> AbstractContextManager[Any]:
    """Make parameters whole inside the block if ZeRO-3 has partitioned them (a collective: all ranks must enter). Does
    nothing outside ZeRO-3."""
    parameters = list(parameters)
    if not partitioned(parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank)


def named_weights(model: nn.Module, bucket_elements: int = 50_000_000) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) for every parameter of a model. A tied output matrix comes once.

    Under ZeRO-3 parameters are gathered bucket by bucket, so all ranks must iterate to the end; the tensors are then
    copies. Otherwise they are the parameters themselves: copy what must survive the next step.
    """
    return in_buckets(((name, [parameter], None) for name, parameter in model.named_parameters()), bucket_elements)


def in_buckets(
    weights: Iterable[tuple[str, list[nn.Parameter], Combine | None]], bucket_elements: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) for each weight, gathering ``bucket_elements`` elements at a time. Each weight is one
    parameter, or a combination of several."""
    bucket: list[tuple[str, list[nn.Parameter], Combine | None]] = []
    size = 0
    for entry in weights:
        bucket.append(entry)
        size += sum(getattr(p, "ds_numel", p.numel()) for p in entry[1])
        if size >= bucket_elements:
            yield from _gather_bucket(bucket)
            bucket, size = [], 0
    if bucket:
        yield from _gather_bucket(bucket)


@torch.no_grad()
def _gather_bucket(bucket: list[tuple[str, list[nn.Parameter], Combine | None]]) -> list[tuple[str, Tensor]]:
    parameters = [p for _, parts, _ in bucket for p in parts]
    copy = partitioned(parameters)  # the gathered storage is freed on leaving the block
    found = []
    with gathered(parameters):
        for name, parts, combine in bucket:
            first, *others = (_unsharded(p).detach() for p in parts)
            if combine is not None:
                found.append((name, combine(first, *others)))
            else:
                found.append((name, first.clone() if copy else first))
    return found


def _unsharded(parameter: Any) -> Tensor:
    """Return the whole tensor of a parameter that FSDP shards (DTensor), and any other parameter unchanged."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
