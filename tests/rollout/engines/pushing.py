"""Weight updates of an engine as a rollout system makes them, from inside an event loop."""

from __future__ import annotations

import asyncio

from rollout.engines.weights.push import push


async def push_weights(engine, tensors, version, checksum=False, between_steps=False):
    loop = asyncio.get_running_loop()

    def submit(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    await asyncio.to_thread(push, engine, submit, tensors, version, checksum, between_steps)
