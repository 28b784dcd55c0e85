"""Teachers of on-policy distillation: a folder, a server, or the policy itself with another prompt or older weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from common import ranks
from common.ranges import OpenUnitInterval
from lightning_modules.advantage_transforms.base import AdvantageTransform, Algorithm, ConfigRepr, validate_choice
from lightning_modules.advantage_transforms.teacher_prompts import TeacherPrompts
from lightning_modules.batch import RowTensors, TokenBatch, TokenRows, aligned, collate, with_prompts
from lightning_modules.models.policy import DType, hidden_before, load_frozen_lm, output_head, positions
from lightning_modules.models.projection import TopTokens
from lightning_modules.models.remote_teacher import RemoteTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollout.trajectory import Task, Trajectory

TeacherWeights = Literal["current", "ema", "fixed"]


class SelfTeacher(ConfigRepr):
    """The policy as its own teacher, which reads another prompt than the student, or has older weights.

    Args:
        weights: current (the policy as it is at the start of the iteration), ema (their moving average) or fixed (the
            initial policy).
        ema_decay: of the moving average, per iteration.
    """

    def __init__(self, weights: TeacherWeights = "current", ema_decay: OpenUnitInterval = 0.99) -> None:
        self.weights: TeacherWeights = validate_choice("weights", weights, TeacherWeights)
        if ema_decay != 0.99 and weights != "ema":
            raise ValueError(f"ema_decay is {ema_decay}: no effect with the teacher's weights {weights}; leave it out")
        self.ema_decay = ema_decay

    def check_strategy(self, algorithm: Algorithm) -> None:
        """Raise ValueError if the strategy would spoil a moving average."""
        if self.weights == "ema" and isinstance(algorithm.trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "a self-teacher with weights ema keeps a whole float32 average, which DeepSpeed would cast to its own "
                "type and leave out of its checkpoints; take current or fixed, or a strategy without DeepSpeed"
            )

    def frozen_models(self, algorithm: Algorithm) -> dict[str, tuple[str, DType]]:
        if self.weights == "ema":
            return {"average": (algorithm.policy_path, "float32")}
        if self.weights == "fixed" and algorithm.reference_path != algorithm.policy_path:
            return {"self_teacher": (algorithm.policy_path, algorithm.teacher_dtype)}
        return {}

    def build(self, algorithm: Algorithm) -> None:
        if self.weights == "ema" and algorithm.average is None:
            # A whole copy: load_frozen would return an adapted policy's base.
            algorithm.average = load_frozen_lm(algorithm.policy_path, "float32", algorithm.attention)
        for name, (folder, dtype) in self.frozen_models(algorithm).items():
            if name != "average" and getattr(algorithm, name, None) is None:
                setattr(algorithm, name, algorithm.load_frozen(folder, dtype))

    def model(self, algorithm: Algorithm) -> PreTrainedModel:
        # The reference of the KL may be the initial policy; then one copy serves both.
        fixed = algorithm.reference if algorithm.self_teacher is None else algorithm.self_teacher
        found = {"current": algorithm.policy, "ema": algorithm.average, "fixed": fixed}[self.weights]
        if found is None:
            raise RuntimeError("the self-teacher is not loaded; build_models comes first")
        return found

    def after_update(self, algorithm: Algorithm) -> None:
        """Move the average towards the policy, once if several transforms read it."""
        if self.weights == "ema" and algorithm.average is not None and averaging(algorithm)[0] is self:
            with torch.no_grad():
                for name, now in algorithm.policy_weights():  # merged under LoRA: factors cannot be averaged
                    algorithm.average.get_parameter(name).lerp_(now.float(), 1.0 - self.ema_decay)


def averaging(algorithm: Algorithm) -> list[SelfTeacher]:
    """Return the self-teachers of the algorithm's advantage transforms that read the moving average. Raises ValueError
    if their averages differ: there is only one."""
    selves = [getattr(t, "self_teacher", None) for t in algorithm.advantage_transforms if t.learns]
    found = [one for one in selves if one is not None and one.weights == "ema"]
    if len(decays := {one.ema_decay for one in found}) > 1:
        raise ValueError(f"advantage_transforms: ema_decay is {sorted(decays)}; expected one, of one moving average")
    return found


@dataclass(frozen=True, slots=True)
class Judged(RowTensors):
    """What a teacher said of a rollout batch, no gradient."""

    logprobs: Tensor  # [B, T] float32 of the sampled tokens, 0 where the mask is 0 and in rows that it did not judge
    rows_judged: Tensor  # [B] float32, 1 for the rows that it judged
    ids: TokenRows | None = None  # [n, K] int32, the tokens of the support
    support: TokenRows | None = None  # [n, K] float32, the teacher's log-probs of these
    hidden: TokenRows | None = None  # [n, H], the teacher's last hidden states, for its whole distribution


class TaughtTransform(AdvantageTransform):
    """Base of transforms with a teacher that reads the student's trajectories and never generates.

    Several may be in the list, each with its own ``name``; equal folders are loaded once. ``tasks`` routes: a teacher
    reads the trajectories of its tasks only.

    Args:
        teacher: folder of the frozen teacher; it must share the student's tokenizer.
        server: a teacher behind HTTP, instead of ``teacher``.
        self_teacher: the policy itself, instead of ``teacher``.
        prompts: the prompt that the teacher reads before each response; null for the student's prompt.
        tasks: values of a task's fields, such as ``{data_source: [hotpotqa]}``, that the teacher judges: data_source,
            or a key of the task's metadata. Null for all tasks.
        name: part of the names of its metrics; needed where several transforms have teachers.
    """

    def __init__(
        self,
        teacher: str | None,
        server: RemoteTeacher | None,
        self_teacher: SelfTeacher | None,
        prompts: TeacherPrompts | None,
        tasks: dict[str, list[str]] | None,
        name: str | None,
    ) -> None:
        given = [f"'{teacher}'" if isinstance(teacher, str) else "", str(server or ""), str(self_teacher or "")]
        found = [one for one in given if one]
        if len(found) > 1:
            raise ValueError(f"there are two teachers, {' and '.join(found)}; name one of them")
        if not found:
            raise ValueError("teacher, server and self_teacher are null; name a teacher to distil from")
        if self_teacher is not None and self_teacher.weights == "current" and prompts is None:
            raise ValueError(
                "self_teacher has the current weights and the student's prompt, so that it agrees with the student; "
                "give it prompts, or weights: ema or fixed"
            )
        if name is not None and not name.isidentifier():
            raise ValueError(f"name is {name!r}; expected letters, digits and underscores")
        if name in ("path", "dtype"):
            raise ValueError(f"name is {name!r}, which other options of teachers have; take another one")
        self.teacher, self.server, self.self_teacher = teacher, server, self_teacher
        self.prompts, self.tasks, self.name = prompts, tasks, name

    def __repr__(self) -> str:
        options = {k: v for k, v in vars(self).items() if not k.startswith("_") and v is not None}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())})"

    def metric(self, name: str) -> str:
        """Return the name of a metric: of this teacher if it has a name."""
        return f"train/{name}" if self.name is None else f"train/{self.name}/{name}"

    # ------------------------------------------------------------------ models
    def check(self, algorithm: Algorithm) -> None:
        if self.server is not None and algorithm.temperature != 1.0:
            raise ValueError(f"temperature is {algorithm.temperature}, but a server's log-probs are those of 1.0")
        taught = [t for t in algorithm.advantage_transforms if isinstance(t, TaughtTransform)]
        names = [t.name for t in taught]
        if len(set(names)) < len(names):
            raise ValueError(
                f"advantage_transforms: {len(names)} have teachers, with the names {names}; give each its own name"
            )
        for field in ("server", "self_teacher", "prompts"):
            mine = getattr(self, field)
            shared = [t.name for t in taught if mine is not None and getattr(t, field) is mine]
            if len(shared) > 1:
                raise ValueError(
                    f"advantage_transforms: {' and '.join(map(str, shared))} share one {field}, which counts what it "
                    "was asked in an iteration; give each its own"
                )
        averaging(algorithm)
        if algorithm.teacher_path is None:
            algorithm.teacher_path = self.teacher

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        """Refuse a teacher server that is missing or reads other token ids, prompts that cannot be rendered, and tasks
        that no training question has."""
        if self.server is not None:
            budgets = getattr(getattr(data, "rollouts", None), "budgets", None)
            with ranks.stop_together():
                self.server.check(algorithm.policy_path, getattr(budgets, "max_length", None), self.support_size)
            if self.prompts is None and (listen := getattr(data, "listen", None)) is not None:
                listen(functools.partial(self._begin, data.max_off_policy_iterations), self.server.forget)
        if self.self_teacher is not None:
            self.self_teacher.check_strategy(algorithm)
        questions = getattr(data, "training_questions", None)
        mine = None if questions is None else [task for task in questions if self.judges(task)]
        if self.tasks is not None and mine == [] and questions:
            raise ValueError(f"tasks is {self.tasks}, but no training question is of these; check the values")
        if self.prompts is not None:
            self.prompts.check_data(algorithm, data, mine)

    def _begin(self, ahead: int, trajectory: Trajectory) -> None:
        """Have the server score a trajectory while others roll out."""
        if self.server is not None and not trajectory.left_out and self.judges(trajectory.task):
            self.server.begin(trajectory, self.support_size, ahead)

    @property
    def support_size(self) -> int:
        """The number of tokens at each position whose log-probs the teacher returns; 0 for the sampled one only."""
        return 0

    def _attribute(self, algorithm: Algorithm) -> str:
        """Return the algorithm's attribute of the folder's model: that of the first transform with this folder."""
        for other in algorithm.advantage_transforms:
            if isinstance(other, TaughtTransform) and other.teacher == self.teacher:
                return "teacher" if other.teacher == algorithm.teacher_path else f"teacher_{other.name or 'unnamed'}"
        return "teacher"

    def frozen_models(self, algorithm: Algorithm) -> dict[str, tuple[str, DType]]:
        if self.self_teacher is not None:
            return self.self_teacher.frozen_models(algorithm)
        if self.teacher is None:
            return {}
        return {self._attribute(algorithm): (self.teacher, algorithm.teacher_dtype)}

    def build(self, algorithm: Algorithm) -> None:
        if self.self_teacher is not None:
            self.self_teacher.build(algorithm)
            return
        for name, (folder, dtype) in self.frozen_models(algorithm).items():
            if getattr(algorithm, name, None) is None:
                setattr(algorithm, name, algorithm.load_frozen(folder, dtype))

    def model(self, algorithm: Algorithm) -> PreTrainedModel:
        """Return the teacher's model on this machine."""
        if self.self_teacher is not None:
            return self.self_teacher.model(algorithm)
        found = getattr(algorithm, self._attribute(algorithm), None)
        if found is None:
            raise RuntimeError("the teacher is not loaded; build_models comes first")
        return found

    def after_update(self, algorithm: Algorithm) -> None:
        if self.self_teacher is not None:
            self.self_teacher.after_update(algorithm)

    # ------------------------------------------------------------------ what the teacher says
    def judges(self, task: Task) -> bool:
        """Return whether the teacher judges the trajectories of a task."""
        return all(
            str(task.data_source if field == "data_source" else task.metadata.get(field)) in values
            for field, values in (self.tasks or {}).items()
        )

    def judge(self, algorithm: Algorithm, trajectories: Sequence[Trajectory], batch: TokenBatch) -> Judged:
        rows = [row for row, t in enumerate(trajectories) if self.judges(t.task)]
        prompts: list[Sequence[int]] = [trajectories[row].prompt_ids for row in rows]
        if self.prompts is not None:
            with ranks.stop_together():
                told = self.prompts(algorithm, [trajectories[row] for row in rows])
            pairs = [(row, ids) for row, ids in zip(rows, told, strict=True) if ids is not None]
            rows, prompts = [row for row, _ in pairs], [ids for _, ids in pairs]
        chosen = [trajectories[row] for row in rows]
        own = collate(chosen, batch.mask.device)
        said = self.said(algorithm, own, own if self.prompts is None else with_prompts(chosen, prompts, own))
        return _in_batch(said, rows, batch.mask)

    def said(self, algorithm: Algorithm, own: TokenBatch, read: TokenBatch) -> Judged:
        """Return what the teacher says of trajectories, by default the log-probs of the sampled tokens. Every rank must
        call, also without trajectories.

        Args:
            algorithm: has the models.
            own: the trajectories after the student's prompts.
            read: the same responses after the prompts that the teacher reads.
        """
        if self.server is not None:
            with ranks.stop_together():
                logprobs = self.server.score(read)
        else:
            logprobs = algorithm.logprobs_of(self.model(algorithm), read)
        return Judged(aligned(logprobs, read, own), torch.ones(len(own.lengths), device=own.mask.device))

    def top(self, algorithm: Algorithm) -> TopTokens:
        """Return how many likeliest tokens are read (``support_size``), among those that teacher and policy have."""
        size = rows_of(algorithm.policy)
        if self.server is None:
            size = min(rows_of(self.model(algorithm)), size)
        return TopTokens(min(self.support_size, size), size, algorithm.temperature)

    def likeliest(self, algorithm: Algorithm, read: TokenBatch) -> tuple[TokenRows, TokenRows, TokenRows]:
        """Return the teacher's log-probs of the sampled tokens [n, 1], its likeliest tokens at each [n, k] int32, and
        their log-probs [n, k]. Every rank must call."""
        top = self.top(algorithm)
        if self.server is None:
            return top_of(algorithm, self.model(algorithm), read, top)
        with ranks.stop_together():
            return self.server.score_top(read, top.k, top.vocabulary)


def top_of(
    algorithm: Algorithm, model: PreTrainedModel, batch: TokenBatch, top: TopTokens
) -> tuple[TokenRows, TokenRows, TokenRows]:
    """Return a model's log-probs of the sampled tokens [n, 1], its k likeliest tokens at each [n, k] int32, and their
    log-probs [n, k]. Every rank must call."""

    def function(micro: TokenBatch, _: Sequence[int]) -> Tensor:
        at = positions(micro.mask)
        return output_head(model)(hidden_before(model, micro, at), top, (micro.input_ids[at],), algorithm.logits_chunk)

    found, k = algorithm.values_of(batch, function), top.k
    return found.columns(0, 1), found.columns(1 + k, None, torch.int32), found.columns(1, 1 + k)


def rows_of(model: PreTrainedModel) -> int:
    """Return the number of tokens of a model's output layer, padding included."""
    return output_head(model).out_features


def _in_batch(said: Judged, rows: Sequence[int], mask: Tensor) -> Judged:
    """Return what a teacher said of some rows, in the rows and columns of the whole batch with this mask [B, T]. Other
    rows have 0."""
    index = torch.tensor(rows, dtype=torch.int64, device=mask.device)
    counts = (mask != 0).sum(1).tolist()

    def placed(values: Any) -> Any:
        if isinstance(values, TokenRows):
            known = dict(zip(rows, values.by_row, strict=True))
            blank = (values.none.new_zeros((count, *values.none.shape[1:])) for count in counts)
            return TokenRows(tuple(known.get(row, other) for row, other in enumerate(blank)), values.none)
        if not isinstance(values, Tensor):
            return values
        found = values.new_zeros(mask.shape if values.dim() == 2 else len(mask))
        if rows and values.dim() == 2:
            found[index, : values.shape[1]] = values
        elif rows:
            found[index] = values
        return found

    return dataclasses.replace(said, **{f.name: placed(getattr(said, f.name)) for f in dataclasses.fields(said)})
