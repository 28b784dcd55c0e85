"""The server over HTTP, without our client: what any client of Search-R1's servers may rely on."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from retrieval.batching import OwnerThread
from retrieval.server import DOCUMENTS, QUERIES, READ_S, TOPK, listening_socket
from tests.processes import alive, gone_within, with_patience
from tests.raw_http import check_unreadable
from tests.retrieval.serving import serving

ROOT = Path(__file__).resolve().parents[2]


def post(url: str, body: object) -> tuple[int, dict]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + "/retrieve", content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def health(url: str) -> dict:
    with urllib.request.urlopen(url + "/health", timeout=300) as response:
        return json.load(response)


def test_with_scores(server, corpus):
    status, answer = post(server.url, {"queries": corpus.words[:3], "topk": 2, "return_scores": True})
    assert status == 200 and list(answer) == ["result"] and [len(hits) for hits in answer["result"]] == [2, 2, 2]
    for word, hits in zip(corpus.words, answer["result"], strict=False):
        assert hits[0]["score"] >= hits[1]["score"] > 0
        for hit in hits:
            assert set(hit) == {"document", "score"} and set(hit["document"]) == {"id", "title", "text", "contents"}
            row = corpus.ids.index(hit["document"]["id"])
            assert hit["document"]["contents"] == corpus.contents[row] and word in corpus.contents[row].lower()
            assert hit["document"]["contents"] == f'"{hit["document"]["title"]}"\n{hit["document"]["text"]}'


@pytest.mark.parametrize("queries", [1, 2])
def test_without_scores_come_plain_documents(server, corpus, queries):
    """Search-R1's own server fails here, or loses a query's documents."""
    body = {"queries": corpus.words[:queries]}
    plain = post(server.url, body)[1]["result"]
    scored = post(server.url, body | {"return_scores": True})[1]["result"]
    assert plain == [[hit["document"] for hit in hits] for hits in scored] and len(plain) == queries


def test_topk(server, corpus):
    assert len(post(server.url, {"queries": corpus.words[:1], "topk": None, "unknown": 1})[1]["result"][0]) == 3


def test_queries_that_find_nothing_or_are_odd(server, corpus):
    word = corpus.words[0]
    long = " ".join(f"w{number}" for number in range(5000)) + f" {word}"
    queries = ["", "the of and", "zzzz", "😀 " + word, "\x00", "half \ud83d pair " + word, long, '"(' + word + "*~^)"]
    status, answer = post(server.url, {"queries": queries})
    assert status == 200 and [bool(hits) for hits in answer["result"]] == [
        False, False, False, True, False, True, True, True,
    ]  # fmt: skip
    assert post(server.url, {"queries": []}) == (200, {"result": []})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "queries: Field required"),
        ({"queries": "text"}, "queries: Input should be a valid list; found 'text'"),
        ({"queries": ["a", {}]}, "queries[1]: Input should be a valid string; found {}"),
        ({"queries": ["a"], "topk": TOPK + 1}, f"topk: Input should be less than or equal to {TOPK}; found {TOPK + 1}"),
        ({"queries": ["a"], "topk": True}, "topk: "),
        (b'{"queries": ["a"], "topk": NaN}', "topk: "),
        ({"queries": ["a"], "return_scores": "perhaps"}, "return_scores: "),
        ({"queries": ["a"] * (QUERIES + 1)}, f"queries: List should have at most {QUERIES} items"),
        ({"queries": ["a"] * 1000, "topk": 101}, f"1000 queries with topk 101: expected at most {DOCUMENTS} documents"),
        (b"", "the body is not JSON: "),
        (b"\xff\xfe\x00", "the body is not JSON: "),
        (b'{"queries": ' + b"[" * 100_000, "the body is not JSON: "),
        (b'{"queries": ' + b"9" * 5000 + b"}", "the body is not JSON: "),
        ([1], "the body: Input should be "),
    ],
)
def test_wrong_input_is_refused_in_one_line(server, body, said):
    status, answer = post(server.url, body)
    assert status == 422 and answer["detail"].startswith(said), answer["detail"][:300]
    assert "\n" not in answer["detail"] and len(answer["detail"]) < 300


class Nothing:
    def search(self, queries, k):
        return [[] for _ in queries]

    def close(self):
        pass


def test_requests_that_cannot_be_read_get_one_line_and_leave_no_traceback(caplog):
    with serving(OwnerThread(lambda _: Nothing())) as url:
        host, port = url.removeprefix("http://").split(":")
        asyncio.run(check_unreadable(host, int(port), "/retrieve", "detail", wrong_body=422))
    assert not any(record.exc_info for record in caplog.records)


def test_bodies_are_bounded(monkeypatch):
    monkeypatch.setattr("retrieval.server.REQUEST_BYTES", 1000)
    with serving(OwnerThread(lambda _: Nothing())) as url:
        assert post(url, {"queries": ["a" * 900]}) == (200, {"result": [[]]})
        status, answer = post(url, {"queries": ["a" * 1000]})
    assert status == 413 and answer["detail"] == "the body has more than 1000 bytes; ask in several requests"


REQUEST = b'POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 18\r\n\r\n{"queries": ["a"]}'


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        pytest.param(REQUEST[:-5], b"HTTP/1.1 408 ", marks=pytest.mark.slow),
        (REQUEST, b"HTTP/1.1 200 "),
        (b"no HTTP\r\n\r\n", b"HTTP/1.0 400 "),
    ],
)
def test_slow_and_idle_connections_are_closed(monkeypatch, sent, answered):
    def check(seconds):
        monkeypatch.setattr("retrieval.server.IDLE_S", seconds)
        monkeypatch.setattr("retrieval.server.BODY_S", seconds)
        with serving(OwnerThread(lambda _: Nothing())) as url:
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=300) as connection:
                connection.sendall(sent)
                assert b"".join(iter(lambda: connection.recv(1000), b"")).startswith(answered)  # to its end
            assert post(url, {"queries": ["a"]})[0] == 200

    with_patience(check, 0.2, 2.0, 20.0)


def test_concurrent_requests_are_merged_and_answered_rightly(server, corpus):
    pairs = [[corpus.words[number % 50], corpus.words[number % 7]] for number in range(120)]
    bodies = [{"queries": pair, "topk": 1 + number % 3, "return_scores": True} for number, pair in enumerate(pairs)]
    alone = [post(server.url, body) for body in bodies]
    before = health(server.url)
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda body: post(server.url, body), bodies))
    after = health(server.url)
    assert together == alone
    assert after["requests"] - before["requests"] == 120 and after["queries"] - before["queries"] == 240
    assert after["batches"] - before["batches"] < 120 and after["largest_batch"] > 2


def test_health_describes_the_index(server, corpus):
    described = health(server.url)
    assert (described["status"], described["topk"], described["indexes"][0]["passages"]) == ("ok", 3, 200)
    assert described["indexes"][0]["kind"] == "bm25" and described["indexes"][0]["corpus"] == str(corpus.path)


def run_server(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "retrieval.server", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_port_in_use_is_told_in_one_line(bm25_index):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_server("--index", bm25_index, "--port", str(port))
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr and "--port" in done.stderr


OWNER = """
import sys, threading
from retrieval.process import RetrieverProcess
process = RetrieverProcess(sys.argv[1], k1=2.0)
starter = threading.Thread(target=process.start)  # whose end must not be taken for the end of the process
starter.start(); starter.join()
print(process._server.pid, process.url, process._server.log, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_server_ends_with_its_owner_even_by_kill_9(bm25_index, server, corpus):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, bm25_index], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid, url, log = owner.stdout.readline().split()
    body = {"queries": corpus.words[:1], "return_scores": True}
    here, there = (post(at, body)[1]["result"][0][0]["score"] for at in (server.url, url))  # two at once
    assert url != server.url and here != there  # each with its own k1
    time.sleep(0.6)  # longer than the watch's interval: it lives while its owner does
    assert alive(int(pid))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdin.close(), owner.stdout.close()
    assert gone_within(int(pid))
    os.unlink(log)


def test_accepted_connections_do_not_wait_for_acknowledgements():
    """Small answers would otherwise take 40 ms: asyncio turns Nagle's algorithm off only for sockets of its own."""
    with listening_socket("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_kernel_gives_up_clients_that_do_not_take_their_answers():
    with listening_socket("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * READ_S
