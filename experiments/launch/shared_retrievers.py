"""Search servers shared by the ranks of a node: one per index, started by the process that starts the ranks.

It outlives every rank, so that none takes it away from the others, and one that dies is started anew at its address. A
stage that is continued gets a new one: the address stands in the environment of the ranks, never in a key or a
checkpoint.
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
    environment: dict[str, str]  # of the ranks
    servers: tuple[RetrieverProcess, ...] = ()

    def trouble(self) -> str | None:
        """Why a server is gone for good, where one is."""
        return next((server.failure for server in self.servers if server.failure), None)


@contextmanager
def shared_retrievers(config: Config, processes: int | None) -> Iterator[SharedRetrievers]:
    """Start every ``RetrieverProcess`` of a stage's configuration if several ranks here would each start one.

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
