"""Search QA as SDAR runs it (docs/algorithms/sdar.md): one search or answer a turn, a window of past turns."""

from __future__ import annotations

import re
from collections.abc import Mapping

from common.ranges import NonNegativeInt
from rollout.protocols.base import PromptMode
from rollout.protocols.episodes import EpisodeProtocol
from rollout.trajectory import Action, ActionKind, Task, ToolRequest

CORRECTION = (
    "That was neither a search nor an answer. Write one query between <search> and </search>, or the answer between "
    "<answer> and </answer>."
)
_CLOSING = re.compile(r"</(search|answer)>")


class SearchEpisodeProtocol(EpisodeProtocol):
    """``EpisodeProtocol`` with ``<search>`` and ``<answer>`` instead of actions.

    A turn ends at its first ``</search>`` or ``</answer>``. It is not well-formed if it opens both, or one twice; as in
    the released code, the search then counts before the answer. Prompts ask for thinking but do not require it. A turn
    with neither is INVALID and answered with a correction.

    Args:
        tokenizer: Hugging Face folder with a chat template.
        texts: see ``EpisodeProtocol``.
        window: number of past turns in each turn's prompt (published: 4); null: one conversation.
        correction: text that the model reads after a turn without a search or an answer.
        thinking: passed to the chat template as ``enable_thinking``; by default the template decides.
    """

    tools = ("search",)
    stop = ("</search>", "</answer>")

    def __init__(
        self,
        tokenizer: str,
        texts: str | dict[str, str] = "search",
        window: NonNegativeInt | None = 4,
        correction: str = CORRECTION,
        thinking: bool | None = None,
    ) -> None:
        super().__init__(tokenizer, texts, window, "search", require_thinking=False, thinking=thinking)
        self.correction = correction

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        said, ended = self.chat.without_end(text)
        closing = _CLOSING.search(said)
        said = said[: closing.end()] if closing else said
        found = {name: self._content(said, name) for name in ("search", "answer")}
        openings = said.count("<search>") + said.count("<answer>")
        fault = None if openings == 1 else f"{openings} openings of <search> and <answer>; expected one"
        if found["search"] is not None:
            return self._call(ToolRequest("search", {"query": found["search"]}), fault, ended)
        if found["answer"] is not None:
            return Action(ActionKind.ANSWER, answer=found["answer"], error=fault, well_formed=fault is None)
        return Action(ActionKind.INVALID, error=self.correction, ended=ended, well_formed=False)

    def _content(self, said: str, name: str) -> str | None:
        before, closed, _ = said.partition(f"</{name}>")
        _, opened, content = before.rpartition(f"<{name}>")
        return content.strip() if closed and opened else None

    def _acted(self, action: Action) -> str:
        return " ".join(f"<search>{call.arguments.get('query', '')}</search>" for call in action.calls)

    def _goal(self, task: Task) -> str:
        return task.question.strip()

    def _actions(self, facts: Mapping[str, object]) -> str:
        return ""
