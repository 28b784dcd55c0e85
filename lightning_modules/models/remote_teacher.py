"""A teacher behind HTTP, for one that does not fit beside the student: log-probs of given tokens from vLLM servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from common.async_calls import EventLoopThread
from common.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from lightning_modules.batch import TokenBatch, TokenRows, collate, micro_batches
from lightning_modules.models.policy import embedding_rows
from rollout.services.http_client import ApiKey
from rollout.services.round_robin import RoundRobinClient
from rollout.trajectory import InfrastructureError, PermanentFailure, Trajectory, split_turns

logger = logging.getLogger(__name__)

# vLLM returns -9999 for -inf. exp(-100) is about float32's smallest probability; one token must not dominate a batch.
LEAST_LOGPROB = -100.0
_LOCK = threading.Lock()  # guards ``_begun`` of all teachers
PROBE_TOKENS = 2000  # evenly spaced tokens of the student's vocabulary; their text compares the tokenizers

T = TypeVar("T")
Key = tuple[int, tuple[int, ...], tuple[int, ...]]  # k, the ids and the wanted positions of a row


@cache
def _thread() -> EventLoopThread:
    """Return the event loop of all teachers' requests. It cannot belong to a teacher: configurations copy theirs, and a
    thread cannot be copied."""
    return EventLoopThread("teacher")


class Begun(NamedTuple):
    """A request that is made while others roll out."""

    answer: Future[list[Tensor]]  # of one row
    until: int  # ``score_top`` will not ask for it after so many calls


class RemoteTeacher:
    """Requests a teacher's log-probs of sampled tokens from vLLM servers (OpenAI-compatible ``/completions`` with
    ``prompt_logprobs``).

    The servers read the sampled ids, tool results included; nothing is tokenised again. A request ends with the last
    sampled token, and the one token that the server must generate is dropped. Trajectories are never cut: the server
    must accept prompt and response in one request (``--max-model-len``, one more than the longest), and splits the
    computation itself. Log-probs of a prompt are those of temperature 1. All servers must serve the same model.

    Args:
        urls: base addresses such as ``["http://127.0.0.1:8001/v1"]``; requests go round-robin.
        model: name of the teacher on the servers.
        api_key_variable: name of the environment variable with the key; null: no key is sent.
        max_tokens_per_request: most tokens of the trajectories in a request; a longer trajectory gets its own request,
            as does one that is scored while others roll out.
        concurrency: requests in flight at once, of each rank.
        timeout_s: seconds for one attempt.
        patience_s: seconds after its first failure during which a request is repeated while no server answers or all
            are busy (see ``RoundRobinClient.post``), as when a server restarts. Finished ranks wait
            for the others: keep it below the timeout of the process group (Lightning: 1800).
        backoff_s: seconds before the first retry; the pauses double up to a minute.

    Raises:
        ValueError: the key is not set.
    """

    def __init__(
        self,
        urls: list[str],
        model: str,
        api_key_variable: str | None = None,
        max_tokens_per_request: PositiveInt = 32768,
        concurrency: PositiveInt = 16,
        timeout_s: PositiveFloat = 600.0,
        patience_s: NonNegativeFloat = 1500.0,
        backoff_s: NonNegativeFloat = 1.0,
    ) -> None:
        self._given = (
            urls, model, api_key_variable, max_tokens_per_request, concurrency, timeout_s, patience_s, backoff_s
        )  # fmt: skip
        self.model, self.max_tokens_per_request, self.patience_s = model, max_tokens_per_request, patience_s
        self.urls = [url.rstrip("/").removesuffix("/completions") + "/completions" for url in urls]
        key = ApiKey(api_key_variable, f"the teacher {model}")
        options = (timeout_s, 0, backoff_s, concurrency)  # patience instead of retries
        self._servers = RoundRobinClient("RemoteTeacher", f"the teacher {model}", self.urls, key, *options)
        self._begun: dict[Key, Begun] = {}
        self._calls = 0  # of score_top

    def __repr__(self) -> str:
        return f"RemoteTeacher({self.model} at {', '.join(self.urls)})"

    # ------------------------------------------------------------------ log-probs
    def score(self, batch: TokenBatch) -> Tensor:
        """Return the teacher's log-probs [B, T] float32 of the sampled tokens, 0 where the mask is 0.

        Blocks until all are there; each rank requests its own. Values below ``LEAST_LOGPROB`` are raised to it, and the
        log counts them.

        Raises:
            InfrastructureError: no server answered in ``patience_s``, one refused the request (a trajectory longer than
                it takes, an id that it does not know), or left out a position; with what it said.
        """
        logprobs, _, _ = self.score_top(batch, 0)
        return logprobs.column(0, batch.mask)

    def score_top(
        self, batch: TokenBatch, k: int, vocabulary: int | None = None
    ) -> tuple[TokenRows, TokenRows, TokenRows]:
        """Return the teacher's log-probs of the sampled tokens [n, 1] float32, and its k likeliest tokens at each of
        these positions: ids [n, k] int32, log-probs [n, k] float32. See ``score``.

        The servers need ``--max-logprobs`` of at least k (vLLM's default is 20). Ids from ``vocabulary`` on, which the
        student does not have, are -1.
        """
        read, wanted = _read(batch)
        keys = [_key(k, *row) for row in zip(read, wanted, strict=True)]
        with _LOCK:
            begun = {row: self._begun[key] for row, key in enumerate(keys) if key in self._begun}
        lengths = [len(row) for row in read]
        asked = [row for row, length in enumerate(lengths) if length and row not in begun]
        groups = micro_batches(lengths, asked, self.max_tokens_per_request, packed=True)
        others = _thread().submit(_all([self._ask(g, read, wanted, k) for g in groups]))
        self._calls += 1
        said: dict[int, Tensor] = {}
        try:
            for row, one in begun.items():
                try:
                    [said[row]] = one.answer.result()
                except PermanentFailure:
                    raise
                except InfrastructureError:  # its patience has run out while others rolled out
                    [said[row]] = _thread().submit(self._ask([row], read, wanted, k)).result()
            for group, answers in zip(groups, others.result(), strict=True):
                said.update(zip(group, answers, strict=True))
        except BaseException:  # one has failed, or Ctrl-C: the others end, too
            others.cancel()
            self.forget()
            raise
        finally:
            self._forget(self._calls, [keys[row] for row in begun])
        device, columns = batch.mask.device, 1 + 2 * k
        none = torch.empty((0, columns), dtype=torch.float64, device=device)  # float64 is exact for ids and log-probs
        found = TokenRows(tuple(said[row].to(device) if row in said else none for row in range(len(read))), none)
        sampled = found.columns(0, 1, torch.float32)
        if bounded := int((sampled.joined == LEAST_LOGPROB).sum()):
            logger.warning("%s: %d tokens are impossible to it, counted as log-prob %g", self, bounded, LEAST_LOGPROB)
        ids = found.columns(1, 1 + k, torch.int32)
        if vocabulary is not None:
            ids = ids.mapped(lambda rows: rows.masked_fill(rows >= vocabulary, -1))
        return sampled, ids, found.columns(1 + k, None, torch.float32)

    async def _ask(
        self, group: Sequence[int], ids: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], k: int
    ) -> list[Tensor]:
        """Request what the teacher says at the wanted positions of the rows in ``group``. Returns of each row a tensor
        [n, 1 + 2 k] float64: at each position the token's log-prob, the ids of the k likeliest, their log-probs."""
        prompts = [ids[row] for row in group]
        answer, url = await self._servers.post(self._request(prompts, k), self.patience_s)
        choices = _choices(answer.body, len(prompts))
        if choices is None:
            raise InfrastructureError(f"{url}: expected {len(prompts)} choices; found {answer.excerpt}")
        said = (
            [[_logprob(choice, prompt, position, url), *_top(choice, position, k, url)] for position in wanted[row]]
            for row, prompt, choice in zip(group, prompts, choices, strict=True)
        )
        return [torch.tensor(row, dtype=torch.float64) for row in said]

    def _request(self, prompts: Sequence[Sequence[int]], k: int = 0) -> dict[str, Any]:
        return {"model": self.model, "prompt": list(prompts), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}

    def begin(self, trajectory: Trajectory, k: int = 0, ahead: int = 0) -> None:
        """Request what ``score_top`` will ask for, of a trajectory that has just finished. Returns at once.

        Args:
            ahead: calls of ``score_top`` for earlier batches that may come first. Later the request is ended.
        """
        for ids, wanted in zip(*_read(collate(split_turns(trajectory))), strict=True):
            with _LOCK:
                if (key := _key(k, ids, wanted)) not in self._begun:
                    answer = _thread().submit(self._ask([0], [ids], [wanted], k))
                    self._begun[key] = Begun(answer, self._calls + 1 + ahead)

    def forget(self) -> None:
        """End all requests that were begun."""
        self._forget(math.inf)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given  # a copy has its own connections and has begun nothing

    def _forget(self, calls: float, taken: Sequence[Key] = ()) -> None:
        """End requests whose answers were taken, and those that ``score_top`` will not ask for after so many calls.
        When no request is left, close the connections."""
        with _LOCK:
            for key in {*taken, *(key for key, one in self._begun.items() if one.until <= calls)}:
                if (one := self._begun.pop(key, None)) is not None:
                    one.answer.cancel()
            closed = None if self._begun else _thread().submit(self._servers.close())
        if closed is not None:
            closed.result()

    # ------------------------------------------------------------------ before a training
    def check(self, student: str, longest: int | None = None, k: int = 0) -> None:
        """Check every teacher server before the training; a failure ends the start at once.

        The server must return log-probs, read text like the student's tokenizer, and accept the longest trajectory and
        the student's largest token id.

        Args:
            student: Hugging Face folder with the student's tokenizer.
            longest: tokens that a prompt and its response may have together, where that is known.
            k: number of likeliest tokens that will be asked for.

        Raises:
            InfrastructureError: a server cannot be reached, does not know the model, or gives no prompt log-probs.
            ValueError: a server's tokenizer is another, it does not know all of the student's token ids, or its
                --max-model-len is less than ``longest`` and one.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(student)
        vocabulary = sorted(tokenizer.get_vocab().values())
        spread = vocabulary[:: max(len(vocabulary) // PROBE_TOKENS, 1)]
        text = tokenizer.decode(spread) + "".join(tokenizer.all_special_tokens)
        expected = tokenizer.encode(text, add_special_tokens=False)
        checks = [self._check_one(url, text, expected, student, longest, k) for url in self.urls]
        try:
            _thread().submit(_all(checks)).result()
        finally:
            self._forget(0)

    async def _check_one(
        self, url: str, text: str, expected: list[int], student: str, longest: int | None, k: int
    ) -> None:
        rows = embedding_rows(student)
        probe = expected[:4] if rows is None else [*expected[:4], rows - 1]  # the last id that the student may sample
        answer = await self._servers.post_once(url, self._request([probe]))
        if answer.status != 200 and rows is not None:
            without = await self._servers.post_once(url, self._request([expected[:4]]))
            if without.status == 200 and answer.status == 400:
                raise ValueError(
                    f"the teacher at {url} refuses token {probe[-1]}, which the student at '{student}' may sample "
                    f"({answer.excerpt}); take a teacher with at least {rows} embedding rows"
                )
            answer, probe = without, expected[:4]
        choices = _choices(answer.body, 1) if answer.status == 200 else None
        if choices is None:
            found = f"{answer.status}: {answer.excerpt}"
            raise InfrastructureError(f"{url}: expected log-probs of a prompt; found {found}")
        for position in range(1, len(probe)):
            _logprob(choices[0], probe, position, url)
        if k:
            answer = await self._servers.post_once(url, self._request([probe], k))
            choices = _choices(answer.body, 1) if answer.status == 200 else None
            if choices is None:
                raise ValueError(
                    f"the teacher at {url} does not return its {k} likeliest tokens ({answer.status}: "
                    f"{answer.excerpt}); start it with --max-logprobs {k} or more, or lower top_k"
                )
            _top(choices[0], 1, k, url)
        address = url.removesuffix("/completions").removesuffix("/v1") + "/tokenize"
        request = {"model": self.model, "prompt": text, "add_special_tokens": False}
        answer = await self._servers.post_once(address, request)
        found, most = _tokens(answer.body) if answer.status == 200 else (None, None)
        if found is None:
            details = (address, answer.status, answer.excerpt, student)
            logger.warning("%s: status %d, %s; cannot compare the teacher's tokenizer with that of %s", *details)
            return
        if longest is not None and most is not None and most < longest + 1:
            raise ValueError(
                f"the teacher at {url} takes {most} tokens, but a prompt and its response may have {longest} together, "
                f"and one is generated; start it with --max-model-len {longest + 1} or more"
            )
        for position, (there, here) in enumerate(itertools.zip_longest(found, expected)):
            if there != here:
                raise ValueError(
                    f"the teacher at {url} has another tokenizer than the student at '{student}': of a text of "
                    f"{len(expected)} tokens, number {position} is {there} there and {here} here; take a teacher of "
                    "the same family"
                )


async def _all(requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all requests. The first failure ends the others."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read(batch: TokenBatch) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of each row up to its last sampled token, and the positions of the sampled tokens."""
    wanted = [row.nonzero()[:, 0].tolist() for row in batch.mask.cpu()]
    ids = batch.input_ids.tolist()
    return [row[: at[-1] + 1] if at else [] for row, at in zip(ids, wanted, strict=True)], wanted


def _key(k: int, ids: Sequence[int], wanted: Sequence[int]) -> Key:
    return k, tuple(ids), tuple(wanted)


def _tokens(body: str) -> tuple[list[int] | None, int | None]:
    """Return the token ids and the server's limit of tokens from the text of a ``/tokenize`` answer. Missing ones are
    None."""
    try:
        content = json.loads(body)
        tokens, most = content["tokens"], content.get("max_model_len")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None
    return (tokens if isinstance(tokens, list) else None), (most if isinstance(most, int) else None)


def _choices(body: str, count: int) -> list[dict[str, Any]] | None:
    """Return the choices of a ``/completions`` answer in the order of the prompts, or None for an answer of another
    shape."""
    try:
        choices = sorted(json.loads(body)["choices"], key=lambda choice: choice["index"])
    except (ValueError, KeyError, TypeError):
        return None
    return choices if len(choices) == count else None


def _logprob(choice: dict[str, Any], prompt: Sequence[int], position: int, url: str) -> float:
    """Return the log-prob of ``prompt[position]`` given the tokens before it, from one choice of a server's answer.
    Raises InfrastructureError if it is missing."""
    token = prompt[position]
    try:
        entries = choice["prompt_logprobs"]
        value = entries[position][str(token)]["logprob"] if len(entries) == len(prompt) else None
    except (KeyError, IndexError, TypeError):
        value = None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        entries = choice.get("prompt_logprobs")
        found = f"{len(entries)} positions, there {str(entries[position : position + 1])[:200]}" if entries else "none"
        raise InfrastructureError(
            f"{url}: expected prompt_logprobs of {len(prompt)} positions with token {token} at {position}; "
            f"found {found}"
        )
    return max(float(value), LEAST_LOGPROB)


def _top(choice: dict[str, Any], position: int, k: int, url: str) -> list[float]:
    """Return the k likeliest tokens at a position and their log-probs, from one choice of a server's answer. Raises
    InfrastructureError if there are fewer."""
    if k == 0:
        return []
    try:
        entries = choice["prompt_logprobs"][position]  # the k likeliest, and the prompt's token
        ranked = sorted((entry["rank"], int(token), float(entry["logprob"])) for token, entry in entries.items())[:k]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        ranked = []
    if len(ranked) < k or not all(math.isfinite(value) for _, _, value in ranked):
        found = str(choice.get("prompt_logprobs", [])[position : position + 1])[:200]
        raise InfrastructureError(
            f"{url}: expected rank and logprob of {k} tokens at position {position}; found {found}"
        )
    return [*(float(token) for _, token, _ in ranked), *(max(value, LEAST_LOGPROB) for _, _, value in ranked)]
