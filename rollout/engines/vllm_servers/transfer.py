"""Loads weights into one server through vLLM's weight transfer API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from rollout.engines.vllm_servers.client import INCOMPLETE, ServerClient
from rollout.trajectory import InfrastructureError


async def load_files(server: ServerClient, paths: Sequence[str], label: str, between_steps: bool) -> None:
    """Load weights from files, which `require_files` has checked, on a server. It then says ``label`` in every answer.
    ``between_steps``: requests in flight continue with the new weights; else they finish first."""
    async with updating(server, label, between_steps):
        await server.post("/update_weights", {"update_info": {"paths": list(paths)}})


async def require_files(server: ServerClient, paths: Sequence[str], verify: bool) -> None:
    """Let a server check names, shapes and values of weight files, and with ``verify`` their checksums. Raises
    ValueError with its reason; the server keeps its weights."""
    refusal = next(filter(None, await server.call("refusal_of_files", list(paths), verify)), None)
    if refusal is not None:
        raise ValueError(refusal)


@contextlib.asynccontextmanager
async def updating(server: ServerClient, label: str, between_steps: bool) -> AsyncIterator[None]:
    """Context manager for one weight update of a server: the caller sends the weights inside the block.

    The server samples nothing inside the block. If the block fails, the server says "incomplete" in every answer until
    the next whole update."""
    try:
        await server.post(f"/pause?mode={'keep' if between_steps else 'wait'}&clear_cache=false")
        await server.post("/update_weight_version", {"new_version": INCOMPLETE})
        await server.call("end_broken_update")
        await server.post("/start_weight_update")
        yield
        # Requests in flight keep their tokens; their keys and values are computed again.
        if not (await server.post("/reset_prefix_cache?reset_running_requests=true"))["success"]:
            raise InfrastructureError(f"{server}: vLLM did not drop its prefix cache after a weight update")
        await server.call("clear_tainted_cache")
        await server.post("/finish_weight_update", {"weight_version": label})
    finally:
        with contextlib.suppress(InfrastructureError, ValueError):  # a dead server; the pool finds it
            await server.post("/resume")
