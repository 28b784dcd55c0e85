"""Interface of annotations: parts of an advantage or of a loss that are put together in ``annotations=[...]``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, get_args

from torch import Tensor

from lightning_modules.batch import RowTensors, TokenBatch
from lightning_modules.maths.group_advantages import Lone
from lightning_modules.metrics import StepMetrics
from lightning_modules.models.policy import DType
from lightning_modules.training.scoring import Outputs, Scores
from lightning_modules.training.token_weights import Correction, TokenWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollout.trajectory import Trajectory


class Algorithm(Protocol):
    """The part of an algorithm that its annotations may read. An ``OnPolicyModule`` has all but the options of the
    policy's loss; ``GRPO`` and ``PPO`` have those, too."""

    annotations: list[Annotation]
    metrics: StepMetrics
    rolled_out: Sequence[Trajectory]
    # Options.
    attention: str
    correction: Correction
    temperature: float
    clip_low: float
    clip_high: float
    dual_clip: float | None
    lone: Lone
    use_grpo: bool  # whether rewards enter
    # Models, and where they come from; those of annotations are each of one kind's alone.
    policy: PreTrainedModel
    policy_path: str
    reference: PreTrainedModel | None
    reference_path: str | None
    teacher: PreTrainedModel | None  # of Distillation
    teacher_path: str | None
    teacher_dtype: DType
    self_teacher: PreTrainedModel | None  # of SkillTeacher, fixed
    average: PreTrainedModel | None  # of SkillTeacher, moving with the policy

    @property
    def advantage(self) -> str:
        """How the outcome becomes an advantage: an option of GRPO, or gae."""
        ...

    @property
    def data(self) -> Any: ...

    @property
    def trainer(self) -> Any: ...

    def load_frozen(self, folder: str, dtype: DType) -> PreTrainedModel: ...

    def logprobs_of(self, model: PreTrainedModel, batch: TokenBatch) -> Tensor: ...

    def policy_weights(self) -> Iterable[tuple[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The batch of an iteration, before its first update."""

    algorithm: Algorithm
    trajectories: Sequence[Trajectory]  # the rows of ``batch``
    batch: TokenBatch
    scores: Scores


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch in the forward pass of the update."""

    algorithm: Algorithm
    outputs: Outputs  # of the policy, with gradient
    old_logprobs: Tensor  # [B, T], what the ratio of the policy's loss divides by
    weights: TokenWeights  # ``aggregation`` weighs an auxiliary loss; ``product`` is for the policy's term


class ConfigRepr:
    """An object that YAML makes by ``class_path``; checkpoints keep what it was made with as text."""

    def __repr__(self) -> str:
        options = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def per_turn_prompts(data: Any) -> bool:
    """Whether the data module's protocol gives every turn a prompt of its own, which makes it a row by itself."""
    return getattr(getattr(getattr(data, "rollouts", None), "protocol", None), "per_turn_prompts", False)


def validate_choice(name: str, value: Any, choices: Any) -> Any:
    """Return ``value``. Raises ValueError unless it is one of the choices of a Literal."""
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(get_args(choices))}")
    return value


class Annotation(ConfigRepr):
    """Changes what a token is worth or adds a loss; algorithms call the hooks in the order of their list. Every hook is
    a no-op here; those that score or log run on every rank.

    ``credit`` comes first, for all annotations: what the outcome is worth by token. Then ``annotate``: what is added to
    it. All [B, T] tensors are 0 where the mask is 0.
    """

    learns = False  # whether there is something to learn without the outcome (use_grpo: false)
    needs_outcome = False  # whether it has no effect without the outcome
    needs_groups = False  # whether it compares the trajectories of a group
    reads_policy_scores = True  # whether ``credit`` or ``annotate`` read what the policy says before the update
    replaces_credit = False  # whether ``credit`` drops what annotations before it made of the outcome

    def check(self, algorithm: Algorithm) -> None:
        """Refuse options of the algorithm that do not go with this; called while it is constructed."""

    def check_single(self, algorithm: Algorithm, kind: type[Annotation], instead: str) -> None:
        """Refuse a second annotation of a kind: they would share what the algorithm has one of."""
        if (count := sum(isinstance(other, kind) for other in algorithm.annotations)) > 1:
            raise ValueError(f"annotations: {count} are a {kind.__name__}, of which there can be one; {instead}")

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        """Refuse a data module before any model loads, see ``OnPolicyModule.check_data``."""

    def frozen_models(self, algorithm: Algorithm) -> dict[str, tuple[str, DType]]:
        """Folder and type of the models that nothing trains, by attribute of the algorithm, which no two kinds of
        annotations share."""
        return {}

    def build(self, algorithm: Algorithm) -> None:
        """Load them as attributes of the algorithm, so that one DeepSpeed engine shards them all."""
        for name, (folder, dtype) in self.frozen_models(algorithm).items():
            setattr(algorithm, name, algorithm.load_frozen(folder, dtype))

    def teacher_logprobs(
        self, algorithm: Algorithm, trajectories: Sequence[Trajectory], batch: TokenBatch
    ) -> Tensor | None:
        """Log-probs [B, T] for ``Scores.teacher_logprobs``, if this has a teacher."""
        return None

    def credit(self, rollout: RolloutBatch, advantages: Tensor) -> Tensor:
        """The outcome's advantages [B, T]."""
        return advantages

    def annotate(self, rollout: RolloutBatch, advantages: Tensor) -> tuple[Tensor, RowTensors | None]:
        """The advantages [B, T] to learn from, and what ``loss`` needs or people want to read."""
        return advantages, None

    def loss(self, micro: MicroBatch, notes: RowTensors | None) -> Tensor | None:
        """What is added to the policy's loss, summed over a micro-batch's tokens times their weights.

        Args:
            micro: outputs of the policy, and the weights.
            notes: what ``annotate`` returned, the micro-batch's rows of it.
        """
        return None

    def after_update(self, algorithm: Algorithm) -> None:
        """After the last optimiser step of an iteration."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the annotation's state to a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore it from a checkpoint."""


# -- for algorithms ---------------------------------------------------------------------------------------------------


def check_annotations(algorithm: Algorithm) -> None:
    """Refuse annotations without effect, those that take away the effect of others, those of groups where the
    algorithm compares none, and those whose models do not know the policy's token ids."""
    lost: list[str] = []  # names of those before that change the credit
    for annotation in algorithm.annotations:
        name = type(annotation).__name__
        if annotation.needs_groups and algorithm.advantage == "gae":
            host = type(algorithm).__name__
            raise ValueError(f"annotations: {name} compares the trajectories of a group, {host} does not; take GRPO")
        if annotation.needs_outcome and not algorithm.use_grpo:
            raise ValueError(
                f"{name} changes what the outcome is worth, which use_grpo: false takes away; leave it out"
            )
        if annotation.replaces_credit and lost:
            raise ValueError(
                f"annotations: {name} replaces the advantages of {', '.join(lost)}; put it first, or leave one out"
            )
        if type(annotation).credit is not Annotation.credit:
            lost.append(name)
        annotation.check(algorithm)


def credit(rollout: RolloutBatch, advantages: Tensor) -> Tensor:
    """``Annotation.credit`` of all annotations, one after the other."""
    for annotation in rollout.algorithm.annotations:
        advantages = annotation.credit(rollout, advantages)
    return advantages


def annotate(rollout: RolloutBatch, advantages: Tensor) -> tuple[Tensor, tuple[RowTensors | None, ...]]:
    """``Annotation.annotate`` of all annotations, one after the other: the advantages, and each one's notes."""
    notes: list[RowTensors | None] = []
    for annotation in rollout.algorithm.annotations:
        advantages, own = annotation.annotate(rollout, advantages)
        notes.append(own)
    return advantages, tuple(notes)


def add_losses(policy: Tensor, micro: MicroBatch, notes: Sequence[RowTensors | None]) -> Tensor:
    """The policy's loss and those of all annotations."""
    for annotation, own in zip(micro.algorithm.annotations, notes, strict=True):
        added = annotation.loss(micro, own)
        policy = policy if added is None else policy + added
    return policy
