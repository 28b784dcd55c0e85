"""The search tool starts what is behind it: a server is asked, a process is started once."""

import asyncio
import threading

import pytest

from retrieval.client import RetrieverClient
from retrieval.process import RetrieverProcess
from retrieval.types import IndexFolderError
from rollout.tools.limits import LimitedTool, ToolLimits
from rollout.tools.search import SearchTool
from rollout.trajectory import InfrastructureError
from tests.rollout.serving import free_port, serving

ANSWER = {"result": [[{"document": {"id": "7", "contents": '"T"\nx'}, "score": 1.5}]]}


def test_a_server_is_asked_before_it_is_needed():
    async def main():
        async with serving([ANSWER]) as served:
            tool = LimitedTool(SearchTool(RetrieverClient([served.url])), ToolLimits())
            for _ in range(2):  # every rollout starts its tools
                await tool.start()
            asked = len(served.bodies)
            text = (await tool.call({"query": "q"})).text
            await tool.close()
            return asked, text

    assert asyncio.run(main()) == (1, 'Doc 1(Title: "T") x\n')
    nobody = SearchTool(RetrieverClient([f"http://127.0.0.1:{free_port()}"], retries=1, backoff=0.01))
    with pytest.raises(InfrastructureError, match="search cannot start: no answer .*that the address is right"):
        asyncio.run(nobody.start())


def test_a_wrong_index_is_told_at_the_start(tmp_path):
    with pytest.raises(IndexFolderError, match=str(tmp_path)):
        asyncio.run(SearchTool(RetrieverProcess(str(tmp_path))).start())


@pytest.mark.parametrize(
    ("contents", "shown"),
    [
        ('"T"\nx', '"T"'),
        ('""Heroes" (album)"\nx', '""Heroes" (album)"'),  # its own quotation marks beside the corpus file's
        ("T\nx", "T"),  # a corpus without them
    ],
)
def test_titles_are_shown_as_the_corpus_has_them(contents, shown):
    """As Search-R1's _passages2string: the first line of contents, unchanged."""

    async def main():
        async with serving([{"result": [[{"document": {"id": "7", "contents": contents}, "score": 1.0}]]}]) as served:
            tool = SearchTool(RetrieverClient([served.url]))
            text = (await tool.call({"query": "q"})).text
            await tool.close()
            return text

    assert asyncio.run(main()) == f"Doc 1(Title: {shown}) x\n"


class Blocking:
    """Starts as ``RetrieverProcess`` does: not in the event loop."""

    def __init__(self):
        self.threads = []

    def start(self):
        self.threads.append(threading.current_thread())

    async def search(self, queries, k):
        return [[]]

    async def close(self):
        return None


def test_a_start_that_blocks_has_a_thread_and_one_without_start_is_left_alone():
    blocking = Blocking()
    asyncio.run(SearchTool(blocking).start())
    assert len(blocking.threads) == 1 and blocking.threads[0] is not threading.main_thread()

    class Plain:
        search, close = Blocking.search, Blocking.close

    asyncio.run(SearchTool(Plain()).start())
