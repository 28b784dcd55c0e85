"""OPSD, on-policy self-distillation: the teacher is the initial policy, which is told more (specs/sod.md 3 and 9)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_modules.sod import SOD, Mode

if TYPE_CHECKING:
    from rollout.trajectory import Task, Trajectory

Privilege = Literal["answer", "hint"]

TEMPLATES: dict[str, str] = {
    "answer": (
        "{question}\n\nOnly you are told that the correct final answer is: {answer}\nSolve it all the same as if you "
        "had to find it: reason in steps, use the tools where they help, and end with this answer."
    ),
    "hint": (
        "{question}\n\nOnly you are told this about the way to the solution: {hint}\nSolve it in your own words, use "
        "the tools where they help, and do not mention what you were told."
    ),
}


class OPSD(SOD):
    """SOD's signal from a teacher that is the initial policy itself, frozen, which reads the question with the answer
    or a hint in it. The response's ids stay as the student sampled them; only the prompt before them is another.

    The paper's baselines OPSD_gt and OPSD_hint are ``privilege: answer`` and ``hint``; their prompts are not published,
    so the texts are ours. Released OPSD matches whole distributions (full-vocabulary JSD); here, as in SOD, the sampled
    tokens' log-ratio is the signal, uniform by default.

    Args:
        policy: Hugging Face folder to start from, and of the teacher.
        privilege: what the teacher is told: answer (the task's first golden answer) or hint (``metadata["hint"]``).
        template: the teacher's question: a text with {question} and {answer} or {hint}; null for one of ours.
        opd_mode: what the signal of a step weighs, see ``SOD``.
    """

    def __init__(
        self,
        policy: str,
        privilege: Privilege = "answer",
        template: str | None = None,
        opd_mode: Mode = "uniform",
        **kwargs,
    ) -> None:
        super().__init__(policy=policy, teacher=policy, opd_mode=opd_mode, **kwargs)
        if privilege not in get_args(Privilege):
            raise ValueError(f"privilege is {privilege!r}; expected one of {', '.join(get_args(Privilege))}")
        self.privilege: Privilege = privilege
        self.template = TEMPLATES[privilege] if template is None else template
        for name in ("question", privilege):
            if f"{{{name}}}" not in self.template:
                raise ValueError(f"template: expected {{{name}}} where the task's {name} goes; found {self.template!r}")

    def check_data(self, data: Any) -> None:
        """Refuse questions about which there is nothing to tell the teacher, or whose prompt with it cannot be rendered
        (a hint that quotes a control token)."""
        super().check_data(data)
        if not self.distils:
            return
        protocol = getattr(getattr(data, "rollouts", None), "protocol", None)
        questions = getattr(data, "training_questions", None)
        if protocol is None or questions is None:
            raise ValueError(
                f"OPSD renders the teacher's prompts as the rollout system does, but {type(data).__name__} has none; "
                "train with a RolloutDataModule"
            )
        for task in questions:
            told = self.privileged(task)
            try:
                protocol.prompt_ids(told)
            except ValueError as error:
                raise ValueError(f"task {task.id} of {task.data_source}, told the {self.privilege}: {error}") from error

    def privileged(self, task: Task) -> Task:
        """The task as the teacher reads it: its question, and the last user message of its own prompt if it has one,
        put into the template.

        Raises:
            ValueError: the task has no such answer or hint.
        """
        told = self._told(task)

        def fill(question: str) -> str:  # in one pass: what stands in braces in a question stays as it is
            values = {"question": question, self.privilege: told}
            return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), self.template)

        messages = list(task.prompt)
        users = [i for i, (role, _) in enumerate(messages) if role == "user"]
        if users:
            messages[users[-1]] = ("user", fill(messages[users[-1]][1]))
        return dataclasses.replace(task, question=fill(task.question), prompt=tuple(messages))

    def _told(self, task: Task) -> str:
        found: Any = task.metadata.get("hint") if self.privilege == "hint" else next(iter(task.golden_answers), None)
        if not isinstance(found, str) or not found.strip():
            hint = self.privilege == "hint"
            where = 'metadata["hint"]' if hint else "a golden answer"
            way = "take files that have one" if hint else "leave programs out by data option abilities: [math, choice]"
            raise ValueError(
                f"privilege is {self.privilege}, but task {task.id} of {task.data_source} has none: expected a text as "
                f"{where}, found {found!r}; {way}, or tell the teacher something else"
            )
        return found

    def teacher_prompts(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        protocol = self.trainer.datamodule.rollouts.protocol
        prompts: dict[str, list[int]] = {}  # by group: one question each
        for t in trajectories:
            if t.row is not None:
                raise ValueError(
                    f"task {t.task.id}: every turn has a prompt of its own, which OPSD does not render; take window: "
                    "null, or SDAR with signal: reverse_kl and gate: none, which tells the teacher skills"
                )
            if t.group in prompts:
                continue
            if tuple(protocol.prompt_ids(t.task)) != t.prompt_ids:
                raise ValueError(
                    f"task {t.task.id} was read by the policy otherwise than the protocol renders it (an environment "
                    "that opens with an observation?); the teacher's prompt could not be made like it"
                )
            prompts[t.group] = protocol.prompt_ids(self.privileged(t.task))
        return [prompts[t.group] for t in trajectories]
