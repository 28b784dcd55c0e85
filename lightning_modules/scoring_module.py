"""The models of an on-policy algorithm, and what they say of a rollout batch without gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_modules import scoring
from lightning_modules.batch import TokenBatch, aligned, with_prompts
from lightning_modules.lora import InitialPolicy, LoRA
from lightning_modules.policy import (
    DType,
    TokenStats,
    ValueModel,
    load_frozen_lm,
    partitioned,
    require_same_tokenizer,
    token_logprobs,
)
from lightning_modules.policy_module import PolicyModule
from lightning_modules.scoring import Scores

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory


class ScoringModule(PolicyModule):
    """A policy, and where they are named a frozen teacher and a critic.

    Args:
        policy: Hugging Face folder (or owner/name) to start from.
        teacher: folder of a frozen teacher or reference model; null for none.
        critic: folder a critic is started from; null for none.
        temperature: that log-probs are computed at.
        micro_batch_tokens: tokens (without packing: padding included) that go through the models at once.
        logits_chunk: tokens whose logits exist at once.
        dtype: type the policy's and the critic's parameters are kept in.
        teacher_dtype: type the teacher's parameters are kept in.
        attention: attention implementation of transformers.
        gradient_checkpointing: recompute activations in the backward pass.
        packing: rows go through the models without padding, one after the other in one row (packing.py).
        liger: Liger's kernels for RMSNorm, rotary embeddings and SwiGLU; needs CUDA and the extra ``liger``.
        lora: train low-rank adapters instead of the whole, of the critic's body too; null for the whole.
    """

    def __init__(
        self,
        policy: str,
        teacher: str | None = None,
        critic: str | None = None,
        temperature: float = 1.0,
        micro_batch_tokens: int = 16384,
        logits_chunk: int = 1024,
        dtype: DType = "float32",
        teacher_dtype: DType = "float32",
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        packing: bool = False,
        liger: bool = False,
        lora: LoRA | None = None,
    ) -> None:
        super().__init__(policy, dtype, attention, gradient_checkpointing, packing, liger, lora)
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; expected a positive number (training needs sampling)")
        self.teacher_path, self.critic_path = teacher, critic
        self.temperature = temperature
        self.micro_batch_tokens, self.logits_chunk = micro_batch_tokens, logits_chunk
        self.teacher_dtype: DType = teacher_dtype
        self.teacher: nn.Module | None = None  # built in build_models
        self.critic: ValueModel | None = None

    # ------------------------------------------------------------------ what an algorithm may say of its teacher
    def teacher_prompts(self, trajectories: Sequence[Trajectory]) -> Sequence[Sequence[int]] | None:
        """Ids of the prompt that the teacher reads before each response; None: what the policy has read. All ranks must
        answer alike, with prompts or without."""
        return None

    def teacher_logprobs(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor | None:
        """The teacher's log-probs [B, T] of the sampled tokens; None without one. Override for a teacher that is not
        a frozen folder (``score_logprobs(self.policy, ...)``: the policy itself). Every rank must call."""
        return None if self.teacher is None else self.score_logprobs(self.teacher, trajectories, batch)

    # ------------------------------------------------------------------ the models
    def build_models(self) -> None:
        super().build_models()
        if self.teacher_path is not None:
            require_same_tokenizer(self.policy_path, self.teacher_path)
            self.teacher = self.load_teacher(self.teacher_path)
        if self.critic_path is not None:
            self.critic = ValueModel(self.critic_path, self.dtype_name, self.attention, self.gradient_checkpointing)
            if self.lora is not None:
                self.lora.attach(self.critic.body)
                if not partitioned(self.critic.head.parameters()):
                    self.critic.head.float()  # trained, and so float32 beside a base in half precision

    def load_teacher(self, folder: str) -> nn.Module:
        """The frozen model of a folder; the adapted policy's own base where it is that one."""
        if self.lora is not None and folder == self.policy_path:
            return InitialPolicy(self.policy)
        return load_frozen_lm(folder, self.teacher_dtype, self.attention)

    def trained_parts(self) -> dict[str, nn.Module]:
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic is not None else {})

    # ------------------------------------------------------------------ what they say
    def score(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> Scores:
        """Run the declared models over the batch without gradient, micro-batch by micro-batch."""

        def policy_stats(micro: TokenBatch) -> Tensor:
            stats = self._token_stats(self.policy, micro)
            return torch.stack([stats.logprobs, stats.entropy])

        old, entropy = self._scored(batch, policy_stats, leading=(2,))
        teacher = self.teacher_logprobs(trajectories, batch)
        values = self._scored(batch, self.critic) if self.critic is not None else None
        return Scores(old, teacher, values, entropy)

    def score_logprobs(self, model: nn.Module, trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor:
        """Log-probs [B, T] of the sampled tokens under any model, after ``teacher_prompts`` where there are any."""
        return self.read_by_teacher(trajectories, batch, lambda read: self.logprobs_of(model, read))

    def logprobs_of(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """Log-probs [B, T] of the sampled tokens under any model, without gradient. Every rank must call."""
        return self._scored(batch, lambda micro: self._token_stats(model, micro).logprobs)

    def _scored(
        self, batch: TokenBatch, function: Callable[[TokenBatch], Tensor], leading: tuple[int, ...] = ()
    ) -> Tensor:
        return scoring.score(batch, function, self.micro_batch_tokens, leading, self.packing)

    def read_by_teacher(
        self, trajectories: Sequence[Trajectory], batch: TokenBatch, score: Callable[[TokenBatch], Tensor]
    ) -> Tensor:
        """``score`` of the responses after ``teacher_prompts``, moved back to the places of ``batch``: [B, T]."""
        prompts = self.teacher_prompts(trajectories)
        return score(batch) if prompts is None else self.read_after(prompts, trajectories, batch, score)

    def read_after(
        self,
        prompts: Sequence[Sequence[int]],
        trajectories: Sequence[Trajectory],
        batch: TokenBatch,
        score: Callable[[TokenBatch], Tensor],
    ) -> Tensor:
        """``score`` of the responses after other prompts, moved back to the places of ``batch``: [B, T]."""
        read = with_prompts(trajectories, prompts, batch)
        return aligned(score(read), read, batch)

    def _token_stats(self, model: nn.Module, micro: TokenBatch) -> TokenStats:
        return token_logprobs(model, micro, self.logits_chunk, self.temperature)
