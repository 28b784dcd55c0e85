"""Interface of advantage transforms: parts of an advantage or of a loss, combined in a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, get_args

import torch
from torch import Tensor

from common.schedules import Schedule
from lightning_modules.batch import LogprobBatch, PolicyOutputs, RowTensors, TokenBatch, TokenRows
from lightning_modules.maths.correction import Correction
from lightning_modules.maths.losses import Singleton, TokenWeights
from lightning_modules.metrics import StepMetrics
from lightning_modules.models.policy import DType
from lightning_modules.models.projection import Reading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollout.trajectory import Trajectory


class Algorithm(Protocol):
    """The attributes of an algorithm (such as GRPO) that its advantage transforms may use. Only ``GRPO`` and ``PPO``
    have the options of the policy loss."""

    advantage_transforms: list[AdvantageTransform]
    metrics: StepMetrics
    rolled_out: Sequence[Trajectory]
    # Options.
    attention: str
    correction: Correction
    temperature: float
    clip_low: float
    clip_high: float
    dual_clip: float | None
    singleton_advantage: Singleton
    use_grpo: bool  # whether rewards enter
    logits_chunk: int
    num_mini_batches: int
    epochs: int
    # Models and their folders. More teachers are attributes ``teacher_NAME``.
    policy: PreTrainedModel
    policy_path: str
    reference: PreTrainedModel | None
    reference_path: str | None
    teacher: PreTrainedModel | None
    teacher_path: str | None
    teacher_dtype: DType
    self_teacher: PreTrainedModel | None  # the initial policy
    average: PreTrainedModel | None  # moving with the policy

    @property
    def advantage(self) -> str:
        """The way in which rewards become advantages: GRPO's option ``advantage``, or gae."""
        ...

    @property
    def data(self) -> Any: ...

    @property
    def trainer(self) -> Any: ...

    def load_frozen(self, folder: str, dtype: DType) -> PreTrainedModel: ...

    def logprobs_of(self, model: PreTrainedModel, batch: TokenBatch) -> Tensor: ...

    def values_of(self, batch: TokenBatch, function: Callable[[TokenBatch, Sequence[int]], Tensor]) -> TokenRows: ...

    def policy_weights(self) -> Iterable[tuple[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The rollout batch of an iteration before its first optimiser step: trajectories, token tensors and log-probs."""

    algorithm: Algorithm
    trajectories: Sequence[Trajectory]  # the rows of ``tokens``
    tokens: TokenBatch
    scores: LogprobBatch
    outcome: Tensor | None = None  # [B, T], the outcome's advantages, before other signals; None in ``assign_credit``

    def judged(self, transform: AdvantageTransform) -> Any:
        """Return what ``judge`` of a transform of the algorithm has returned."""
        place = next(i for i, other in enumerate(self.algorithm.advantage_transforms) if other is transform)
        return self.scores.judged[place]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch after the policy's forward pass: outputs with gradient, old log-probs and token weights."""

    algorithm: Algorithm
    outputs: PolicyOutputs  # with gradient
    old_logprobs: Tensor  # [B, T], the denominator of the ratio in the policy's loss
    weights: TokenWeights  # ``aggregation`` weights an auxiliary loss; ``product`` is for the policy's term
    read: Tensor | None = None  # [N, K] float32 with gradient, what the transform's ``reading`` asked for


class ConfigRepr:
    """Base of objects that YAML creates by ``class_path``. Their ``repr`` shows the constructor's arguments, which
    checkpoints keep as text."""

    def __repr__(self) -> str:
        options = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def plays_programs(data: Any) -> bool:
    """Return whether agent programs play the tasks of a data module, perhaps in several conversations."""
    return getattr(getattr(data, "rollouts", None), "program", None) is not None


def per_turn_prompts(data: Any) -> bool:
    """Return whether the data module's protocol renders a new prompt for every turn. Each turn is then a row of the
    batch."""
    return getattr(getattr(getattr(data, "rollouts", None), "protocol", None), "per_turn_prompts", False)


def first_teacher(judged: Sequence[Any]) -> Tensor | None:
    """Return the log-probs [B, T] of the first teacher that judged each row, from what ``judge`` of all transforms
    returned; None without a teacher."""
    found: Tensor | None = None
    for one in reversed([one for one in judged if one is not None and hasattr(one, "logprobs")]):
        found = one.logprobs if found is None else torch.where(one.rows_judged[:, None] > 0, one.logprobs, found)
    return found


def check_defaults(algorithm: Algorithm, name: str) -> None:
    """Raise ValueError for options of GRPO's advantages, which a transform that replaces them would ignore."""
    if algorithm.advantage != "std" or algorithm.singleton_advantage != "zero":
        raise ValueError(
            f"advantage is {algorithm.advantage} and singleton_advantage {algorithm.singleton_advantage}, but {name} "
            "computes advantages in its own way; leave both out"
        )


def current(algorithm: Algorithm, coefficient: float | Schedule) -> float:
    """Return a coefficient's value in the algorithm's current iteration."""
    return coefficient(algorithm.trainer.global_step) if isinstance(coefficient, Schedule) else coefficient


def validate_choice(name: str, value: Any, choices: Any) -> Any:
    """Check that ``value`` is one of the choices of a ``Literal`` type, and return it. Raises ValueError otherwise."""
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(get_args(choices))}")
    return value


class AdvantageTransform(ConfigRepr):
    """Base of transforms that change the advantages of tokens or add a loss. Algorithms call the hooks in the order of
    their list.

    All transforms first ``assign_credit``: they share out the outcome among the tokens. Then all ``transform`` the
    result: they add signals other than the outcome. Every hook does nothing here; those that score or log run on every
    rank. All [B, T] tensors are 0 where the mask is 0.
    """

    learns = False  # whether the transform can learn without the outcome (use_grpo: false)
    needs_outcome = False  # whether it has no effect without the outcome
    needs_groups = False  # whether it compares the trajectories of a group
    reads_old_logprobs = True  # whether it reads the policy's log-probs or entropies before the update
    replaces_credit = False  # whether ``assign_credit`` drops the credit that earlier transforms assigned

    @property
    def adds_loss(self) -> bool:
        """Whether ``loss`` may return a loss. By default: whether the class defines one."""
        return type(self).loss is not AdvantageTransform.loss

    def check(self, algorithm: Algorithm) -> None:
        """Refuse options of the algorithm that conflict with this transform. Called during construction."""

    def check_single(self, algorithm: Algorithm, kind: type[AdvantageTransform], instead: str) -> None:
        """Raise ValueError if the algorithm has several transforms of ``kind``. All of them would use the same model of
        the algorithm."""
        if (count := sum(isinstance(other, kind) for other in algorithm.advantage_transforms)) > 1:
            raise ValueError(f"advantage_transforms: {count} are a {kind.__name__}; expected at most one; {instead}")

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        """Refuse a data module that this transform cannot learn from, before any model loads
        (``OnPolicyModule.check_data``)."""

    def frozen_models(self, algorithm: Algorithm) -> dict[str, tuple[str, DType]]:
        """Return the folder and dtype of each frozen model that the transform needs, by the algorithm's attribute.
        Transforms that share an attribute load one model."""
        return {}

    def build(self, algorithm: Algorithm) -> None:
        """Load the transform's frozen models as attributes of the algorithm, so that one DeepSpeed engine shards them
        all."""
        for name, (folder, dtype) in self.frozen_models(algorithm).items():
            setattr(algorithm, name, algorithm.load_frozen(folder, dtype))

    def judge(self, algorithm: Algorithm, trajectories: Sequence[Trajectory], batch: TokenBatch) -> RowTensors | None:
        """Return what the transform's teacher says of the rollout batch, or None without a teacher. ``transform`` finds
        it by ``RolloutBatch.judged``; trajectory pages show its fields ``logprobs`` [B, T] (of the sampled tokens) and
        ``rows_judged`` [B]. Every rank calls."""
        return None

    def assign_credit(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        """Share out the outcome's advantages [B, T] among the tokens, and return them. The default changes nothing."""
        return advantages

    def transform(self, batch: RolloutBatch, advantages: Tensor) -> tuple[Tensor, RowTensors | None]:
        """Return the advantages [B, T] to learn from, and the tensors (or None) that ``loss`` or trajectory pages
        read."""
        return advantages, None

    def reading(self, algorithm: Algorithm, inputs: RowTensors | None) -> Reading | None:
        """Return what ``loss`` needs of the policy's distribution beside the sampled tokens, for the micro-batch's rows
        of what ``transform`` returned. It arrives as ``MicroBatch.read``, from the same forward pass."""
        return None

    def loss(self, micro: MicroBatch, inputs: RowTensors | None) -> Tensor | None:
        """Return a loss to add to the policy's loss, or None. It is a sum over the micro-batch's tokens times their
        weights.

        Args:
            micro: outputs of the policy, and the weights.
            inputs: the micro-batch's rows of what ``transform`` returned.
        """
        return None

    def after_update(self, algorithm: Algorithm) -> None:
        """Hook that runs after the last optimiser step of an iteration, for example to update a moving average."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the transform's state to a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the transform's state from a checkpoint."""


def check_transforms(algorithm: Algorithm) -> None:
    """Refuse advantage transforms that have no effect, that cancel another one, or that compare groups in an algorithm
    without groups."""
    lost: list[str] = []  # names of earlier transforms that assign credit
    for transform in algorithm.advantage_transforms:
        name = type(transform).__name__
        if transform.needs_groups and algorithm.advantage == "gae":
            host = type(algorithm).__name__
            raise ValueError(
                f"advantage_transforms: {name} compares the trajectories of a group, {host} does not; take GRPO"
            )
        if transform.needs_outcome and not algorithm.use_grpo:
            raise ValueError(f"{name} changes the outcome's advantages, which use_grpo: false takes away; leave it out")
        if transform.replaces_credit and lost:
            raise ValueError(
                f"advantage_transforms: {name} replaces the advantages of {', '.join(lost)}; put it first, or leave "
                "one out"
            )
        if type(transform).assign_credit is not AdvantageTransform.assign_credit:
            lost.append(name)
        transform.check(algorithm)
    learning = [transform for transform in algorithm.advantage_transforms if transform.learns]
    if not algorithm.use_grpo and algorithm.correction.active and all(transform.adds_loss for transform in learning):
        raise ValueError(
            "importance_cap and mask_ratio weigh the loss of GRPO, which use_grpo: false leaves out; they do not apply "
            f"to the loss of {', '.join(type(transform).__name__ for transform in learning)}: leave them out as well"
        )
