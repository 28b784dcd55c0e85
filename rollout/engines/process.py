"""Base class of engines that run in a child process, spawned (never forked), which ends when the trainer ends.

The child cannot re-seed the trainer, take its process group or its threads. A child that dies or hangs is replaced. The
next child gets the weights that the dead one held, and samples the unanswered requests, except one that has ended a
child twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.env_vars import child_environment
from common.errors import one_line
from common.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from common.restarts import Restarts
from common.run_folder import run_folder
from rollout.engines.base import EngineGone, Generation, SamplingParams, UpdateInterrupted, WeightsLost, check_request
from rollout.engines.child import ROOT, Child, Results
from rollout.engines.weights.files import WeightFiles
from rollout.trajectory import InfrastructureError, PermanentFailure

logger = logging.getLogger(__name__)

SLEEPING_PARTS = ("weights", "kv_cache")  # of an engine's memory, in the order in which they are woken; vLLM's tags
INTERRUPTED = "the engine was started anew in the middle of a weight update; expected it to be pushed again"
PAUSE_S = 5.0  # before another start when one has failed; what held memory may need it to let go
START_FACTOR = 3.0  # a start anew may take so much longer than the first one, and ``heartbeat_timeout_s``


@dataclass(slots=True)
class _Asked:
    """A message that the child has not answered."""

    message: tuple[Any, ...]  # (kind, number, ...)
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    files: WeightFiles | None = None  # of an update: kept from its end on, for the next child
    sent: bool = False  # to the latest child; else it waits for one
    deaths: int = 0  # of children that had it


class EngineProcess:
    """The trainer's side of `worker.py`; implements `base.Engine`.

    All methods may be called from any event loop; `generate` may be called many times at once.

    A new child has the weights of its folder. It first gets those of the last complete update, if they are kept
    (``keep`` of `load_files` and `transfer`; see `weights.push`), then the unanswered messages in their order. An
    update by files is repeated whole. A `transfer` cannot be repeated, because its tensors are not kept: it raises
    UpdateInterrupted, and the sender pushes again. Where the weights are not kept, `weights_lost` says so, and nothing
    is sampled until new ones have come.

    A message that was in flight when two children died is suspected. If it is the only one, it fails. If there are
    several, the next child gets one at a time, and the message at which it dies fails.
    """

    transport: Literal["auto", "files", "ipc"] = "files"  # of weights from this process; see `weights.push`

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
            backend: dotted path of a class with the methods `worker.py` calls, built there with ``options``.
            heartbeat_timeout_s: seconds without a heartbeat, while the child starts or has work, after which it counts
                as hung. A heartbeat is an answer, or a message sent once a second during the start and between steps.
            restarts: restarts per hour, at most; then requests fail with the reason. An exception before the first
                answer is not followed by a restart, which would repeat it.
        """
        self._backend, self._options, self._threads = backend, options, threads
        self._environment = environment or {}
        self.max_length = max_length
        self._heartbeat_s, self._restarts = heartbeat_timeout_s, Restarts(restarts)
        self._info: dict[str, Any] | None = None
        self._failure: InfrastructureError | None = None
        self._start_lock = threading.Lock()
        self._lock = threading.RLock()  # guards what follows against the threads of children
        self._child: Child | None = None  # the latest
        self._up = False  # it takes messages
        self._reviving: threading.Thread | None = None
        self._died_asleep: str | None = None  # why; it is started anew when it is needed
        self._closing = threading.Event()
        self._has_sampled = False  # whether a child has ever answered a request
        self._wanted = False  # the latest was ended by `restart`
        self._start_s = 0.0  # seconds that the first start took
        self._asked: dict[int, _Asked] = {}  # by number, in the order in which they are sent
        self._on_trial = False  # a suspected message is in flight; later ones wait
        self._loading: int | None = None  # number of what changes the weights or the memory; one at a time
        self._numbers = itertools.count()
        self._asleep: tuple[str, ...] = ()  # of SLEEPING_PARTS
        self._version: int | None = None  # of the last complete update; None: the folder's weights
        self._kept: WeightFiles | None = None  # that update
        self._lost: str | None = None  # why the child does not hold it
        self._transferring = False  # between start and finish of a transfer
        self._broken = False  # such a transfer lost its child
        self._spawned, self._connected = 0, None  # children so far; of them the one that can take a transfer

    @property
    def pid(self) -> int | None:
        """Of the child process, None before `start`."""
        return self._child.process.pid if self._child else None

    @property
    def model(self) -> str:
        """Folder or name of the model that the child loads."""
        return self._options.get("model", "")

    @property
    def info(self) -> dict[str, Any]:
        """What the child says of its model: vocab_size, device."""
        if self._info is None:
            raise InfrastructureError("the engine has not been started; await engine.start() first")
        return self._info

    @property
    def gone(self) -> bool:
        """Whether it has died once too often."""
        return isinstance(self._failure, EngineGone)

    @property
    def keeps_weights(self) -> bool:
        """Whether updates are to be kept for a child that is started anew."""
        return self._restarts.limit > 0

    @property
    def kept(self) -> WeightFiles | None:
        """The files of the last complete update, which a child that is started anew gets."""
        return self._kept

    @property
    def weights_lost(self) -> str | None:
        """Why nothing is sampled until new weights have come; None: the child holds what it should."""
        return self._lost

    async def start(self) -> None:
        """Spawn the child and load the model; returns when it is ready. Idempotent.

        Raises:
            ValueError: the options do not fit the model.
            InfrastructureError: the child failed; the message holds its traceback.
        """
        await asyncio.to_thread(self._start)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """See `base.Engine.generate`. A child that dies meanwhile costs time, and no more.

        Raises:
            ValueError: no ids, ids outside the vocabulary, or more than ``max_length`` tokens in all; or the backend's
                refusal.
            WeightsLost: the child was replaced, and the weights that it held are not kept.
            PermanentFailure: the model's logits are not finite, or two children died with this request in flight.
            EngineGone: the child died once too often.
            InfrastructureError: it has not been started, or was closed.
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
                if self._asked.pop(number, None) is not None and self._up and self._child:  # this task was cancelled
                    self._child.send("cancel", number)
                    self._send_waiting()

    async def load_files(
        self, files: WeightFiles, version: int, between_steps: bool = False, keep: bool = False
    ) -> None:
        """See `base.Engine.load_files`. If this task is cancelled, the child loads all the same. With ``keep`` the
        files stay where they are until the next update has come to its end, or `close`."""
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
        """One call of vLLM's weight transfer; the last one brings a ``version``, and may say which files hold the same
        weights. From its start to its finish nothing is sampled: requests in flight stand still, and go on with the new
        weights; or, not ``between_steps``, the call waits until they have finished.

        Raises:
            ValueError: the backend's error; the weights may then be damaged.
            UpdateInterrupted: the child was started anew since the transfer began.
        """
        if method == "start_weight_update":
            await self.wake_up("weights")
        await self._change("transfer", method, arguments, version, between_steps, files=keep)
        if version is not None:
            await self.wake_up()

    def forget(self) -> None:
        """Remove what is kept: before an update with nothing in flight, two models' worth need not fit."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            kept.remove()

    def restart(self, why: str) -> None:
        """End the child, which is started anew like one that has died, and not counted."""
        with self._lock:
            if self._up and self._child is not None:
                self._wanted = True
                self._child.kill(why)

    def allow_sleep(self) -> None:
        """Before `start`: the engine will `sleep`."""
        self._options["sleeps"] = True

    async def sleep(self) -> None:
        """Free the device's memory, weights and cache; nothing if it is free. A push (`load_files`, `transfer`) wakes
        the weights before and the cache after, so that the cache never lies beside what the push needs.
        Raises RuntimeError if requests are in flight, which vLLM would abort."""
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
        """Take the memory back: all of it, or these ``parts``. Weights are those that fell asleep. Nothing if awake."""
        for part in [part for part in self._asleep if not parts or part in parts]:
            await self._change("wake_up", part)

    async def close(self) -> None:
        """End the child; pending requests fail with InfrastructureError. Idempotent. It takes at most 5 s, in which
        the event loop stands still: at a process's end no thread can be started any more."""
        self._close()

    # ------------------------------------------------------------------ messages
    def _ask(
        self, kind: str, *content: Any, changes: bool = False, files: WeightFiles | None = None
    ) -> tuple[int, asyncio.Future[Any]]:
        """Send a message, or keep it for the next child. ``changes``: weights or memory."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            self._raise_if_dead()
            if changes and self._loading is not None:
                raise RuntimeError("new weights were given while an update is in progress")
            if not changes and self._lost and not self._repeats_update():
                raise WeightsLost(self._lost)
            if kind == "transfer" and self._is_interrupted(content[0]):
                raise UpdateInterrupted(INTERRUPTED)
            number = next(self._numbers)
            asked = self._asked[number] = _Asked((kind, number, *content), loop, future, files)
            if changes:
                self._loading = number
            if self._up:
                if not self._on_trial:
                    self._send(asked)
            elif self._died_asleep is not None:
                self._start_anew(self._died_asleep)
        return number, future

    async def _change(self, kind: str, *content: Any, files: WeightFiles | None = None) -> None:
        _, future = self._ask(kind, *content, changes=True, files=files)
        await asyncio.shield(future)

    def _receive(self, results: Results) -> None:
        """In a child's thread: its answers become results of futures."""
        answered: list[tuple[_Asked, Any]] = []
        with self._lock:
            for number, outcome in results:
                asked = self._asked.pop(number, None)  # None: it was cancelled meanwhile
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
        assert self._child is not None
        asked.sent = True
        self._child.send(*asked.message)

    def _send_waiting(self) -> None:
        """Send what a trial has held back, up to the next suspected message."""
        if not self._on_trial or not self._up:
            return
        for asked in self._asked.values():
            if not asked.sent:
                self._send(asked)
            if asked.deaths > 1:
                return
        self._on_trial = False

    def _repeats_update(self) -> bool:
        """Whether a whole update is on its way to the child: what is asked after it is sampled from it."""
        return self._loading is not None and self._asked[self._loading].message[0] == "load"

    def _is_interrupted(self, method: str) -> bool:
        if method == "init_weight_transfer_engine":
            return False
        elsewhere = self._connected is not None and self._connected != self._spawned
        return elsewhere or (self._broken and method != "start_weight_update")

    def _note(self, asked: _Asked) -> None:
        """What the child holds after it has done what it was asked."""
        kind, _, *content = asked.message
        if kind == "generate":
            self._has_sampled = True
        elif kind == "wake_up":
            self._asleep = tuple(part for part in self._asleep if part != content[0])
        elif kind == "transfer" and content[0] == "init_weight_transfer_engine":
            self._connected = self._spawned
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
            self._child_environment = environment  # also of later children: by then Lightning has set variables
            self._closing.clear()
            self._restarts = Restarts(self._restarts.limit)
            child, info = self._first_child()
            with self._lock:
                if self._closing.is_set():
                    child.end()
                    raise InfrastructureError("the engine was closed")
                self._failure, self._asleep, self._version, self._lost = None, (), None, None
                self._transferring, self._broken, self._connected = False, False, None
                self._begin(child, info)

    def _first_child(self) -> tuple[Child, dict[str, Any]]:
        """It, and what it says of its model. Another where one hangs; one that dies would mostly die again."""
        while True:
            began = time.monotonic()
            with self._lock:  # so that `close` finds each child
                if self._closing.is_set():
                    raise InfrastructureError("the engine was closed")
                child = self._child = self._spawn()
            try:
                info = child.ready(self._heartbeat_s)
                self._start_s = time.monotonic() - began
                return child, info
            except InfrastructureError as error:
                child.end(5.0)
                if not child.hung or not self._restarts.take():
                    why = f"{child.trace or error}{self._restarts.used_up() if child.hung else ''}"
                    raise InfrastructureError(f"the engine's process failed at start: {why}") from None
                logger.warning("the engine hung while it started: %s. Another is started (%s)", error, self._restarts)
            except BaseException:
                child.end(5.0)
                raise
            self._closing.wait(PAUSE_S)

    def _spawn(self) -> Child:
        self._spawned += 1
        return Child((self._backend, self._options, self._threads), self._child_environment, os.getpid())

    def _begin(self, child: Child, info: dict[str, Any]) -> None:
        self._info, self._up, self._on_trial = info, True, True
        self._send_waiting()
        child.begin(self._receive, self._ended, lambda: bool(self._asked), self._heartbeat_s)

    def _close(self) -> None:
        with self._lock:
            self._closing.set()
            child, up, thread = self._child, self._up, self._reviving
            self._info, self._up, self._died_asleep = None, False, None
            if child is None:
                return
            if up:
                child.send("close")
        child.end(5.0 if up and self._failure is None else 0.0)  # one that is being started would not listen
        child.join()
        if thread is not None:
            thread.join()
        self._fail(InfrastructureError("the engine was closed"))
        self.forget()

    def _ended(self, child: Child) -> None:
        """Restart the engine or give it up. Runs in the ended child's reader thread."""
        with self._lock:
            self._up = False
            if self._closing.is_set():
                return
            if child.trace is not None and not self._has_sampled:  # a restarted child would repeat the exception
                self._fail(EngineGone(f"the engine died before it answered a request: {child.describe_death()}"))
            elif self._asleep and not self._asked:  # its memory is in use: another would find none
                self._died_asleep = child.describe_death()
                logger.warning("the engine died asleep: %s. It is started anew when it is woken", self._died_asleep)
            else:
                self._start_anew(child.describe_death())
        if child.trace:
            logger.warning("%s", child.trace)

    def _start_anew(self, why: str) -> None:
        self._died_asleep = None
        self._reviving = threading.Thread(target=self._revive, args=(why,), daemon=True, name="engine-revival")
        self._reviving.start()

    def _revive(self, why: str) -> None:
        """Own thread: until a child is there that has what the dead one had, or the engine is given up."""
        while True:
            try:
                child = self._next_child(why)
                if child is None:
                    return
                info = child.ready(self._heartbeat_s, self._heartbeat_s + START_FACTOR * self._start_s)
                self._give_back(child)
            except (ValueError, OSError, InfrastructureError) as error:
                why = f"it was started anew, and then: {one_line(error)}"
                if self._child is not None:
                    self._child.end()
                self._closing.wait(PAUSE_S)
                continue
            with self._lock:
                if not self._closing.is_set():
                    logger.warning("the engine is there again, and samples %d requests anew", len(self._asked))
                    self._begin(child, info)
            return

    def _next_child(self, why: str) -> Child | None:
        """Start the next child. Returns None if the engine is closed or given up."""
        with self._lock:  # so that `close` finds each child
            if self._closing.is_set():
                return None
            wanted, self._wanted = self._wanted, False
            if not wanted and not self._restarts.take():
                self._fail(EngineGone(f"the engine died: {why}{self._restarts.used_up()}"))
                return None
            if not wanted:
                self._suspect(why)
            self._interrupt()
            held = "its folder's weights" if self._version is None else f"the weights of version {self._version}"
            lost = (
                "the update in progress" if self._repeats_update() else "weights that nobody has kept: it needs others"
            )
            logger.warning(
                "the engine died: %s. It is started anew (%s) with %s",
                why,
                self._restarts,
                lost if self._lost else held,
            )
            self._child = self._spawn()
            return self._child

    def _interrupt(self) -> None:
        """Fail what the next child cannot go on with; all else waits for that child."""
        for asked in list(self._asked.values()):
            if asked.message[0] == "transfer" and asked.sent:
                self._fail_one(asked, UpdateInterrupted(INTERRUPTED))
            asked.sent = False
        self._broken, self._transferring = self._broken or self._transferring, False
        if self._version is not None and self._kept is None:
            self._lose(
                f"the engine was started anew, and its weights (version {self._version}) are not kept: nothing is "
                "sampled until new ones have come"
            )

    def _suspect(self, why: str) -> None:
        """Count a child's death against the messages that it had. Fail a message that is suspected alone."""
        for asked in self._asked.values():
            asked.deaths += asked.sent
        suspects = [asked for asked in self._asked.values() if asked.sent and asked.deaths > 1]
        if len(suspects) == 1:
            kind, deaths = suspects[0].message[0], suspects[0].deaths
            failure = f"the engine died {deaths} times with this request ({kind}) in flight, the last time: {why}"
            self._fail_one(suspects[0], PermanentFailure(f"{failure}. It is not sent again: change what it asks for"))

    def _lose(self, why: str) -> None:
        """Nothing can be sampled but what waits for an update by files, which is repeated."""
        with self._lock:
            self._lost = why
            first = self._loading if self._repeats_update() else None
            for number, asked in list(self._asked.items()):
                if asked.message[0] == "generate" and (first is None or number < first):
                    self._fail_one(asked, WeightsLost(why))
                    if self._up and self._child is not None:
                        self._child.send("cancel", number)

    def _give_back(self, child: Child) -> None:
        """Weights, compared with their checksums, and sleep. Raises as `Child.ask`."""
        with self._lock:
            version, kept, asleep = self._version, None if self._lost else self._kept, self._asleep
            falling = self._loading is not None and self._asked[self._loading].message[0] == "sleep"
        if kept is not None:
            refusal = child.ask("load", -1, kept.paths, version, True, True, timeout_s=self._heartbeat_s)
            if isinstance(refusal, Exception):
                self._lose(f"the engine was started anew, and refused the weights that were kept: {refusal}")
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

    def _fail(self, why: InfrastructureError) -> None:
        """For good, or until `start`."""
        with self._lock:
            self._failure = why
            waiting, self._asked, self._loading = list(self._asked.values()), {}, None
        _resolve([(asked, type(why)(*why.args)) for asked in waiting])


def check_model_folder(model: str) -> None:
    """Raises FileNotFoundError if ``model`` is a path without a Hugging Face model (a name such as "Qwen/Qwen3-0.6B"
    is left to the child, which looks it up in the local cache)."""
    folder = Path(model)
    if not folder.is_dir() and model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return
    if not (folder / "config.json").is_file():
        found = "holds no config.json" if folder.is_dir() else "does not exist"
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
