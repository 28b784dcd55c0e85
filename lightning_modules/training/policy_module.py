"""LightningModule around a causal language model: loading, weights for the sampler, evaluation, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from common import ranks
from common.schedules import Schedule
from lightning_modules.batch import TokenBatch, collate, score
from lightning_modules.models import lora as adapters
from lightning_modules.models.liger import use_liger
from lightning_modules.models.lora import LoRA
from lightning_modules.models.packing import check_available, check_unpacked, packed_name
from lightning_modules.models.policy import (
    DType,
    embedding_rows,
    load_causal_lm,
    load_frozen_lm,
    named_weights,
    require_rows,
    require_same_tokenizer,
    token_logprobs,
    zero3_notice,
)
from lightning_modules.models.precision import check_master_weights
from lightning_modules.models.projection import LOGITS_CHUNK
from lightning_modules.sharding.resharding import accept_shards
from lightning_modules.training.token_values import TurnValues, regrouped, values_by_turn
from rollout.trajectory import split_turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollout.trajectory import Trajectory

log = logging.getLogger(__name__)

# Submodules that never change: in no checkpoint, loaded from their folder again.
FROZEN = ("teacher.", "teacher_", "self_teacher.", "reference.")


class PolicyModule(L.LightningModule):
    """LightningModule that loads a language model (the policy) and evaluates it. Subclasses add the learning.

    Validation and test batches are trajectories that were rolled out with the current weights; the steps hand them
    on unchanged, and callbacks compute metrics of them.

    Args:
        policy: Hugging Face folder (or owner/name) to start from.
        dtype: type the policy's parameters are loaded in; float32 to train it, bfloat16 products are
            ``trainer.precision: bf16-mixed`` (precision.py).
        attention: attention implementation of transformers (sdpa, eager, flash_attention_2).
        gradient_checkpointing: recompute activations in the backward pass: less memory, a third more time.
        packing: rows go through the models without padding, one after the other in one row (packing.py).
        liger: Liger's kernels for RMSNorm, rotary embeddings and SwiGLU; needs CUDA and the extra ``liger``.
        lora: train low-rank adapters instead of the whole; null for the whole.
    """

    def __init__(
        self,
        policy: str,
        dtype: DType = "float32",
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        packing: bool = False,
        liger: bool = False,
        lora: LoRA | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        schedules = {name: asdict(value) for name, value in self.hparams.items() if isinstance(value, Schedule)}
        self.save_hyperparameters(schedules)  # checkpoints hold plain types only
        if lora is not None:
            self.save_hyperparameters({"lora": asdict(lora)})  # checkpoints hold plain types only
            if (Path(policy) / "config.json").is_file():  # else it is made or fetched later: ``setup`` looks again
                lora.check(policy)
        self.automatic_optimization = False
        self.strict_loading = False  # frozen submodules are not in checkpoints; on_load_checkpoint does the checking
        self.policy_path = policy
        self.dtype_name: DType = dtype
        check_unpacked(attention)
        check_available(attention)
        self.attention = packed_name(attention) if packing else attention  # packs whatever is loaded with it
        self.packing, self.liger = packing, liger
        self.gradient_checkpointing = gradient_checkpointing
        self.lora = lora
        self.policy: PreTrainedModel = cast("Any", None)  # built in configure_model
        self._judges: dict[
            str, PreTrainedModel
        ] = {}  # a dict, so that it is no submodule: in no checkpoint, in no engine

    # ------------------------------------------------------------------ building
    def frozen_models(self) -> dict[str, tuple[str, DType]]:
        """Return the folder and dtype of each frozen model, by the module's attribute. They are known before
        ``build_models`` loads the models."""
        return {}

    def models_reading_ids(self) -> dict[str, str]:
        """Return the folder of the policy and of every other model that reads the trajectories' token ids, by the
        module's attribute."""
        frozen = {name: folder for name, (folder, _) in self.frozen_models().items()}
        return {"policy": self.policy_path} | frozen

    def check_ids(self, trajectories: Iterable[Trajectory]) -> None:
        """Raise ValueError if a model has no embedding for a token id of the trajectories. The model itself would raise
        an IndexError."""
        known = {name: (folder, self._rows_of(name, folder)) for name, folder in self.models_reading_ids().items()}
        for t in trajectories:
            token = max((*t.prompt_ids, *t.response_ids))
            for name, (folder, rows) in known.items():
                if rows is not None and token >= rows:
                    raise ValueError(
                        f"trajectory {t.name} has token {token}, but the {name} at '{folder}' has {rows} embedding "
                        "rows; expected trajectories of this model's tokenizer, or a model with more rows "
                        f"(resize_token_embeddings({token + 1}))"
                    )

    def _rows_of(self, name: str, folder: str) -> int | None:
        """Return the number of embedding rows of a model: of the loaded model, else by the configuration in its
        folder."""
        embeddings = getattr(getattr(self, name, None), "get_input_embeddings", None)
        return getattr(embeddings(), "num_embeddings", None) if callable(embeddings) else embedding_rows(folder)

    def configure_model(self) -> None:
        """Load the module's models once. Lightning calls this before each of fit, validate and test."""
        strategy: Any = self.trainer.strategy
        if self.trainer.state.fn == TrainerFn.FITTING:
            check_master_weights(self.trainer, self.dtype_name, self.lora is not None)
        if self.policy is not None:
            return
        if self.liger:
            use_liger(set(self.models_reading_ids().values()), strategy.root_device)
        if getattr(strategy, "zero_stage_3", False):
            with zero3_notice(strategy.config):
                self.build_models()
            return
        # Lightning makes the accelerator torch's default device here, which transformers takes as a device_map;
        # load in host memory and let the strategy move the whole.
        with torch.device("cpu"):
            self.build_models()

    def build_models(self) -> None:
        """Load the module's models, here the policy. Override to add more, calling this first."""
        self.policy = load_causal_lm(self.policy_path, self.dtype_name, self.attention, self.gradient_checkpointing)
        if self.lora is not None:
            self.lora.attach(self.policy)

    def setup(self, stage: str) -> None:
        if self.lora is not None and self.policy is None:
            self.lora.check(self.policy_path)
        # Half-precision plugins would walk through the (frozen) trajectories in search of floats to cast.
        plugin: Any = self.trainer.precision_plugin
        plugin.convert_input = _unchanged
        ranks.wait_for(getattr(self.trainer.strategy, "_timeout", None))
        accept_shards(self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Forget the training metrics of the last step. Lightning would log those again that this step lacks, such as a
        mean over no tokens, and callbacks would read them."""
        results: Any = self.trainer._results
        results.reset()
        read = self.trainer.callback_metrics
        for name in [name for name in read if name.startswith("train/")]:
            del read[name]

    def on_fit_start(self) -> None:
        if self.lora is None or not self.trainer.is_global_zero:
            return
        parts = {name: part for name, part in self.named_children() if name in ("policy", "critic")}
        log.info(adapters.summary(self.lora, parts, getattr(self, "lr", None)))
        trained = sum(adapters.counts(part)[0] for part in parts.values())
        for logger in self.loggers:
            logger.log_metrics({"lora/trained_parameters": trained}, step=0)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # trajectories are plain Python; collate makes the tensors where they are needed

    # ------------------------------------------------------------------ for the sampler and for export
    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) for all weights of the policy, LoRA adapters merged. All ranks must iterate
        to the end (see ``named_weights``)."""
        return named_weights(self.policy) if self.lora is None else adapters.merged_weights(self.policy)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the policy, tensor) for all LoRA adapters; empty without LoRA. All ranks must iterate to the
        end."""
        return iter(()) if self.lora is None else adapters.adapter_weights(self.policy)

    def scaled_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the LoRA adapters for an engine that adds them to the policy's base (``lora.scaled_adapter_weights``).
        All ranks must iterate to the end."""
        return adapters.scaled_adapter_weights(self.policy)

    # ------------------------------------------------------------------ evaluation
    def validation_step(self, batch: list[Trajectory], batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch

    def test_step(self, batch: list[Trajectory], batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch

    def turn_divergences(
        self,
        trajectories: Sequence[Trajectory],
        teacher: str,
        max_tokens_per_micro_batch: int = 16384,
        temperature: float = 1.0,
        logits_chunk: int = LOGITS_CHUNK,
    ) -> list[TurnValues]:
        """Measure how far the policy's log-probs differ from a teacher's on every turn. Returns the metrics of
        ``values_by_turn`` for each trajectory.

        No gradient. Every rank must call, with any number of trajectories (also 0).

        Args:
            trajectories: whose sampled tokens are judged; tool results are read and not counted.
            teacher: folder of the teacher, which must share the policy's tokenizer. It is loaded once, kept for the
                next call, whole on every rank, in the module's ``teacher_dtype`` or ``reference_dtype``, and is in no
                checkpoint.
            max_tokens_per_micro_batch: tokens (without packing: padding included) that go through a model at once.
            temperature: divides the logits of both.
            logits_chunk: tokens whose logits exist at once.
        """
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; expected a positive number")
        rows = [row for t in trajectories for row in split_turns(t)]
        batch, whole = collate(rows, self.device), collate(trajectories, self.device)
        judge = self._judge_from(teacher)
        (student, _), (judged, entropy) = (
            score(
                batch, partial(_both, model, logits_chunk, temperature), max_tokens_per_micro_batch, (2,), self.packing
            )
            for model in (self.policy, judge)
        )
        found = (regrouped(values, rows, trajectories, whole) for values in (student, judged, entropy))
        return values_by_turn(trajectories, whole, *found)

    def check_judge(self, folder: str) -> None:
        """Raise ValueError if the teacher of ``turn_divergences`` is known to lack a token id of the policy."""
        require_rows(self.policy_path, folder)

    def _judge_from(self, folder: str) -> PreTrainedModel:
        """Return the frozen teacher of a folder, loaded on the first call. The module's own teacher or reference of
        that folder is reused."""
        for name in ("teacher", "reference"):
            own = getattr(self, name, None)
            if own is not None and getattr(self, f"{name}_path", None) == folder:
                return own
        if folder not in self._judges:
            require_same_tokenizer(self.policy_path, folder)
            self.check_judge(folder)
            self._judges.clear()
            with torch.inference_mode(False), torch.device("cpu"):
                # A frozen model's type where there is one: 4B parameters in float32 would be 16 GB beside the sampler.
                dtype: Any = getattr(self, "teacher_dtype", getattr(self, "reference_dtype", self.dtype_name))
                self._judges[folder] = load_frozen_lm(folder, dtype, self.attention)
        return cast("Any", self._judges[folder]).to(self.device)

    # ------------------------------------------------------------------ checkpoints
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "state_dict" in checkpoint:
            checkpoint["state_dict"] = self._trained(checkpoint["state_dict"])
        if self.lora is not None:
            checkpoint["lora"] = self.lora_settings  # what merging takes besides the adapters

    @property
    def lora_settings(self) -> dict[str, Any] | None:
        """Settings of LoRA and the type of merged weights, or None without LoRA."""
        return None if self.lora is None else asdict(self.lora) | {"dtype": self.dtype_name}

    def _trained(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict without the weights that are loaded from their folder again: frozen models, and the bases
        of LoRA adapters."""
        parts = [] if self.lora is None else list(self.named_children())
        bases = {n for name, part in parts if adapters.layers(part) for n in adapters.frozen_names(part, name)}
        return {k: v for k, v in state.items() if not k.startswith(FROZEN) and k not in bases}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if the checkpoint belongs to another model; strict loading is off for the frozen parts."""
        theirs_lora, mine_lora = checkpoint.get("lora"), self.lora_settings
        if theirs_lora != mine_lora:
            raise ValueError(
                f"the checkpoint was written with lora {theirs_lora}, this module has {mine_lora}; continue with the "
                "same settings, or start from the checkpoint's merged model (make export)"
            )
        if "state_dict" not in checkpoint or self.policy is None:
            return
        mine = {k: v.shape for k, v in self._trained(self.state_dict()).items()}
        theirs = {k: v.shape for k, v in checkpoint["state_dict"].items()}
        wrong = [k for k in mine if k in theirs and mine[k] != theirs[k]]
        missing, extra = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
        if not (wrong or missing or extra):
            return
        details = [f"{len(missing)} missing", f"{len(extra)} unknown", f"{len(wrong)} of another shape"]
        first = (wrong or missing or extra)[0]
        raise ValueError(
            f"the checkpoint is not from this model: {', '.join(details)} parameters, first '{first}' (here "
            f"{tuple(mine.get(first, ()))}, there {tuple(theirs.get(first, ()))}); take one written by the same "
            "experiment, or start without it"
        )


def _both(model: PreTrainedModel, chunk: int, temperature: float, micro: TokenBatch) -> Tensor:
    """Return the log-probs and entropies of a micro-batch, stacked [2, b, t]."""
    stats = token_logprobs(model, micro, chunk, temperature)
    return torch.stack([stats.logprobs, stats.entropy])


def _unchanged(batch: Any) -> Any:
    return batch


class EvaluateOnly(PolicyModule):
    """A policy for testing only, for experiments of ``kind: test``.

    Args:
        policy: Hugging Face folder (or owner/name) of the model to evaluate; null: the engine has its own
            (``ServedModel``).
        dtype: type the parameters are kept in.
        attention: attention implementation of transformers.
    """

    def __init__(self, policy: str | None, dtype: DType = "float32", attention: str = "sdpa") -> None:
        super().__init__(policy=policy or "", dtype=dtype, attention=attention)

    def build_models(self) -> None:
        if self.policy_path:
            super().build_models()

    def configure_optimizers(self) -> None:
        return None
