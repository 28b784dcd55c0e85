"""Skills for a prompt: bank, retriever, budget and form, as YAML declares them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from common.ranges import PositiveInt
from rollout.skills.bank import Selection
from rollout.skills.reading import read_bank
from rollout.skills.render import CountTokens, Form, render, too_long
from rollout.skills.retrieval import SkillRetriever
from rollout.trajectory import Task

HEADER = "What is known to work here:"
Place = Literal["user_turn", "before_template"]


@dataclass(frozen=True, slots=True)
class Injection:
    """Skills (advice texts) rendered for one prompt. ``text`` is empty if no skill was selected."""

    text: str
    selection: Selection
    tokens: int  # of ``text``


class Skills:
    """Chooses and renders advice texts of a skill bank for the prompt of a teacher, or of the agent itself.

    ::

        skills:
          bank: household
          retriever: {class_path: rollout.skills.retrieval.Keyword}
          max_tokens: 1500

    Args:
        bank: name of a built-in bank (``household``, ``household_tiny``, ``recipes_tiny``, ``shopping``,
            ``shopping_tiny``, ``search``), a ``.json`` file in SkillRL's form, or a folder of Markdown in SDAR's form.
        retriever: chooses the skills of a task.
        max_tokens: limit of the text, header included. It adds to the student's prompt, which is not cut.
        form: see ``rollout/skills/render.py``.
        header: first line of the text; empty for no header. (SDAR as released: "[Privileged Skill Information]".)
        place: position in a teacher's prompt. ``user_turn``: in the user's turn. ``before_template``: as SDAR released
            it, before the first token of the chat template, outside of any role. There a prompt longer than the
            student's may be is cut at the left, so skills are lost first.
        every_turn: choose again for every turn with its own prompt, by the whole prompt (as released), instead of once
            for an episode by its first observation.

    Raises:
        ValueError: the bank cannot be used, or not with this retriever; ``every_turn`` with a retriever that learns
            from episodes.
    """

    def __init__(
        self,
        bank: str,
        retriever: SkillRetriever,
        max_tokens: PositiveInt = 2048,
        form: Form = "released",
        header: str = HEADER,
        place: Place = "user_turn",
        every_turn: bool = False,
    ) -> None:
        self.name, self.bank = bank, read_bank(bank)
        self.retriever = retriever
        retriever.bind(self.bank)
        self.max_tokens = max_tokens
        self.form: Form = form
        self.header = header
        self.place: Place = place
        self.every_turn = every_turn
        if every_turn and retriever.learns:
            raise ValueError(
                f"{type(retriever).__name__} learns from episodes, but every_turn chooses for turns; set it to false"
            )

    def __repr__(self) -> str:
        retriever = type(self.retriever).__name__
        return f"Skills({self.name!r}, {retriever}, max_tokens={self.max_tokens}, form={self.form!r})"

    def inject(self, task: Task, text: str, count: CountTokens) -> Injection:
        """Return the skills (advice texts) chosen and rendered for ``task``. ``text``: the first prompt or observation.

        Args:
            count: counts tokens with the tokenizer of the reading model (``render.token_counter``).

        Raises:
            ValueError: the skills do not fit ``max_tokens``, or the retriever does not know the task.
        """
        selection = self.retriever.select(task, text)
        text, tokens = self._render(selection, count)
        return Injection(text, selection, tokens)

    def check(self, count: CountTokens, control_tokens: Sequence[str] = ()) -> None:
        """Check, before a model loads, that skills fit ``max_tokens`` and contain no control token of the tokenizer.
        Raises ValueError as ``inject`` does.

        Args:
            control_tokens: tokens that would end or open a turn of the chat; the protocol refuses a prompt with one of
                them.
        """
        entries = ((location, "\n".join(dataclasses.astuple(entry))) for location, entry in self.bank.entries())
        texts = [("header", self.header), *entries]
        for location, text in texts:
            if quoted := [token for token in control_tokens if token in text]:
                raise ValueError(
                    f"skill bank {self.name!r}, {location}: it quotes {quoted[0]!r}, a control token of the tokenizer, "
                    "which would end or open a turn of the chat; expected plain text: write it differently there"
                )
        for selection in self.retriever.possible():
            self._render(selection, count)

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Raise ValueError for the first task for which the retriever has no skills. Computes no selection."""
        for task in tasks:
            self.retriever.check_task(task)

    def _render(self, selection: Selection, count: CountTokens) -> tuple[str, int]:
        """Return the selected skills as prompt text, and its number of tokens."""
        text = render(selection, self.form, self.header)
        tokens = count(text)
        if tokens > self.max_tokens:
            raise too_long(selection, self.form, tokens, self.max_tokens, count)
        return text, tokens
