"""Training step of on-policy algorithms: score a rollout batch, compute advantages, take several optimiser steps.

One Lightning step is one rollout batch (an iteration). An algorithm never sees micro-batches, optimisers or ranks. It
defines:

* the models it needs (``critic``, ``reference`` given to ``__init__``),
* ``compute_advantages``: advantages, targets and all other inputs of ``loss``; no gradient,
* ``loss``: sums over tokens, one per stream, and ``streams``: the divisor of each stream.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from common import ranks
from common.ranges import (
    AtLeastOne,
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)
from lightning_modules.advantage_transforms.base import MicroBatch, RolloutBatch, first_teacher
from lightning_modules.advantage_transforms.guided_turns import GuidedTurns, of_policy
from lightning_modules.batch import (
    LogprobBatch,
    PolicyOutputs,
    RowTensors,
    TokenBatch,
    TokenRows,
    collate,
    plan,
    score,
    score_tokens,
    tensors_BT,
    without_token_rows,
)
from lightning_modules.maths.correction import Correction, Level, MaskRatio
from lightning_modules.maths.losses import Aggregation, TokenWeights, aggregation_weights
from lightning_modules.maths.schedules import warmup_constant
from lightning_modules.metrics import StepMetrics
from lightning_modules.models.lora import InitialPolicy
from lightning_modules.models.policy import (
    DType,
    TokenStats,
    ValueModel,
    load_frozen_lm,
    partitioned,
    require_loadable,
    require_rows,
    require_same_tokenizer,
    token_columns,
    token_logprobs,
)
from lightning_modules.models.projection import LOGITS_CHUNK, Reading, TokenStatistics
from lightning_modules.training import optimisation
from lightning_modules.training.policy_module import PolicyModule
from lightning_modules.training.rollout_metrics import log_mismatch, log_rollout
from lightning_modules.training.token_values import values_by_token
from rollout.trajectory import split_turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollout.trajectory import Trajectory

log = logging.getLogger(__name__)
CONSTANT_ITERATIONS = 5  # in a row without differing rewards in any group, before a warning


class OnPolicyModule(PolicyModule):
    """Base of on-policy algorithms: computes log-probs and advantages of a rollout batch (``list[Trajectory]``) and
    learns from it. The module's docstring lists what an algorithm defines.

    Where every turn has its own prompt, an algorithm learns from the rows of ``split_turns``: one per turn, with the
    trajectory's reward, group and index.

    Every loss stream is divided by its count over the whole mini-batch, all micro-batches and all ranks, so neither
    ``max_tokens_per_micro_batch`` nor the number of ranks changes the gradient. Gradients of policy and critic are
    clipped separately (DeepSpeed: jointly, inside its engine).

    The correction for the sampler (``importance_cap``, ``mask_ratio``) reaches ``loss`` in ``TokenWeights``. A loss
    applies it to the policy's term, not to KL, entropy, value or distillation losses, and its class sets
    ``applies_correction``. The divisor counts all tokens.

    Args:
        policy: Hugging Face folder (or owner/name) to start from.
        reference: folder of the frozen model of the KL; null for none.
        critic: folder that a critic starts from; null for none.
        lr: learning rate of the policy, constant after the warmup.
        warmup_steps: iterations of linear warmup of the policy's learning rate.
        critic_lr: learning rate of the critic.
        critic_warmup_steps: iterations of linear warmup of the critic's learning rate.
        weight_decay: AdamW's decoupled weight decay.
        betas: AdamW's betas.
        max_grad_norm: gradient norm above which gradients are scaled down; 0 for never.
        num_mini_batches: optimiser steps per pass over the rollout batch. Trajectory i goes to step
            i mod num_mini_batches.
        epochs: passes over the rollout batch.
        temperature: sampling temperature of the log-probs; must be the sampler's.
        max_tokens_per_micro_batch: tokens (without packing: padding included) that go through the models at once.
        logits_chunk: tokens whose logits exist at once.
        reference_dtype: type of the reference's parameters.
        importance_cap: bound C of the importance weights min(r, C), r = pi_old / pi_sampler. They multiply a token's
            policy loss, without gradient, and correct for an engine whose probabilities differ from the trainer's and
            for older weights (``data.max_off_policy_iterations``). "TIS", Yao et al. 2025,
            fengyao.notion.site/off-policy-rl; verl's tis_imp_ratio_cap; 2.0 is usual. Null for no correction.
        importance_level: token (r of each token) or sequence (geometric mean over the tokens of a trajectory; with
            per-turn prompts, of a turn).
        mask_ratio: bounds (low, high) on r; tokens outside are masked in the policy's loss. Null for no bounds.
        mask_level: token, or sequence: r of the whole sequence masks all of its tokens.
    """

    PROGRESS: ClassVar[tuple[str, ...]] = ("train/reward", "train/em", "train/response_tokens")
    applies_correction: ClassVar[bool] = False  # whether ``loss`` multiplies the policy's term by weights.correction
    aggregation: Aggregation = "token_mean"  # mean of the policy's loss, see ``aggregation_weights``

    def __init__(
        self,
        policy: str,
        reference: str | None = None,
        critic: str | None = None,
        lr: UnitInterval = 1e-6,
        warmup_steps: NonNegativeInt = 0,
        critic_lr: UnitInterval = 1e-5,
        critic_warmup_steps: NonNegativeInt = 0,
        weight_decay: NonNegativeFloat = 0.01,
        betas: tuple[BelowOne, BelowOne] = (0.9, 0.999),
        max_grad_norm: NonNegativeFloat = 1.0,
        num_mini_batches: PositiveInt = 2,
        epochs: PositiveInt = 1,
        temperature: PositiveFloat = 1.0,
        max_tokens_per_micro_batch: PositiveInt = 16384,
        logits_chunk: PositiveInt = LOGITS_CHUNK,
        reference_dtype: DType = "float32",
        importance_cap: AtLeastOne | None = None,
        importance_level: Level = "token",
        mask_ratio: MaskRatio | None = None,
        mask_level: Level = "token",
        **kwargs,
    ) -> None:
        super().__init__(policy=policy, **kwargs)
        self.reference_path, self.critic_path = reference, critic
        self.reference_dtype: DType = reference_dtype
        self.reference: PreTrainedModel | None = None  # built in build_models
        self.critic: ValueModel | None = None
        self.advantage_transforms: list[Any] = []  # AdvantageTransforms, of the algorithms that take some
        # Models of advantage transforms, built in build_models.
        self.teacher_path: str | None = None
        self.teacher_dtype: DType = reference_dtype
        self.teacher: PreTrainedModel | None = None
        self.self_teacher: PreTrainedModel | None = None  # the initial policy
        self.average: PreTrainedModel | None = None  # moving with the policy
        self.temperature = temperature
        self.max_tokens_per_micro_batch, self.logits_chunk = max_tokens_per_micro_batch, logits_chunk
        self.lr, self.warmup_steps = lr, warmup_steps
        self.critic_lr, self.critic_warmup_steps = critic_lr, critic_warmup_steps
        self.weight_decay, self.betas, self.max_grad_norm = weight_decay, betas, max_grad_norm
        self.num_mini_batches, self.epochs = num_mini_batches, epochs
        self.importance_cap = importance_cap
        self.correction = Correction(importance_cap, importance_level, mask_ratio, mask_level)
        self.corrects = self.correction.active
        if self.corrects and not self.applies_correction:
            raise ValueError(
                f"importance_cap and mask_ratio correct the policy's loss, but {type(self).__name__} does not say that "
                "its loss applies them; multiply the policy's term by weights.product and set applies_correction = "
                "True in the class, or leave the options out"
            )
        self.metrics = StepMetrics()  # of the current training step; algorithms add to it
        self.rolled_out: Sequence[Trajectory] = ()  # the current rollout batch, infrastructure failures included
        self._rows: Sequence[Trajectory] = ()  # of the current batch
        self._constant = 0  # consecutive iterations with only constant groups
        self._accepted: int | None = None  # id of the data module that ``accept_data`` has seen last
        self._seen: TokenStats  # of the current batch, by the last forward pass of the update over each token
        self._last: tuple[list[Trajectory], TokenBatch, LogprobBatch, RowTensors, TokenWeights] | None = None

    # ------------------------------------------------------------------ what an algorithm says
    @abstractmethod
    def compute_advantages(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: LogprobBatch) -> Any:
        """Return advantages and other inputs of ``loss`` as ``RowTensors`` (such as ``LossInputs``), one row per
        trajectory.

        No gradient is recorded. Every rank calls. The mean size of a field ``advantages`` ([B] or [B, T]) is logged as
        ``train/advantage_abs``, unless this method logs it.
        """

    @abstractmethod
    def loss(
        self, outputs: PolicyOutputs, batch: TokenBatch, inputs: Any, weights: TokenWeights
    ) -> Mapping[str, Tensor]:
        """Return the losses of a micro-batch by loss stream (policy, value), as sums over its tokens. Each is divided
        by the stream's global count.

        Weight the policy's term of each token by ``weights.product``. A loss that clips logs
        ``train/clip_fraction``.
        """

    @property
    def compares(self) -> bool:
        """Whether advantages compare rewards within a group, so that a group with equal rewards teaches nothing."""
        return True

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether the policy's log-probs and entropies are computed for the rollout batch before the update.

        An algorithm that takes a single optimiser step and reads neither in ``compute_advantages`` may return False.
        Then they are None in ``LogprobBatch``, and the logged figures are those of the update's forward passes.
        """
        return True

    def rows_without_gradient(self, inputs: Any) -> Sequence[int]:
        """Return rows whose loss has no gradient. The update runs them forward only, for the metrics."""
        return ()

    def streams(self, batch: TokenBatch, inputs: Any, weights: TokenWeights) -> Mapping[str, Tensor]:
        """Return the token weights [B, T] of each loss stream (policy, value). Their sum over the mini-batch and all
        ranks is the stream's divisor."""
        return {"policy": weights.aggregation}

    # ------------------------------------------------------------------ what it can be trained on
    @property
    def data(self) -> Any:
        """The trainer's data module, or None where the Trainer was given loaders."""
        return getattr(self.trainer, "datamodule", None)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self.accept_data(self.data)

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        self._accepted = None  # another training has the data checked again

    def accept_data(self, data: Any) -> None:
        """Check a data module with ``check_data``, only once. Data modules with rollouts call this before their engine
        loads a model; ``setup`` calls it for all others."""
        if self._accepted != id(data):
            self.check_data(data)
            self._accepted = id(data)

    def check_data(self, data: Any) -> None:
        """Refuse a data module that this algorithm cannot learn from. Its questions are read, but no model is loaded.

        The base class refuses a sampler with another distribution than the log-probs have, and what advantage
        transforms refuse. Call it first in an override.

        Args:
            data: null where the Trainer was given loaders.
        """
        self.check_rows()
        self.check_sampling(getattr(data, "train_sampling", None))
        guided = getattr(getattr(data, "rollouts", None), "guide", None) is not None
        if guided and not any(isinstance(transform, GuidedTurns) for transform in self.advantage_transforms):
            raise ValueError(
                "rollouts.guide plays turns, which the policy loss would reinforce as if the policy had sampled them; "
                "put lightning_modules.advantage_transforms.guided_turns.GuidedTurns last in GRPO's "
                "advantage_transforms"
            )
        if guided and (folder := getattr(data.rollouts.guide.engine, "folder", None)) is not None:
            require_same_tokenizer(self.policy_path, folder)
        for transform in self.advantage_transforms:
            transform.check_data(self, data)

    def check_sampling(self, sampling: Any) -> None:
        """Raise ValueError if the sampler's distribution (null: unknown) is not that of the log-probs. The dry run
        calls this, too."""
        if sampling is not None and sampling.temperature != self.temperature:
            raise ValueError(
                f"trajectories are sampled at temperature {sampling.temperature} (data.train_sampling.temperature), "
                f"but log-probs are computed at {self.temperature} (model.temperature); set both to the same value"
            )
        if sampling is not None and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.repetition_penalty != 1.0):
            raise ValueError(
                f"train_sampling changes the distribution (top_p {sampling.top_p}, top_k {sampling.top_k}, "
                f"repetition_penalty {sampling.repetition_penalty}), but log-probs are those of the whole one; train "
                "with top_p 1.0, top_k -1 and repetition_penalty 1.0"
            )

    # ------------------------------------------------------------------ models and optimiser
    def frozen_models(self) -> dict[str, tuple[str, DType]]:
        found: dict[str, tuple[str, DType]] = {}
        if self.reference_path is not None:
            found["reference"] = (self.reference_path, self.reference_dtype)
        for transform in self.advantage_transforms:
            found |= transform.frozen_models(self)
        return found

    def models_reading_ids(self) -> dict[str, str]:
        return super().models_reading_ids() | ({} if self.critic_path is None else {"critic": self.critic_path})

    def check_rows(self) -> None:
        """Refuse models (reference, teacher, critic) without an embedding for a token id that the policy may sample,
        and what ``require_loadable`` refuses. The dry run calls this, too, for models on this machine."""
        require_loadable(self.policy_path, [folder for folder, _ in self.frozen_models().values()])
        for folder in self.models_reading_ids().values():
            require_rows(self.policy_path, folder)

    def build_models(self) -> None:
        super().build_models()
        if self.reference_path is not None:
            self.reference = self.load_frozen(self.reference_path, self.reference_dtype)
        if self.critic_path is not None:
            self.critic = ValueModel(self.critic_path, self.dtype_name, self.attention, self.gradient_checkpointing)
            if self.lora is not None:
                self.lora.attach(self.critic.body)
                if not partitioned(self.critic.head.parameters()):
                    self.critic.head.float()  # trained, and so float32 beside a base in half precision
        for transform in self.advantage_transforms:
            transform.build(self)
        optimisation.set_clipping(self, self.max_grad_norm)

    def load_frozen(self, folder: str, dtype: DType) -> PreTrainedModel:
        """Load the frozen model (reference or teacher) of a folder. If this is the folder of a policy with LoRA
        adapters, return the policy's base instead.

        Raises:
            ValueError: it has another tokenizer than the policy.
        """
        require_same_tokenizer(self.policy_path, folder)
        if self.lora is not None and folder == self.policy_path:
            return cast("PreTrainedModel", InitialPolicy(self.policy))  # answers what token_logprobs asks
        return load_frozen_lm(folder, dtype, self.attention)

    def trained_parts(self) -> dict[str, nn.Module]:
        parts: dict[str, nn.Module] = {"policy": self.policy}
        return parts if self.critic is None else parts | {"critic": self.critic}

    def configure_optimizers(self) -> Any:
        rates = {"policy": (self.lr, self.warmup_steps), "critic": (self.critic_lr, self.critic_warmup_steps)}
        parts = self.trained_parts()
        trained = {name: [p for p in part.parameters() if p.requires_grad] for name, part in parts.items()}
        groups = [{"params": parameters, "lr": rates[name][0]} for name, parameters in trained.items()]
        factors = [warmup_constant(rates[name][1]) for name in parts]
        return optimisation.adamw(groups, factors, betas=self.betas, weight_decay=self.weight_decay)

    # ------------------------------------------------------------------ forward passes without gradient
    def score(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> LogprobBatch:
        """Return the log-probs, values and entropies of a batch from all declared models, without gradient."""

        def policy_stats(micro: TokenBatch) -> Tensor:
            stats = self._token_stats(self.policy, micro)
            return torch.stack([stats.logprobs, stats.entropy])

        old = entropy = None
        if self.reads_old_logprobs:
            old, entropy = self._scored(batch, policy_stats, leading=(2,))
        judged = tuple(transform.judge(self, trajectories, batch) for transform in self.advantage_transforms)
        teacher = first_teacher(judged)
        reference = None if self.reference is None else self.logprobs_of(self.reference, batch)
        values = self._scored(batch, self.critic) if self.critic is not None else None
        return LogprobBatch(old, teacher, reference, values, entropy, judged)

    def logprobs_of(self, model: PreTrainedModel, batch: TokenBatch) -> Tensor:
        """Return the log-probs [B, T] of the sampled tokens under any model, without gradient. Every rank must call."""
        statistics = TokenStatistics(self.temperature)
        return self._scored(batch, lambda micro: token_columns(model, micro, statistics, self.logits_chunk)[0])

    def values_of(self, batch: TokenBatch, function: Callable[[TokenBatch, Sequence[int]], Tensor]) -> TokenRows:
        """Apply a function to micro-batches without gradient, see ``score_tokens``. Every rank must call."""
        return score_tokens(batch, function, self.max_tokens_per_micro_batch, self.packing)

    def _scored(
        self, batch: TokenBatch, function: Callable[[TokenBatch], Tensor], leading: tuple[int, ...] = ()
    ) -> Tensor:
        return score(batch, function, self.max_tokens_per_micro_batch, leading, self.packing)

    def _token_stats(
        self, model: PreTrainedModel, micro: TokenBatch, readings: Sequence[Reading | None] = ()
    ) -> TokenStats:
        return token_logprobs(model, micro, self.logits_chunk, self.temperature, readings=readings)

    def _readings(self, inputs: Any) -> tuple[Reading | None, ...]:
        """Return what the losses of advantage transforms read, for a micro-batch's rows of the inputs of ``loss``."""
        kept = getattr(inputs, "transforms", ())
        return tuple(t.reading(self, own) for t, own in zip(self.advantage_transforms, kept, strict=False))

    # ------------------------------------------------------------------ one iteration
    def token_weights(self, batch: TokenBatch, scores: LogprobBatch) -> TokenWeights:
        """Return the weights of each token in the policy's loss (``TokenWeights``). ``batch`` must have complete rows,
        because some weights depend on a row's other tokens."""
        aggregation = aggregation_weights(batch.mask, self.aggregation)
        correction = batch.mask
        if self.corrects:
            correction = self.correction.weights(scores.require("old_logprobs"), batch)
        return TokenWeights(batch.mask, aggregation, correction)

    def assign_credit(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        """Share out the outcome's advantages [B, T] among the tokens by all advantage transforms in turn, and return
        them."""
        for transform in self.advantage_transforms:
            advantages = transform.assign_credit(batch, advantages)
        return advantages

    def apply_transforms(self, batch: RolloutBatch, advantages: Tensor) -> tuple[Tensor, tuple[RowTensors | None, ...]]:
        """Apply all advantage transforms in turn. Returns the advantages [B, T], and the values that each transform
        keeps for its loss."""
        kept: list[RowTensors | None] = []
        batch = dataclasses.replace(batch, outcome=advantages)
        for transform in self.advantage_transforms:
            advantages, own = transform.transform(batch, advantages)
            kept.append(own)
        return advantages, tuple(kept)

    def add_losses(self, policy: Tensor, micro: MicroBatch, kept: Sequence[RowTensors | None]) -> Tensor:
        """Return the policy's loss plus the losses of all advantage transforms."""
        read = micro.outputs.read or (None,) * len(kept)
        for transform, own, found in zip(self.advantage_transforms, kept, read, strict=True):
            added = transform.loss(dataclasses.replace(micro, read=found), own)
            policy = policy if added is None else policy + added
        return policy

    def training_step(self, trajectories: list[Trajectory], batch_idx: int) -> None:
        usable, positions = [], []
        for i, t in enumerate(trajectories):
            if t.left_out:
                continue
            if t.reward is None:
                raise ValueError(f"trajectory {t.group}/{t.index} has no reward; score it before training on it")
            rows = split_turns(t)  # the trajectory itself, or its turns if each has its own prompt
            usable += rows
            position = i if t.batch_index is None else t.batch_index  # it may come from another rank
            positions += [position + (row.row or 0) for row in rows]
        self.rolled_out, self._rows = trajectories, usable
        self.metrics = StepMetrics()
        self.check_ids(usable)
        batch = collate(usable, self.device)
        own = of_policy(usable, batch)
        with torch.no_grad():
            scores = self.score(usable, batch)
            inputs = self.compute_advantages(usable, own, scores)
            weights = dataclasses.replace(self.token_weights(batch, scores), mask=own.mask)
        advantages = getattr(inputs, "advantages", None)
        if isinstance(advantages, Tensor) and "train/advantage_abs" not in self.metrics:
            by_token = advantages if advantages.dim() == 2 else advantages[:, None]
            self.metrics.mean("train/advantage_abs", (by_token.abs() * own.mask).sum(), own.mask.sum())
        version = self.trainer.global_step
        self._seen = TokenStats(torch.zeros_like(batch.mask), torch.zeros_like(batch.mask))
        self.update(batch, inputs, weights, positions)
        if scores.old_logprobs is None:
            scores = dataclasses.replace(scores, old_logprobs=self._seen.logprobs, entropy=self._seen.entropy)
        self._last = (usable, batch, without_token_rows(scores), without_token_rows(inputs), weights)
        log_mismatch(self.metrics, usable, own, scores.require("old_logprobs"), self.correction, version)
        for transform in self.advantage_transforms:
            transform.after_update(self)
        log_rollout(self.metrics, trajectories)
        self.log_batch(usable, own, scores)
        metrics = self.metrics.reduce()
        self._warn_of_zero_variance_groups(metrics)
        shown = {k: v for k, v in metrics.items() if k in self.PROGRESS}
        self.log_dict(shown, prog_bar=True, batch_size=1)
        self.log_dict({k: v for k, v in metrics.items() if k not in shown}, batch_size=1)

    def _warn_of_zero_variance_groups(self, metrics: Mapping[str, float]) -> None:
        """Warn once when no group had differing rewards in ``CONSTANT_ITERATIONS`` consecutive iterations."""
        if not self.compares or self._constant >= CONSTANT_ITERATIONS:
            return
        self._constant = self._constant + 1 if metrics.get("train/zero_variance_groups") == 1.0 else 0
        if self._constant == CONSTANT_ITERATIONS and self.trainer.is_global_zero:
            log.warning(
                "iteration %d: in each of the last %d iterations the rewards of every group were identical (their mean "
                "is %.3g now), so that comparing them teaches nothing. Check whether the reward can take other values, "
                "whether answers are found (train/stop/answer) in the form it expects, whether the questions are too "
                "hard or too easy for this model, and whether samples differ (train/distinct, temperature)",
                self.trainer.fit_loop.total_batch_idx + 1, CONSTANT_ITERATIONS, metrics.get("train/reward", 0.0),
            )  # fmt: skip

    @property
    def last_token_values(self) -> list[tuple[Trajectory, dict[str, list[float]]]]:
        """The values per token of the last batch, for trajectory pages. Each entry is a whole trajectory and, by name,
        one value per response token.

        The values are those of ``score`` and ``compute_advantages``, ``kl`` (log-ratio of student to teacher, or else
        to the reference) and ``importance`` (the correction).
        """
        if self._last is None:
            return []
        trajectories, batch, scores, inputs, weights = self._last
        scores = dataclasses.replace(scores, judged=())
        tensors = tensors_BT(inputs) | tensors_BT(scores)  # the page underlines by the first: PPO's advantages
        frozen = scores.reference_logprobs if scores.teacher_logprobs is None else scores.teacher_logprobs
        if frozen is not None:
            known = (frozen != 0).any(1, keepdim=True)  # not in rows that no teacher has judged
            tensors["kl"] = (scores.require("old_logprobs") - frozen) * batch.mask * known
        if self.corrects:
            tensors["importance"] = weights.correction
        return values_by_token(trajectories, batch, tensors)

    # ------------------------------------------------------------------ optimiser steps
    def update(self, batch: TokenBatch, inputs: RowTensors, weights: TokenWeights, positions: Sequence[int]) -> None:
        """Take all optimiser steps of the iteration; only the last one raises ``trainer.global_step``.

        Args:
            positions: of each row in the rollout batch before failed trajectories were left out. The trajectory at
                position i belongs to step i mod ``num_mini_batches``, so a failure moves no other trajectory to another
                step. Turn k of a trajectory that is split into turns has position i + k.
        """
        optimizer, scheduler = optimisation.only(self)
        n = self.num_mini_batches
        plan = [[row for row, i in enumerate(positions) if i % n == k] for k in range(n)] * self.epochs
        learnt = False
        for k, index in enumerate(plan):
            with optimisation.counted(optimizer, k == len(plan) - 1):
                learnt = self._mini_batch(batch, inputs, weights, index) or learnt
        for group, name in zip(optimizer.param_groups, self.trained_parts(), strict=True):
            self.metrics.maximum("train/lr" if name == "policy" else f"train/lr_{name}", group["lr"])
        if learnt:
            scheduler.step()

    def _mini_batch(self, batch: TokenBatch, inputs: RowTensors, weights: TokenWeights, index: Sequence[int]) -> bool:
        """Take one optimiser step on the rows ``index``. Returns whether any rank had something to learn from."""
        whole = {name: divisor[list(index)].sum() for name, divisor in self.streams(batch, inputs, weights).items()}
        counts = dict(zip(whole, ranks.sum_over_ranks(torch.stack(list(whole.values()))), strict=True))
        losses: list[optimisation.MicroLosses] = []
        idle = set(self.rows_without_gradient(inputs))
        if not ranks.max_over_ranks(len(set(index) - idle), self.device):
            idle = set()  # without any gradient AdamW would leave out its step, which moves weights by momentum
        for backward in (True, False):
            rows = [i for i in index if (i not in idle) is backward]
            with torch.set_grad_enabled(backward):
                losses += self._micro_batches(batch, inputs, weights, rows, counts, backward)
        for name in counts:
            self.metrics.mean(f"train/loss_{name}", 0.0, 1.0 / ranks.world_size())
        learnt = any(bool(count > 0) for count in counts.values())
        optimisation.step(self, self.trained_parts(), self.max_grad_norm, losses, self.metrics, idle=not learnt)
        return learnt

    def _micro_batches(
        self,
        batch: TokenBatch,
        inputs: RowTensors,
        weights: TokenWeights,
        index: Sequence[int],
        counts: Mapping[str, Tensor],
        backward: bool,
    ) -> Iterator[optimisation.MicroLosses]:
        """Run the rows ``index`` through the trained models and the loss, and yield the losses of each micro-batch.

        Args:
            counts: divisor of each loss stream, over all ranks.
            backward: whether to compute gradients, too.
        """
        groups = plan(batch, index, self.max_tokens_per_micro_batch, self.packing)
        # Without rows on any rank a stand-in gives a gradient of 0: DeepSpeed and loss scalers fail without one.
        for group, length in groups or [([], 1)] * backward:
            micro, own = batch.rows(group, length), inputs.rows(group, length)
            stats = self._token_stats(self.policy, micro, self._readings(own))
            values = self.critic(micro) if self.critic is not None else None
            for seen, said in ((self._seen.logprobs, stats.logprobs), (self._seen.entropy, stats.entropy)):
                seen[group, :length] = said.detach()[: len(group)]  # no rows: a stand-in of one
            outputs = PolicyOutputs(stats.logprobs, stats.entropy, values, stats.read)
            of_tokens = weights.rows(group, length)
            sums = self.loss(outputs, micro, own, of_tokens)
            if sums.keys() != counts.keys():
                raise ValueError(
                    f"loss sums {sorted(sums)}, but streams divides {sorted(counts)}; name the same in both"
                )
            means = {f"train/loss_{name}": sums[name] / count.clamp(min=1e-8) for name, count in counts.items()}
            if backward:
                optimisation.backward(self, cast("Tensor", sum(means.values())))
            self.metrics.mean("train/entropy", (stats.entropy * of_tokens.mask).sum(), of_tokens.mask.sum())
            for name, mean in means.items():  # the mean over ranks and mini-batches of a sum over micro-batches
                self.metrics.mean(name, mean, 0.0)
            yield [self._rows[i] for i in group], {name: mean.detach() for name, mean in means.items()}

    # ------------------------------------------------------------------ checkpoints and metrics
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        for transform in self.advantage_transforms:
            transform.on_save_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        for transform in self.advantage_transforms:
            transform.on_load_checkpoint(checkpoint)

    def log_batch(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: LogprobBatch) -> None:
        """Log metrics that need the batch's tensors, without infrastructure failures. ``log_rollout`` logs the other
        metrics."""
        episodes = {(t.group, t.index) for t in trajectories}
        self.metrics.mean("train/response_tokens", batch.mask.sum(), len(episodes))
