"""Training step of supervised algorithms (SFT, distillation): one batch of given trajectories, one optimiser step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common import ranks
from common.ranges import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveInt, UnitInterval
from lightning_modules.batch import TokenBatch, collate, plan
from lightning_modules.maths.schedules import ScheduleName, make_schedule
from lightning_modules.metrics import StepMetrics
from lightning_modules.models.policy import require_loadable, require_rows
from lightning_modules.models.projection import LOGITS_CHUNK
from lightning_modules.training import optimisation
from lightning_modules.training.policy_module import PolicyModule

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory


class SupervisedModule(PolicyModule):
    """Base of supervised algorithms: one Lightning step is one batch of trajectories and one optimiser step.

    The loss is a token mean over the *whole* batch: micro-batches and ranks each add their sum, divided by the global
    count of loss tokens, so that neither the split nor the number of ranks changes the gradient.

    Args:
        policy: Hugging Face folder (or owner/name) to start from.
        lr: peak learning rate of AdamW.
        schedule: learning-rate schedule after the warmup.
        warmup_steps: steps of linear warmup.
        weight_decay: AdamW's decoupled weight decay, of matrices only: biases and norms have none.
        betas: AdamW's betas.
        max_grad_norm: gradient norm above which gradients are scaled down; 0 for never.
        max_tokens_per_micro_batch: tokens (without packing: padding included) that go through the model at once.
        logits_chunk: tokens whose logits exist at once.
    """

    def __init__(
        self,
        policy: str,
        lr: UnitInterval = 1e-4,
        schedule: ScheduleName = "cosine",
        warmup_steps: NonNegativeInt = 0,
        weight_decay: NonNegativeFloat = 0.01,
        betas: tuple[BelowOne, BelowOne] = (0.9, 0.999),
        max_grad_norm: NonNegativeFloat = 1.0,
        max_tokens_per_micro_batch: PositiveInt = 16384,
        logits_chunk: PositiveInt = LOGITS_CHUNK,
        **kwargs,
    ) -> None:
        super().__init__(policy=policy, **kwargs)
        self.lr = lr
        self.schedule: ScheduleName = schedule
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.betas = betas
        self.max_grad_norm = max_grad_norm
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.logits_chunk = logits_chunk

    @abstractmethod
    def token_losses(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        """Return losses and metrics by name, with one value [N] for each position where ``batch.mask`` is 1. ``loss``
        carries the gradient; all values are logged as token means under train/."""

    def build_models(self) -> None:
        super().build_models()
        optimisation.set_clipping(self, self.max_grad_norm)

    def configure_optimizers(self) -> Any:
        total = self.trainer.estimated_stepping_batches if self.schedule == "cosine" else 0
        factor = make_schedule(self.schedule, self.warmup_steps, int(total) if total != float("inf") else 0)
        groups = [group | {"lr": self.lr} for group in optimisation.decay_groups(self.policy, self.weight_decay)]
        return optimisation.adamw(groups, [factor] * len(groups), betas=self.betas, weight_decay=self.weight_decay)

    def accept_data(self, data: Any) -> None:
        """Raise ValueError for data that this algorithm cannot learn from: the student's own trajectories to imitate,
        or token ids that a model lacks. Data modules call this before an engine starts."""
        samples = getattr(data, "samples_student", False)
        if samples and self.imitates_tokens:
            raise ValueError(
                f"{type(data).__name__} yields the student's own trajectories, and cross-entropy on these would only "
                "repeat them; distil from a teacher with ce_coef: 0, or take SupervisedDataModule"
            )
        require_loadable(self.policy_path, [folder for folder, _ in self.frozen_models().values()])
        for folder in self.models_reading_ids().values():
            require_rows(self.policy_path, folder, sampled=samples)
        self.check_ids(getattr(data, "training_rows", ()))

    @property
    def imitates_tokens(self) -> bool:
        """Whether the loss raises the likelihood of the trajectories' tokens, regardless of their author."""
        return True

    def on_train_start(self) -> None:
        if not self.trainer.global_step:  # a resumed run knows what the loss was
            self._validate_held_out(log=False)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self._validate_held_out(log=True)

    @torch.no_grad()
    def _validate_held_out(self, log: bool) -> None:
        """Compute the mean losses on held-out trajectories, over tokens, for the log and for data modules that adapt to
        them."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if not getattr(data, "held_out", 0):
            return
        batch = collate(data.held_out_rows, self.device)
        metrics = StepMetrics()
        was_training = self.policy.training  # it is before the first step, and no longer within a validation
        self.policy.eval()
        with self.trainer.precision_plugin.val_step_context():  # Lightning enters it for steps alone
            for group, length in plan(batch, range(len(batch.lengths)), self.max_tokens_per_micro_batch, self.packing):
                for name, values in self.token_losses(batch.rows(group, length)).items():
                    metrics.mean(name, values.sum(), values.numel())
        self.policy.train(was_training)
        losses = metrics.reduce()
        if log:
            self.log_dict({f"val/{name}": value for name, value in losses.items()}, batch_size=1)
        if callable(validated := getattr(data, "validated", None)):
            validated(losses)

    def training_step(self, trajectories: list[Trajectory], batch_idx: int) -> None:
        usable = [t for t in trajectories if t.trainable]
        self.check_ids(usable)
        batch = collate(usable, self.device)
        tokens = ranks.sum_over_ranks(batch.mask.sum())
        metrics = StepMetrics()
        losses: list[optimisation.MicroLosses] = []
        groups = plan(batch, range(len(usable)), self.max_tokens_per_micro_batch, self.packing)
        for group, length in groups or [([], 1)]:  # DeepSpeed and loss scalers fail without a gradient
            columns = self.token_losses(batch.rows(group, length))
            loss = columns["loss"].sum() / tokens.clamp(min=1)
            optimisation.backward(self, loss)
            losses.append(([usable[i] for i in group], {"train/loss": loss.detach()}))
            for name, values in columns.items():
                metrics.mean(f"train/{name}", values.sum(), values.numel())
        optimizer, scheduler = optimisation.only(self)
        metrics.maximum("train/lr", optimizer.param_groups[0]["lr"])
        idle = not bool(tokens > 0)
        optimisation.step(self, {"policy": self.policy}, self.max_grad_norm, losses, metrics, idle)
        scheduler.step()
        metrics.mean("train/tokens", batch.mask.sum(), 1.0 / ranks.world_size())
        reduced = metrics.reduce() | getattr(getattr(self.trainer, "datamodule", None), "batch_metrics", {})
        self.after_step(reduced)
        self.log_dict(reduced, batch_size=1)

    def after_step(self, metrics: dict[str, float]) -> None:
        """Hook that runs after every optimiser step. ``metrics`` are equal on all ranks, and entries added to them are
        logged. For schedules that depend on the loss."""
