import asyncio
import gc
import json
import os
import shutil
import signal

import pytest

from experiments.launch.shared_retrievers import shared_retrievers
from retrieval.client import RetrieverClient
from retrieval.process import SHARED_VARIABLE, RetrieverProcess
from retrieval.types import IndexFolderError, RetrievalError, RetrieverStartError
from rollout.tools.search import SearchTool
from tests.processes import alive
from tests.rollout.serving import serving


def start_elsewhere_than_here(process: RetrieverProcess) -> str | None:
    """The URL if a server was started."""
    with pytest.raises(IndexFolderError):
        process.start()
    return process.url


def test_a_wrong_index_is_told_before_anything_starts(bm25_index, tmp_path):
    assert start_elsewhere_than_here(RetrieverProcess(str(tmp_path))) is None
    other = tmp_path / "other.jsonl"
    other.write_text("{}")
    process = RetrieverProcess(bm25_index, corpus=str(other))
    assert start_elsewhere_than_here(process) is None and process._server is None


def test_a_server_that_does_not_come_up_shows_its_log_once(bm25_index, tmp_path):
    broken = tmp_path / "index"
    shutil.copytree(bm25_index, broken)
    segments = next((broken / "lucene").glob("segments_*"))
    segments.write_bytes(bytes(segments.stat().st_size))
    process = RetrieverProcess(str(broken))

    async def main():
        return await asyncio.gather(*(process.search(["q"]) for _ in range(20)), return_exceptions=True)

    errors = asyncio.run(main())
    assert {type(error) for error in errors} == {RetrieverStartError} and len({str(error) for error in errors}) == 1
    assert "ended with code 2 while starting" in str(errors[0]) and "Lucene cannot open it" in str(errors[0])
    log = process._server.log
    assert log.read_text().count("Lucene cannot open it") == 1  # one start for all twenty
    process.stop()
    assert not log.exists()


def test_the_search_tools_start_and_its_searches_share_one_server(bm25_index, monkeypatch):
    """A small server in the place of the child; what decides whether to start one is all real."""
    launched = []
    answer = {"result": [[{"document": {"id": "7", "contents": '"T"\nx'}, "score": 1.5}]]}

    async def main():
        async with serving([answer]) as served:
            process = RetrieverProcess(bm25_index)
            monkeypatch.setattr(process, "_launch", lambda: launched.append(1) or served.url)
            tool = SearchTool(process)
            await asyncio.gather(tool.start(), tool.start(), tool.call({"query": "q"}))
            await tool.start()
            found = await tool.call({"query": "q"})
            once = len(launched)
            await tool.close()
            await tool.start()
            await tool.close()
            return found.documents[0].id, once, len(launched), len(served.bodies)

    assert asyncio.run(main()) == ("7", 1, 2, 2)


@pytest.mark.slow
def test_starting_lazily_dying_and_starting_again(bm25_index, corpus, tmp_path, caplog):
    """Whoever asks while it is dead waits. Once too often, and the reason is told."""
    log = tmp_path / "logs" / "retriever.log"
    process = RetrieverProcess(bm25_index, topk=2, restarts=1, log=str(log))

    async def search_all():
        return await asyncio.gather(*(process.search([word]) for word in corpus.words[:20]))

    async def main():
        found = await search_all()
        assert [len(answer[0]) for answer in found] == [2] * 20  # topk
        assert len((await process.search(corpus.words[:1], 5))[0]) == 5
        first, url = process._server.pid, process.url
        os.kill(first, signal.SIGKILL)
        assert await search_all() == found
        assert process._server.pid != first and not alive(first) and process.url == url
        os.kill(process._server.pid, signal.SIGKILL)
        with pytest.raises(RetrievalError, match=r"was killed by SIGKILL; it was restarted once within an hour"):
            await process.search(corpus.words[:1])
        assert "\n" not in process.failure and str(log) in process.failure
        await process.close()
        assert await process.search(corpus.words[:1]) == found[0]
        server = process._server
        for _ in range(2):  # Ctrl-C
            server._child.send_signal(signal.SIGINT)
        assert server._child.wait(300) == 0
        await process.close()

    asyncio.run(main())
    said = [record.getMessage() for record in caplog.records if record.name == "retrieval.server_process"]
    assert said[0] == "the search server was killed by SIGKILL. It is restarted (1 of 1 within an hour)"
    logged = log.read_text()
    assert logged.count("retriever ready at") == 3 and "Traceback" not in logged


@pytest.mark.slow
def test_a_forgotten_process_is_ended(bm25_index):
    process = RetrieverProcess(bm25_index)
    process.start()
    server = process._server
    server.log.unlink()
    del process
    gc.collect()
    assert server._child.wait(300) == 0  # it was sent SIGTERM, and left cleanly


def test_processes_share_a_server_that_one_has_started_for_them(bm25_index, monkeypatch):
    """Whoever has other settings starts its own; a shared one is left to its owner."""
    owner = RetrieverProcess(bm25_index)
    monkeypatch.setenv(SHARED_VARIABLE, json.dumps({owner.identity: "http://127.0.0.1:1"}))
    launched = []
    monkeypatch.setattr(RetrieverProcess, "_launch", lambda self: launched.append(self) or "http://127.0.0.1:2")
    user, other = RetrieverProcess(os.path.relpath(bm25_index), topk=5), RetrieverProcess(bm25_index, k1=1.2)
    assert (user.start(), other.start()) == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert launched == [other]
    user.stop()
    assert user.start() == "http://127.0.0.1:1", "closing it has ended nothing"


@pytest.mark.slow
def test_a_shared_server_is_started_anew_where_the_ranks_look_for_it(bm25_index, corpus):
    init_args = {"index": bm25_index, "restarts": 1}
    config = {"tool": {"class_path": "retrieval.process.RetrieverProcess", "init_args": init_args}}
    with shared_retrievers(config, processes=2) as shared:
        (server,) = shared.servers
        (url,) = json.loads(shared.environment[SHARED_VARIABLE]).values()

        async def main():
            client = RetrieverClient([url])
            found = await client.search(corpus.words[:2], 3)
            os.kill(server._server.pid, signal.SIGKILL)
            assert await client.search(corpus.words[:2], 3) == found and shared.trouble() is None
            os.kill(server._server.pid, signal.SIGKILL)
            with pytest.raises(RetrievalError, match="no answer"):
                await client.search(corpus.words[:2], 3)
            await client.close()

        asyncio.run(main())
        assert shared.trouble() == server.failure and "killed by SIGKILL" in server.failure
