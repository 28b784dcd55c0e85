"""Self-teacher: the policy reads its responses after a prompt that also holds skills (docs/algorithms/sdar.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from common import ranks
from common.ranges import OpenUnitInterval
from common.schedules import Coefficient, is_zero
from lightning_modules.advantage_transforms.base import AdvantageTransform, Algorithm, RolloutBatch, validate_choice
from lightning_modules.advantage_transforms.teacher_prompts import after_prompts, check_lengths
from lightning_modules.advantage_transforms.teachers import SelfTeacher, TeacherWeights, averaging
from lightning_modules.advantage_transforms.turns import turn_numbers
from lightning_modules.batch import RowTensors
from lightning_modules.models.policy import DType
from rollout.protocols.base import PerTurnPrompts, sampled_turns
from rollout.protocols.text_protocol import control_tokens
from rollout.skills.injection import Injection, Skills
from rollout.skills.render import token_counter
from rollout.trajectory import Task, Trajectory

if TYPE_CHECKING:
    from rollout.skills.render import CountTokens


@dataclass(frozen=True, slots=True)
class SkillInputs(RowTensors):
    """The self-teacher's log-probs of the sampled tokens, and the numbers of their turns; [B, T], 0 where the mask is
    0."""

    skill_teacher_logprobs: Tensor  # of the sampled tokens after the prompt with skills
    turns: Tensor  # int64, the number of the token's turn from 1
    gate_mean: Tensor | None = None  # [B], the baseline of a centred gate, the same number in every row


class SkillTeacher(AdvantageTransform):
    """Base of transforms that learn from a self-teacher (``skill_signals.py``): the current, averaged or initial policy
    with skills (advice texts) in its prompt.

    The teacher never generates. It scores the student's response ids after the student's prompt with skills in the
    user's turn. The rollout system's protocol renders that prompt again, from the same task and turns, with the history
    that the student read. Skills are retrieved once per episode, by its first observation; ``skills`` may change that
    (``place``, ``every_turn``).

    Logged: ``train/skills_tokens`` (tokens that the skills add to a prompt).

    Args:
        skills: skills of the teacher's prompt, and how they are selected.
        teacher_weights: current (the policy as it is at the start of the iteration: as published), ema (their moving
            average) or fixed (the initial policy).
        ema_decay: of the moving average, per iteration.
        skills_coef: weight of the teacher's signal, a number or a ``Schedule``; with 0 no teacher runs.
    """

    def __init__(
        self,
        skills: Skills | None = None,
        teacher_weights: TeacherWeights = "current",
        ema_decay: OpenUnitInterval = 0.99,
        skills_coef: Coefficient = 0.01,
    ) -> None:
        if skills is None and not is_zero(skills_coef):
            raise ValueError("skills is null, but skills_coef is above 0; name skills, or set skills_coef to 0")
        self._skills, self.skills_coef = skills, skills_coef
        self.self_teacher = SelfTeacher(validate_choice("teacher_weights", teacher_weights, TeacherWeights), ema_decay)
        self._count: CountTokens | None = None

    @property
    def skills(self) -> Skills:
        if self._skills is None:
            raise ValueError("skills is null; give the teacher skills")
        return self._skills

    @property
    def learns(self) -> bool:
        return not is_zero(self.skills_coef)

    @property
    def adds_loss(self) -> bool:
        return self.learns and super().adds_loss

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"

    # ------------------------------------------------------------------ models
    def check(self, algorithm: Algorithm) -> None:
        self.check_single(algorithm, SkillTeacher, "take the signal of one self-teacher")
        averaging(algorithm)

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        """Refuse skills (advice texts) that are too long, tasks unknown to their retriever, and data modules without a
        protocol."""
        if not self.learns:
            return
        protocol = getattr(getattr(data, "rollouts", None), "protocol", None)
        if protocol is None:
            raise ValueError(
                f"{type(algorithm).__name__} renders the teacher's prompts with the rollout system's protocol, but "
                f"{type(data).__name__} has no rollout system; train with a RolloutDataModule"
            )
        self.self_teacher.check_strategy(algorithm)
        self._count = token_counter(protocol.tokenizer)
        self.skills.check(self._count, control_tokens(protocol.tokenizer))
        self.skills.check_tasks(getattr(data, "training_questions", ()))
        if getattr(data.rollouts, "program", None) is not None and self.skills.place != "before_template":
            raise ValueError(
                f"skills.place is {self.skills.place}, but a program writes the prompts, into which the teacher's "
                "skills cannot be inserted; expected place: before_template"
            )

    def frozen_models(self, algorithm: Algorithm) -> dict[str, tuple[str, DType]]:
        return self.self_teacher.frozen_models(algorithm) if self.learns else {}

    def build(self, algorithm: Algorithm) -> None:
        if self.learns:
            self.self_teacher.build(algorithm)

    # ------------------------------------------------------------------ log-probs of the teacher
    def transform(self, batch: RolloutBatch, advantages: Tensor) -> tuple[Tensor, SkillInputs | None]:
        if not self.learns:
            return advantages, None
        algorithm, trajectories, tokens = batch.algorithm, batch.trajectories, batch.tokens
        with ranks.stop_together():
            injections, prompts = self._prompts(algorithm, trajectories)
        score = partial(algorithm.logprobs_of, self.self_teacher.model(algorithm))
        teacher = after_prompts(score, prompts, trajectories, tokens)
        longer = sum(len(ids) - len(t.prompt_ids) for ids, t in zip(prompts, trajectories, strict=True))
        algorithm.metrics.mean("train/skills_tokens", longer, len(trajectories))
        self._update_retriever(trajectories, injections)
        return self.with_teacher(batch, advantages, SkillInputs(teacher, turn_numbers(trajectories, tokens)))

    def _prompts(
        self, algorithm: Algorithm, trajectories: Sequence[Trajectory]
    ) -> tuple[dict[str, Injection], list[Sequence[int]]]:
        """Return the skills (advice texts) chosen for each group, and the ids of the teacher's prompt for each row."""
        injections: dict[str, Injection] = {}
        prompts: list[Sequence[int]] = []
        for t in trajectories:
            if self.skills.every_turn or t.group not in injections:
                decode = algorithm.data.rollouts.protocol.decode
                text = decode(list(t.prompt_ids)) if self.skills.every_turn else t.task.question
                injections[t.group] = self._injection(t.task, text)
            prompts.append(self.prompt_with_skills(algorithm, t, injections[t.group].text))
        check_lengths(algorithm, prompts, trajectories, "skills", "skills.max_tokens")
        return injections, prompts

    def with_teacher(self, batch: RolloutBatch, advantages: Tensor, inputs: SkillInputs) -> tuple[Tensor, SkillInputs]:
        """Return the advantages and the inputs of ``loss``, once ``inputs`` holds the self-teacher's log-probs. By
        default both are unchanged. No gradient. Every rank must call."""
        return advantages, inputs

    def prompt_with_skills(self, algorithm: Algorithm, trajectory: Trajectory, skills: str) -> Sequence[int]:
        """Return the ids of the teacher's prompt, which contains ``skills``, for the response of a row or trajectory.

        Raises:
            ValueError: the student read a prompt that the protocol does not render.
        """
        protocol = algorithm.data.rollouts.protocol
        if self.skills.place == "before_template":
            before = protocol.tokenizer(f"{skills}\n\n", add_special_tokens=False)["input_ids"] if skills else []
            limit = algorithm.data.rollouts.budgets.max_prompt_tokens
            return [*before, *trajectory.prompt_ids][-limit if limit else None :]
        task = dataclasses.replace(trajectory.task, skills=skills)
        if trajectory.episode is None or trajectory.row is None:
            plain = protocol.prompt_ids(trajectory.task)
            with_skills = protocol.prompt_ids(task)
        else:
            assert isinstance(protocol, PerTurnPrompts)  # rows come from prompts that it has written
            turns = trajectory.episode.turns[: trajectory.row]
            calls = [call for call in trajectory.episode.calls if call.turn < trajectory.row]
            limit = algorithm.data.rollouts.budgets.max_prompt_tokens
            said = sampled_turns(trajectory.episode.response_ids, turns)
            read = protocol.turn_prompt(trajectory.task, turns, calls, limit, sampled=said)
            plain, with_skills = read.ids, protocol.turn_prompt(task, turns, calls, shown=read.shown, sampled=said).ids
        if tuple(plain) != trajectory.prompt_ids:
            raise ValueError(
                f"task {trajectory.task.id} was read by the policy otherwise than the protocol renders it, so the "
                "teacher's prompt cannot match; train on trajectories of this experiment's protocol"
            )
        return with_skills

    def _injection(self, task: Task, text: str) -> Injection:
        if self._count is None:
            raise RuntimeError("tokens cannot be counted before check_data; call check_data first")
        return self.skills.inject(task, text, self._count)

    def _update_retriever(self, trajectories: Sequence[Trajectory], injections: dict[str, Injection]) -> None:
        """Report the outcome of every episode to the skills' retriever: the reward part ``success``, else the
        reward."""
        episodes = {(t.group, t.index): t for t in trajectories}
        pairs = []
        for t in episodes.values():
            if t.reward is not None:
                pairs.append((injections[t.group].selection, t.reward.parts.get("success", t.reward.total)))
        retriever = self.skills.retriever
        retriever.update([pair for part in ranks.gather_objects(pairs) for pair in part])

    # ------------------------------------------------------------------ moving average and checkpoints
    def after_update(self, algorithm: Algorithm) -> None:
        self.self_teacher.after_update(algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._skills is not None:
            checkpoint["skills"] = self._skills.retriever.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._skills is not None and "skills" in checkpoint:
            self._skills.retriever.load_state_dict(checkpoint["skills"])
