"""A sandbox that lives as long as a test module, with the event loop it belongs to."""

import asyncio
from pathlib import Path

import pytest

from rollout.tools.python.local import LocalSandbox
from rollout.tools.python.tool import PythonTool


class Bench:
    """Synchronous calls to one sandbox."""

    def __init__(self, **options):
        self.loop = asyncio.new_event_loop()
        self.sandbox = LocalSandbox(**options)
        self.tool = PythonTool(self.sandbox)

    def do(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    def run(self, code):
        return self.do(self.tool.call({"code": code}))

    @property
    def monitor(self) -> int:
        return self.sandbox._server.process.pid

    def close(self):
        self.do(self.sandbox.close())
        self.loop.close()


def descendants(pid: int) -> list[int]:
    """Process ids below ``pid``."""
    try:
        own = [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return own + [below for child in own for below in descendants(child)]


@pytest.fixture(scope="module")
def make_bench():
    benches = []

    def make(**options):
        benches.append(Bench(**options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()
