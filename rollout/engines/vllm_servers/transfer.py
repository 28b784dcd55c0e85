"""Loads weights into one server through vLLM's weight transfer API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from rollout.engines.vllm_servers.client import ServerClient
from rollout.trajectory import InfrastructureError


async def load_files(
    server: ServerClient, paths: Sequence[str], label: str, incomplete: str, between_steps: bool
) -> None:
    """Load weights from files on a server. The arguments are those of `updating`.

    Call `require_files` before. Raises ValueError if the files cannot be read any more; the server then says
    ``incomplete``."""
    async with updating(server, label, incomplete, between_steps):
        await server.post("/update_weights", {"update_info": {"paths": list(paths)}})


async def require_files(server: ServerClient, paths: Sequence[str], verify: bool) -> None:
    """Let a server check names, shapes and values of weight files, and with ``verify`` their checksums. Raises
    ValueError with the server's reason; the server keeps its weights."""
    refusal = next(filter(None, await server.call("refusal_of_files", list(paths), verify)), None)
    if refusal is not None:
        raise ValueError(refusal)


@contextlib.asynccontextmanager
async def updating(server: ServerClient, label: str, incomplete: str, between_steps: bool) -> AsyncIterator[None]:
    """Context manager for one weight update of a server: the caller sends the weights inside the block.

    If the block fails, the server stays paused, because a part of its model may be missing. It says ``incomplete``
    until the next whole update.

    Args:
        label: name of the new weights in answers.
        incomplete: name of the weights meanwhile.
        between_steps: requests in flight continue with the new weights. False: they finish first.
    """
    begun = False
    try:
        await server.post(f"/pause?mode={'keep' if between_steps else 'wait'}&clear_cache=false", again=True)
        await server.post("/update_weight_version", {"new_version": incomplete}, again=True)
        await server.call("end_broken_update")
        begun = True
        await server.post("/start_weight_update")
        yield
        await _drop_cache(server)
        await server.post("/finish_weight_update", {"weight_version": label})
    except BaseException:
        if not begun:  # the model is as it was
            with contextlib.suppress(InfrastructureError, ValueError):  # a dead server; the pool finds it
                await server.post("/resume", again=True)
        raise
    await server.post("/resume", again=True)


async def clean(server: ServerClient) -> None:
    """Clear a server's key/value cache if it may contain numbers that are not finite. Requests in flight go on."""
    if any(answer["tainted"] for answer in await server.call("is_tainted")):
        await server.post("/pause?mode=keep&clear_cache=false", again=True)
        await _drop_cache(server)
        await server.post("/resume", again=True)


async def _drop_cache(server: ServerClient) -> None:
    """Drop the prefix cache of a paused server. Requests in flight keep their tokens; their keys and values are
    computed again."""
    if not (await server.post("/reset_prefix_cache?reset_running_requests=true"))["success"]:
        raise InfrastructureError(f"{server}: vLLM did not drop its prefix cache after a weight update")
    await server.call("clear_tainted_cache")
