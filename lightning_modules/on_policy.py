"""The shared module of on-policy algorithms: one Lightning step = one rollout batch = several optimiser steps.

An algorithm says three things and never sees micro-batches, optimisers or ranks:

* which models it needs (``critic``, ``teacher_path`` given to ``__init__``),
* ``annotate``: what each token is worth (advantages, targets, gates; no gradient),
* ``loss``: sums over tokens, one per stream, and ``streams``: what each stream is divided by.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_modules import optimisation, ranks, scoring
from lightning_modules.batch import RowTensors, TokenBatch, collate, tensors_BT
from lightning_modules.lora import LoRA
from lightning_modules.metrics import StepMetrics
from lightning_modules.mismatch import Correction, Level, MaskRatio, log_mismatch, require_weighable
from lightning_modules.policy import DType
from lightning_modules.rollout_figures import log_rollout
from lightning_modules.schedules import warmup_constant
from lightning_modules.scoring import Outputs, Scores, token_figures
from lightning_modules.scoring_module import ScoringModule
from rollout.trajectory import turn_rows

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory


class OnPolicyModule(ScoringModule):
    """Scores, annotates and learns from ``list[Trajectory]``; see the module docstring for what an algorithm adds.

    Trajectories whose turns have prompts of their own are learnt from turn by turn: what an algorithm then sees are the
    rows of ``turn_rows``, each with its trajectory's reward, group and index.

    Every loss stream is divided by its own count over the whole mini-batch, all micro-batches and all ranks, so that
    neither ``micro_batch_tokens`` nor the number of ranks changes the gradient.  Policy and critic are clipped
    separately (DeepSpeed: jointly, inside its engine).

    The correction for what sampled (``importance_cap``, ``mask_ratio``) is weights on the policy's loss of each token,
    in any algorithm: they multiply ``notes.advantages``, in which every such loss is linear for weights of 0 or more,
    unless the notes have a field ``importance`` by which the algorithm weighs itself (GRPO). KL, entropy and value
    losses are not weighted, nor is what an algorithm adds of its own (SDAR, Skill-SD), and what divides counts all
    tokens, those left out too: masking makes a step smaller rather than the other tokens heavier. Whether there is
    anything to weigh is read from the type that ``annotate`` says it returns.

    Args:
        policy: Hugging Face folder (or owner/name) to start from.
        teacher: folder of a frozen teacher or reference model; null for none.
        critic: folder a critic is started from; null for none.
        lr: learning rate of the policy, constant after the warmup.
        warmup_steps: iterations of linear warmup of the policy's learning rate.
        critic_lr: learning rate of the critic.
        critic_warmup_steps: iterations of linear warmup of the critic's learning rate.
        weight_decay: AdamW's decoupled weight decay.
        betas: AdamW's betas.
        max_grad_norm: gradient norm above which gradients are scaled down; 0 for never.
        mini_batches: optimiser steps per pass over the rollout batch (trajectory i goes to step i mod mini_batches).
        epochs: passes over the rollout batch.
        temperature: sampling temperature the log-probs are computed at; must be the sampler's.
        micro_batch_tokens: tokens (without packing: padding included) that go through the models at once.
        logits_chunk: tokens whose logits exist at once.
        dtype: type the policy's and the critic's parameters are kept in.
        teacher_dtype: type the teacher's parameters are kept in.
        attention: attention implementation of transformers.
        gradient_checkpointing: recompute activations in the backward pass.
        packing: rows go through the models without padding, one after the other in one row (packing.py).
        liger: Liger's kernels for RMSNorm, rotary embeddings and SwiGLU; needs CUDA and the extra ``liger``.
        lora: train low-rank adapters instead of the whole, of the critic's body too; null for the whole.
        importance_cap: bound C of the importance weights min(r, C), r = pi_old / pi_sampler, by which the policy's loss
            of a token is multiplied, without gradient: they correct for an engine whose probabilities differ from the
            trainer's, and for weights that were older (``data.staleness``). "TIS", Yao et al. 2025,
            fengyao.notion.site/off-policy-rl; verl's tis_imp_ratio_cap; 2.0 is usual. Null for no correction.
        importance_level: whether r is each token's own, or the geometric mean over the tokens of its sequence (a
            trajectory; a turn, where turns have prompts of their own).
        mask_ratio: bounds (low, high) outside of which r leaves a token out of the policy's loss; null for none.
        mask_level: whether that is each token's r, or the sequence's, which is then left out as a whole.
    """

    PROGRESS: ClassVar[tuple[str, ...]] = ("train/reward", "train/em", "train/response_tokens")

    def __init__(
        self,
        policy: str,
        teacher: str | None = None,
        critic: str | None = None,
        lr: float = 1e-6,
        warmup_steps: int = 0,
        critic_lr: float = 1e-5,
        critic_warmup_steps: int = 0,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        max_grad_norm: float = 1.0,
        mini_batches: int = 2,
        epochs: int = 1,
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
        importance_cap: float | None = None,
        importance_level: Level = "token",
        mask_ratio: MaskRatio | None = None,
        mask_level: Level = "token",
    ) -> None:
        reading = {"temperature": temperature, "micro_batch_tokens": micro_batch_tokens, "logits_chunk": logits_chunk}
        loading: dict[str, Any] = {"dtype": dtype, "teacher_dtype": teacher_dtype, "attention": attention}
        loading |= {"gradient_checkpointing": gradient_checkpointing}
        loading |= {"packing": packing, "liger": liger, "lora": lora}
        super().__init__(policy, teacher, critic, **reading, **loading)
        if mini_batches < 1 or epochs < 1:
            raise ValueError(f"mini_batches is {mini_batches}, epochs is {epochs}; expected both to be at least 1")
        self.lr, self.warmup_steps = lr, warmup_steps
        self.critic_lr, self.critic_warmup_steps = critic_lr, critic_warmup_steps
        self.weight_decay, self.betas, self.max_grad_norm = weight_decay, betas, max_grad_norm
        self.mini_batches, self.epochs = mini_batches, epochs
        self.importance_cap = importance_cap
        self.correction = Correction(importance_cap, importance_level, mask_ratio, mask_level)
        if self.correction.active:
            require_weighable(type(self))
        self.metrics = StepMetrics()  # of the current training step; algorithms add to it
        self._accepted: int | None = None  # id of the data module that ``accept_data`` has seen last
        self._last: tuple[list[Trajectory], TokenBatch, Scores, RowTensors] | None = None

    # ------------------------------------------------------------------ what an algorithm says
    @abstractmethod
    def annotate(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> RowTensors:
        """Advantages and whatever else ``loss`` needs, one row per trajectory. No gradient is recorded. An algorithm
        that can be corrected for what sampled names its own type as what it returns."""

    @abstractmethod
    def loss(self, outputs: Outputs, batch: TokenBatch, notes: Any) -> Mapping[str, Tensor]:
        """Sums over a micro-batch's tokens, by stream; each is divided by the stream's global count."""

    def streams(self, batch: TokenBatch, notes: Any) -> Mapping[str, Tensor]:
        """By stream, the weights [B, T] whose sum over the mini-batch and all ranks divides it."""
        return {"policy": batch.mask}

    # ------------------------------------------------------------------ what it can be trained on
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self.accept_data(getattr(self.trainer, "datamodule", None))

    def accept_data(self, data: Any) -> None:
        """``check_data``, once for a data module: one that rolls out asks before its engine loads a model, ``setup``
        asks for any other."""
        if self._accepted != id(data):
            self.check_data(data)
            self._accepted = id(data)

    def check_data(self, data: Any) -> None:
        """Refuse a data module that cannot be learnt from; no model is loaded yet, and its questions are read. Override
        for what an algorithm needs besides, calling this first. Here: a sampler whose distribution is not the one that
        log-probs are computed for.

        Args:
            data: null where the Trainer was given loaders.
        """
        sampling = getattr(data, "train_sampling", None)
        if sampling is None:
            return
        if sampling.temperature != self.temperature:
            raise ValueError(
                f"trajectories are sampled at temperature {sampling.temperature} (data.train_sampling.temperature), "
                f"but log-probs are computed at {self.temperature} (model.temperature); set both to the same value"
            )
        if sampling.top_p < 1.0 or sampling.top_k > 0:
            raise ValueError(
                f"train_sampling cuts the distribution (top_p {sampling.top_p}, top_k {sampling.top_k}), but log-probs "
                "are those of the whole one; train with top_p 1.0 and top_k -1"
            )

    # ------------------------------------------------------------------ optimiser
    def build_models(self) -> None:
        super().build_models()
        optimisation.set_clipping(self, self.max_grad_norm)

    def configure_optimizers(self) -> Any:
        rates = {"policy": (self.lr, self.warmup_steps), "critic": (self.critic_lr, self.critic_warmup_steps)}
        parts = self.trained_parts()
        trained = {name: [p for p in part.parameters() if p.requires_grad] for name, part in parts.items()}
        groups = [{"params": parameters, "lr": rates[name][0]} for name, parameters in trained.items()]
        factors = [warmup_constant(rates[name][1]) for name in parts]
        return optimisation.adamw(groups, factors, betas=self.betas, weight_decay=self.weight_decay)

    # ------------------------------------------------------------------ one iteration
    def training_step(self, trajectories: list[Trajectory], batch_idx: int) -> None:
        usable, places = [], []
        for i, t in enumerate(trajectories):
            if t.failed_by_infrastructure:
                continue
            if t.reward is None:
                raise ValueError(f"trajectory {t.group}/{t.index} has no reward; score it before training on it")
            rows = turn_rows(t)  # itself, unless every turn has a prompt of its own
            usable += rows
            place = i if t.place is None else t.place  # it may come from another rank
            places += [place + (row.row or 0) for row in rows]
        self.metrics = StepMetrics()
        batch = collate(usable, self.device)
        with torch.no_grad():
            scores = self.score(usable, batch)
            notes = self.annotate(usable, batch, scores)
            learnt_from = self._corrected(notes, batch, scores)
        self._last = (usable, batch, scores, notes)
        log_mismatch(self.metrics, usable, batch, scores.old_logprobs, self.correction, self.trainer.global_step)
        self.update(batch, learnt_from, places)
        log_rollout(self.metrics, trajectories)
        self._describe(usable, batch, scores)
        figures = self.metrics.reduce()
        shown = {k: v for k, v in figures.items() if k in self.PROGRESS}
        self.log_dict(shown, prog_bar=True, batch_size=1)
        self.log_dict({k: v for k, v in figures.items() if k not in shown}, batch_size=1)

    def importance(self, batch: TokenBatch, scores: Scores) -> Tensor | None:
        """By what each token's policy loss is to be multiplied [B, T]; None where nothing is corrected."""
        return self.correction.weights(scores.old_logprobs, batch)

    def _corrected(self, notes: RowTensors, batch: TokenBatch, scores: Scores) -> RowTensors:
        weights = self.importance(batch, scores)
        if weights is None or hasattr(notes, "importance"):
            return notes
        return dataclasses.replace(notes, advantages=notes.advantages * weights)  # type: ignore[type-var]

    @property
    def last_annotated(self) -> list[tuple[Trajectory, dict[str, list[float]]]]:
        """The last batch for people to read: with each trajectory, whole where its turns were learnt from one by one,
        by name, one figure per response token (everything ``score`` and ``annotate`` gave, and the log-ratio of student
        to teacher as ``kl``)."""
        if self._last is None:
            return []
        trajectories, batch, scores, notes = self._last
        figures = tensors_BT(notes) | tensors_BT(scores)  # the page underlines by the first: PPO's advantages
        if scores.teacher_logprobs is not None:
            figures["kl"] = (scores.old_logprobs - scores.teacher_logprobs) * batch.mask
        if (weights := self.importance(batch, scores)) is not None:
            figures["importance"] = weights
        return token_figures(trajectories, batch, figures)

    # ------------------------------------------------------------------ optimiser steps
    def update(self, batch: TokenBatch, notes: RowTensors, places: Sequence[int]) -> None:
        """All optimiser steps of the iteration; only the last one raises ``trainer.global_step``.

        ``places``: where each row stood in the rollout batch before failed trajectories were left out; the trajectory
        at place i belongs to step i mod ``mini_batches``, so that a failure moves no other trajectory to another step.
        Turn k of one that is learnt from turn by turn has place i + k.
        """
        optimizer = self.optimizers()
        steps = [[row for row, i in enumerate(places) if i % self.mini_batches == k] for k in range(self.mini_batches)]
        plan = steps * self.epochs
        learnt = False
        for k, index in enumerate(plan):
            with optimisation.counted(optimizer, k == len(plan) - 1):
                learnt = self._mini_batch(batch, notes, index, optimizer) or learnt
        for group, name in zip(optimizer.param_groups, self.trained_parts(), strict=True):
            self.metrics.maximum("train/lr" if name == "policy" else f"train/lr_{name}", group["lr"])
        if learnt:
            self.lr_schedulers().step()

    def _mini_batch(self, batch: TokenBatch, notes: RowTensors, index: Sequence[int], optimizer: Any) -> bool:
        """One optimiser step. Returns whether there was anything to learn from, on any rank."""
        whole = {name: weights[list(index)].sum() for name, weights in self.streams(batch, notes).items()}
        names = list(whole)
        counts = ranks.sum_over_ranks(torch.stack([whole[n] for n in names]))
        for group, length in scoring.plan(batch, index, self.micro_batch_tokens, self.packing):
            micro, micro_notes = batch.rows(group, length), notes.rows(group, length)
            stats = self._token_stats(self.policy, micro)
            values = self.critic(micro) if self.critic is not None else None
            sums = self.loss(Outputs(stats.logprobs, stats.entropy, values), micro, micro_notes)
            total = sum(sums[n] / counts[i].clamp(min=1e-8) for i, n in enumerate(names))
            optimisation.backward(self, total)
            self.metrics.mean("train/entropy", (stats.entropy * micro.mask).sum(), micro.mask.sum())
            for i, n in enumerate(names):  # the mean over ranks and mini-batches of a sum over micro-batches
                self.metrics.mean(f"train/loss_{n}", sums[n] / counts[i].clamp(min=1e-8), 0.0)
        for n in names:
            self.metrics.mean(f"train/loss_{n}", 0.0, 1.0 / ranks.world_size())
        learnt = bool(counts.sum() > 0)
        self._step(optimizer, idle=not learnt)
        return learnt

    def _step(self, optimizer: Any, idle: bool) -> None:
        norms = optimisation.clip_gradients(self, self.trained_parts(), self.max_grad_norm)
        with optimisation.paused(optimizer, idle):
            optimizer.step()
        optimizer.zero_grad()
        for name, norm in (norms or optimisation.engine_norm(self)).items():
            self.metrics.maximum("train/grad_norm" if name == "policy" else f"train/grad_norm_{name}", norm)

    # ------------------------------------------------------------------ figures
    def _describe(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> None:
        """What every algorithm logs about its batch, infrastructure failures left out; beside ``log_rollout``."""
        self.metrics.mean("train/response_tokens", batch.mask.sum(), len({(t.group, t.index) for t in trajectories}))
