"""Stage: tokenises ARPO's cold-start file of tagged traces into trajectories for supervised training.

docs/algorithms/arpo.md. A trace is one assistant turn that holds everything, tool results included::

    <think> t </think> <search> q </search> <result> r </result> <python> c </python> <result> r </result>
    <think> t </think> <answer> \\boxed{a} </answer>

The released recipe (LLaMA-Factory) also trains on the results; here they are masked. Model text and tool results are
tokenised separately, each piece once, as in a rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from common.ranges import PositiveInt
from data_modules.datasets.traces import MalformedTrace, Trace, cut, read_traces
from data_modules.demonstrations.trace_stage import TraceStage
from rollout.protocols.arpo_tags import ARGUMENT
from rollout.protocols.text_protocol import control_tokens
from rollout.rewards.arpo import EMPTY_RESULT, answer_text, format_error
from rollout.tags import boxed
from rollout.tokenizer import Quotes, load_tokenizer, render_chat
from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    StopReason,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
    Trajectory,
    Turn,
)


class TaggedTraces(TraceStage[Trace]):
    """Tokenises ARPO's tagged traces (recorded conversations) and writes them as trajectories for
    ``SupervisedDataModule``. The files are ``trajectories/chunk-<n>.parquet`` (rollout.storage).

    Log-probs are 0.0 and the policy version is 0, because the tokens were not sampled. The data module's option
    ``append_eos`` adds the EOS. Tasks have no gold answer; the trace's answer is in ``Trajectory.answer``.

    Args:
        files: .json or .jsonl, in either shape: alpaca {instruction, input, output[, system]} or sharegpt
            {conversations: [{from, value}, ..][, system]}.
        tokenizer: Hugging Face folder; its chat template makes the prompt, with the generation prompt.
        system: a file with the system message, or its text, for every prompt; by default each trace's own.
        instruction: use the alpaca shape's ``instruction`` as the first line of the user's message, as LLaMA-Factory
            does, or as the system message (of traces without one), as ARPO does in RL.
        max_tokens: leave out traces with more tokens, prompt included. (LLaMA-Factory cuts them off.)
        mask_results: keep tool results out of the loss; false trains on them, as published.
        limit: at most so many traces, evenly spaced over the files.
        data_source: of the tasks.

    Raises:
        ValueError: no tokenizer in the folder, one without a chat template, or a ``system`` that looks like a
            missing file.
    """

    label = "tagged traces"
    expected = "<think>, <search>, <python>, <result>, <answer>"
    counted = ("format_errors",)

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: str,
        system: str | None = None,
        instruction: Literal["user", "system"] = "user",
        max_tokens: PositiveInt | None = None,
        mask_results: bool = True,
        limit: PositiveInt | None = None,
        data_source: str = "arpo_sft",
    ) -> None:
        super().__init__(files, max_tokens, limit)
        self.tokenizer = load_tokenizer(tokenizer)
        if not self.tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {tokenizer!r} has no chat template, and these traces are chats")
        self.system = _text_or_file(system)
        self.instruction = instruction
        self.mask_results, self.data_source = mask_results, data_source
        self._control_tokens = control_tokens(self.tokenizer)
        self._quotes = Quotes(self.tokenizer)

    read_file = staticmethod(read_traces)

    def note(self, trace: Trace, trajectory: Trajectory, counts: Counter[str]) -> None:
        """Add 1 to ``format_errors`` if ARPO's reward would refuse this kept trace."""
        sampled = "".join(piece.text + EMPTY_RESULT * (piece.tool is not None) for piece in cut(trace.output))
        counts["format_errors"] += format_error(sampled) is not None

    def trajectory(self, trace: Trace) -> Trajectory:
        """Return one trace, tokenised, as a trajectory. Raises MalformedTrace."""
        if trace.fault is not None:
            raise MalformedTrace(trace.fault)
        messages = self._messages(trace)
        prompt = render_chat(self.tokenizer, messages, add_generation_prompt=True)
        ids: list[int] = []
        turns, calls, mask = [], [], []
        pieces = cut(trace.output)
        answer = answer_text(pieces[-1].text)
        content = boxed(answer)
        final = Action(ActionKind.ANSWER, answer=answer.strip() if content is None else content)
        for number, piece in enumerate(pieces):
            said, read = self._ids(piece.text), self._observed(piece.observation)
            start, end = len(ids), len(ids) + len(said)
            ids += said + read
            mask += [1] * len(said) + [0] * len(read)
            action = final
            if piece.tool is not None:
                request = ToolRequest(piece.tool, {ARGUMENT[piece.tool]: piece.argument})
                outcome = CallOutcome.OK if piece.result else CallOutcome.EMPTY
                turn = number if self.mask_results else 0
                calls.append(ToolCall(turn, request, ToolResult(piece.result, outcome), latency_s=0.0))
                action = Action(ActionKind.CALL, (request,))
            turns.append(Turn(start, end, action, "stop", 0, len(ids)))
        if not self.mask_results:
            mask, turns = [1] * len(ids), [Turn(0, len(ids), final, "stop", 0, len(ids))]
        return Trajectory(
            task=Task(
                id=trace.id,
                question=trace.question,
                golden_answers=(),
                data_source=self.data_source,
                prompt=tuple((m["role"], m["content"]) for m in messages),
            ),
            prompt_ids=tuple(self._ids(prompt, plain=False)),
            response_ids=tuple(ids),
            loss_mask=tuple(mask),
            logprobs=(0.0,) * len(ids),
            turns=tuple(turns),
            calls=tuple(calls),
            stop_reason=StopReason.ANSWER,
            group=trace.id,
            index=0,
            answer=final.answer,
        )

    def _messages(self, trace: Trace) -> list[dict[str, str]]:
        system, user = trace.system, trace.question
        if trace.instruction and self.instruction == "system":
            system = system or trace.instruction
        elif trace.instruction:
            user = f"{trace.instruction}\n{user}" if user else trace.instruction
        system = system if self.system is None else self.system
        messages = [{"role": "user", "content": user}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        if not user.strip():
            raise MalformedTrace("no_question")
        if any(token in message["content"] for token in self._control_tokens for message in messages):
            raise MalformedTrace("control_token_in_prompt")  # it would end or open a turn of the chat
        return messages

    def _observed(self, text: str) -> list[int]:
        """Return the token ids of a tool's result block as ``ARPOProtocol`` shows it: its tags as tags, and its content
        as foreign text.
        """
        opening, tag, rest = text.partition("<result>")
        body, closing, after = rest.rpartition("</result>")
        return self._quotes.ids(f"{opening}{tag}{self._quotes.quote(body)}{closing}{after}")

    def _ids(self, text: str, plain: bool = True) -> list[int]:
        """Return the token ids of ``text``. ``plain`` treats control tokens in the text as ordinary text."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=plain)["input_ids"]


def _text_or_file(system: str | None) -> str | None:
    if not system or " " in system:
        return system
    if not Path(system).is_file():
        raise ValueError(f"system is {system!r}: neither a file nor a text of several words")
    return Path(system).read_text(encoding="utf-8").strip()
