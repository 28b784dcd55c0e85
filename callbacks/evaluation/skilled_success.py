"""Measures how well a policy does with skills in its prompt that it normally does not see."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import lightning as L

from callbacks.evaluation.evaluation import add_metrics
from callbacks.evaluation.statistics import bootstrap_interval
from callbacks.evaluation_hooks import EvaluationHooks
from callbacks.evaluation_rows import AGENT, row_of
from callbacks.trainer import data_module
from common.ranks import gather_lists
from rollout.protocols.text_protocol import control_tokens
from rollout.skills.injection import Skills
from rollout.skills.render import token_counter
from rollout.trajectory import Task, Trajectory

METRIC = "with_skills"


class SkilledSuccess(EvaluationHooks):
    """Repeats the tasks of each validation and test with skills (advice texts) in the prompt, and logs the success
    rate. The rate (share of right outcomes, ``EvaluationRow.accuracy``) is named ``with_skills``, also in
    ``evaluation.json``.

    If SDAR's self-teacher uses the current weights, this is the teacher's success. A policy that has unlearned to read
    its skills shows here, not in its loss.

    Args:
        skills: skills for the user's turn, in place of those of the rollout system.

    Raises:
        ValueError: skills with a retriever that learns; the teacher has its own.
    """

    def __init__(self, skills: Skills) -> None:
        if skills.retriever.learns:
            raise ValueError(
                f"SkilledSuccess chooses by a rule; {type(skills.retriever).__name__} learns: take another"
            )
        self.skills = skills
        self._tasks: dict[str, Task] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.accept_data(data_module(trainer))

    def accept_data(self, data: Any) -> None:
        """Refuse a data module without a rollout system, and skills (advice texts) that do not fit its tokenizer. The
        data module calls this before a model loads."""
        if getattr(data, "rollouts", None) is None:
            raise ValueError(
                "SkilledSuccess puts tasks to the model once more, which takes a rollout system; found none"
            )
        tokenizer = data.rollouts.protocol.tokenizer
        self.skills.check(token_counter(tokenizer), control_tokens(tokenizer))

    def begin(self, split: str) -> None:
        self._tasks = {}

    def take(self, split: str, prompt_mode: str, trajectories: Sequence[Trajectory]) -> None:
        if prompt_mode == AGENT:
            self._tasks |= {t.task.id: t.task for t in trajectories}

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        if trainer.sanity_checking:
            return
        data = data_module(trainer)
        count = token_counter(data.rollouts.protocol.tokenizer)
        advised = [
            dataclasses.replace(task, skills=self.skills.inject(task, task.question, count).text)
            for task in self._tasks.values()
        ]
        # its own skills, if it has any, would take the place of these
        sampled = data.sample(split, advised, METRIC, inject_skills=False)
        judged = [row_of(t, AGENT).accuracy for t in sampled]
        metrics = {METRIC: bootstrap_interval([a for a in gather_lists(judged) if a is not None])}
        add_metrics(trainer, pl_module, split, metrics, METRIC)
