"""A backend of one's own; the page that shows it is executed against a stub of OpenSearch."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from retrieval import server as serving
from retrieval.client import RetrieverClient
from retrieval.process import RetrieverProcess
from retrieval.types import Document

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "new_retriever.md").read_text()
BLOCKS = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
POTTERS = [("p3", "Mira Voss", "a potter"), ("x", "Not in the index", "a painter")]


class Stub(BaseHTTPRequestHandler):
    """OpenSearch's ``_msearch``: a header and a query in turn, an answer for each pair."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        header, *queries = [json.loads(line) for line in body.splitlines()]
        assert self.path == "/_msearch" and header == {"index": "wiki"} and body.endswith("\n")
        assert queries[0]["query"]["multi_match"]["fields"] == ["title^2", "text"]
        found = [{"_id": i, "_score": 2.5, "_source": {"title": title, "text": text}} for i, title, text in POTTERS]
        asked = [query["size"] for query in queries[::2]]
        answer = json.dumps({"responses": [{"hits": {"hits": found[:size]}} for size in asked]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def opensearch():
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{stub.server_port}"
    stub.shutdown()


@pytest.mark.slow
def test_the_class_of_the_page(opensearch, tmp_path, monkeypatch):
    """Through the server, started as ``make retriever`` starts it."""
    (tmp_path / "my_search.py").write_text(BLOCKS["my_search.py"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def ask(name: str, query: str) -> list[Document]:
        text = BLOCKS[name].replace("http://127.0.0.1:9200", opensearch)
        (tmp_path / name).write_text(text)
        process = RetrieverProcess("unused")
        process._command = lambda: [sys.executable, "-m", "retrieval.server", "--backend", str(tmp_path / name)]
        url = process._launch()
        client = RetrieverClient([url])

        async def main():
            try:
                return (await client.search([query], 5))[0]
            finally:
                await client.close()

        try:
            return asyncio.run(main())
        finally:
            process.stop()

    alone = ask("opensearch.yaml", "potter")
    assert alone == [Document(*potter, 2.5) for potter in POTTERS]


@pytest.mark.parametrize(
    "text", ["class_path: retrieval.corpus.PassageStore\ninit_args: {folder: x}\n", "class_path: !!int abc\n"]
)
def test_a_file_that_describes_no_backend_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "s.yaml").write_text(text)
    command = [sys.executable, "-m", "retrieval.server", "--port", "0", "--backend", str(tmp_path / "s.yaml")]
    wrong = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == serving.EXIT_WRONG_INPUT
    assert "not a backend" in wrong.stderr and "docs/new_retriever.md" in wrong.stderr and wrong.stderr.count("\n") == 1
    wrong = subprocess.run([*command, "--k1", "1.2"], cwd=ROOT, capture_output=True, text=True)
    assert "--k1: belong to --index; with --backend write them into" in wrong.stderr
