"""The policy as its own teacher: the same tokens after a prompt that also holds skills (specs/sdar.md 1.1 and 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from lightning_modules import ranks
from lightning_modules.batch import TokenBatch
from lightning_modules.episode_grpo import EpisodeGRPO, turn_numbers
from lightning_modules.grpo import GRPONotes
from lightning_modules.policy import load_frozen_lm
from lightning_modules.scoring import Scores
from rollout.protocols.base import WindowedProtocol
from rollout.protocols.text import control_tokens
from rollout.skills.injection import Injection, Skills
from rollout.skills.render import token_counter
from rollout.trajectory import Task, Trajectory

if TYPE_CHECKING:
    from rollout.skills.render import CountTokens

TeacherWeights = Literal["current", "ema", "fixed"]


@dataclass(frozen=True, slots=True)
class SkillNotes(GRPONotes):
    """GRPO's, and what the self-teacher says; [B, T], 0 where the mask is 0."""

    skilled_logprobs: Tensor  # of the sampled tokens after the prompt with skills
    turns: Tensor  # int64, the number of the token's turn from 1
    centre: Tensor | None  # [B], the same number in every row: what a centred gate is reduced by


class SkillTaught(EpisodeGRPO):
    """EpisodeGRPO with a self-teacher; subclasses say what its log-probs are for.

    The teacher never generates. It reads the student's own response ids after the student's prompt with skills in the
    user's turn; the prompt is rendered again by the rollout system's protocol, from the same task and steps, with as
    much history as the student was shown. Skills are retrieved once for each episode, by its opening.

    Logged: ``train/skills_tokens`` (of a teacher's prompt, more than the student's), ``train/skills_left_out``.

    Args:
        policy: Hugging Face folder to start from.
        skills: what the teacher is told, and the rule by which.
        teacher_weights: current (the policy as it is at the start of the iteration: as published), ema (their moving
            average) or fixed (the initial policy).
        ema_decay: of the moving average, per iteration.
        skills_coef: weight of what the teacher adds; 0: it is never asked, and this is EpisodeGRPO.
    """

    def __init__(
        self,
        policy: str,
        skills: Skills | None = None,
        teacher_weights: TeacherWeights = "current",
        ema_decay: float = 0.99,
        skills_coef: float = 0.01,
        **kwargs,
    ) -> None:
        super().__init__(policy=policy, **kwargs)
        if teacher_weights not in get_args(TeacherWeights):
            raise ValueError(f"teacher_weights is {teacher_weights!r}; expected one of {get_args(TeacherWeights)}")
        if not 0 < ema_decay < 1:
            raise ValueError(f"ema_decay is {ema_decay}; expected a number between 0 and 1")
        if teacher_weights == "fixed" and self.teacher_path not in (None, policy):
            raise ValueError(
                f"teacher_weights is fixed, the initial policy {policy}, but reference is another model: "
                f"{self.teacher_path}; expected the same, so that one copy serves both"
            )
        if skills_coef < 0:
            raise ValueError(f"skills_coef is {skills_coef}; expected 0 or more")
        if skills is None and skills_coef > 0:
            raise ValueError("skills is null, but skills_coef is above 0; say what the teacher is told, or set it to 0")
        self.skills, self.skills_coef = skills, skills_coef
        self.teacher_weights, self.ema_decay = teacher_weights, ema_decay
        self.average: nn.Module | None = None  # built in build_models
        self.save_hyperparameters({"skills": repr(skills)})  # checkpoints hold plain types only
        self._count: CountTokens | None = None

    @property
    def is_taught(self) -> bool:
        return self.skills_coef > 0

    # ------------------------------------------------------------------ models
    def check_data(self, data: Any) -> None:
        """Refuse skills that do not fit, tasks that the retriever does not know, and a data module that does not render
        prompts."""
        super().check_data(data)
        if not self.is_taught:
            return
        protocol = getattr(getattr(data, "rollouts", None), "protocol", None)
        if protocol is None:
            raise ValueError(
                f"{type(self).__name__} renders the teacher's prompts as the rollout system does, but "
                f"{type(data).__name__} has none; train with a RolloutDataModule"
            )
        if self.teacher_weights == "ema" and isinstance(self.trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "teacher_weights: ema keeps a whole float32 average, which DeepSpeed would cast to its own type and "
                "leave out of its checkpoints; take current or fixed, or a strategy without DeepSpeed"
            )
        self._count = token_counter(protocol.tokenizer)
        tokens = control_tokens(protocol.tokenizer)
        self.skills.check(self._count, tokens)  # type: ignore[union-attr]  # checked in __init__
        self.skills.check_tasks(getattr(data, "training_questions", ()))  # type: ignore[union-attr]

    def build_models(self) -> None:
        super().build_models()
        if self.is_taught and self.teacher_weights == "fixed" and self.teacher is None:
            self.teacher = self.load_teacher(self.policy_path)
        if self.is_taught and self.teacher_weights == "ema":
            self.average = load_frozen_lm(self.policy_path, "float32", self.attention)

    def teacher_logprobs(self, trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor | None:
        """Those of the reference, for the KL; the self-teacher is asked in ``annotate``."""
        return super().teacher_logprobs(trajectories, batch) if self.kl_coef > 0 else None

    # ------------------------------------------------------------------ what the teacher says
    def annotate(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> GRPONotes:
        notes = super().annotate(trajectories, batch, scores)
        if not self.is_taught:
            return notes
        with ranks.stop_together():
            told, prompts = self._prompts(trajectories)
        model = {"current": self.policy, "ema": self.average, "fixed": self.teacher}[self.teacher_weights]
        skilled = self.read_after(prompts, trajectories, batch, lambda read: self.logprobs_of(model, read))
        longer = sum(len(ids) - len(t.prompt_ids) for ids, t in zip(prompts, trajectories, strict=True))
        self.metrics.mean("train/skills_tokens", longer, len(trajectories))
        self.metrics.mean("train/skills_left_out", sum(one.left_out for one in told.values()), len(told))
        self._learn_retrieval(trajectories, told)
        fields = {field.name: getattr(notes, field.name) for field in dataclasses.fields(GRPONotes)}
        return self.taught(
            SkillNotes(**fields, skilled_logprobs=skilled, turns=turn_numbers(trajectories, batch), centre=None),
            batch,
            scores,
        )

    def _prompts(self, trajectories: Sequence[Trajectory]) -> tuple[dict[str, Injection], list[Sequence[int]]]:
        """What the teacher is told, by group, and what it reads, by row."""
        told: dict[str, Injection] = {}
        for t in trajectories:
            if t.group not in told:
                told[t.group] = self._injection(t.task)
        prompts = [self.skilled_prompt(t, told[t.group].text) for t in trajectories]
        self._check_lengths(prompts, trajectories)
        return told, prompts

    def taught(self, notes: SkillNotes, batch: TokenBatch, scores: Scores) -> SkillNotes:
        """What a subclass makes of the teacher's log-probs before the update. No gradient. Every rank must call."""
        return notes

    def skilled_prompt(self, trajectory: Trajectory, skills: str) -> Sequence[int]:
        """Ids of the prompt that the teacher reads before the response of a row or trajectory.

        Raises:
            ValueError: the student has read a prompt that the protocol does not render.
        """
        protocol = self.trainer.datamodule.rollouts.protocol
        task = dataclasses.replace(trajectory.task, skills=skills)
        if trajectory.episode is None or trajectory.row is None:
            plain = protocol.prompt_ids(trajectory.task)
            told = protocol.prompt_ids(task)
        else:
            assert isinstance(protocol, WindowedProtocol)  # rows come from prompts that it has written
            turns = trajectory.episode.turns[: trajectory.row]
            calls = [call for call in trajectory.episode.calls if call.turn < trajectory.row]
            limit = self.trainer.datamodule.rollouts.budgets.max_prompt_tokens
            read = protocol.turn_prompt(trajectory.task, turns, calls, limit)
            plain, told = read.ids, protocol.turn_prompt(task, turns, calls, shown=read.shown).ids
        if tuple(plain) != trajectory.prompt_ids:
            raise ValueError(
                f"task {trajectory.task.id} was read by the policy otherwise than the protocol renders it, so that the "
                "teacher's prompt could not be made like it; train on trajectories of this experiment's own protocol"
            )
        return told

    def _injection(self, task: Task) -> Injection:
        return self.skills.inject(task, task.question, self._count)  # type: ignore[union-attr,arg-type]

    def _check_lengths(self, prompts: Sequence[Sequence[int]], trajectories: Sequence[Trajectory]) -> None:
        known = getattr(getattr(self.policy, "config", None), "max_position_embeddings", None)
        longest = max((len(p) + len(t.response_ids) for p, t in zip(prompts, trajectories, strict=True)), default=0)
        if known is not None and longest > known:
            raise ValueError(
                f"with skills the teacher reads {longest} tokens, but the model has positions for {known}; lower "
                "skills.max_tokens (on_overflow: drop leaves out whole skills), or the rollouts' max_length"
            )

    def _learn_retrieval(self, trajectories: Sequence[Trajectory], told: dict[str, Injection]) -> None:
        """Tell the retriever what became of the episodes, over all ranks: success where the environment says so, else
        the reward."""
        episodes = {(t.group, t.index): t for t in trajectories}
        pairs = []
        for t in episodes.values():
            if t.reward is not None:
                pairs.append((told[t.group].selection, t.reward.parts.get("success", t.reward.total)))
        retriever = self.skills.retriever  # type: ignore[union-attr]
        retriever.update([pair for part in ranks.gather_objects(pairs) for pair in part])

    # ------------------------------------------------------------------ what moves and what is kept
    def update(self, batch: TokenBatch, notes: Any, places: Sequence[int]) -> None:
        super().update(batch, notes, places)
        if self.average is not None:
            with torch.no_grad():
                for name, now in self.policy_weights():  # merged under LoRA: the product of two means is no mean
                    self.average.get_parameter(name).lerp_(now.float(), 1.0 - self.ema_decay)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.skills is not None:
            checkpoint["skills"] = self.skills.retriever.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.skills is not None and "skills" in checkpoint:
            self.skills.retriever.load_state_dict(checkpoint["skills"])
