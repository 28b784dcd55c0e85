"""Base class of engines that run in a child process. The child is spawned (never forked) and ends with the trainer.

The child cannot re-seed the trainer, take its process group or its threads. A child that dies or hangs is replaced
(`revival.py`). The next child gets the weights that the dead one held, and samples the unanswered requests again,
except a request that has ended two children.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.env_vars import child_environment
from common.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from common.run_folder import run_folder
from rollout.engines.base import (
    INTERRUPTED,
    EngineGone,
    Generation,
    SamplingParams,
    UpdateInterrupted,
    WeightsLost,
    check_request,
)
from rollout.engines.child import ROOT, Child, Results
from rollout.engines.revival import Children
from rollout.engines.weights.files import WeightFiles
from rollout.trajectory import InfrastructureError, PermanentFailure

logger = logging.getLogger(__name__)

SLEEPING_PARTS = ("weights", "kv_cache")  # of an engine's memory, in their order of waking; vLLM's tags


@dataclass(slots=True)
class _Asked:
    """A message to the child process that is not answered yet."""

    message: tuple[Any, ...]  # (kind, number, ...)
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    files: WeightFiles | None = None  # of an update: kept after its end, for the next child
    sent: bool = False  # to the latest child; else it waits for a child
    deaths: int = 0  # number of children that died with this message in flight


class EngineProcess:
    """An engine whose model runs in a child process (`worker.py`). Implements `base.Engine`.

    Call the methods from any event loop, and `generate` any number of times at once.

    A new child starts with the weights of its folder. It first gets the weights of the last complete update, if they
    are kept (``keep`` of `load_files` and `transfer`; see `weights.push`), then the unanswered messages in their order.
    An update by files is repeated from its start. A `transfer` cannot be repeated, because its tensors are not kept: it
    raises UpdateInterrupted, and the sender pushes again. Where the weights are not kept, the engine samples nothing
    until new weights arrive.

    A message that was in flight when two children died is a suspect. A single suspect fails. Of several suspects the
    next child gets one at a time, and fails the message that kills it.
    """

    transport: Literal["auto", "files", "ipc"] = "files"  # how weights reach the child; see `weights.push`

    def __init__(
        self,
        backend: str,
        options: dict[str, Any],
        *,
        max_length: PositiveInt,
        threads: PositiveInt = 1,
        environment: dict[str, str] | None = None,
        heartbeat_timeout_s: PositiveFloat = 600.0,
        restarts: NonNegativeInt = 3,
    ) -> None:
        """
        Args:
            backend: dotted path of a `worker.Backend` class, which the child builds with ``options``.
            max_length: given plus new tokens of a request, at most.
            threads: of the child, on CPU.
            environment: variables of the child beside those of `child_environment`.
            heartbeat_timeout_s: limit for the seconds without a heartbeat, while the child starts or has work; then it
                counts as hung. A heartbeat is an answer, or a message once a second during the start and between engine
                steps.
            restarts: restarts per hour, at most; then requests fail with the reason. An exception before the first
                answer is not followed by a restart, because the next child would raise it again.
        """
        self._backend, self._options, self._threads = backend, options, threads
        self._environment = environment or {}
        self.max_length = max_length
        self._info: dict[str, Any] | None = None
        self._failure: InfrastructureError | None = None
        self._start_lock = threading.Lock()
        self._lock = threading.RLock()  # guards all that follows against the threads of children
        self._children = Children(self, self._lock, restarts, heartbeat_timeout_s)
        self._heartbeat_s = heartbeat_timeout_s
        self._up = False  # the latest child takes messages
        self._died_asleep: str | None = None  # why the child died asleep; the next one starts when it is needed
        self._has_sampled = False  # whether a child has ever answered a request
        self._asked: dict[int, _Asked] = {}  # by number, in the order of sending
        self._on_trial = False  # a suspect is in flight; later messages wait
        self._loading: int | None = None  # number of the message that changes weights or memory; one at a time
        self._numbers = itertools.count()
        self._asleep: tuple[str, ...] = ()  # of SLEEPING_PARTS
        self._version: int | None = None  # of the last complete update (None: the folder's weights)
        self._kept: WeightFiles | None = None  # the files of that update
        self._lost: str | None = None  # why the child does not hold that update
        self._transferring = False  # between start and finish of a transfer
        self._broken = False  # the child died during a transfer
        self._connected: int | None = None  # number of the child that has opened the way for a transfer

    @property
    def pid(self) -> int | None:
        """Process id of the child process, None before `start`."""
        return self._children.latest.process.pid if self._children.latest else None

    @property
    def model(self) -> str:
        """Folder or name of the model that the child process loads."""
        return self._options.get("model", "")

    @property
    def info(self) -> dict[str, Any]:
        """Facts that the child process reports about its model: vocab_size, device, weights."""
        if self._info is None:
            raise InfrastructureError("the engine has not been started; await engine.start() first")
        return self._info

    @property
    def gone(self) -> bool:
        """Whether the engine has died too often and is not restarted any more."""
        return isinstance(self._failure, EngineGone)

    @property
    def keeps_weights(self) -> bool:
        """Whether to keep the files of a weight update, so that a restarted child process can load them."""
        return self._children.restarts.limit > 0

    @property
    def kept(self) -> WeightFiles | None:
        """The files of the last complete weight update, which a restarted child process loads."""
        return self._kept

    async def start(self) -> None:
        """Spawn the child process and wait until it has loaded the model. Idempotent.

        Raises:
            ValueError: the options do not fit the model.
            InfrastructureError: the child failed; the message holds its traceback.
        """
        await asyncio.to_thread(self._start)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Sample and return a continuation of ``token_ids``, see `base.Engine.generate`. A child process that dies
        meanwhile costs only time.

        Raises:
            ValueError: no ids, ids outside the vocabulary, or more than ``max_length`` tokens in all; or the backend's
                refusal.
            WeightsLost: the child was replaced, and the weights of the dead child are not kept.
            PermanentFailure: the model's logits are not finite, or two children died with this request in flight.
            EngineGone: the child died once too often.
            InfrastructureError: the engine has not been started, or was closed.
            RuntimeError: the engine is asleep.
        """
        vocab_size = None if self._info is None else self._info["vocab_size"]
        ids, sampling = check_request(token_ids, sampling, self.max_length, vocab_size)
        self._raise_if_asleep()
        number, future = self._ask("generate", ids, sampling)
        try:
            return await future
        finally:
            with self._lock:
                if self._asked.pop(number, None) is not None and self._up:  # this task was cancelled
                    self._send_to_child("cancel", number)
                    self._send_waiting()

    async def load_files(
        self, files: WeightFiles, version: int, between_steps: bool = False, keep: bool = False
    ) -> None:
        """Load weights from files into the child process, see `base.Engine.load_files`. It loads them even if this task
        is cancelled.

        Args:
            keep: keep the files for the next child, until the next update has ended, or `close`.
        """
        await self.wake_up("weights")
        message = ("load", files.paths, version, files.verified, between_steps)
        await self._change(*message, files=files if keep else None)
        await self.wake_up()

    async def transfer(
        self,
        method: str,
        arguments: dict[str, Any],
        version: int | None = None,
        between_steps: bool = True,
        keep: WeightFiles | None = None,
    ) -> None:
        """Make one call of vLLM's weight transfer API in the child process. The engine samples nothing between the
        transfer's start and its finish.

        Args:
            version: of the new weights, with the last call.
            between_steps: requests in flight pause and continue with the new weights. False: wait for their end first.
            keep: files that hold the same weights, with the last call.

        Raises:
            ValueError: the backend's error; the weights may then be damaged.
            UpdateInterrupted: the child was restarted since the transfer began.
        """
        if method == "start_weight_update":
            await self.wake_up("weights")
        await self._change("transfer", method, arguments, version, between_steps, files=keep)
        if version is not None:
            await self.wake_up()

    def forget(self) -> None:
        """Delete the files of the last weight update, to make room for the next one. For updates without requests in
        flight."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            kept.remove()

    def allow_sleep(self) -> None:
        """Prepare the engine for `sleep`, which frees device memory. Call it before `start`."""
        self._options["sleeps"] = True

    async def sleep(self) -> None:
        """Free the engine's device memory of weights and cache. Does nothing if the engine is asleep.

        A push (`load_files`, `transfer`) wakes the weights before and the cache after, so that the cache takes no
        memory that the push needs. Raises RuntimeError if requests are in flight, because vLLM would abort them."""
        with self._lock:
            if self._asked:
                raise RuntimeError(
                    f"the engine was told to sleep with {len(self._asked)} requests in flight; expected none: wait "
                    "for them, or cancel them"
                )
            if self._asleep:
                return
            self._asleep = SLEEPING_PARTS
        await self._change("sleep")

    async def wake_up(self, *parts: str) -> None:
        """Take back the device memory that `sleep` freed: of all ``SLEEPING_PARTS``, or of ``parts``. The weights are
        the same as before."""
        for part in [part for part in self._asleep if not parts or part in parts]:
            await self._change("wake_up", part)

    async def close(self) -> None:
        """End the child process; pending requests fail with InfrastructureError. Idempotent.

        Blocks the event loop for up to 5 s, because no thread can be started while the interpreter shuts down."""
        self._close()

    # ------------------------------------------------------------------ messages
    def _ask(
        self, kind: str, *content: Any, changes: bool = False, files: WeightFiles | None = None
    ) -> tuple[int, asyncio.Future[Any]]:
        """Send a message to the child process, or keep it for the next one. Returns its number and a future of the
        answer. ``changes``: the message changes weights or memory."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            self._raise_if_dead()
            if changes and self._loading is not None:
                raise RuntimeError("new weights were given while an update is in progress")
            if not changes and self._lost and not self._repeats_update():
                raise WeightsLost(self._lost)
            if kind == "transfer":
                self.check_transfer(content[0])
                if self._broken and content[0] not in ("init_weight_transfer_engine", "start_weight_update"):
                    raise UpdateInterrupted(INTERRUPTED)
            number = next(self._numbers)
            asked = self._asked[number] = _Asked((kind, number, *content), loop, future, files)
            if changes:
                self._loading = number
            if self._up:
                if not self._on_trial:
                    self._send(asked)
            elif self._died_asleep is not None:
                why, self._died_asleep = self._died_asleep, None
                self._children.revive(why)
        return number, future

    async def _change(self, kind: str, *content: Any, files: WeightFiles | None = None) -> None:
        _, future = self._ask(kind, *content, changes=True, files=files)
        await asyncio.shield(future)

    def receive(self, results: Results) -> None:
        """Resolve the futures of messages that the child process has answered. Called in the child's reader thread."""
        answered: list[tuple[_Asked, Any]] = []
        with self._lock:
            for number, outcome in results:
                asked = self._asked.pop(number, None)  # None: the message was cancelled meanwhile
                if number == self._loading:
                    self._loading = None
                if asked is None:
                    continue
                if not isinstance(outcome, Exception):
                    self._note(asked)
                elif asked.message[0] == "load" and self._lost:
                    self._lose(self._lost)
                answered.append((asked, outcome))
            self._send_waiting()
        _resolve(answered)

    def _send(self, asked: _Asked) -> None:
        asked.sent = True
        self._send_to_child(*asked.message)

    def _send_to_child(self, *message: Any) -> None:
        assert self._children.latest is not None
        self._children.latest.send(*message)

    def _send_waiting(self) -> None:
        """Send waiting messages to a restarted child process, up to the next suspect (message with which two children
        died)."""
        if not self._on_trial or not self._up:
            return
        for asked in self._asked.values():
            if not asked.sent:
                self._send(asked)
            if asked.deaths > 1:
                return
        self._on_trial = False

    def _repeats_update(self) -> bool:
        """Return whether a weight update by files is in progress. Requests after it are sampled from the new
        weights."""
        return self._loading is not None and self._asked[self._loading].message[0] == "load"

    def check_transfer(self, method: str) -> None:
        """Check that the child process has opened its side of a weight transfer before ``method`` is called.

        Raises:
            ValueError: no init_weight_transfer_engine came before ``method``.
            UpdateInterrupted: the child was restarted since then.
        """
        if method == "init_weight_transfer_engine":
            return
        if self._connected is None and method != "shutdown_weight_transfer_engine":
            raise ValueError(f"{method}: expected init_weight_transfer_engine before it")
        if self._connected not in (None, self._children.spawned):
            raise UpdateInterrupted(INTERRUPTED)

    def _note(self, asked: _Asked) -> None:
        """Record the child's new state (weights, sleep, transfer) after it has answered a message."""
        kind, _, *content = asked.message
        if kind == "generate":
            self._has_sampled = True
        elif kind == "wake_up":
            self._asleep = tuple(part for part in self._asleep if part != content[0])
        elif kind == "transfer" and content[0] == "init_weight_transfer_engine":
            self._connected = self._children.spawned
        elif kind == "transfer" and content[0] == "start_weight_update":
            self._transferring, self._broken = True, False
        version = {"load": 1, "transfer": 2}.get(kind)
        if version is not None and content[version] is not None:
            self._version, self._kept, self._lost = content[version], asked.files, None
            self._transferring = self._broken = False

    def _raise_if_asleep(self) -> None:
        if self._asleep:
            raise RuntimeError(
                f"generate was called while the engine is asleep (not on the device: {', '.join(self._asleep)}); "
                "expected one that is awake: push weights or call wake_up first"
            )

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if self._info is None:
            raise InfrastructureError("the engine has not been started; await engine.start() first")

    # ------------------------------------------------------------------ children
    def _start(self) -> None:
        with self._start_lock:
            if self._info is not None:
                return
            several = self._options.get("tensor_parallel_size", 1) > 1
            environment = child_environment(os.environ, self._threads, several_devices=several) | self._environment
            environment["TMPDIR"] = str(run_folder())  # vLLM leaves a file there at every start
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
            child, info = self._children.start((self._backend, self._options, self._threads), environment)
            with self._lock:
                if self._children.closing.is_set():
                    child.end()
                    raise InfrastructureError("the engine was closed")
                self._failure, self._asleep, self._version, self._lost = None, (), None, None
                self._transferring, self._broken, self._connected = False, False, None
                self._children.begin(child, info)

    def _close(self) -> None:
        def ask_to_end(child: Child) -> float:
            up, self._info, self._up, self._died_asleep = self._up, None, False, None
            if up:
                child.send("close")
            return 5.0 if up and self._failure is None else 0.0  # a child that is starting would not listen

        if self._children.close(ask_to_end):
            self.fail(InfrastructureError("the engine was closed"))
            self.forget()

    def busy(self) -> bool:
        """Return whether messages to the child process are unanswered."""
        return bool(self._asked)

    def child_ready(self, child: Child, info: dict[str, Any]) -> None:
        """Send the waiting messages to a new child process. See `revival.Owner`."""
        self._info, self._up, self._on_trial = info, True, True
        self._send_waiting()

    def child_died(self, child: Child) -> bool:
        """Stop sending messages to a dead child process, and return whether to start the next one. See
        `revival.Owner`."""
        self._up = False
        if self._children.closing.is_set():
            return False
        if child.trace is not None and not self._has_sampled:  # the next child would raise the exception again
            self.fail(EngineGone(f"the engine died before it answered a request: {child.describe_death()}"))
            return False
        if self._asleep and not self._asked:  # the trainer uses the memory: another child would find none
            self._died_asleep = child.describe_death()
            logger.warning("the engine died asleep: %s. It is restarted when it is woken", self._died_asleep)
            return False
        return True

    def before_restart(self, why: str) -> str:
        """Fail the messages that the next child process cannot continue; all others wait for it. Returns which weights
        it gets, in words. See `revival.Owner`."""
        self._suspect(why)
        for asked in list(self._asked.values()):
            if asked.message[0] == "transfer" and asked.sent:
                self._fail_one(asked, UpdateInterrupted(INTERRUPTED))
            asked.sent = False
        self._broken, self._transferring = self._broken or self._transferring, False
        if self._version is not None and self._kept is None:
            self._lose(
                f"the engine was restarted, and its weights (version {self._version}) are not kept: it samples nothing "
                "until new weights are pushed"
            )
        if self._lost:
            return "the update in progress" if self._repeats_update() else "no weights: none are kept"
        return "its folder's weights" if self._version is None else f"the weights of version {self._version}"

    def _suspect(self, why: str) -> None:
        """Count a child's death against each message in flight. A message with which two children died fails, if it is
        the only one."""
        for asked in self._asked.values():
            asked.deaths += asked.sent
        suspects = [asked for asked in self._asked.values() if asked.sent and asked.deaths > 1]
        if len(suspects) == 1:
            kind, deaths = suspects[0].message[0], suspects[0].deaths
            failure = f"the engine died {deaths} times with this request ({kind}) in flight, the last time: {why}"
            self._fail_one(suspects[0], PermanentFailure(f"{failure}. It is not sent again: change the request"))

    def _lose(self, why: str) -> None:
        """Note why the weights are lost. Fail all requests but those that wait for a weight update by files, because
        that update is repeated."""
        with self._lock:
            self._lost = why
            first = self._loading if self._repeats_update() else None
            for number, asked in list(self._asked.items()):
                if asked.message[0] == "generate" and (first is None or number < first):
                    self._fail_one(asked, WeightsLost(why))
                    if self._up:
                        self._send_to_child("cancel", number)

    def restore(self, child: Child) -> None:
        """Bring a new child process into the dead one's state: load its weights, compared by checksum, and sleep if it
        slept. Raises as `Child.ask`."""
        with self._lock:
            version, kept, asleep = self._version, None if self._lost else self._kept, self._asleep
            falling = self._loading is not None and self._asked[self._loading].message[0] == "sleep"
        if kept is not None:
            refusal = child.ask("load", -1, kept.paths, version, True, True, timeout_s=self._heartbeat_s)
            if isinstance(refusal, Exception):
                self._lose(f"the engine was restarted, and refused the kept weights: {refusal}")
        if asleep and not falling:
            child.ask("sleep", -1, timeout_s=self._heartbeat_s)
            for part in SLEEPING_PARTS:
                if part not in asleep:
                    child.ask("wake_up", -1, part, timeout_s=self._heartbeat_s)

    def _fail_one(self, asked: _Asked, error: Exception) -> None:
        number = asked.message[1]
        self._asked.pop(number, None)
        if number == self._loading:
            self._loading = None
        _resolve([(asked, error)])

    def fail(self, why: InfrastructureError) -> None:
        """Fail all unanswered messages, and every new message until the next `start`."""
        with self._lock:
            self._failure = why
            waiting, self._asked, self._loading = list(self._asked.values()), {}, None
        _resolve([(asked, type(why)(*why.args)) for asked in waiting])


def check_model_folder(model: str) -> None:
    """Check that ``model``, if it is a path, is a folder with a Hugging Face model. Raises FileNotFoundError.

    A name such as "Qwen/Qwen3-0.6B" passes: the child looks it up in the local cache."""
    folder = Path(model)
    if not folder.is_dir() and model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return
    if not (folder / "config.json").is_file():
        found = "has no config.json" if folder.is_dir() else "does not exist"
        raise FileNotFoundError(f"the model folder {model} {found}; expected a folder written by save_pretrained")


def _resolve(answered: list[tuple[_Asked, Any]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for asked, outcome in answered:
        by_loop.setdefault(asked.loop, []).append((asked.future, outcome))
    for loop, pairs in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_set, pairs)


def _set(pairs: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in pairs:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
