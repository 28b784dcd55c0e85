"""Weight update of a rollout engine from the trainer's thread, with one rank or several.

Every rank gathers all tensors (a collective under ZeRO-3), in its own thread. The way to the engine differs:

- A rank's own engine: each rank fills a buffer that its engine shares (`ipc.py`), or the first rank of each host
  writes files, which the engines of all its ranks read.
- Servers that all ranks share: the first rank writes files that the servers read, or broadcasts by NCCL.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

from common.ranks import gather_objects, rank
from rollout.engines.base import INTERRUPTED, Engine, EngineGone, UpdateInterrupted
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
    """An engine that several ranks sample from (``shared = True``). The first rank sends the weights."""

    shared: bool

    @property
    def held(self) -> Any:
        """Identifies the weights of the engine. The first rank sends it to the other ranks."""
        ...

    async def begin_push(self) -> None:
        """Prepare for a weight push. Called on every rank, before the first rank sends."""
        ...

    def send(self, submit: Submit, tensors: Tensors, version: int, checksum: bool, between_steps: bool) -> None:
        """Send new weights to the engine. Called in the trainer's thread, on the first rank. Raises as
        `Engine.load_files`."""
        ...

    async def adopt(self, held: Any) -> None:
        """Send requests only to servers that hold the weights ``held``, from now on. Called on the other ranks."""
        ...

    async def end_push(self) -> None: ...


def is_shared(engine: Engine) -> TypeGuard[SharedEngine]:
    return getattr(engine, "shared", False)


def takes_adapters(engine: Engine) -> bool:
    """Return whether a push sends LoRA adapters to the engine instead of the policy's weights."""
    return getattr(engine, "adapters", False)


def push(
    engine: Engine, submit: Submit, tensors: Tensors, version: int, checksum: bool = False, between_steps: bool = False
) -> None:
    """Replace the engine's weights. A collective: each rank returns or raises once it knows the outcome on all ranks.

    Args:
        submit: runs a coroutine in the engine's event loop.
        tensors: consumed in this thread, and to the end even after a failure.
        checksum, between_steps: see ``RolloutSystem.load_weights`` and `base.Engine.load_files`.
    """
    if is_shared(engine):
        _push_to_servers(engine, submit, tensors, version, checksum, between_steps)
    else:
        _push_to_own_engines(engine, submit, tensors, version, checksum, between_steps)


def _push_to_own_engines(
    engine: Engine, submit: Submit, tensors: Tensors, version: int, checksum: bool, between_steps: bool
) -> None:
    """Push weights to each rank's own engine: through a shared buffer if every rank can, otherwise by files. Both have
    the engine's dtype.

    A host needs memory for one set of files, for any number of ranks and engines. Engines that restart keep the files
    until the next push has ended. With a buffer the files are written beside it, for an engine that dies in the push.
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
    if keeper is not None and not between_steps:  # no request in flight, on any rank, may need the
        keeper.forget()  # old weights again, so both copies need not fit
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
    """Pushes weights through a shared buffer, and writes ``copies`` (files) beside it. If ``mended``, an engine that
    restarts during the push loads the copies; otherwise the push fails."""

    def __init__(self, sender: IPCSender, copies: WeightFiles | None, mended: bool) -> None:
        self._sender, self._copies, self._mended = sender, copies, mended
        self._interrupted = False

    def send(self, tensors: Tensors, checksum: bool, between_steps: bool) -> WeightFiles | None:
        """Send the weights. Returns the files with their copies, or None if another rank writes them."""
        passing = iter(tensors) if self._copies is None else _copying(tensors, self._copies)
        try:
            self._sender.send(passing, checksum, between_steps)
        except UpdateInterrupted:
            if not self._mended:
                raise
            self._interrupted = True
        for _ in passing:  # copy the tensors that the sender has left
            pass
        return self._copies

    def finish(self, version: int, copies: WeightFiles) -> bool:
        """Finish the weight push. Returns False if the engine must load the copies from files."""
        if not self._interrupted:
            try:
                self._sender.finish(version, **({"keep": copies} if self._mended and copies.paths else {}))
                return True
            except UpdateInterrupted:
                if not self._mended:
                    raise
        if not copies.paths:
            raise UpdateInterrupted(f"{INTERRUPTED}; there was no room for a copy of them")
        return False

    def close(self) -> None:
        self._sender.close()


def _copying(tensors: Tensors, copies: WeightFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights, and copy each into the files ``copies``. Without room for copies, only yield them."""
    source = iter(tensors)
    try:
        yield from copies.copying(source, checksum=True)
    except OSError as error:
        copies.paths.clear()
        logger.warning("no copy of the weights is kept for an engine that restarts: %s", error)
        yield from source


def _connect(engine: Any, submit: Submit, tensors: Tensors) -> tuple[Tensors, IPCSender | None, str | None]:
    """Open a shared buffer with the engine. Returns the tensors, the IPC sender or None, and the obstacle as a text or
    None.

    All ranks gather the first tensor to find its device."""
    if getattr(engine, "transport", "files") == "files":
        return tensors, None, "transport: files"
    tensors = iter(tensors)
    first = list(itertools.islice(tensors, 1))
    if not first:
        return tensors, None, "there are no weights"
    sender, obstacle = IPCSender(engine, submit), None
    try:
        sender.connect(first[0][1].device)
    except (ValueError, OSError, RuntimeError) as error:  # also if the engine is dead
        sender, obstacle = None, str(error) or type(error).__name__
        if _info(engine).get("ipc_memory") is not None:
            _warn_of_files(obstacle)
    return itertools.chain((first.pop() for _ in range(1)), tensors), sender, obstacle


@functools.cache  # once
def _warn_of_files(obstacle: str) -> None:
    logger.warning("weights go to the engine by files, because IPC cannot be used: %s", obstacle)


def _info(engine: Any) -> Mapping[str, Any]:
    try:
        return getattr(engine, "info", {})
    except InfrastructureError:  # not started: a later request reports that
        return {}


def _push_to_servers(
    engine: SharedEngine, submit: Submit, tensors: Tensors, version: int, checksum: bool, between_steps: bool
) -> None:
    """Push weights to the shared servers from the first rank, and tell the other ranks which weights the servers
    hold."""

    def send(given: Tensors) -> None:
        engine.send(submit, given, version, checksum, between_steps)

    submit(engine.begin_push()).result()
    try:
        gather_objects(None)  # a barrier: no rank treats a server with new weights as wrong
        _, problem = _consume(tensors, send, rank() == 0)
        outcome: Any = gather_objects(_picklable(problem) if problem else engine.held)[0]
        if isinstance(outcome, Exception):
            _raise_first([outcome], problem)
        elif rank() > 0:
            submit(engine.adopt(outcome)).result()
    finally:  # also if gathering fails: otherwise this rank's requests wait forever
        submit(engine.end_push()).result()


def _consume(
    tensors: Tensors, write: Callable[[Tensors], Result], writes: bool
) -> tuple[Result | None, Exception | None]:
    """Gather all tensors, and pass them to ``write`` if this rank ``writes``. Returns the result of ``write`` and its
    error.

    The remaining tensors are gathered too, because other ranks wait for that. Raises only errors of gathering, which
    all ranks raise."""
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
    """An iterator without ``close``: closing a generator that delegates to it does not close the source."""

    def __init__(self, tensors: Tensors) -> None:
        self._source = iter(tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._source)


def _raise_first(problems: list[Exception | None], cause: Exception | None) -> None:
    """Raise the error of the lowest rank that failed, if any. With several ranks the error names the failing one.
    ``cause``: this rank's own error."""
    for number, problem in enumerate(problems):
        if problem is not None:
            error = type(problem)(f"rank {number}: {problem}") if len(problems) > 1 else problem
            if error is cause:
                raise error
            raise error from cause


def _picklable(error: Exception) -> Exception:
    """Return an error as a type that the other ranks can receive."""
    if type(error) in (ValueError, InfrastructureError, EngineGone, UpdateInterrupted):
        return error
    return InfrastructureError(f"weights could not be pushed: {type(error).__name__}: {error}")
