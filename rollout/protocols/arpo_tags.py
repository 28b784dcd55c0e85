"""ARPO's protocol: <think>, <search>, <python>, <result>, <answer> as plain text in one assistant turn.

Source of the format: RUC-NLPIR/ARPO (docs/algorithms/arpo.md). Differences from the released code: a
call is read only from its own turn, never from the prompt, whose example has tags too; results are tokenised without
special tokens; a long result loses text, never its closing tag; a call limit ends the trajectory without an EOS that
was not sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rollout.protocols.base import PromptMode
from rollout.protocols.text_protocol import DATASET, TextProtocol
from rollout.tags import boxed, last_between, mended, unwrapped
from rollout.trajectory import Action, ActionKind, Task, ToolRequest, ToolResult

# ARPO's system prompt in our words. Checkpoints trained on the published wording need that wording: ARPO's question
# files have it, and ``system: dataset`` takes it from there.
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
ARGUMENT = {"search": "query", "python": "code"}  # by tool: the argument between its tags


class ARPOProtocol(TextProtocol):
    """Writes prompts and tool results, and reads actions, in ARPO's format with the tokenizer of one model.

    A turn ends at the closing tag of a tool or with EOS. A turn without a call ends the trajectory with its answer: the
    last ``\\boxed{}`` in the last ``<answer>`` block, without a ``\\text{}`` around it, or the whole block without a
    box.

    Args:
        tokenizer: Hugging Face folder. Its chat template is used, with the generation prompt.
        system: ``arpo`` (the full instruction, in our words), ``none`` (for tiny models trained without it), a file
            with your own text, or a question file (.parquet). The system message of its first row serves questions
            without a prompt. The user's turn is the bare question. Or ``dataset``: the messages of the task's
            ``prompt``, word by word.
        eos_ends: whether a turn that ends with EOS and has neither call nor answer ends the trajectory (as released);
            else the model reads the correction.
        correction: the result of a turn without a call.
        tools: tools that may be called, and the argument between their tags; by default ``{search: query, python:
            code}``. The system text must describe others to the model.

    Raises:
        ValueError: the system text is neither a name nor a file, or the folder has no tokenizer or one without EOS.
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
        """Return the action of one turn's text: the tool call at the first closing tag of a tool, else the answer. The
        closing tag is a stop string, so the turn ends there.

        The content of a call starts after its last opening tag, so that tags which the model only mentions are not
        content. An empty call is a CALL (the tool refuses it), an empty answer is an ANSWER (it scores 0).
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
        """Return the token ids of a ``<result>`` block with the tools' results, and whether text was cut. After an
        INVALID action the block has the correction. A long text loses its end; the tags stay. Returns ``([], True)`` if
        the tags do not fit."""
        texts = [self.correction] if action.kind is ActionKind.INVALID else [result.text.strip() for result in results]
        return self._block(OPEN, "\n".join(texts), CLOSE, budget)

    def _messages(self, task: Task) -> list[dict[str, str]]:
        if self.template == DATASET:
            return self._dataset_messages(task, otherwise="arpo")
        system = [{"role": "system", "content": self.template}] if self.template else []
        return [*system, {"role": "user", "content": self._question(task)}]


def read_system(system: str) -> str:
    """Return the system prompt of a built-in name or a file. Raises ValueError if there is no such text."""
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
    raise ValueError(f"{path}: the prompt of the first row has no system message; take another system text")
