"""The search server in a thread of the test, over any backend."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from common.http_server import bind
from retrieval.batching import OwnerThread
from retrieval.server import RetrievalServer


@contextmanager
def serving(owner: OwnerThread, secret: str | None = None) -> Iterator[str]:
    """Yields its URL."""
    loop, listener = asyncio.new_event_loop(), bind("127.0.0.1", 0)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    run = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(60)  # noqa: E731
    runner = run(RetrievalServer(owner, 3, secret).start(listener))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        run(runner.cleanup())
        owner.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
