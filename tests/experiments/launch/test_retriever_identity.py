"""What stands behind a search server's URL is recorded, and another corpus there is refused."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from experiments.launch import retriever_identity, runner
from experiments.registry.errors import ExperimentError
from experiments.stages.context import RunContext
from experiments.stages.store import StageFolder

INDEX = {"kind": "bm25", "corpus_sha256": "a" * 64, "passages": 3}
OTHER = {**INDEX, "corpus_sha256": "b" * 64}


@pytest.fixture
def serve():
    """serve(indexes) -> url of a server whose GET /health tells them, after ``loading`` answers that
    it is loading; None: a server without that page."""
    servers = []

    def start(indexes, loading=0):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.server.loading:
                    self.server.loading -= 1
                    self.send_response(503)
                    self.end_headers()
                    return self.wfile.write(b'{"status": "loading", "detail": "3 of 65 GB"}')
                if self.server.indexes is None or self.path != "/health":
                    return self.send_error(404)
                self.send_response(200)
                self.end_headers()
                indexes = [{**index, "settings": {}} for index in self.server.indexes]
                self.wfile.write(json.dumps({"status": "ok", "indexes": indexes}).encode())

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.indexes, server.loading = indexes, loading
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server, f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def client(*urls):
    tools = {
        "search": {
            "init_args": {"retriever": {"class_path": retriever_identity.CLIENT, "init_args": {"urls": [*urls]}}}
        }
    }
    return {"data": {"init_args": {"rollouts": {"init_args": {"tools": tools}}}}}


def test_servers_are_found_wherever_they_stand_and_described(serve):
    (_, ours), (_, search_r1) = serve([INDEX]), serve(None)
    assert retriever_identity.describe(client(ours + "/retrieve"), "x", "make retriever") == {ours: [INDEX]}
    assert retriever_identity.describe(client(search_r1, ours), "x", "make retriever") == {
        search_r1: "unknown",
        ours: [INDEX],
    }
    assert retriever_identity.describe({"model": {"init_args": {"urls": [ours]}}}, "x", "make retriever") == {}


def test_a_server_that_is_loading_is_waited_for(serve, monkeypatch, capsys):
    """Taken for one that does not tell, its corpus would not be compared."""
    monkeypatch.setattr("retrieval.client.LOADING_PAUSE_S", 0.01)
    (_, url), (_, slow) = serve([INDEX], loading=3), serve([INDEX], loading=10**6)
    assert retriever_identity.describe(client(url), "x", "make retriever") == {url: [INDEX]}
    assert capsys.readouterr().out.splitlines() == [
        f"'x' waits for the search server at {url}, which is loading: 3 of 65 GB"
    ]
    impatient = {"class_path": retriever_identity.CLIENT, "init_args": {"urls": [slow], "loading_timeout": 0.1}}
    with pytest.raises(ExperimentError, match=r"still loading after 0\.1 s \(3 of 65 GB\)"):
        retriever_identity.describe({"retriever": impatient}, "x", "make retriever")


def test_equal_servers_must_be_equal_and_all_must_answer(serve):
    (_, one), (closed, gone) = serve([INDEX]), serve([OTHER])
    with pytest.raises(ExperimentError, match="must serve the same indexes"):
        retriever_identity.describe(client(one, gone), "x", "make retriever")
    closed.shutdown()
    closed.server_close()
    with pytest.raises(ExperimentError, match=f"'x' searches over {gone}, where no server answers .*make retriever"):
        retriever_identity.describe(client(gone), "x", "make retriever")


def test_only_a_known_other_index_is_another():
    url = "http://127.0.0.1:1"
    for before, now in ((INDEX, INDEX), (INDEX, None), (None, OTHER)):
        known = [{url: [index] if index else "unknown"} for index in (before, now)]
        retriever_identity.require_same("x", *known, "make train")
    with pytest.raises(ExperimentError, match="another index .* corpus a{12} then, .* corpus b{12} now"):
        retriever_identity.require_same("x", {url: [INDEX]}, {url: [OTHER]}, "make train")


def test_a_stage_records_what_it_searched_and_does_not_go_on_over_another_corpus(serve, workshop, monkeypatch):
    server, url = serve([INDEX])
    arguments = "{class_path: retrieval.client.RetrieverClient, init_args: {urls: ['" + url + "']}}"
    workshop.task("a", f"text: A, retriever: {arguments}")
    workshop.task("b", f"text: B, source: '${{stage:a}}', retriever: {arguments}")
    for name, value in workshop.environment().items():
        monkeypatch.setenv(name, value)
    context = RunContext(workshop.project, "a", (), None)
    stage = workshop.graph("a").target()
    runner.make_stage(stage, context, fresh=False)
    assert StageFolder(stage.folder).result()["retrievers"] == {url: [INDEX]}

    server.indexes = [OTHER]
    with pytest.raises(ExperimentError, match=f"'a' was made with another index behind {url}"):
        runner.make_stage(workshop.graph("b").target(), context, fresh=False)
    (stage.folder / "result.json").unlink()  # as if it had been interrupted
    with pytest.raises(ExperimentError, match="make train EXP=a FRESH=1"):
        runner.make_stage(stage, context, fresh=False)
    assert StageFolder(stage.folder).metadata()["retrievers"] == {url: [INDEX]}, "refused before anything is written"
    assert workshop.journal.read_text().count("\n") == 1


def test_a_run_goes_on_with_a_server_that_has_moved(serve, workshop, tmp_path):
    """The key holds the name of the file in which the address stands, not the address."""
    announced = tmp_path / "search.url"
    (_, first), (_, second), (_, wrong) = serve([INDEX]), serve([INDEX]), serve([OTHER])
    address = f"file:{announced}"
    arguments = "{class_path: retrieval.client.RetrieverClient, init_args: {urls: ['" + address + "']}}"
    workshop.task("a", f"text: A, retriever: {arguments}")
    found, keys = [], []
    for url in (first, second, wrong):
        announced.write_text(url + "\n")
        stage = workshop.graph("a").target()
        found.append(retriever_identity.describe(stage.config, "a", "make retriever"))
        keys.append(stage.key)
    assert len(set(keys)) == 1
    assert found == [{address: [INDEX]}, {address: [INDEX]}, {address: [OTHER]}]
    retriever_identity.require_same("a", found[0], found[1], "make train")
    with pytest.raises(ExperimentError, match="another index behind file:"):
        retriever_identity.require_same("a", found[0], found[2], "make train")
    announced.unlink()
    with pytest.raises(ExperimentError, match="search.url, which cannot be read .*--announce"):
        retriever_identity.describe(stage.config, "a", "make retriever")
