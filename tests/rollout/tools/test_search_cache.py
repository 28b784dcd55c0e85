"""The search cache: the published file in and out, several processes at once, kills, damage."""

import asyncio
import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading

import pytest

from experiments.registry.project import ROOT
from rollout.tools.web.search_cache import CachedSearch, SearchCache, SearchCacheError
from rollout.tools.web.web_search import BrightDataSearch
from rollout.trajectory import Document

PUBLISHED = {
    "who wrote Emma": "Page 1: Jane Austen wrote it.\nPage 2: A novel of 1815.",
    " Who  wrote Emma": "No search results found.",  # keys are exact but for the quotes
    "红楼梦 作者": "Page 1: 曹雪芹\u2028…",
}


@pytest.fixture
def cache(tmp_path):
    return SearchCache(tmp_path / "cache.sqlite")


def as_published(entries) -> str:
    return json.dumps(entries, indent=2, ensure_ascii=False)


def test_the_published_file_is_imported(cache, tmp_path):
    theirs = tmp_path / "search_cache.json"
    theirs.write_text(as_published(PUBLISHED), encoding="utf-8")
    assert cache.import_json(theirs) == 3
    assert {query: cache.lookup(query).text for query in PUBLISHED} == PUBLISHED
    assert cache.lookup('"who wrote "Emma"') == CachedSearch(PUBLISHED["who wrote Emma"], None)
    assert cache.lookup("who wrote emma") is None


def test_an_import_adds_what_is_new_and_leaves_out_empty_texts(cache, tmp_path):
    cache.store("a", "old", [Document("http://x", "t", "old", 1.0)])
    file = tmp_path / "search_cache.json"
    file.write_text(as_published({"a": "new", "b": "", '"c"': "text"}))
    assert cache.import_json(file) == 1
    assert cache.lookup("a").text == "old" and cache.lookup("b") is None and cache.lookup("c").text == "text"
    assert cache.import_json(file) == 0


def test_results_for_other_options_are_refused(cache, tmp_path):
    theirs = tmp_path / "search_cache.json"
    theirs.write_text(as_published(PUBLISHED), encoding="utf-8")
    cache.import_json(theirs)
    ours, other = (SearchCache(cache.path, {"location": place}) for place in ("cn", "us"))  # an import says nothing
    ours.store("a", "Page 1: of cn")
    with pytest.raises(SearchCacheError, match='holds results for {"location": "cn"}, not for {"location": "us"}: tak'):
        other.store("b", "Page 1: of us")
    assert other.lookup("b") is None
    with pytest.raises(SearchCacheError, match="cache.sqlite holds results for"):
        BrightDataSearch(cache=str(cache.path), location="us")
    assert SearchCache(cache.path, {"location": "cn"}).lookup("a").text == "Page 1: of cn"
    assert cache.count() == 4


def test_documents_come_back_and_an_empty_text_is_never_kept(cache):
    documents = [Document("https://e.org/a", "Ä", 'say "x"', 0.5), Document("", "", "", 1 / 3)]
    cache.store('an "exact" query', "Page 1: x", documents)
    cache.store("failed", "")
    cache.store("half \ud83d pair\0", "half \ud83d text\0", ())
    assert cache.lookup("an exact query") == CachedSearch("Page 1: x", tuple(documents))
    assert cache.lookup("failed") is None
    assert cache.lookup("half \ud83d pair\0") == CachedSearch("half ? text\0", ())
    cache.store("an exact query", "Page 1: y")  # the newer one
    assert cache.lookup("an exact query") == CachedSearch("Page 1: y", None)
    assert cache.count() == 2


def test_sqlite_works_outside_the_event_loop(cache, monkeypatch):
    threads = []
    search = BrightDataSearch(cache=str(cache.path), offline=True)
    lookup = search.cache.lookup
    monkeypatch.setattr(
        search.cache, "lookup", lambda query: threads.append(threading.current_thread()) or lookup(query)
    )

    async def main():
        await asyncio.gather(*(search.call({"query": str(i)}) for i in range(20)))

    asyncio.run(main())
    assert len(threads) == 20 and threading.main_thread() not in threads


def write_many(path, name, n, started):
    started.wait()  # all open the new file at the same moment
    cache = SearchCache(path)
    for i in range(n):
        cache.store(f"{name} {i}", f"Page 1: {name} {i}")
        cache.store("shared", f"Page 1: {name} {i}")
        assert cache.lookup(f"{name} {i}").text == f"Page 1: {name} {i}"


@pytest.mark.slow
def test_several_processes_write_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    started = context.Barrier(4)
    path = tmp_path / "cache.sqlite"
    writers = [context.Process(target=write_many, args=(path, f"w{i}", 10, started)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    cache = SearchCache(path)
    assert cache.count() == 41 and cache.lookup("shared").text.endswith(" 9")


WRITER = """
import sys
from rollout.tools.web.search_cache import SearchCache
cache = SearchCache(sys.argv[1])
for i in range(10**6):
    cache.store(f"query {i}", f"Page 1: {i} " + "x" * 2000)
    print(i, flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_that_it_had_kept(tmp_path):
    path = tmp_path / "cache.sqlite"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ)
    )
    told = [writer.stdout.readline() for _ in range(30)]
    writer.send_signal(signal.SIGKILL)
    told += writer.stdout.readlines()
    writer.wait()
    told = [int(line) for line in told if line.endswith("\n")]
    cache = SearchCache(path)
    assert len(told) >= 30
    for i in told:
        assert cache.lookup(f"query {i}").text.startswith(f"Page 1: {i} ")
    assert cache.count() - len(told) in (0, 1)  # one may have been kept and not yet told
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": "b"', "expected JSON"),
        ("[1]", "found list; expected one JSON object"),
        ('{"a": "b", "q 2": ["c"]}', r"entry 'q 2' is list; expected a text"),
        (b'{"a": "\xff"}', "expected JSON in UTF-8"),
    ],
)
def test_an_import_of_another_shape_names_the_entry_and_changes_nothing(cache, tmp_path, content, message):
    file = tmp_path / "search_cache.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        cache.import_json(file)
    assert cache.count() == 0


def test_damage_inside_the_file_is_told(cache):
    for i in range(20):
        cache.store(f"query {i}", "x" * 10_000)
    size = cache.path.stat().st_size
    with open(cache.path, "r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * (size - 8192))
    with pytest.raises(SearchCacheError, match="cache.sqlite: .*(malformed|not a database)"):
        for i in range(20):
            cache.lookup(f"query {i}")


def test_a_file_that_stays_locked_is_told_by_its_name(cache, monkeypatch):
    cache.store("a", "b")
    monkeypatch.setattr("rollout.tools.web.search_cache._PATIENCE_S", 0.05)
    other = sqlite3.connect(cache.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(SearchCacheError, match="cache.sqlite: database is locked$"):
        cache.store("c", "d")
    other.execute("ROLLBACK")
    other.close()
    cache.store("c", "d")
    assert cache.count() == 2


def test_the_command_imports(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "rollout.tools.web.search_cache", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    theirs, database = tmp_path / "in.json", tmp_path / "cache.sqlite"
    theirs.write_text(as_published(PUBLISHED), encoding="utf-8")
    assert run("import", database, theirs).stdout == f"3 searches imported; 3 in {database}\n"
    assert SearchCache(database).lookup("who wrote Emma").text == PUBLISHED["who wrote Emma"]
    for wrong, message in [
        ((), "import DATABASE JSON"),
        (("import", database, tmp_path / "none"), "No such file"),
    ]:
        done = run(*wrong)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
