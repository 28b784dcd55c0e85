"""The conversations of one rollout: which earlier turn a request continues, and the rows that are trained on.

A request continues a recorded turn if its messages begin with that turn's conversation (equal roles, texts, calls and
tools) and go on with messages of tools or the user. Its prompt is then the recorded ids, and the text that the chat
template writes behind a sampled turn: no sampled token is encoded again. Every other request is rendered as a whole: a
sub-agent, a compacted or edited history, a branch of an earlier turn. Requests whose prompt begins with the ids of a
chain's last turn join its chain, which is one row::

    row     prompt | turn | messages | turn | ...            one chain
    mask    0 ...    1 1    0 ...      1 1
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.engines.base import Generation
from rollout.programs.protocol import ProgramProtocol, prompt_of, tail_ids
from rollout.programs.requests import ChatMessage, ChatRequest, Reply, Tools
from rollout.protocols.hermes import HermesProtocol
from rollout.trajectory import ENDED_HERE, Action, CallOutcome, ToolCall, ToolResult, Turn, recorded, runs_of

FIRST = "the first request"
TAIL = ("tool", "user")  # roles that may follow a recorded turn
UNANSWERED = ToolResult("", CallOutcome.REFUSED, detail=f"{ENDED_HERE}: the program sent no result back")


@dataclass(slots=True)
class Recorded:
    """A turn that the model has sampled, and the conversation up to its end."""

    request: ChatRequest
    prompt: tuple[int, ...]
    generation: Generation
    action: Action
    reply: Reply
    answered_s: float  # monotonic time of the answer
    number: int  # of its request in the rollout
    why: str  # rendered as a whole; "" where it continues a turn
    before: Recorded | None = None  # the turn whose conversation it continues, by its messages
    results: tuple[ChatMessage, ...] = ()  # of its calls, once the program has sent them back
    results_s: float = 0.0
    ids: tuple[int, ...] = ()  # prompt and sampled

    def __post_init__(self) -> None:
        self.ids = (*self.prompt, *self.generation.token_ids)

    @property
    def thinking(self) -> tuple[str | None, ...]:
        """The thinking of each message up to and with this turn, also where the program left it out."""
        earlier = self.before.thinking if self.before else ()
        return (*earlier, *self.request.thinking[len(earlier) :], self.reply.thinking)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request, and why it is what it is."""

    ids: tuple[int, ...]
    form: HermesProtocol
    before: Recorded | None  # the turn that its messages continue
    why: str  # it was rendered as a whole; "" where it continues a turn
    number: int  # of the request in the rollout, from 0


@dataclass
class Conversations:
    """All requests of one rollout and the turns that answered them."""

    protocol: ProgramProtocol
    turns: list[Recorded] = field(default_factory=list)
    asked: int = 0  # prompts written so far
    _by_key: dict[bytes, list[Recorded]] = field(default_factory=dict)

    def prompt(self, request: ChatRequest, form: HermesProtocol) -> Prompt:
        """Return the prompt of a request: a recorded turn and what follows it, or the whole conversation rendered.

        Args:
            form: the chat format of the request's tools.

        Raises:
            RequestError: the model's template refuses the messages.
        """
        number = self.asked
        self.asked += 1
        before, why = self._continued(request)
        if before is not None and self.protocol.history == "sampled":
            tail = request.messages[len(before.request.messages) + 1 :]
            called = [call.name for call in before.reply.calls]
            try:
                behind = tail_ids(form, tail, called, before.generation.finish_reason == "eos")
            except ValueError:
                why = "the template does not write these messages behind a turn"
            else:
                return Prompt((*before.ids, *behind), form, before, "", number)
        elif before is not None:
            why = "history is template"
        return Prompt(tuple(prompt_of(form, request.messages, request.thinking)), form, before, why, number)

    def add(
        self, request: ChatRequest, prompt: Prompt, generation: Generation, action: Action, reply: Reply, now: float
    ) -> Recorded:
        """Record the turn that answers a request. ``now``: the time, for the latency of its calls."""
        turn = Recorded(request, prompt.ids, generation, action, reply, now, prompt.number, prompt.why, prompt.before)
        self.turns.append(turn)
        key = _key((*request.messages, reply.message), request.tools)
        self._by_key.setdefault(key, []).append(turn)
        return turn

    def answer(self, before: Recorded | None, request: ChatRequest, now: float) -> None:
        """Record the results of a turn's calls, which a request has brought back."""
        if before is None or before.results or not before.reply.calls:
            return
        tail = request.messages[len(before.request.messages) + 1 :]
        results = tuple(message for message in tail if message.role == "tool")[: len(before.reply.calls)]
        before.results, before.results_s = results, now - before.answered_s

    def _continued(self, request: ChatRequest) -> tuple[Recorded | None, str]:
        """Return the latest turn that the request's messages continue, or None and the reason."""
        if not self.turns:
            return None, FIRST
        messages = request.messages
        last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
        if last < 0:
            return None, "no turn of the model in it"
        if last == len(messages) - 1 or any(message.role not in TAIL for message in messages[last + 1 :]):
            return None, "it ends with other messages than those of tools or the user"
        found = self._by_key.get(_key(messages[: last + 1], request.tools), [])
        same = [turn for turn in found if _same_thinking(turn, request)]
        if not same:
            return None, "thinking differs" if found else self._difference(request, last)
        extended = {id(turn.before) for turn in self.turns}  # two equal turns: the one that is not continued yet
        return next((turn for turn in reversed(same) if id(turn) not in extended), same[-1]), ""

    def _difference(self, request: ChatRequest, last: int) -> str:
        """Return where the messages leave the nearest recorded conversation, as text."""
        best, said = -1, "no recorded turn before it"
        for turn in self.turns:
            known = (*turn.request.messages, turn.reply.message)
            pairs = enumerate(zip(known, request.messages, strict=False))
            shared = next((i for i, (a, b) in pairs if a != b and a.compared != b.compared), len(known))
            if shared <= best:
                continue
            best = shared
            if shared > last and turn.request.tools.key != request.tools.key:
                said = "other tools"
            elif shared == len(known):
                said = f"message {shared + 1} is no turn of the model's"
            elif shared < len(request.messages):
                one, other = known[shared], request.messages[shared]
                part = next(name for name in ("role", "content", "calls") if getattr(one, name) != getattr(other, name))
                said = f"the {part} of message {shared + 1} ({other.role}) differs"
        return said

    # --- rows ---------------------------------------------------------------------------------------------------------

    def chains(self) -> list[list[Recorded]]:
        """Return the turns by chain: each turn's prompt begins with all ids of the turn before it in the chain."""
        chains: list[list[Recorded]] = []
        for turn in self.turns:
            fitting = [chain for chain in chains if turn.prompt[: len(chain[-1].ids)] == chain[-1].ids]
            if fitting:
                max(fitting, key=lambda chain: len(chain[-1].ids)).append(turn)
            else:
                chains.append([turn])
        return chains


@dataclass
class Rows:
    """The tokens of all chains, as the fields of a ``Trajectory``."""

    prompt_ids: tuple[int, ...] = ()
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, recorded_turn: Recorded, before: Recorded | None, own_prompt: bool) -> None:
        """Append a turn. ``before``: the turn before it in its chain."""
        turn, generation = recorded_turn, recorded_turn.generation
        if before is not None:
            self._extend(turn.prompt[len(before.ids) :])
            self.turns[-1] = dataclasses.replace(self.turns[-1], observation_end=len(self.response_ids))
        elif not self.turns:
            self.prompt_ids = turn.prompt
        start = len(self.response_ids)
        self._extend(generation.token_ids, generation.logprobs)
        end = len(self.response_ids)
        self.turns.append(
            Turn(
                start,
                end,
                turn.action,
                generation.finish_reason,
                generation.policy_version,
                observation_end=end,
                prompt_ids=turn.prompt if own_prompt else None,
                version_runs=recorded(runs_of(generation.policy_version, generation.version_runs, end - start)),
            )
        )
        for place, call in enumerate(turn.reply.calls):
            answered = place < len(turn.results)
            result = ToolResult.of(turn.results[place].content) if answered else UNANSWERED
            self.calls.append(ToolCall(len(self.turns) - 1, call, result, turn.results_s))

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.response_ids += ids
        self.loss_mask += [int(logprobs is not None)] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


def rows_of(chains: Sequence[Sequence[Recorded]]) -> Rows:
    """Return the turns as tokens: the chains one after the other."""
    rows = Rows()
    for chain in chains:
        for place, turn in enumerate(chain):
            rows.add(turn, chain[place - 1] if place else None, own_prompt=not place and len(chains) > 1)
    return rows


def _same_thinking(turn: Recorded, request: ChatRequest) -> bool:
    """Whether the request repeats the model's thinking, or leaves it out."""
    pairs = zip(turn.thinking, request.thinking, strict=False)
    return all(given is None or given.strip() == (sampled or "").strip() for sampled, given in pairs)


def _key(messages: Sequence[ChatMessage], tools: Tools) -> bytes:
    """Return a digest of a conversation and its tools."""
    digest = hashlib.sha256(tools.key.encode("utf-8", "surrogatepass"))
    for message in messages:
        parts = message.compared
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        digest.update(len(parts).to_bytes(8, "big"))
    return digest.digest()
