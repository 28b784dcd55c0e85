"""One rollout's side of the model: answers its program's requests, within the rollout's limits."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from common.seeds import derive_seed
from rollout.engines.base import Engine, Generation, SamplingParams
from rollout.loop.agent_loop import Budgets
from rollout.programs.conversations import Conversations, Prompt
from rollout.programs.dialects import chat_completions
from rollout.programs.protocol import ProgramProtocol
from rollout.programs.requests import ChatRequest, Reply, RequestError
from rollout.programs.served_model import ServedModel
from rollout.protocols.call_formats import CLOSE, OPEN, UnclosedThinking
from rollout.protocols.hermes import CUT, UNCLOSED, UNREADABLE
from rollout.tags import boxed, unwrapped
from rollout.trajectory import Action, ActionKind, InfrastructureError, StopReason, finite_number

GONE = "this rollout is over; nothing that is asked now belongs to it"


class Session:
    """The requests of one rollout. Belongs to one event loop.

    Args:
        sampling: of every turn; what a request asks for (temperature, ...) is ignored and counted in ``ignored``.
        seed_parts: each request's seed is derived from these and its prompt, so the order of requests does not matter.
        on_turn: awaited after each turn that is recorded.
    """

    def __init__(
        self,
        engine: Engine,
        protocol: ProgramProtocol,
        budgets: Budgets,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
        on_turn: Callable[[Generation], Awaitable[None]] | None = None,
    ) -> None:
        self.engine, self.protocol, self.budgets, self.sampling = engine, protocol, budgets, sampling
        self.conversations = Conversations(protocol)
        self.limit: StopReason | None = None  # the first limit that refused a request
        self.reward: float | None = None  # that the program has posted
        self.metrics: dict[str, float] = {}
        self.ignored: Counter[str] = Counter()
        self.kept: dict[str, list[Any]] = {}  # conversations that the dialect `responses` may continue, by response
        self.broken: asyncio.Future[InfrastructureError] = asyncio.get_running_loop().create_future()
        self._seed_parts, self._prompts, self._on_turn = seed_parts, Counter[bytes](), on_turn
        self._sampling: set[asyncio.Future[Any]] = set()
        self._tokens = 0  # sampled; parallel requests may pass max_response_tokens by a turn each
        self._over = False

    def end(self) -> None:
        """Refuse all further requests, and drop those in flight: their turns are in no row."""
        self._over = True
        for generating in list(self._sampling):
            generating.cancel()

    async def chat(self, **body: Any) -> dict[str, Any]:
        """Answer a request in the form of a chat completion. Raises RequestError."""
        await asyncio.sleep(0)  # a program that repeats a refused request lets others run
        reply = await self.reply(chat_completions.read(body | {"stream": False}, self.kept))
        return chat_completions.answer(reply, body, self.kept)

    def post_reward(self, body: Any) -> None:
        """Take the program's reward, ``{"reward": number or null, "metrics": {...}}``; the last one counts. Raises
        RequestError, RewardError."""
        if self._over:
            raise RequestError(GONE, status=410)
        if not isinstance(body, dict) or "reward" not in body or not isinstance(body.get("metrics") or {}, dict):
            raise RequestError('the body is no object like {"reward": 1.0, "metrics": {"solved": 1}}')
        reward = body["reward"]
        metrics = {k: finite_number(v, f"the metric {k!r}") for k, v in (body.get("metrics") or {}).items()}
        self.reward = None if reward is None else finite_number(reward, "the posted reward")
        self.metrics = metrics

    async def reply(self, request: ChatRequest) -> Reply:
        """Sample the turn that answers a request, and record it.

        Raises:
            RequestError: over a limit, a request that the template cannot write, a rollout that is over (status 410),
                or an engine that has failed (503).
        """
        self._check_open()
        form = self.protocol.known_format(request.tools)
        form = form or await asyncio.to_thread(self.protocol.format_for, request.tools)
        self._check_open()
        if len(self.conversations.turns) + len(self._sampling) >= self.budgets.max_turns:
            self._refuse(StopReason.MAX_TURNS, f"the rollout has had its {self.budgets.max_turns} turns (max_turns)")
        prompt = self.conversations.prompt(request, form)
        self.conversations.answer(prompt.before, request, time.monotonic())
        allowed = self._allowed(prompt, request)
        try:
            params = self._params(prompt, request, allowed).checked()
        except ValueError as error:
            raise RequestError(str(error)) from error
        self.ignored.update(request.ignored)
        generating = asyncio.ensure_future(self._sample(prompt, request, params))
        self._sampling.add(generating)
        try:
            generation, action, reply = await generating
        except asyncio.CancelledError:
            if self._over:
                raise RequestError(GONE, status=410) from None
            raise
        except InfrastructureError as error:
            if not self.broken.done():
                self.broken.set_result(error)
            raise RequestError(f"the engine failed: {error}", status=503) from error
        except RequestError as error:  # of a served model
            if error.code == "context_length_exceeded":
                self.limit = self.limit or StopReason.LENGTH
            raise
        finally:
            self._sampling.discard(generating)
        self._check_open()
        self._tokens += len(generation.token_ids)
        self.conversations.add(request, prompt, generation, action, reply, time.monotonic())
        if self._on_turn is not None:
            await self._on_turn(generation)
        return reply

    async def _sample(
        self, prompt: Prompt, request: ChatRequest, params: SamplingParams
    ) -> tuple[Generation, Action, Reply]:
        if isinstance(self.engine, ServedModel):
            generation, reply = await self.engine.answer(request, prompt.form, params)
            return generation, _action(reply), reply
        generation = await self.engine.generate(prompt.ids, params)
        return generation, *self._read(prompt, generation)

    def _check_open(self) -> None:
        if self._over:
            raise RequestError(GONE, status=410)

    def _refuse(self, limit: StopReason, why: str) -> None:
        self.limit = self.limit or limit
        code = "context_length_exceeded" if limit is StopReason.LENGTH else "max_turns"
        raise RequestError(f"{why}; end the task with what there is", code)

    def _allowed(self, prompt: Prompt, request: ChatRequest) -> int:
        """Return the number of tokens that the turn may have."""
        held, budgets = len(prompt.ids), self.budgets
        room = budgets.room(held, self._tokens)
        if room <= 0:
            full = budgets.max_length is not None and held >= budgets.max_length
            sampled = f"{self._tokens} tokens are sampled, and max_response_tokens is {budgets.max_response_tokens}"
            self._refuse(
                StopReason.LENGTH,
                f"the prompt has {held} tokens, and max_length is {budgets.max_length}" if full else sampled,
            )
        limits = (budgets.max_turn_tokens, self.sampling.max_new_tokens, request.max_tokens or room, room)
        return min(limits)

    def _params(self, prompt: Prompt, request: ChatRequest, allowed: int) -> SamplingParams:
        digest = hashlib.sha256(array("I", prompt.ids)).digest()
        self._prompts[digest] += 1
        return dataclasses.replace(
            self.sampling,
            max_new_tokens=allowed,
            stop=(*self.protocol.stop, *request.stop),
            stop_token_ids=self.protocol.stop_token_ids,
            seed=derive_seed(*self._seed_parts, digest.hex(), self._prompts[digest]),
        )

    def _read(self, prompt: Prompt, generation: Generation) -> tuple[Action, Reply]:
        """Return a sampled turn as an action, for metrics, and as the program reads it."""
        form = prompt.form
        chat, reader = form.chat, form.reader
        turn, ended = chat.without_end(self.protocol.decode(generation.token_ids))
        found = generation.stop_string
        if found is not None:
            turn = turn[: turn.find(found)] if found in turn else turn
        whole, ended = chat.opened + turn, ended or found is not None
        action, calls, said = None, (), ""
        try:
            said, calls = reader.read(whole)
            if calls and not ended and OPEN in whole and CLOSE not in whole.rpartition(OPEN)[2]:
                calls = ()  # cut inside a call, which GLM's form can read with the arguments so far
        except UnclosedThinking:
            error = UNCLOSED.format(closing=chat.thinking_tags[1]) if ended else CUT
            action = Action(ActionKind.INVALID, error=error, ended=ended)
        except Exception as fault:  # a call that cannot be read, in whatever way: the turn is sampled and stays
            said = whole.rpartition(chat.thinking_tags[1])[2]
            error = UNREADABLE.format(reason=fault or type(fault).__name__, form=reader.form)
            action = Action(ActionKind.INVALID, error=error, ended=ended)
        thinking = whole.removesuffix(said) if whole.endswith(said) and reader.turn is None else ""
        for tag in chat.thinking_tags:
            thinking = thinking.replace(tag, "")
        if calls:
            said = said.partition(reader.beginning)[0] if reader.beginning else ""
        reply = Reply(
            content=said.strip() or None,
            thinking=thinking.strip() or None,
            calls=calls,
            finish_reason="tool_calls" if calls else "stop" if ended else "length",
            prompt_tokens=len(prompt.ids),
            sampled_tokens=len(generation.token_ids),
            cached_tokens=generation.cached_tokens,
            stop_string=found,
        )
        return action or _action(reply), reply


def _action(reply: Reply) -> Action:
    """Return a turn as an action, for metrics."""
    if reply.calls:
        return Action(ActionKind.CALL, reply.calls)
    if reply.finish_reason == "length":
        return Action(ActionKind.INVALID, error=CUT, ended=False)
    content = boxed(reply.content or "")
    return Action(ActionKind.ANSWER, answer=None if content is None else unwrapped(content))
