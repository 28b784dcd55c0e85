"""A model behind OpenAI-compatible servers plays agent programs: a baseline to test, or a teacher to learn from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from common.text import whole
from rollout.engines.base import Generation, SamplingParams
from rollout.programs.requests import THINKING, ChatRequest, Reply, RequestError
from rollout.protocols.call_formats import MalformedCall, decode_json
from rollout.protocols.hermes import HermesProtocol
from rollout.services.chat_client import chat_addresses
from rollout.services.http_client import ApiKey
from rollout.services.round_robin import RoundRobinClient
from rollout.trajectory import InfrastructureError, PermanentFailure, ToolRequest

if TYPE_CHECKING:
    from rollout.engines.weights.files import WeightFiles

PROGRAMS_ONLY = "ServedModel answers messages, so it plays agent programs only"
UNTRAINABLE = (
    "a ServedModel takes no weights: test it, with trainer.callbacks.weight_sync: null, or take another engine"
)
OWN_FIELDS = frozenset({"model", "messages", "tools", "stream", "n", "max_tokens", "max_completion_tokens", "stop"})
# In the refusals of servers, of a conversation that is too long.
TOO_LONG = (
    "context_length",
    "context length",
    "context size",
    "context window",
    "maximum context",
    "maximum number of tokens",
    "prompt is too long",
    "input is too long",
)


class ServedModel(RoundRobinClient):
    """Answers the requests of agent programs with a model that is served elsewhere (vLLM, SGLang, Ollama, OpenAI, ...).
    Takes the place of an engine in evaluations and in ``GenerateTrajectories``; it cannot be trained.

    Servers return texts, not token ids. The recorded rows are these texts in the chat format of ``rollouts.protocol``,
    for reading, for counting tokens, and for SFT of the model whose tokenizer that is. Some templates leave out
    thinking, or a text beside a call. Log-probs are 0. Of the sampling only temperature and top_p are sent.

    Args:
        urls: base addresses of equal servers, such as ``["http://127.0.0.1:8000/v1"]``.
        served_model_name: name of the model on the servers.
        api_key_variable: name of the environment variable that holds the key; null: no key.
        sampling: ``sent``: temperature and top_p of the evaluation go with each request. ``server``: they are left out,
            for models that refuse them.
        max_tokens_as: name of the limit of a turn. OpenAI's newer models want ``max_completion_tokens``.
        timeout, retries, backoff, concurrency: see ``ChatClient``.
        extra: further fields of each request, such as ``{"reasoning_effort": "low"}``.

    Raises:
        ValueError: a wrong address, a field in ``extra`` that is set here, or the key is not set.
    """

    def __init__(
        self,
        urls: list[str],
        served_model_name: str,
        api_key_variable: str | None = None,
        sampling: Literal["sent", "server"] = "sent",
        max_tokens_as: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
        timeout: PositiveFloat = 600.0,
        retries: NonNegativeInt = 3,
        backoff: NonNegativeFloat = 1.0,
        concurrency: PositiveInt = 32,
        extra: dict[str, Any] | None = None,
    ) -> None:
        if taken := sorted(OWN_FIELDS & set(extra or {})):
            raise ValueError(f"extra has {', '.join(taken)}, which the program or the rollout sets; leave it out")
        self.name, self.sampling = served_model_name, sampling
        self.max_tokens_as, self.extra = max_tokens_as, dict(extra or {})
        self._thinking = THINKING[0]  # the field that the servers use
        key = ApiKey(api_key_variable, f"the server of {served_model_name}")
        addresses = chat_addresses(urls)
        super().__init__(type(self).__name__, served_model_name, addresses, key, timeout, retries, backoff, concurrency)

    async def start(self) -> None:
        """Do nothing: the first request finds out whether the servers are there."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Raise ValueError: the servers take messages."""
        raise ValueError(f"{PROGRAMS_ONLY}; give rollouts.program, or another engine")

    async def load_files(self, files: WeightFiles, version: int, between_steps: bool = False) -> None:
        """Raise ValueError: the servers keep their weights."""
        raise ValueError(UNTRAINABLE)

    async def answer(
        self, request: ChatRequest, form: HermesProtocol, params: SamplingParams
    ) -> tuple[Generation, Reply]:
        """Return the model's turn, and the same as tokens of the protocol's chat format.

        Raises:
            RequestError: the conversation is too long for the server (``context_length_exceeded``), or the template
                cannot write the turn.
            InfrastructureError: no server answered, or with something else than a chat completion.
        """
        try:
            answer, url = await self.post(self._payload(request, params))
        except PermanentFailure as error:
            if any(sign in str(error).lower() for sign in TOO_LONG):
                raise RequestError(str(error), "context_length_exceeded") from error
            raise
        reply = self._reply(answer.body, f"{url}: {answer.excerpt}")
        try:
            ids = tuple(form.chat.turn_ids(reply.content or "", reply.thinking, reply.calls))
        except ValueError as error:
            raise RequestError(f"the protocol's chat template cannot write the server's turn: {error}") from error
        cut = reply.finish_reason == "length"
        generation = Generation(ids[:-1] if cut else ids, (0.0,) * (len(ids) - cut), "length" if cut else "eos", 0)
        return generation, reply

    def _payload(self, request: ChatRequest, params: SamplingParams) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        ids: list[str] = []  # of the latest calls
        for message, thought in zip(request.messages, request.thinking, strict=True):
            written: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "tool":
                written["tool_call_id"] = ids[message.place] if message.place < len(ids) else "call"
            else:
                ids = [f"call_{len(messages)}_{place}" for place in range(len(message.calls))]
            if message.calls:
                functions = [{"name": name, "arguments": arguments} for name, arguments in message.calls]
                calls = zip(ids, functions, strict=True)
                written["tool_calls"] = [{"id": i, "type": "function", "function": f} for i, f in calls]
                written["content"] = message.content or None
            messages.append(written | ({self._thinking: thought} if thought else {}))
        payload = {"model": self.name, "messages": messages, self.max_tokens_as: params.max_new_tokens} | self.extra
        if request.tools.schemas:
            payload["tools"] = list(request.tools.schemas)
        if request.stop:
            payload["stop"] = list(request.stop)
        if self.sampling == "sent":
            payload = {"temperature": params.temperature, "top_p": params.top_p} | payload
        return payload

    def _reply(self, body: str, where: str) -> Reply:
        """Return the reply in the body of a chat completion. Calls that cannot be read become text, as at the
        endpoint."""
        try:
            given = json.loads(body)
            choice, usage = given["choices"][0], given.get("usage") or {}
            message = choice["message"]
            content = _text(message.get("content") or message.get("refusal"))
            self._thinking = next((key for key in THINKING if message.get(key)), self._thinking)
            thinking = _text(message.get(self._thinking))
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            written = [(whole(str(one["name"])), one.get("arguments") or {}) for one in functions]
            counts = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
            raise InfrastructureError(f"expected a chat completion with texts; found {where}") from None
        calls: list[ToolRequest] = []
        for name, arguments in written:
            read = _arguments(arguments)
            if read is None:
                content += json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            else:
                calls.append(ToolRequest(name, read))
        cut = choice.get("finish_reason") == "length"
        reason = "length" if cut else "tool_calls" if calls else "stop"
        return Reply(content or None, thinking or None, tuple(calls), reason, counts[0], counts[1])


def _text(given: Any) -> str:
    """Return the text of a message's content, a text or a list of text parts. Raises TypeError, KeyError."""
    if isinstance(given, list):
        given = "".join(part["text"] for part in given)
    if not isinstance(given, str | None):
        raise TypeError(type(given).__name__)
    return whole(given or "").strip()


def _arguments(given: Any) -> dict[str, Any] | None:
    """Return the arguments of a call as an object, or None if they are none."""
    end = 0
    try:
        read, end = decode_json(given, 0) if isinstance(given, str) else (given, 0)
    except MalformedCall:
        return None
    return whole(read) if isinstance(read, dict) and not (end and given[end:].strip()) else None
