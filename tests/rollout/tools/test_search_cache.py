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

from experiments.project import ROOT
from rollout.tools.search_cache import CachedSearch, SearchCache, SearchCacheError, cache_key
from rollout.trajectory import Document

PUBLISHED = {
    "who wrote Emma": "Page 1: Jane Austen wrote it.\nPage 2: A novel of 1815.",
    " Who  wrote Emma": "No search results found.",  # keys are exact but for the quotes
    "红楼梦 作者": "Page 1: 曹雪芹\u2028…",
}


@pytest.fixture
def cache(tmp_path):
    cache = SearchCache(tmp_path / "cache.sqlite")
    yield cache
    cache.close()


def as_published(entries) -> str:
    return json.dumps(entries, indent=2, ensure_ascii=False)


def test_import_and_export_give_the_published_file_back_byte_for_byte(cache, tmp_path):
    theirs, ours = tmp_path / "search_cache.json", tmp_path / "out" / "search_cache.json"
    theirs.write_text(as_published(PUBLISHED), encoding="utf-8")
    assert cache.import_json(theirs) == 3
    assert cache.export_json(ours) == 3
    assert ours.read_bytes() == theirs.read_bytes()
    assert cache.lookup('"who wrote "Emma"') == CachedSearch(PUBLISHED["who wrote Emma"], None)
    assert cache.lookup("who wrote emma") is None


def test_an_import_adds_what_is_new_and_leaves_out_empty_texts(cache, tmp_path):
    cache.store("a", "old", [Document("http://x", "t", "old", 1.0)])
    file = tmp_path / "search_cache.json"
    file.write_text(as_published({"a": "new", "b": "", '"c"': "text"}))
    assert cache.import_json(file) == 1
    assert cache.lookup("a").text == "old" and cache.lookup("b") is None and cache.lookup("c").text == "text"
    assert cache.import_json(file) == 0


def test_documents_come_back_and_an_empty_text_is_never_kept(cache):
    documents = [Document("https://e.org/a", "Ä", 'say "x"', 0.5), Document("", "", "", 1 / 3)]

    async def main():
        await cache.put('an "exact" query', "Page 1: x", documents)
        await cache.put("failed", "")
        await cache.put("half \ud83d pair\0", "half \ud83d text\0", ())
        assert await cache.get("an exact query") == CachedSearch("Page 1: x", tuple(documents))
        assert await cache.get("failed") is None
        assert await cache.get("half \ud83d pair\0") == CachedSearch("half ? text\0", ())
        await cache.put("an exact query", "Page 1: y")  # the newer one
        assert await cache.get("an exact query") == CachedSearch("Page 1: y", None)

    asyncio.run(main())
    assert cache.count() == 2


def test_a_closed_cache_opens_again_in_another_loop(cache):
    asyncio.run(cache.put("a", "b"))
    cache.close()
    assert asyncio.run(cache.get("a")).text == "b"


def test_sqlite_works_outside_the_event_loop_and_only_there(cache, monkeypatch):
    threads = []
    lookup = cache.lookup
    monkeypatch.setattr(cache, "lookup", lambda query: threads.append(threading.current_thread()) or lookup(query))

    async def main():
        await asyncio.gather(*(cache.get(str(i)) for i in range(20)))

    asyncio.run(main())
    assert len(threads) == 20 and len(set(threads)) == 1 and threads[0] is not threading.main_thread()


def write_many(path, name, n, started):
    started.wait()  # all open the new file at the same moment
    cache = SearchCache(path)
    for i in range(n):
        cache.store(f"{name} {i}", f"Page 1: {name} {i}")
        cache.store("shared", f"Page 1: {name} {i}")
        assert cache.lookup(f"{name} {i}").text == f"Page 1: {name} {i}"
    cache.close()


def test_several_processes_write_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    started = context.Barrier(4)
    path = tmp_path / "cache.sqlite"
    writers = [context.Process(target=write_many, args=(path, f"w{i}", 50, started)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    cache = SearchCache(path)
    assert cache.count() == 201 and cache.lookup("shared").text.endswith(" 49")


WRITER = """
import sys
from rollout.tools.search_cache import SearchCache
cache = SearchCache(sys.argv[1])
for i in range(10**6):
    cache.store(f"query {i}", f"Page 1: {i} " + "x" * 2000)
    print(i, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_it_had_kept(tmp_path):
    path = tmp_path / "cache.sqlite"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ)
    )
    told = [writer.stdout.readline() for _ in range(300)]
    writer.send_signal(signal.SIGKILL)
    told += writer.stdout.readlines()
    writer.wait()
    told = [int(line) for line in told if line.endswith("\n")]
    cache = SearchCache(path)
    assert len(told) >= 300
    for i in told:
        assert cache.lookup(f"query {i}").text.startswith(f"Page 1: {i} ")
    assert cache.count() - len(told) in (0, 1)  # one may have been kept and not yet told
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected JSON"),
        ('{"a": "b"', "expected JSON"),
        ("[1]", "found list; expected one JSON object"),
        ('{"a": "b", "q 2": ["c"]}', r"entry 'q 2' is list; expected a text"),
        ('{"a": null}', "entry 'a' is NoneType"),
        (b'{"a": "\xff"}', "expected JSON in UTF-8"),
    ],
)
def test_an_import_of_another_shape_names_the_entry_and_changes_nothing(cache, tmp_path, content, message):
    file = tmp_path / "search_cache.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        cache.import_json(file)
    assert cache.count() == 0


def test_what_is_no_cache_is_told_at_once(tmp_path):
    with pytest.raises(SearchCacheError, match="no folder .*missing; make it"):
        SearchCache(tmp_path / "missing" / "cache.sqlite")
    (tmp_path / "text").write_text("not a database, by far" * 100)
    with pytest.raises(SearchCacheError, match="text: file is not a database; the file is damaged: move it away"):
        SearchCache(tmp_path / "text")
    other = sqlite3.connect(tmp_path / "mlflow.db")
    other.execute("CREATE TABLE runs (id)")
    other.close()
    with pytest.raises(SearchCacheError, match="SQLite file of something else"):
        SearchCache(tmp_path / "mlflow.db")


def test_damage_inside_the_file_is_told(cache):
    for i in range(200):
        cache.store(f"query {i}", "x" * 1000)
    cache.close()
    size = cache.path.stat().st_size
    with open(cache.path, "r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * (size - 8192))
    with pytest.raises(SearchCacheError, match="cache.sqlite: .*damaged"):
        for i in range(200):
            cache.lookup(f"query {i}")


def test_a_file_that_stays_locked_is_told_by_its_name(cache, monkeypatch):
    cache.store("a", "b")
    cache.close()
    monkeypatch.setattr("rollout.tools.search_cache._PATIENCE_S", 0.05)
    other = sqlite3.connect(cache.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(SearchCacheError, match="cache.sqlite: database is locked$"):
        cache.store("c", "d")
    other.execute("ROLLBACK")
    other.close()
    cache.store("c", "d")
    assert cache.count() == 2


def test_the_command_imports_and_exports(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "rollout.tools.search_cache", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    theirs, ours, database = (tmp_path / name for name in ("in.json", "out.json", "cache.sqlite"))
    theirs.write_text(as_published(PUBLISHED), encoding="utf-8")
    assert run("import", database, theirs).stdout == f"3 searches imported; 3 in {database}\n"
    assert run("export", database, ours).returncode == 0 and ours.read_bytes() == theirs.read_bytes()
    for wrong, message in [
        ((), "import|export DATABASE JSON"),
        (("export", tmp_path / "none", ours), "there is no search cache"),
        (("import", database, tmp_path / "none"), "No such file"),
    ]:
        done = run(*wrong)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "none").exists()


def test_the_key():
    assert cache_key('"Emma" ') == "Emma "
