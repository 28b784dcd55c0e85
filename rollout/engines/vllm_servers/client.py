"""HTTP client of one ``vllm serve`` process (vLLM 0.32, started with the flags of `flags.serve_command`)."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from common.secret import authorization
from common.sessions import LoopSession
from rollout.engines.base import Generation, SamplingParams
from rollout.trajectory import InfrastructureError, PermanentFailure, merged, recorded

CHECK_S = 30.0  # a live server answers a check in this time, even between long engine steps
NOT_A_NUMBER = -9999.0  # vLLM's log-prob on the wire for nan and -inf
START = "0-start"  # label of the weights in a server's folder, once a trainer has checked the server
UNCHECKED = "default"  # vLLM's label after its start
KEEP_ALIVE_S = 3.0  # less than uvicorn's 5 s, after which it closes an idle connection
POLL_S = 1.0  # between looks whether a server with requests is lost
_EXCERPT = 500


class Labels:
    """Labels of one trainer's pushes: vLLM's ``weight_version``. They have the trainer's id, because a server may hold
    weights of another one."""

    def __init__(self) -> None:
        self._trainer = uuid.uuid4().hex[:12]

    @property
    def incomplete(self) -> str:
        """Label of a server during a weight update."""
        return f"incomplete-{self._trainer}"

    def new(self, version: int) -> str:
        """Return a unique label for one push of the policy's weights."""
        return f"{version}-{self._trainer}-{uuid.uuid4().hex[:12]}"

    def has(self, label: str) -> bool:
        """Return whether a label is of this trainer, or of no trainer."""
        return label in (START, UNCHECKED) or label.partition("-")[2].startswith(self._trainer)


def version_of(label: str) -> int:
    """Return the policy version of a label made by `Labels.new`; 0 for weights that no trainer has pushed."""
    number = label.partition("-")[0]
    return int(number) if number.isdigit() else 0


class OtherWeights(InfrastructureError):
    """Weights other than those of this run's pushes sampled an answer, or a server holds others."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A generation, and the label of the weights that sampled each token run."""

    generation: Generation
    labels: tuple[str, ...]


class ServerClient:
    """HTTP client of one server.

    All methods raise ServerDown if the server does not answer or its engine has died, and ValueError, with the server's
    message, if it refuses the request.
    """

    def __init__(self, url: str, sessions: LoopSession, timeout_s: float, silence_s: float) -> None:
        self.url, self._sessions = url.rstrip("/"), sessions
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self._alive_at = 0.0  # time of the last sign of life that was asked for
        self.request_seeds: bool | None = None  # whether requests have seeds (None: if they cost no speed)
        self.updating = False  # a push is in progress, during which servers are paused
        self.in_flight = 0  # requests for tokens
        self.lost: str | None = None  # why it gets no requests (None: it serves)
        self.checked: str | None = None  # the instance (start of the server) whose model was checked
        self.facts: dict[str, Any] = {}  # of `worker.ServedWorker.describe`

    def __repr__(self) -> str:
        return self.url

    # ------------------------------------------------------------------ tokens
    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, adapter: str | None = None) -> Answer:
        """Return a continuation of ``token_ids``. ``adapter``: name of the LoRA adapter that samples it.

        Raises PermanentFailure if the model's logits are not finite."""
        body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": self._wire(sampling)}
        if adapter is not None:
            body["model"] = adapter
        self.in_flight += 1
        try:
            answer = await self._while_alive(self.post("/inference/v1/generate", body, again=True))
        finally:
            self.in_flight -= 1
        try:
            return self._read(answer, sampling, adapter)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise InfrastructureError(
                f"{self.url}: its answer cannot be read ({type(error).__name__}: {error}); is it vLLM 0.32?"
            ) from None

    async def _while_alive(self, request: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Await a request for tokens, until its server is lost. While it is not answered, ask the engine for a sign of
        life now and then: a stopped engine would keep its requests, and vLLM's front end goes on saying that it is
        healthy."""
        task = asyncio.ensure_future(request)
        begun = time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=min(POLL_S, self._silence_s)))[0]:
                if self.lost is not None:
                    raise InfrastructureError(self.lost)
                if self.updating:
                    self._alive_at = time.monotonic()
                elif time.monotonic() - max(begun, self._alive_at) >= self._silence_s:
                    self._alive_at = time.monotonic()
                    if await self.is_paused() and not self.updating:
                        raise InfrastructureError(f"{self.url}: it is paused, and no push is in progress")
            return task.result()
        finally:
            task.cancel()

    @property
    def _has_seeds(self) -> bool:
        return self.facts["seeds"] if self.request_seeds is None else self.request_seeds

    def _wire(self, sampling: SamplingParams) -> dict[str, Any]:
        """Return the sampling parameters as vLLM's."""
        samples = sampling.temperature > 0
        return {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if samples else 1.0,
            "top_k": sampling.top_k if samples else -1,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # stop_token_ids has the caller's EOS ids
            "seed": sampling.seed if self._has_seeds else None,
            # vLLM returns as many candidates as are asked for, the sampled token among them.
            "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
        }

    def _read(self, answer: dict[str, Any], sampling: SamplingParams, adapter: str | None) -> Answer:
        (choice,) = answer["choices"]
        ids, content = choice["token_ids"], choice["logprobs"]["content"]
        reason, stop = choice["finish_reason"], choice["stop_reason"]
        if reason not in ("stop", "length"):
            raise InfrastructureError(f"{self.url}: it ended the request with {reason!r}")
        if len(content) != len(ids):
            raise InfrastructureError(f"{self.url}: {len(content)} log-probs came with {len(ids)} tokens")
        spans = choice["weight_versions"] or []
        if adapter is not None:  # the versions are those of the base, which trainers of adapters never change
            base = {span["version"] for span in spans} - {START}
            spans = [{"version": base.pop() if base else answer["model"], "start": 0, "end": len(ids)}]
        if sum(span["end"] - span["start"] for span in spans) != len(ids):
            raise InfrastructureError(f"{self.url}: it did not say which weights sampled the tokens")
        label = spans[-1]["version"] if spans else UNCHECKED
        logprobs = tuple(float(entry["logprob"]) for entry in content)
        if NOT_A_NUMBER in logprobs:
            raise PermanentFailure(
                f"the model's logits are not finite (weights {label}): training has diverged, or the weights are "
                "damaged; continue from an earlier checkpoint"
            )
        top = None
        if sampling.top_logprobs:
            top = tuple(_likeliest(entry["top_logprobs"], sampling.top_logprobs) for entry in content)
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        generation = Generation(
            token_ids=tuple(ids),
            logprobs=logprobs,
            finish_reason="eos" if reason == "stop" and not isinstance(stop, str) else reason,
            policy_version=version_of(label),
            stop_string=stop if isinstance(stop, str) else None,
            top_logprobs=top,
            cached_tokens=cached,
            version_runs=recorded(merged((version_of(s["version"]), s["end"] - s["start"]) for s in spans)),
        )
        return Answer(generation, tuple(span["version"] for span in spans))

    # ------------------------------------------------------------------ state
    async def held(self) -> str:
        """Return the label of the weights that the server holds."""
        return await self.get("/weight_info", "weight_version")

    async def is_paused(self) -> bool:
        return await self.get("/is_paused", "is_paused")

    async def get(self, path: str, field: str) -> Any:
        """Return one field of what the server answers at a path."""
        return self._field(await self._ask("GET", path, timeout_s=CHECK_S), field)

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of `worker.ServedWorker` in every worker of the server. Returns the results."""
        body = json.dumps({"method": method, "args": arguments}).encode()
        return self._field(await self._ask("POST", "/collective_rpc", body, timeout_s), "results")

    def _field(self, answer: dict[str, Any], name: str) -> Any:
        if name not in answer:
            raise InfrastructureError(f"{self.url}: its answer has no {name}; is it vLLM 0.32?")
        return answer[name]

    async def post(self, path: str, body: dict[str, Any] | None = None, again: bool = False) -> dict[str, Any]:
        """Send a JSON body and return the answer. ``again``: send it once more if the connection breaks, which an idle
        one does."""
        content = json.dumps(body or {}).encode()
        try:
            return await self._ask("POST", path, content)
        except _Disconnected:
            if not again:
                raise
        return await self._ask("POST", path, content)

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        session, _ = self._sessions.open()
        timeout_s = timeout_s or self._timeout_s
        headers = authorization() | ({"Content-Type": "application/json"} if body else {})
        try:
            async with asyncio.timeout(timeout_s):
                async with session.request(method, self.url + path, data=body, headers=headers) as response:
                    text = await response.text()
        except TimeoutError:
            raise ServerDown(f"{self.url}{path}: no answer within {timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise NotReached(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise _Disconnected(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerDown(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        return self._checked(path, response.status, text)

    def _checked(self, path: str, status: int, text: str) -> dict[str, Any]:
        try:
            answer = json.loads(text) if text.startswith("{") else {"text": text}
        except ValueError:
            answer = {"text": text}
        if status == 200:
            return answer
        error = answer.get("error", answer.get("detail", answer.get("text")))
        error = error.get("message", error) if isinstance(error, dict) else error
        said = " ".join(str(error)[:_EXCERPT].split())
        if status in (400, 413, 422):
            raise ValueError(f"{self.url}: {said}")
        kind = ServerDown if status >= 500 else InfrastructureError
        raise kind(f"{self.url}{path}: status {status}: {said}")


class ServerDown(InfrastructureError):
    """A server does not answer, or its engine has died."""


class NotReached(ServerDown):
    """No connection: the server did not take the request."""


class _Disconnected(ServerDown):
    """The connection broke before an answer, as vLLM's does after an error or an idle time."""


def _likeliest(entries: Sequence[dict[str, Any]], k: int) -> dict[int, float]:
    """Return the ``k`` most likely tokens with their log-probs; the sampled one, if among them, first. ``entries``: the
    sampled token, then the most likely ones."""
    return {entry["token_id"]: entry["logprob"] for entry in entries if (entry["rank"] or 0) <= k}
