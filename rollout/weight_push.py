"""Weights on their way from the trainer's thread into the engine: of one rank, of many that share their engine, or of
many with an engine each, whose first on a host writes the files that all engines there read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rollout.engines.base import Engine
from rollout.engines.weights import WeightFiles, place_of_files
from rollout.trajectory import InfrastructureError
from rollout.weight_relay import WeightRelay

if TYPE_CHECKING:
    import torch

Submit = Callable[[Coroutine[Any, Any, Any]], Future[Any]]
Tensors = Iterable[tuple[str, "torch.Tensor"]]


def push(engine: Engine, submit: Submit, tensors: Tensors, version: int, options: dict[str, bool]) -> None:
    """Replace the engine's weights; ``tensors`` is consumed in this thread, to its end.

    Where ranks share the engine, the first rank sends; where each has its own, in a process that reads files, the first
    rank of each host writes them. The others only gather, and all return (or raise) when they have heard what became of
    it on every rank.

    Args:
        submit: runs a coroutine in the engine's event loop.
        options: of the engine's ``load_weights``.
    """
    if not getattr(engine, "shared_by_ranks", False):
        if _several() and hasattr(engine, "load_files"):
            return _push_by_host(engine, submit, tensors, version, **options)
        if (error := _send(engine, submit, tensors, version, options)) is not None:
            raise error
        return
    error = None
    sends = not _several() or _rank() == 0
    if not sends:
        submit(engine.expect_push(options.get("between_steps", False))).result()
    try:
        _meet()
        if sends:
            error = _send(engine, submit, tensors, version, options)
        else:
            _consumed(tensors)
        told = _word_of_first_rank(engine.held if error is None else _for_all_ranks(error))
        if isinstance(told, Exception):
            raise told from error
    except BaseException:  # of the gathering, too: else this rank's requests would wait for a push that is over
        submit(engine.give_up()).result()
        raise
    submit(engine.adopt(told)).result()


def _send(
    engine: Engine, submit: Submit, tensors: Tensors, version: int, options: dict[str, bool]
) -> BaseException | None:
    """Returns what the engine raised. Raises only what the gathering of ``tensors`` raises, which all ranks meet."""
    relay = WeightRelay(tensors)
    future = submit(engine.load_weights(relay, version, **options))
    relay.serve_until(future)
    return future.exception()


def _push_by_host(
    engine: Any, submit: Submit, tensors: Tensors, version: int, checksum: bool = False, between_steps: bool = False
) -> None:
    """The model lies in a host's memory once, however many ranks and engines it has."""
    places = _of_all_ranks(place_of_files())
    writer = places.index(places[_rank()])
    files, problem = _written(tensors, checksum) if writer == _rank() else (_consumed(tensors), None)
    try:
        written = _of_all_ranks((files.paths, problem))
        _raise_first([problem for _, problem in written])
        try:
            submit(engine.load_files(WeightFiles(written[writer][0]), version, between_steps)).result()
        except Exception as error:
            problem = _for_all_ranks(error)
        _raise_first(_of_all_ranks(problem))
    finally:
        files.remove()


def _written(tensors: Tensors, checksum: bool) -> tuple[WeightFiles, Exception | None]:
    """The files, and what was in their way. Raises only what the gathering of ``tensors`` raises, which all ranks
    meet; whatever else happens, it is gathered to its end."""
    failed: list[Exception] = []

    def gathering() -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for pair in source:  # no "yield from", which would close the source with this generator
                yield pair
        except Exception as error:
            failed.append(error)
            raise

    source = iter(tensors)
    try:
        return WeightFiles.write(gathering(), checksum), None
    except Exception as error:
        if failed:
            raise
        return _consumed(source), _for_all_ranks(error)


def _consumed(tensors: Tensors) -> WeightFiles:
    for _ in tensors:
        pass
    return WeightFiles([])


def _raise_first(problems: list[Exception | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise type(problem)(f"rank {rank}: {problem}")


def _for_all_ranks(error: BaseException) -> Exception:
    """Whatever it is (a full disk), the others wait for a word of it; not every exception can be sent."""
    if type(error) in (ValueError, InfrastructureError):
        return error
    return InfrastructureError(f"weights could not be pushed: {type(error).__name__}: {error}")


def _meet() -> None:
    """Nothing is sent before every rank expects it: none takes new weights in a server for a server gone astray."""
    if _several():
        import torch

        torch.distributed.barrier()


def _several() -> bool:
    import torch

    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return ready and torch.distributed.get_world_size() > 1


def _rank() -> int:
    import torch

    return torch.distributed.get_rank()


def _of_all_ranks(word: Any) -> list[Any]:
    """A collective, in the trainer's thread, before or after all its gathering."""
    import torch

    words = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(words, word)
    return words


def _word_of_first_rank(word: Any) -> Any:
    """A collective, in the trainer's thread, after all its gathering."""
    if not _several():
        return word
    import torch

    box = [word]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]
