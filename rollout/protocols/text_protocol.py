"""Base class of text protocols: chat template, tokenisation of prompts, observations cut to a budget of tokens."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.protocols.base import ChatProtocol, PromptMode
from rollout.tokenizer import Quotes, decode, load_tokenizer, render_chat
from rollout.tools.python.base import LEFT_OUT
from rollout.tools.search import format_passages
from rollout.trajectory import Task

DATASET = "dataset"  # a template's name: the messages of the task's ``prompt``, word by word


def shows_task_prompts(protocol: ChatProtocol) -> bool:
    """Return whether a protocol shows the tasks' own prompts (template ``dataset``); protocols call this option by
    different names."""
    return DATASET in (getattr(protocol, "template", None), getattr(protocol, "instruction", None))


class TextProtocol:
    """Base class of the chat protocols. Subclasses turn a task into messages, and text into actions.

    Args:
        tokenizer: Hugging Face folder. Its chat template is used, with the generation prompt. Without one (a base
            model) the prompt is BOS, if the tokenizer has it, and the bare text.
        eos_ends: meaning of a turn that ends with EOS without an action. False: it is invalid, and the model reads the
            correction. True: the trajectory ends there.

    Raises:
        ValueError: the folder has no tokenizer or one without EOS.
    """

    block: tuple[str, str] = ("", "")  # tags around passages and results

    def __init__(self, tokenizer: str, eos_ends: bool) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self.eos_ends = eos_ends
        self.stop_token_ids = eos_token_ids(tokenizer, self.tokenizer)
        self._control_tokens = control_tokens(self.tokenizer)
        self.quotes = Quotes(self.tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled token ids, special tokens kept."""
        return decode(self.tokenizer, token_ids)

    def _dataset_messages(self, task: Task, otherwise: str) -> list[dict[str, str]]:
        """Return the messages of the task's own prompt, checked; ``otherwise``: the template that the error message
        suggests."""
        roles = [role for role, _ in task.prompt]
        if not roles or roles[-1] != "user" or (len(roles) > 1 and not self.tokenizer.chat_template):
            expected = "messages that end with the user's" if self.tokenizer.chat_template else "one user message"
            raise ValueError(
                f"task {task.id}: the prompt template is 'dataset', which takes the task's own prompt; expected "
                f"{expected}, found {'those of ' + ', '.join(roles) if roles else 'none'}. Take question files with a "
                f"column 'prompt', a list of {{role, content}} (the published ones have it), or another template: "
                f"{otherwise}"
            )
        for _, content in task.prompt:
            self._refuse_control_tokens(task, "the prompt", content)
        return [{"role": role, "content": content} for role, content in task.prompt]

    def _with_skills(self, task: Task, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """Return the messages with the task's skills (advice texts) at the beginning of the last one, the user's.
        SDAR's released code puts them before the first control token instead (docs/algorithms/sdar.md)."""
        if not task.skills:
            return list(messages)
        self._refuse_control_tokens(task, "the skills", task.skills)
        *before, last = messages
        return [*before, {**last, "content": f"{task.skills}\n\n{last['content']}"}]

    def _messages(self, task: Task) -> list[dict[str, str]]:
        """Return the chat messages of the task's prompt."""
        raise NotImplementedError

    def prompt_ids(self, task: Task, mode: PromptMode = PromptMode.AGENT) -> list[int]:
        """Return the token ids [P] of a task's prompt: chat template, instruction and question.

        ARCap's gold modes also write the passages at the beginning of the assistant's turn. GOLD_DIRECT opens
        ``<answer>``, so the model cannot think first.

        Raises:
            ValueError: the question is empty, a gold mode meets a task without gold passages, the template is
                ``dataset`` and the task has no prompt, or the task's text quotes a control token.
        """
        messages = self._with_skills(task, self._messages(task))
        return self._ids(self._chat(messages) + self._gold(task, mode))

    def _gold(self, task: Task, mode: PromptMode) -> str:
        """Return the gold passages as text for the beginning of the assistant's turn, in ARCap's gold modes; "" in the
        others."""
        if mode not in (PromptMode.GOLD_DIRECT, PromptMode.GOLD_THINK):
            return ""
        if not task.gold_passages:
            raise ValueError(f"task {task.id}: mode {mode} needs gold passages, and the task has none")
        passages = self.quotes.quote(format_passages(task.gold_passages).strip())
        opening, closing = self.block
        return opening + passages + closing + ("<answer>" if mode is PromptMode.GOLD_DIRECT else "")

    def _question(self, task: Task) -> str:
        question = task.question.strip()
        if not question:
            raise ValueError(f"task {task.id}: the question is empty")
        self._refuse_control_tokens(task, "the question", question)
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
            begin = self.tokenizer.bos_token or ""  # a base model has read texts from there
            return begin + "\n".join(message["content"] for message in messages)
        return render_chat(self.tokenizer, messages, add_generation_prompt=True)

    def _ids(self, text: str) -> list[int]:
        """Return the token ids of a text; quoted tags (``Quotes``) become ordinary text."""
        return self.quotes.ids(text)

    def _block(self, opening: str, body: str, closing: str, budget: int) -> tuple[list[int], bool]:
        """Return the token ids of ``opening + body + closing`` within ``budget`` ids, and whether text was cut. A long
        body, which is untrusted text, loses its end; the tags stay. Returns ``([], True)`` if the tags do not fit."""
        body = self.quotes.quote(body)
        ids = self._ids(opening + body + closing)
        if len(ids) <= budget:
            return ids, False
        tail = self._ids(closing)
        head = self._ids(opening + body)[: max(budget - len(tail), 0)]
        for _ in range(3):  # a character has at most four bytes, so at most three tokens of a broken one are left
            if head and self.decode(head[-4:]).endswith("\ufffd"):
                head.pop()
        # If one token spans the opening tag and the first letters of the text, the tag may not fit alone. Decoders of
        # the Llama kind drop a blank at the start.
        whole = self.decode(head).lstrip(" ").startswith(opening.lstrip(" "))
        return (head + tail, True) if whole else ([], True)


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of the tokenizer's special tokens, sorted. The tokenizer reads each of them as one token, also
    inside other text."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens)))


def eos_token_ids(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the distinct EOS ids of the tokenizer and of generation_config.json in ``folder`` (Qwen lists two)."""
    ids = [tokenizer.eos_token_id]
    config = Path(folder) / "generation_config.json"
    if config.is_file():
        listed = json.loads(config.read_text(encoding="utf-8")).get("eos_token_id")
        ids += listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def check_thinking(tokenizer: Any, thinking: bool | None, opened: bool) -> None:
    """Raise ValueError if a chat template without ``enable_thinking`` does not do what the option ``thinking`` asks
    for.

    Args:
        opened: the template's header opens the thinking.
    """
    known = "enable_thinking" in (tokenizer.chat_template or "")
    if thinking is not None and not known and thinking != opened:
        raise ValueError(
            f"thinking is {str(thinking).lower()}, but the chat template of {tokenizer.name_or_path!r} knows no "
            "enable_thinking; expected thinking: null"
        )


def read_template(template: str, built_in: Mapping[str, str]) -> str:
    """Return the text of a prompt template. ``template`` is a built-in name, the text itself with {question}, or a
    file: a text file, or a question file (.parquet) whose prompts' wording is taken. Raises ValueError for anything
    else."""
    if template in built_in:
        return built_in[template]
    if "{question}" in template:
        return template
    path = Path(template)
    if not path.is_file():
        raise ValueError(
            f"prompt template {template!r} is neither one of {sorted([*built_in, DATASET])}, nor a file, nor a text "
            "that holds {question}"
        )
    text = _worded_in(path) if path.suffix == ".parquet" else path.read_text(encoding="utf-8")
    if "{question}" not in text:
        raise ValueError(f"prompt template {path}: expected {{question}} where the question goes, found none")
    return text


def _worded_in(path: Path) -> str:
    """Return the prompt template that a question file (Search-R1's) uses: its first row's user turn, with {question}
    instead of the question and its question mark. Raises ValueError if the turn does not contain the question."""
    import polars as pl

    frame = pl.scan_parquet(path).head(1)
    if not {"prompt", "question"} <= set(frame.collect_schema()):
        raise ValueError(f"{path}: expected the columns prompt and question, for the wording of its prompts")
    row = frame.select("prompt", "question").collect().to_dicts()[0]
    asked, question = row["prompt"][-1]["content"], row["question"].strip()
    if asked.count(question) != 1:
        raise ValueError(f"{path}: the prompt of the first row does not contain its question once: {question!r}")
    before, _, after = asked.partition(question)
    return f"{before}{{question}}{after.removeprefix('?')}"


def fitting(write: Callable[[int | None], list[int]], longest: int, budget: int) -> tuple[list[int], bool]:
    """Return the token ids of the longest version of a text that fits ``budget``, and whether text was cut. The ids are
    those of ``write(limit)`` for the largest limit that fits; ``([], True)`` if no limit fits.

    Args:
        write: writes texts cut to ``limit`` characters each, or uncut for None.
        longest: length of the longest text.
    """
    ids = write(None)
    if len(ids) <= budget:
        return ids, False
    over = bisect.bisect_right(range(longest + 1), budget, key=lambda limit: len(write(limit)))
    for limit in range(over - 1, -1, -1):  # one character less may be one token more, so look
        ids = write(limit)
        if len(ids) <= budget:
            return ids, True
    return [], True


def shortened(text: str, limit: int) -> str:
    """Return a text cut to ``limit`` characters: the beginning and, because errors come last, a fifth for the end. A
    limit too small for the note between keeps only the beginning.

    >>> shortened("a" * 100, 40), shortened("abc", 2)
    ('aaaaaaaaaaa\\n[... output left out ...]\\naa', 'ab')
    """
    if len(text) <= limit:
        return text
    kept = limit - len(LEFT_OUT)
    if kept < 10:
        return text[:limit]
    return f"{text[: kept - kept // 5]}{LEFT_OUT}{text[len(text) - kept // 5 :]}"
