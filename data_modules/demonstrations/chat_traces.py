"""Stage: tokenises conversations with tool calls (SOD's cold start) into trajectories for supervised training.

docs/algorithms/sod.md. A conversation becomes the ids that a rollout of it would have: the prompt as
``HermesProtocol`` asks, each assistant's turn with its end of turn (mask 1), and between turns what the protocol would
have written (mask 0).
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from common.ranges import PositiveInt
from data_modules.datasets.conversations import Conversation, read_conversations
from data_modules.datasets.files import DatasetError
from data_modules.datasets.traces import MalformedTrace
from data_modules.demonstrations.trace_stage import TraceStage
from rollout.protocols.conversation_turns import AssistantTurn, conversation_turns, parts_left_out
from rollout.protocols.hermes import HermesProtocol, ToolsIn
from rollout.protocols.text_protocol import control_tokens
from rollout.tokenizer import load_tokenizer
from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

Tool = str | dict[str, Any]  # a name, a file, or the schema itself


class ChatTraces(TraceStage[Conversation]):
    """Tokenises conversations with tool calls and writes them as trajectories for ``SupervisedDataModule``. The files
    are ``trajectories/chunk-<n>.parquet`` (rollout.storage).

    Log-probs are 0.0 and the policy version is 0: these tokens were not sampled. A task has no gold answer: the
    conversation's own is in ``Trajectory.answer``. Besides what ``TraceStage.run`` lists, the report counts, of the
    kept: ``cut``; ``rewritten``, where the template renders earlier turns differently once others follow, and so every
    turn was taken as if it were the last (``metadata["rewritten"]``); ``invalid_turns``, which the protocol would
    refuse; ``unsaid_turns``, whose text the template leaves out (Llama 3 writes nothing beside a call).

    Args:
        files: .parquet, .jsonl or .json of {messages, tools[, enable_thinking]}.
        tokenizer: Hugging Face folder with a chat template that knows tools.
        tools: what the prompt offers, as in ``HermesProtocol``; by default each row's own ``tools``.
        tools_in: where prompts show the tools, as in ``HermesProtocol``.
        thinking: passed to the template as ``enable_thinking``; by default the row's own, if it has one and the
            template knows it.
        call_format: as in ``HermesProtocol``.
        max_tokens: of a trajectory, prompt included.
        too_long: what happens to longer ones: ``drop``, or ``cut`` at the right.
        limit: at most so many conversations, evenly spaced over the files.
        data_source: of the tasks.

    Raises:
        ValueError: no tokenizer in the folder, a template that ``HermesProtocol`` refuses, or a number below 1.
    """

    label = "conversations"
    expected = "messages of user, assistant and tool that end with the assistant's"
    counted = ("cut", "rewritten", "invalid_turns", "unsaid_turns")

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: str,
        tools: Sequence[Tool] | None = None,
        tools_in: ToolsIn = "auto",
        thinking: bool | None = None,
        call_format: str = "auto",
        max_tokens: PositiveInt | None = None,
        too_long: Literal["drop", "cut"] = "drop",
        limit: PositiveInt | None = None,
        data_source: str = "sod_sft",
    ) -> None:
        super().__init__(files, max_tokens, limit)
        self.tokenizer = tokenizer
        self.tools, self.thinking = tools, thinking
        self.tools_in: ToolsIn = tools_in
        self.call_format = call_format
        self.too_long, self.data_source = too_long, data_source
        loaded = load_tokenizer(tokenizer)
        self._control_tokens = control_tokens(loaded)
        self._knows_thinking = "enable_thinking" in (loaded.chat_template or "")
        self._protocols: dict[str, HermesProtocol] = {}  # by tools and thinking
        self._protocol(tools or (), thinking)  # refuses templates

    read_file = staticmethod(read_conversations)

    def trajectory(self, trace: Conversation) -> Trajectory:
        """Return one conversation, tokenised, as a trajectory. Raises MalformedTrace."""
        if trace.fault is not None:
            raise MalformedTrace(trace.fault)
        said_by_others = [message for message in trace.messages if message["role"] != "tool"]
        if any(token in json.dumps(said_by_others, ensure_ascii=False) for token in self._control_tokens):
            raise MalformedTrace("control_token")  # it would end or open a turn of the chat
        protocol = self._protocol_of(trace)
        try:
            said, rewritten = conversation_turns(protocol.chat, trace.messages)
        except ValueError as error:
            raise MalformedTrace("unrenderable") from error
        prompt = trace.messages[: [message["role"] for message in trace.messages].index("assistant")]
        ids, mask, turns, calls = _tokenised(protocol, said)
        ended = turns[-1].action.kind is ActionKind.ANSWER
        return Trajectory(
            task=Task(
                id=trace.id,
                question=prompt[-1]["content"],
                golden_answers=(),
                data_source=self.data_source,
                metadata={"rewritten": rewritten},
                prompt=tuple((message["role"], message["content"]) for message in prompt),
            ),
            prompt_ids=tuple(protocol.chat.ids(protocol.chat.render(prompt))),
            response_ids=tuple(ids),
            loss_mask=tuple(mask),
            logprobs=(0.0,) * len(ids),
            turns=tuple(turns),
            calls=tuple(calls),
            stop_reason=StopReason.ANSWER if ended else StopReason.MAX_TURNS,
            group=trace.id,
            index=0,
            answer=turns[-1].action.answer,
        )

    def note(self, trace: Conversation, trajectory: Trajectory, counts: Counter[str]) -> None:
        counts["rewritten"] += trajectory.task.metadata["rewritten"]
        counts["invalid_turns"] += sum(t.action.kind is ActionKind.INVALID and t.action.ended for t in trajectory.turns)
        said = [message for message in trace.messages if message["role"] == "assistant"]
        for message, turn in zip(said, trajectory.turns, strict=False):  # of one that was cut, the first turns are left
            text = self._protocol_of(trace).decode(trajectory.response_ids[turn.start : turn.end])
            counts["unsaid_turns"] += turn.action.ended and parts_left_out(message, text) > 0

    def shorten(self, trajectory: Trajectory, max_tokens: int) -> Trajectory | None:
        if self.too_long == "drop":
            return None
        return cut_right(trajectory, max_tokens - len(trajectory.prompt_ids))

    def _protocol_of(self, trace: Conversation) -> HermesProtocol:
        thinking = self.thinking
        if thinking is None and self._knows_thinking:
            thinking = trace.thinking
        tools = trace.tools if self.tools is None else self.tools
        try:
            return self._protocol(tools, thinking)
        except ValueError as error:
            raise DatasetError(f"conversation {trace.id} of {', '.join(self.files)}: {error}") from error

    def _protocol(self, tools: Sequence[Tool], thinking: bool | None) -> HermesProtocol:
        key = json.dumps([list(tools), thinking])
        if key not in self._protocols:
            protocol = HermesProtocol(
                self.tokenizer,
                tools or ("code_interpreter",),  # a row without tools may call all the same
                self.tools_in if tools else "trained",
                thinking=thinking,
                max_parallel_calls=None,  # an expert's are all read
                call_format=self.call_format,
            )
            chat = protocol.chat
            if chat.end != chat.call_end:
                raise ValueError(
                    f"{chat.where} ends a turn with {chat.end} and, after a call, with {chat.call_end}; conversations "
                    "can be tokenised where all turns end alike (trajectories of a teacher can be trained on instead)"
                )
            self._protocols[key] = protocol
        return self._protocols[key]


def _tokenised(
    protocol: HermesProtocol, said: Sequence[AssistantTurn]
) -> tuple[list[int], list[int], list[Turn], list[ToolCall]]:
    """Return the response ids, loss mask, turns and calls of a conversation. The last turn has no observation."""
    ids: list[int] = []
    mask: list[int] = []
    turns: list[Turn] = []
    calls: list[ToolCall] = []
    for number, turn in enumerate(said):
        sampled = [*protocol.chat.ids(turn.text), protocol.chat.end_id]
        read = protocol.chat.ids_after(turn.observed, called=turn.called) if number < len(said) - 1 else []
        action = protocol.parse(turn.text + protocol.chat.end)
        start, end = len(ids), len(ids) + len(sampled)
        ids += sampled + read
        mask += [1] * len(sampled) + [0] * len(read)
        turns.append(Turn(start, end, action, "eos", 0, len(ids)))
        results = [_result(message["content"]) for message in turn.observed if message["role"] == "tool"]
        results += [ToolResult("", CallOutcome.REFUSED, detail="no result follows")] * len(action.calls)
        calls += [
            ToolCall(number, request, result, latency_s=0.0)
            for request, result in zip(action.calls, results, strict=False)  # a call each, as far as there are calls
        ]
    return ids, mask, turns, calls


def _result(text: str) -> ToolResult:
    return ToolResult(text, CallOutcome.OK if text else CallOutcome.EMPTY)


def cut_right(trajectory: Trajectory, tokens: int) -> Trajectory | None:
    """Return the trajectory cut to its first ``tokens`` response tokens, without a final observation. None if no
    trainable token is left.
    """
    turns = [turn for turn in trajectory.turns if turn.start < tokens]
    if not turns:
        return None
    last = turns[-1]
    end = min(last.end, tokens)
    action = last.action if end == last.end else Action(ActionKind.INVALID, error="cut at max_tokens", ended=False)
    reason = last.finish_reason if end == last.end else "length"
    turns[-1] = dataclasses.replace(last, end=end, action=action, finish_reason=reason, observation_end=end)
    return trajectory.replace(
        response_ids=trajectory.response_ids[:end],
        loss_mask=trajectory.loss_mask[:end],
        logprobs=trajectory.logprobs[:end],
        turns=tuple(turns),
        calls=tuple(call for call in trajectory.calls if call.turn < len(turns) and turns[call.turn].action.calls),
        stop_reason=StopReason.LENGTH,
        answer=None,
    )
