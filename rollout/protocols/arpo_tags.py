"""ARPO's protocol: <think>, <search>, <python>, <result>, <answer> as plain text in one assistant turn.

Source of the format: RUC-NLPIR/ARPO (docs/papers/arpo.md sections 1.4 and 5). Mended here: a call is read from its own
turn only, never from the prompt, whose example holds tags, too; results are tokenised without special tokens; one that
is too long loses its own text, never its closing tag; a call limit ends the trajectory without an EOS that nobody
sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rollout.protocols.base import PromptMode
from rollout.protocols.boxed import boxed, mended, unwrapped
from rollout.protocols.text import DATASET, TextProtocol
from rollout.tags import last_between
from rollout.trajectory import Action, ActionKind, Task, ToolRequest, ToolResult

# The meaning of ARPO's system prompt in our own words. Checkpoints trained on the published wording need exactly that
# wording: ARPO's question files carry it, ``system: dataset`` takes it from there.
SYSTEM = (
    "You solve questions step by step and may use two tools as often as you need them: a Wikipedia search engine and a "
    "Python interpreter. Think between <think> and </think> first. To search, write <search> your query </search>; to "
    "compute, write <python> your program </python>. What the tool returns will follow between <result> and </result>; "
    "then think again. Close with <answer> The final answer is \\[ \\boxed{your answer} \\] </answer>, the answer "
    "itself in LaTeX within \\boxed{}. For example: <think> I need the year of the fire first. </think> <search> year "
    "of the great fire of London </search> <result> The Great Fire of London was in 1666. </result> <think> Now the "
    "sum of its digits. </think> <python> print(sum(map(int, str(1666)))) </python> <result> 19 </result> <think> That "
    "is it. </think> <answer> The final answer is \\[ \\boxed{19} \\] </answer>"
)
SYSTEMS = {"arpo": SYSTEM, "none": ""}

OPEN, CLOSE = " <result>\n", "\n</result>"
CORRECTION = (
    "Nothing was called. Write <search> a query </search>, or <python> a program </python>, or close with "
    "<answer> \\boxed{the answer} </answer>."
)
ARGUMENT = {"search": "query", "python": "code"}  # by tool: the name of what stands between its tags


class ARPOProtocol(TextProtocol):
    """Prompts, actions and results of ARPO with the tokenizer of one model.

    A turn ends at the closing tag of a tool or with EOS. Its answer is the last ``\\boxed{}`` in the last
    ``<answer>`` block (the whole block where nothing is boxed), out of a ``\\text{}`` that holds all of it, and ends
    the trajectory when the turn calls no tool.

    Args:
        tokenizer: Hugging Face folder. Its chat template is used, with the generation prompt.
        system: ``arpo`` (the full instruction, in our words), ``none`` (for tiny models trained without), a file with
            your own text, or a question file (.parquet) whose first row's system message is taken, for questions that
            bring no prompt of their own. The user's turn is the bare question. Or ``dataset``: the messages of the
            task's own ``prompt``, word by word.
        eos_ends: whether a turn that ends with EOS and holds neither call nor answer ends the trajectory (as released);
            else the model reads the correction.
        correction: the result of a turn without a call.
        tools: what may be called, and the argument that stands between its tags; by default ``{search: query, python:
            code}``. The system text has to tell the model of others.

    Raises:
        ValueError: if the system text is neither a name nor a file, or the folder holds no tokenizer or one without
            EOS.
    """

    tools: tuple[str, ...] = tuple(ARGUMENT)
    stop: tuple[str, ...]
    block = OPEN, CLOSE

    def __init__(
        self,
        tokenizer: str,
        system: str = "arpo",
        eos_ends: bool = True,
        correction: str = CORRECTION,
        tools: dict[str, str] | None = None,
    ) -> None:
        super().__init__(tokenizer, eos_ends)
        self.arguments = dict(ARGUMENT if tools is None else tools)
        self.tools, self.stop = tuple(self.arguments), tuple(f"</{name}>" for name in self.arguments)
        self._closing = re.compile(rf"</({'|'.join(map(re.escape, self.arguments))})>")
        self.template = DATASET if system == DATASET else read_system(system)
        self.correction = correction

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        """The action of one turn: the call at the first closing tag of a tool (a stop string: the turn ends there),
        else its answer.

        The content of a call is what follows its last opening tag, so that tags which the model merely mentions are not
        read as content. An empty call is a CALL (the tool refuses it), an empty answer is an ANSWER (it scores 0).
        """
        closing = self._closing.search(text)
        if closing is not None:
            name = closing[1]
            _, opening, content = text[: closing.start()].rpartition(f"<{name}>")
            if opening:
                return Action(ActionKind.CALL, (ToolRequest(name, {self.arguments[name]: content.strip()}),))
            return Action(ActionKind.INVALID, error=f"</{name}> without <{name}>")
        text = f"<answer>{text}" if mode is PromptMode.GOLD_DIRECT else text
        answer = last_between(text, "<answer>", "</answer>")
        if answer is not None:
            content = boxed(answer)
            return Action(ActionKind.ANSWER, answer=unwrapped((answer if content is None else content).strip()))
        return Action(ActionKind.INVALID, error="neither a call nor a complete answer")

    def observation_ids(self, action: Action, results: Sequence[ToolResult], budget: int) -> tuple[list[int], bool]:
        """Ids of the ``<result>`` block, and whether text was cut; after an INVALID action it holds the correction.
        What does not fit loses the end of the text; the tags stay. ``([], True)`` if not even they fit."""
        texts = [self.correction] if action.kind is ActionKind.INVALID else [result.text.strip() for result in results]
        return self._block(OPEN, "\n".join(texts), CLOSE, budget)

    def _messages(self, task: Task) -> list[dict[str, str]]:
        if self.template == DATASET:
            return self._dataset_messages(task, otherwise="arpo")
        system = [{"role": "system", "content": self.template}] if self.template else []
        return [*system, {"role": "user", "content": self._question(task)}]


def read_system(system: str) -> str:
    """The text behind a built-in name or a file path. Raises ValueError if it is neither, or a question file without a
    system message."""
    if system in SYSTEMS:
        return SYSTEMS[system]
    path = Path(system)
    if not path.is_file():
        raise ValueError(f"system text {system!r} is neither one of {sorted([*SYSTEMS, DATASET])}, nor a file")
    if path.suffix != ".parquet":
        return path.read_text(encoding="utf-8").strip()
    import polars as pl

    frame = pl.scan_parquet(path).head(1)
    if "prompt" not in frame.collect_schema():
        raise ValueError(f"{path}: expected a column 'prompt' with a system message, found none")
    messages = frame.select("prompt").collect().item().to_list()
    for message in messages:
        if message["role"] == "system":
            return mended(message["content"])
    raise ValueError(f"{path}: the prompt of the first row holds no system message; take another system text")
