"""Starts search servers that the ranks of a node share, one per index.

The process that starts the ranks also starts the servers, so that a server outlives every rank. A server that dies is
restarted at its address. The ranks find the address in their environment; keys and checkpoints do not contain it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.registry.files import Config, init_args_of
from experiments.stages.context import StageFailed

if TYPE_CHECKING:
    from retrieval.process import RetrieverProcess

PROCESS = "retrieval.process.RetrieverProcess"


@dataclass(frozen=True)
class SharedRetrievers:
    environment: dict[str, str]  # for the ranks
    servers: tuple[RetrieverProcess, ...] = ()

    def trouble(self) -> str | None:
        """Return why a shared search server has failed for good, or None if all work."""
        return next((server.failure for server in self.servers if server.failure), None)


@contextmanager
def shared_retrievers(config: Config, processes: int | None) -> Iterator[SharedRetrievers]:
    """Context manager that starts a stage's search servers once for all ranks of this node; otherwise each rank would
    start its own.

    Raises:
        StageFailed: a server did not start.
    """
    arguments = list(init_args_of(config, PROCESS)) if (processes or 1) > 1 else []
    if not arguments:
        yield SharedRetrievers({})
        return
    from retrieval.process import SHARED_VARIABLE, RetrieverProcess
    from retrieval.types import RetrievalFailure

    servers = {server.identity: server for server in (RetrieverProcess(**a) for a in arguments)}
    try:
        try:
            urls = {identity: server.start() for identity, server in servers.items()}
        except (RetrievalFailure, ValueError, OSError) as error:
            raise StageFailed(f"the search server did not start: {error}", 1) from None
        print(f"  {processes} ranks share the search server at {', '.join(urls.values())}", flush=True)
        yield SharedRetrievers({SHARED_VARIABLE: json.dumps(urls)}, tuple(servers.values()))
    finally:
        for server in servers.values():
            server.stop()
