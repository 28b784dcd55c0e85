"""Weight update of a rollout engine from the trainer's thread, the same for one rank and for many.

Every rank gathers all tensors (a collective under ZeRO-3), in its own thread. Who writes them where:

- engines of their own: each rank fills a buffer that its engine shares (`ipc.py`), or the first rank of each host
  writes files, which the engines of all its ranks read;
- engine servers shared by all ranks: the first rank writes files that the servers read, or broadcasts by NCCL.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

from common.ranks import gather_objects, rank
from rollout.engines.base import Engine, EngineGone, UpdateInterrupted
from rollout.engines.process import INTERRUPTED
from rollout.engines.weights.files import WeightFiles, in_type, shared_memory_id
from rollout.engines.weights.ipc import IPCSender
from rollout.trajectory import InfrastructureError

if TYPE_CHECKING:
    import torch

Submit = Callable[[Coroutine[Any, Any, Any]], Future[Any]]
Tensors = Iterable[tuple[str, "torch.Tensor"]]
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class SharedEngine(Engine, Protocol):
    """An engine that says ``shared = True``: what several ranks sample from, and the first one sends the weights to."""

    shared: bool

    @property
    def held(self) -> Any:
        """Names the weights that generations come from; it is sent to the other ranks."""
        ...

    async def begin_push(self) -> None:
        """On every rank, before the first one sends."""
        ...

    def send(self, submit: Submit, tensors: Tensors, version: int, checksum: bool, between_steps: bool) -> None:
        """Replace the weights; called in the trainer's thread, on the first rank. Raises as `Engine.load_files`."""
        ...

    async def adopt(self, held: Any) -> None:
        """On the other ranks: from now on generations come from these weights."""
        ...

    async def end_push(self) -> None: ...


def is_shared(engine: Engine) -> TypeGuard[SharedEngine]:
    return getattr(engine, "shared", False)


def push(
    engine: Engine, submit: Submit, tensors: Tensors, version: int, checksum: bool = False, between_steps: bool = False
) -> None:
    """Replace the engine's weights; ``tensors`` is consumed in this thread, to its end, whatever fails meanwhile.
    A collective: all ranks return, or raise, when they know the outcome on every rank.

    Args:
        submit: runs a coroutine in the engine's event loop.
        checksum, between_steps: see ``RolloutSystem.load_weights`` and `base.Engine.load_files`.
    """
    if is_shared(engine):
        _push_to_servers(engine, submit, tensors, version, checksum, between_steps)
    else:
        _push_to_own_engines(engine, submit, tensors, version, checksum, between_steps)


def _push_to_own_engines(
    engine: Engine, submit: Submit, tensors: Tensors, version: int, checksum: bool, between_steps: bool
) -> None:
    """Through a buffer that trainer and engine share where every rank can, else by files, which lie in a host's memory
    once, however many ranks and engines the host has. Both in the engine's type.

    Engines that start a dead child anew keep the files until the next push has come to its end; by way of a buffer they
    are written beside it, and hold the whole push for an engine that dies in it.
    """
    tensors, sender, obstacle = _connect(engine, submit, tensors)
    hosts, obstacles = zip(*gather_objects((shared_memory_id(), obstacle)), strict=True)
    if sender is not None and any(obstacles):
        sender.close()
        sender = None
    if sender is None and getattr(engine, "transport", "files") == "ipc":
        raise ValueError(
            f"transport: ipc cannot be used: {next(filter(None, obstacles))}; take transport: auto or files"
        )
    writer = hosts.index(hosts[rank()])
    keeper: Any = engine if getattr(engine, "keeps_weights", False) else None
    if keeper is not None and not between_steps:  # nothing is in flight, on any rank, that the old weights might be
        keeper.forget()  # needed for again; memory need not hold both
    before: WeightFiles | None = keeper.kept if keeper is not None else None
    tensors = in_type(tensors, _info(engine).get("dtype"))
    if sender is not None:
        copies = WeightFiles([]) if keeper is not None and writer == rank() else None
        route = _Buffer(sender, copies, keeper is not None)
        files, problem = _consume(tensors, lambda given: route.send(given, checksum, between_steps), True)
    else:
        route, sums = None, checksum or keeper is not None
        files, problem = _consume(tensors, lambda given: WeightFiles.write(given, sums), writer == rank())
    try:
        written = gather_objects((files.paths if files else [], problem and _picklable(problem)))
        _raise_first([error for _, error in written], problem)
        whole = files or WeightFiles(written[writer][0])
        whole.verified = checksum
        keep: Any = {"keep": True} if keeper is not None else {}
        try:
            if route is None or not route.finish(version, whole):
                submit(engine.load_files(whole, version, between_steps, **keep)).result()
        except Exception as error:
            problem = error
        _raise_first(gather_objects(problem and _picklable(problem)), problem)
    finally:
        if route is not None:
            route.close()
        for old in (before, files):
            if old is not None and (keeper is None or old is not keeper.kept):
                old.remove()


class _Buffer:
    """The way through a buffer, beside which ``copies`` are written for an engine that dies. An engine that is started
    anew on the way (``mended``: that is foreseen) has to load the copies."""

    def __init__(self, sender: IPCSender, copies: WeightFiles | None, mended: bool) -> None:
        self._sender, self._copies, self._mended = sender, copies, mended
        self._interrupted = False

    def send(self, tensors: Tensors, checksum: bool, between_steps: bool) -> WeightFiles | None:
        """The copies, if this rank writes them."""
        passing = iter(tensors) if self._copies is None else _copying(tensors, self._copies)
        try:
            self._sender.send(passing, checksum, between_steps)
        except UpdateInterrupted:
            if not self._mended:
                raise
            self._interrupted = True
        for _ in passing:  # what the sender has left: the copies are to be whole
            pass
        return self._copies

    def finish(self, version: int, copies: WeightFiles) -> bool:
        """False: the engine has to load the copies."""
        if not self._interrupted:
            try:
                self._sender.finish(version, **({"keep": copies} if self._mended and copies.paths else {}))
                return True
            except UpdateInterrupted:
                if not self._mended:
                    raise
        if not copies.paths:
            raise UpdateInterrupted(f"{INTERRUPTED}, as there was no room for a copy of the weights")
        return False

    def close(self) -> None:
        self._sender.close()


def _copying(tensors: Tensors, copies: WeightFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """``tensors``, which pass also where there is no room for copies."""
    source = iter(tensors)
    try:
        yield from copies.copying(source, checksum=True)
    except OSError as error:
        copies.paths.clear()
        logger.warning("no copy of the weights is kept, which an engine that dies would need: %s", error)
        yield from source


def _connect(engine: Any, submit: Submit, tensors: Tensors) -> tuple[Tensors, IPCSender | None, str | None]:
    """The tensors, of which all ranks gather the first to see where it lies; what sends them by IPC; or why nothing
    does."""
    if getattr(engine, "transport", "files") == "files":
        return tensors, None, "transport: files"
    tensors = iter(tensors)
    first = list(itertools.islice(tensors, 1))
    if not first:
        return tensors, None, "there are no weights"
    sender, obstacle = IPCSender(engine, submit), None
    try:
        sender.connect(first[0][1].device)
    except (ValueError, OSError, RuntimeError) as error:  # the engine may be dead, too
        sender, obstacle = None, str(error) or type(error).__name__
        if _info(engine).get("ipc_memory") is not None:
            _warn_of_files(obstacle)
    return itertools.chain((first.pop() for _ in range(1)), tensors), sender, obstacle


@functools.cache  # once
def _warn_of_files(obstacle: str) -> None:
    logger.warning("weights go to the engine by files, as they cannot go by IPC: %s", obstacle)


def _info(engine: Any) -> Mapping[str, Any]:
    try:
        return getattr(engine, "info", {})
    except InfrastructureError:  # it has not been started: whoever asks it for something is told
        return {}


def _push_to_servers(
    engine: SharedEngine, submit: Submit, tensors: Tensors, version: int, checksum: bool, between_steps: bool
) -> None:
    """The first rank sends; the others learn from it which weights the servers hold."""

    def send(given: Tensors) -> None:
        engine.send(submit, given, version, checksum, between_steps)

    submit(engine.begin_push()).result()
    try:
        gather_objects(None)  # a barrier: no rank takes a server with new weights for a wrong one
        _, problem = _consume(tensors, send, rank() == 0)
        outcome: Any = gather_objects(_picklable(problem) if problem else engine.held)[0]
        if isinstance(outcome, Exception):
            _raise_first([outcome], problem)
        elif rank() > 0:
            submit(engine.adopt(outcome)).result()
    finally:  # also if gathering fails: else this rank's requests would wait for a push that is over
        submit(engine.end_push()).result()


def _consume(
    tensors: Tensors, write: Callable[[Tensors], Result], writes: bool
) -> tuple[Result | None, Exception | None]:
    """Result and error of ``write(tensors)``, called if this rank ``writes``; the tensors it leaves are gathered too,
    as other ranks wait for that. Raises only what gathering raises, which is raised on all ranks."""
    failed: list[BaseException] = []

    def gathering() -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from source
        except BaseException as error:
            if not isinstance(error, GeneratorExit):
                failed.append(error)
            raise

    source, result, problem = iter(_WithoutClose(tensors)), None, None
    if writes:
        try:
            result = write(gathering())
        except Exception as error:
            if failed:
                raise failed[0] from None
            problem = error
    for _ in source:
        pass
    return result, problem


class _WithoutClose:
    """Iterator without ``close``: closing a generator that delegates to it does not close what it iterates over."""

    def __init__(self, tensors: Tensors) -> None:
        self._source = iter(tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._source)


def _raise_first(problems: list[Exception | None], cause: Exception | None) -> None:
    """Raise the lowest rank's problem; where there are several ranks the error names the failing one. ``cause``: this
    rank's own error."""
    for number, problem in enumerate(problems):
        if problem is not None:
            error = type(problem)(f"rank {number}: {problem}") if len(problems) > 1 else problem
            if error is cause:
                raise error
            raise error from cause


def _picklable(error: Exception) -> Exception:
    """An error that can be sent to the other ranks, which wait for the outcome whatever failed (a full disk)."""
    if type(error) in (ValueError, InfrastructureError, EngineGone, UpdateInterrupted):
        return error
    return InfrastructureError(f"weights could not be pushed: {type(error).__name__}: {error}")
