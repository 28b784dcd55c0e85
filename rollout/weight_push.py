"""Weights on their way from the trainer's thread into the engine, for one rank or for many that share their engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rollout.engines.base import Engine
from rollout.trajectory import InfrastructureError
from rollout.weight_relay import WeightRelay

if TYPE_CHECKING:
    import torch

Submit = Callable[[Coroutine[Any, Any, Any]], Future[Any]]
Tensors = Iterable[tuple[str, "torch.Tensor"]]


def push(engine: Engine, submit: Submit, tensors: Tensors, version: int, options: dict[str, bool]) -> None:
    """Replace the engine's weights; ``tensors`` is consumed in this thread, to its end.

    Where ranks share the engine, the first rank sends, the others only gather, and all return (or raise) when they have
    heard what became of it.

    Args:
        submit: runs a coroutine in the engine's event loop.
        options: of the engine's ``load_weights``.
    """
    if not getattr(engine, "shared_by_ranks", False):
        if (error := _send(engine, submit, tensors, version, options)) is not None:
            raise error
        return
    error = None
    sends = not _several() or _rank() == 0
    if not sends:
        submit(engine.expect_push(options.get("between_steps", False))).result()
    _meet()
    if not sends:
        for _ in tensors:
            pass
    else:
        error = _send(engine, submit, tensors, version, options)
    told = _word_of_first_rank(engine.held if error is None else _for_all_ranks(error))
    if isinstance(told, Exception):
        submit(engine.give_up()).result()
        raise told from error
    submit(engine.adopt(told)).result()


def _send(
    engine: Engine, submit: Submit, tensors: Tensors, version: int, options: dict[str, bool]
) -> BaseException | None:
    """Returns what the engine raised. Raises only what the gathering of ``tensors`` raises, which all ranks meet."""
    relay = WeightRelay(tensors)
    future = submit(engine.load_weights(relay, version, **options))
    relay.serve_until(future)
    return future.exception()


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


def _word_of_first_rank(word: Any) -> Any:
    """A collective, in the trainer's thread, after all its gathering."""
    if not _several():
        return word
    import torch

    box = [word]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]
