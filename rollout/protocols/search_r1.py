"""Search-R1's protocol: <think>, <search>, <information>, <answer> as plain text in one assistant turn.

Source of the format: PeterGriffinJin/Search-R1, search_r1/llm_agent/generation.py. Mended here: real stop strings
instead of sampling on and cutting; sampled ids kept as they are; an observation that is too long loses document text,
never its closing tag; EOS and empty queries are decided, not accidental.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.protocols.base import PromptMode
from rollout.tokenizer import load_tokenizer
from rollout.tools.search import format_passages
from rollout.trajectory import Action, ActionKind, Task, ToolRequest, ToolResult

# The meaning of Search-R1's instruction in our own words. Checkpoints trained on the published wording need exactly
# that wording: Search-R1's question files carry it, ``template: dataset`` takes it from there.
INSTRUCTION = (
    "Your task is to answer the question at the end. Each time you receive new information, begin by reasoning about "
    "it between <think> and </think>. When your reasoning shows that you lack knowledge, call the search engine by "
    "writing <search> your query </search>; the best passages it finds will then be shown between <information> and "
    "</information>. You may search as often as you need. As soon as you need no further knowledge, write just the "
    "answer between <answer> and </answer>, without a detailed explanation. For example: <answer> Beijing </answer>. "
    "Question: {question}\n"
)
TEMPLATES = {"search_r1": INSTRUCTION, "short": "Question: {question}"}
DATASET = "dataset"

CORRECTION = (
    "\nThat was neither a search nor an answer. To search, I must write the query between <search> and </search>. To "
    "finish, I must write the answer between <answer> and </answer>. I will try again.\n"
)

OPEN, CLOSE = "<information>", "</information>\n\n"
_TAG = re.compile(r"<(/?)(search|answer)>")


class SearchR1Protocol:
    """Prompts, actions and observations of Search-R1 with the tokenizer of one model.

    Args:
        tokenizer: Hugging Face folder. Its chat template is used, with the generation prompt; without a chat template
            the prompt is the bare text.
        template: ``search_r1`` (the full instruction, in our words), ``short`` ("Question: ...", for tiny models that
            were trained on it), a file with your own text, or the text itself. Must hold ``{question}``. Or
            ``dataset``: the messages of the task's own ``prompt``, word by word.
        eos_ends: what a turn means that ends with EOS without an action. False: it is invalid, the model reads the
            correction and the trajectory goes on (as in Search-R1). True: the trajectory ends there.
        correction: what the model reads after an invalid turn.

    Raises:
        ValueError: if the template is neither a name nor a file nor a text with ``{question}``, or the folder holds no
            tokenizer or one without EOS.
    """

    stop = ("</search>", "</answer>")

    def __init__(
        self, tokenizer: str, template: str = "search_r1", eos_ends: bool = False, correction: str = CORRECTION
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self.template = DATASET if template == DATASET else read_template(template)
        self.ends_with_question_mark = template != "short"
        self.eos_ends, self.correction = eos_ends, correction
        self.stop_token_ids = eos_token_ids(tokenizer, self.tokenizer)
        self._control_tokens = control_tokens(self.tokenizer)

    def prompt_ids(self, task: Task, mode: PromptMode = PromptMode.AGENT) -> list[int]:
        """[P] ids of chat template, instruction and question; for ARCap's gold modes also the passages as the
        beginning of the assistant's turn, and for GOLD_DIRECT an opened ``<answer>``, which leaves no room to think.

        Raises ValueError if the question is empty, a gold mode meets a task without gold passages, the template is
        ``dataset`` and the task has no prompt, or what is shown of the task quotes a control token: the chat
        template's own must become ids, a quoted one must not.
        """
        text = self._chat(self._messages(task))
        if mode in (PromptMode.GOLD_DIRECT, PromptMode.GOLD_THINK):
            if not task.gold_passages:
                raise ValueError(f"task {task.id}: mode {mode} needs gold passages, and the task has none")
            passages = format_passages(task.gold_passages).strip()
            self._refuse_control_tokens(task, "a gold passage", passages)
            text += OPEN + passages + CLOSE
            text += "<answer>" if mode is PromptMode.GOLD_DIRECT else ""
        return self._ids(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids, special tokens kept."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        """The first complete action in the text of one turn.

        An action is complete at a closing tag whose opening tag came before it; it holds what follows the last such
        opening tag, so that tags which the model merely mentions are not read as content. An empty query is a CALL
        (the tool refuses it without asking the server), an empty answer is an ANSWER (it scores 0). In GOLD_DIRECT
        the prompt has opened ``<answer>``, so the text up to ``</answer>`` is the answer.
        """
        opened: dict[str, int] = {"answer": 0} if mode is PromptMode.GOLD_DIRECT else {}
        for tag in _TAG.finditer(text):
            closing, name = tag.groups()
            if not closing:
                opened[name] = tag.end()
            elif name in opened:
                content = text[opened[name] : tag.start()].strip()
                if name == "answer":
                    return Action(ActionKind.ANSWER, answer=content)
                return Action(ActionKind.CALL, calls=(ToolRequest("search", {"query": content}),))
        found = f"unclosed <{'>, <'.join(opened)}>" if opened else "no tag of a search or an answer"
        return Action(ActionKind.INVALID, error=found)

    def observation_ids(self, action: Action, results: Sequence[ToolResult], budget: int) -> tuple[list[int], bool]:
        """Ids of the ``<information>`` block, or of the correction after an INVALID action, and whether text was cut.

        What does not fit loses the end of the documents; the tags stay. ``([], True)`` if not even they fit.
        """
        if action.kind is ActionKind.INVALID:
            ids = self._ids(self.correction, plain=True)
            return (ids, False) if len(ids) <= budget else ([], True)
        body = "\n\n" + OPEN + "\n".join(result.text.strip() for result in results)
        ids = self._ids(body + CLOSE, plain=True)
        if len(ids) <= budget:
            return ids, False
        tail = self._ids(CLOSE, plain=True)
        head = self._ids(body, plain=True)[: max(budget - len(tail), 0)]
        for _ in range(3):  # a character has at most four bytes, so at most three tokens of a broken one are left
            if head and self.decode(head[-4:]).endswith("\ufffd"):
                head.pop()
        # Where one token spans the opening tag and the first letters of the text, the tag may need more than its own.
        return (head + tail, True) if self.decode(head).startswith("\n\n" + OPEN) else ([], True)

    def _messages(self, task: Task) -> list[dict[str, str]]:
        if self.template != DATASET:
            return [{"role": "user", "content": self.template.replace("{question}", self._question(task))}]
        roles = [role for role, _ in task.prompt]
        if not roles or roles[-1] != "user" or (len(roles) > 1 and not self.tokenizer.chat_template):
            expected = "messages that end with the user's" if self.tokenizer.chat_template else "one user message"
            raise ValueError(
                f"task {task.id}: the prompt template is 'dataset', which takes the task's own prompt; expected "
                f"{expected}, found {'those of ' + ', '.join(roles) if roles else 'none'}. Take question files with a "
                "column 'prompt', a list of {role, content} (Search-R1's have it), or another template: search_r1"
            )
        for _, content in task.prompt:
            self._refuse_control_tokens(task, "the prompt", content)
        return [{"role": role, "content": content} for role, content in task.prompt]

    def _question(self, task: Task) -> str:
        question = task.question.strip()
        if not question:
            raise ValueError(f"task {task.id}: the question is empty")
        self._refuse_control_tokens(task, "the question", question)
        if self.ends_with_question_mark and not question.endswith((".", "!", "?")):
            question += "?"
        return question

    def _refuse_control_tokens(self, task: Task, where: str, text: str) -> None:
        for token in self._control_tokens:
            if token in text:
                raise ValueError(
                    f"task {task.id}: {where} quotes {token!r}, a control token of the tokenizer, which would end or "
                    "open a turn of the chat; expected plain text: remove the task, or write the token differently"
                )

    def _chat(self, messages: list[dict[str, str]]) -> str:
        if not self.tokenizer.chat_template:
            return messages[0]["content"]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def _ids(self, text: str, plain: bool = False) -> list[int]:
        """``plain``: control tokens written in the text (a passage that quotes ``<|im_end|>``) become ordinary text."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=plain)["input_ids"]


def read_template(template: str) -> str:
    """The text behind a built-in name, a file path, or the text itself. Raises ValueError if it is none of them."""
    if template in TEMPLATES:
        return TEMPLATES[template]
    if "{question}" in template:
        return template
    path = Path(template)
    if not path.is_file():
        raise ValueError(
            f"prompt template {template!r} is neither one of {sorted([*TEMPLATES, DATASET])}, nor a file, nor a text "
            "that holds {question}"
        )
    text = path.read_text(encoding="utf-8")
    if "{question}" not in text:
        raise ValueError(f"prompt template {path}: expected {{question}} where the question goes, found none")
    return text


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The texts that the tokenizer reads as one special token wherever they stand, sorted."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens)))


def eos_token_ids(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's EOS and those of generation_config.json (Qwen lists two), without repetition."""
    ids = [tokenizer.eos_token_id]
    config = Path(folder) / "generation_config.json"
    if config.is_file():
        listed = json.loads(config.read_text(encoding="utf-8")).get("eos_token_id")
        ids += listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(i for i in ids if i is not None))
