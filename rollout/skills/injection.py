"""Skills for a prompt, as an experiment's YAML declares them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout.skills.reading import read_bank
from rollout.skills.render import Budget, CountTokens, Form, Overflow, Rendered, render
from rollout.skills.retrieval import SkillRetriever
from rollout.skills.selection import Selection
from rollout.trajectory import Task

HEADER = "What is known to work here:"


@dataclass(frozen=True, slots=True)
class Injection:
    """What one prompt gets. ``text`` is empty where nothing was selected."""

    text: str
    selection: Selection
    tokens: int  # of ``text``
    left_out: int  # skills and mistakes that the budget had no room for; to be logged


class Skills:
    """Skills for the prompt of a teacher, or of the agent itself.

    ::

        skills:
          bank: household
          retriever: {class_path: rollout.skills.retrieval.Keyword}
          max_tokens: 1500

    Args:
        bank: the name of one of our banks (``household``, ``household_tiny``, ``shopping``, ``shopping_tiny``,
            ``search``), a ``.json`` file in SkillRL's form, or a folder of Markdown in SDAR's.
        retriever: which skills a task gets.
        max_tokens: of the text, header included. Beyond what the student's prompt has: nothing else is cut for it.
        on_overflow: ``error``, or ``drop``: whole skills are left out from the end, and counted.
        form: see ``rollout/skills/render.py``.
        header: the text's first line; empty for none. (SDAR as released: "[Privileged Skill Information]".)
        mistakes: how many of the bank's mistakes stand after the skills (SkillRL: 5; SDAR: none).

    Raises:
        ValueError: the bank cannot be used, or not with this retriever; ``max_tokens`` or ``mistakes`` is impossible.
    """

    def __init__(
        self,
        bank: str,
        retriever: SkillRetriever,
        max_tokens: int = 2048,
        on_overflow: Overflow = "error",
        form: Form = "released",
        header: str = HEADER,
        mistakes: int = 0,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; expected at least 1 (for no skills: retriever NoSkills)")
        self.name, self.bank = bank, read_bank(bank)
        if not 0 <= mistakes <= len(self.bank.mistakes):
            raise ValueError(f"mistakes is {mistakes}; the skill bank {bank!r} holds {len(self.bank.mistakes)}")
        self.retriever = retriever
        retriever.bind(self.bank)
        self.max_tokens, self.on_overflow, self.form = max_tokens, on_overflow, form
        self.header, self.mistakes = header, self.bank.mistakes[:mistakes]

    def __repr__(self) -> str:
        retriever = type(self.retriever).__name__
        return f"Skills({self.name!r}, {retriever}, max_tokens={self.max_tokens}, form={self.form!r})"

    def inject(self, task: Task, text: str, count: CountTokens) -> Injection:
        """The skills for ``task``, which opens with ``text``.

        Args:
            count: tokens of a text, by the tokenizer of the model that will read it (``render.token_counter``).

        Raises:
            ValueError: they do not fit ``max_tokens`` and ``on_overflow`` is ``error``, or the retriever does not know
                the task.
        """
        selection = self.retriever.select(task, text)
        rendered = self._render(selection, count)
        return Injection(rendered.text, selection, rendered.tokens, rendered.left_out)

    def check(self, count: CountTokens, control_tokens: Sequence[str] = ()) -> int:
        """Try what the retriever can select against ``max_tokens``, and all texts against what would end or open a turn
        of the chat, before a model loads. Returns the most entries that will be left out; ValueError as in ``inject``.

        Args:
            control_tokens: of the tokenizer; the protocol refuses a prompt with one of them.
        """
        entries = ((place, "\n".join(dataclasses.astuple(entry))) for place, entry in self.bank.entries())
        texts = [("header", self.header), *entries]
        for place, text in texts:
            if quoted := [token for token in control_tokens if token in text]:
                raise ValueError(
                    f"skill bank {self.name!r}, {place}: it quotes {quoted[0]!r}, a control token of the tokenizer, "
                    "which would end or open a turn of the chat; expected plain text: write it differently there"
                )
        return max(self._render(selection, count).left_out for selection in self.retriever.possible())

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Raises ValueError for the first task for which the retriever knows no skills; computes no selection."""
        for task in tasks:
            self.retriever.check_task(task)

    def _render(self, selection: Selection, count: CountTokens) -> Rendered:
        budget = Budget(self.max_tokens, count, self.on_overflow)
        mistakes = self.mistakes if selection.skills else ()
        return render(selection, budget, form=self.form, mistakes=mistakes, header=self.header)
