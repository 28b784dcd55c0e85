"""Search-R1's protocol: <think>, <search>, <information>, <answer> as plain text in one assistant turn.

Source of the format: PeterGriffinJin/Search-R1, search_r1/llm_agent/generation.py. Differences: real stop strings
instead of cutting later; sampled ids are never changed; a long observation loses document text, never its closing tag;
EOS and empty queries have defined results.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from rollout.protocols.base import PromptMode
from rollout.protocols.text_protocol import DATASET, TextProtocol, read_template
from rollout.trajectory import Action, ActionKind, Task, ToolRequest, ToolResult

# Search-R1's instruction in our words. Checkpoints trained on the published wording need that wording: Search-R1's
# question files have it, and ``template: dataset`` takes it from there.
INSTRUCTION = (
    "Your task is to answer the question at the end. Each time you receive new information, begin by reasoning about "
    "it between <think> and </think>. When your reasoning shows that you lack knowledge, call the search engine by "
    "writing <search> your query </search>; the best passages it finds will then be shown between <information> and "
    "</information>. You may search as often as you need. As soon as you need no further knowledge, write just the "
    "answer between <answer> and </answer>, without a detailed explanation. For example: <answer> Beijing </answer>. "
    "Question: {question}\n"
)
TEMPLATES = {"search_r1": INSTRUCTION, "short": "Question: {question}"}

CORRECTION = (
    "\nThat was neither a search nor an answer. To search, I must write the query between <search> and </search>. To "
    "finish, I must write the answer between <answer> and </answer>. I will try again.\n"
)

OPEN, CLOSE = "<information>", "</information>\n\n"
_TAG = re.compile(r"<(/?)(search|answer)>")


class SearchR1Protocol(TextProtocol):
    """Writes prompts and observations, and reads actions, in Search-R1's format with the tokenizer of one model.

    Args:
        tokenizer: Hugging Face folder. Its chat template is used, with the generation prompt; without a chat template
            the prompt is the bare text.
        template: ``search_r1`` (the full instruction, in our words), ``short`` ("Question: ...", for tiny models
            trained on it), a file with your own text, or the text itself; it must have ``{question}``. Or a question
            file (.parquet), whose wording serves questions without a prompt; or ``dataset``: the messages of the task's
            ``prompt``, word by word.
        eos_ends: meaning of a turn that ends with EOS without an action. False: it is invalid, the model reads the
            correction and the trajectory goes on (as in Search-R1). True: the trajectory ends there.
        correction: text that the model reads after an invalid turn.
        opening_tag: the opening tag where an action begins, if there are several. last: tags that the model only
            mentions before it are not content. first: as released (generation.py, postprocess_predictions), for
            checkpoints trained with it.

    Raises:
        ValueError: the template is neither a name, a file nor a text with ``{question}``, or the folder has no
            tokenizer or one without EOS.
    """

    tools = ("search",)
    stop = ("</search>", "</answer>")
    block = OPEN, CLOSE

    def __init__(
        self,
        tokenizer: str,
        template: str = "search_r1",
        eos_ends: bool = False,
        correction: str = CORRECTION,
        opening_tag: Literal["last", "first"] = "last",
    ) -> None:
        super().__init__(tokenizer, eos_ends)
        self.opening_tag = opening_tag
        self.template = DATASET if template == DATASET else read_template(template, TEMPLATES)
        self.ends_with_question_mark = template != "short"
        self.correction = correction

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        """Return the first complete action (search or answer) in the text of one turn.

        An action is complete at a closing tag after its opening tag. Its content starts after the last such opening
        tag, or the first, by ``opening_tag``. An empty query is a CALL (the tool refuses it without a request), an
        empty answer is an ANSWER (it scores 0). In GOLD_DIRECT the prompt has opened ``<answer>``, so the text up to
        ``</answer>`` is the answer.
        """
        opened: dict[str, int] = {"answer": 0} if mode is PromptMode.GOLD_DIRECT else {}
        for tag in _TAG.finditer(text):
            closing, name = tag.groups()
            if not closing:
                opened[name] = opened.get(name, tag.end()) if self.opening_tag == "first" else tag.end()
            elif name in opened:
                content = text[opened[name] : tag.start()].strip()
                if name == "answer":
                    return Action(ActionKind.ANSWER, answer=content)
                return Action(ActionKind.CALL, calls=(ToolRequest("search", {"query": content}),))
        found = f"unclosed <{'>, <'.join(opened)}>" if opened else "no tag of a search or an answer"
        return Action(ActionKind.INVALID, error=found)

    def observation_ids(self, action: Action, results: Sequence[ToolResult], budget: int) -> tuple[list[int], bool]:
        """Return the token ids of the ``<information>`` block, or of the correction after an INVALID action, and
        whether text was cut.

        A long block loses the end of the documents; the tags stay. Returns ``([], True)`` if the tags do not fit.
        """
        if action.kind is ActionKind.INVALID:
            ids = self._ids(self.correction)
            return (ids, False) if len(ids) <= budget else ([], True)
        body = "\n".join(result.text.strip() for result in results)
        return self._block("\n\n" + OPEN, body, CLOSE, budget)

    def _messages(self, task: Task) -> list[dict[str, str]]:
        if self.template == DATASET:
            return self._dataset_messages(task, otherwise="search_r1")
        return [{"role": "user", "content": self.template.replace("{question}", self._question(task))}]

    def _question(self, task: Task) -> str:
        question = super()._question(task)
        if self.ends_with_question_mark and not question.endswith((".", "!", "?")):
            question += "?"
        return question
