r"""Measures dense indexes of every kind over generated vectors, and the search server against Search-R1's form.

    python -m benchmarks.retrieval [--passages 1000000] [--kinds dense_flat dense_fp16 dense_sq8 dense_ivfpq] \
        [--folder DIR] [--threads 2] [--documents 50000] [--asked 4000]

**Kinds.** The vectors have dimension 768 and form clusters of a thousand. As in the vectors of encoders, the
differences between and within clusters have a few strong directions (variance 1 / i of the i-th). A query is closer to
its passage than the members of a cluster are to each other. Recall@3 is against exact search of the same 16-bit
vectors. The first answer is timed from opening the file to the first hits, after dropping the file's pages from memory,
in turns with reading the file once; the figure is the median of five. Latencies are medians and exclude the encoder.

**Server.** 64 clients send one query after another, as trajectories do, to BM25 over 50,000 passages. Search-R1's form
(search/retrieval_server.py) is reimplemented: a FastAPI endpoint asks Anserini's searcher, as pyserini's LuceneSearcher
does, one query after another, and reads the passages from the index. It has one thread, because that searcher is not
thread-safe. The two servers take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from benchmarks import common

DIMENSION, MEMBERS, BATCH, BEST = 768, 1000, 64, 3
KINDS = ["dense_flat", "dense_fp16", "dense_sq8", "dense_ivfpq"]
TURNS, CLIENTS, ROUNDS = 5, 64, 3


class Clustered:
    """Vectors by number, in the form that ``copy_vectors`` reads from an index."""

    def __init__(self, passages: int) -> None:
        self.ntotal = passages
        self.scale = (np.arange(1, DIMENSION + 1) ** -0.5).astype(np.float32)
        self.centres = self.draw(0, max(passages // MEMBERS, 1))

    def draw(self, seed: int, count: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((count, DIMENSION), dtype=np.float32) * self.scale

    def reconstruct_n(self, start: int, count: int) -> np.ndarray:
        return unit(
            self.centres[np.arange(start, start + count) % len(self.centres)] + 0.6 * self.draw(start + 1, count)
        )

    def queries(self, count: int = 4 * BATCH) -> np.ndarray:
        """Return queries near the first passages."""
        members = self.centres[np.arange(count) % len(self.centres)] + 0.6 * self.draw(1, self.first)[:count]
        return unit(members + 0.3 * self.draw(self.ntotal + 1, count))

    @property
    def first(self) -> int:
        """Return the vectors from the first on that are drawn together."""
        from retrieval.dense.vectors import ROWS

        return min(ROWS, self.ntotal)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class NoEncoder:
    dimension = DIMENSION


def build(folder: str, kind: str, threads: int) -> float:
    """Build the index; return the seconds."""
    from retrieval.dense.build import build_faiss_index
    from retrieval.dense.vectors import VectorShards

    began = time.perf_counter()
    build_faiss_index(VectorShards(f"{folder}/vectors"), Path(folder) / kind, kind, threads=threads)
    return time.perf_counter() - began


def search(folder: str, kind: str, passages: int, threads: int) -> dict[str, float]:
    """Return the times in seconds and the memory in GB."""
    import retrieval.dense.searcher as searching
    from retrieval.dense.searcher import recall
    from retrieval.dense.vectors import VectorShards
    from retrieval.index_config import EncoderConfig, IVFPQConfig

    searching.TextEncoder = lambda *_, **__: NoEncoder
    path, shards, own = Path(folder) / kind, VectorShards(f"{folder}/vectors"), IVFPQConfig()
    queries, options = Clustered(passages).queries(), {}
    if kind == "dense_ivfpq":
        options = {"probes": own.probes, "candidates": own.candidates, "exact": shards}
    if kind == "dense_hnsw":
        options = {"ef_search": 64}
    times: dict[str, list[float]] = {"reading": [], "first": []}
    for turn in range(TURNS):
        times["reading"].append(read_whole(path))
        forget(path)
        began = time.perf_counter()
        searcher = searching.DenseSearcher(path, EncoderConfig("none"), threads=threads, **options)
        searcher.search_vectors(queries[:1], BEST)
        times["first"].append(time.perf_counter() - began)
        if turn < TURNS - 1:  # mapped pages cannot be dropped
            searcher.close()
    found = {name: statistics.median(values) for name, values in times.items()}
    for name, size in (("single", 1), ("batch", BATCH)):
        latencies = []
        for start in range(0, min(len(queries), 16 * size), size):
            began = time.perf_counter()
            searcher.search_vectors(queries[start : start + size], BEST)
            latencies.append(time.perf_counter() - began)
        found[name] = statistics.median(latencies)
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    found["memory"] = int(fields["VmRSS"].split()[0]) / 1e6
    found["recall"] = recall(searcher.nearest(queries, BEST)[1], queries, shards)
    return found


def forget(path: Path) -> None:
    """Drop a file's pages from memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_whole(path: Path) -> float:
    """Return the seconds of reading a file once, after dropping its pages."""
    forget(path)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
    return time.perf_counter() - began


def kinds(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    from retrieval.dense.vectors import copy_vectors
    from retrieval.index_config import EncoderConfig

    copy_vectors(Clustered(options.passages), folder / "vectors", "generated", EncoderConfig("none"))
    for kind in options.kinds:
        path = folder / kind
        built = (
            f"{common.in_child(build, str(folder), kind, options.threads):.0f} s to build, "
            if not path.is_file()
            else ""
        )
        found = common.in_child(search, str(folder), kind, options.passages, options.threads)
        yield (
            f"{kind}, {options.passages:,} x {DIMENSION}, {options.threads} threads: "
            f"{path.stat().st_size / 1e9:.2f} GB, {built}"
            f"recall@{BEST} {found['recall']:.3f}; {1000 * found['single']:.1f} ms for one query, "
            f"{1000 * found['batch']:.0f} ms for {BATCH}; first answer {found['first']:.1f} s after opening, "
            f"{found['first'] / found['reading']:.2f} x reading the file ({found['reading']:.1f} s); "
            f"{found['memory']:.1f} GB resident"
        )


# ------------------------------------------------------------------------------------------------ the server
class Request(BaseModel):
    queries: list[str]
    topk: int = 3
    return_scores: bool = False


def search_r1_form(lucene: str, port: int) -> None:
    """Serve until the process is ended."""
    import uvicorn
    from fastapi import FastAPI

    from retrieval.bm25 import start_jvm

    start_jvm("1g")
    from jnius import autoclass

    searcher = autoclass("io.anserini.search.SimpleSearcher")(lucene)  # the parts of pyserini's LuceneSearcher
    app = FastAPI()

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict:
        result = []
        for query in request.queries:
            hits = searcher.search(query, request.topk)
            found = [json.loads(searcher.doc_raw(hit.docid))["contents"] for hit in hits]
            documents = [
                {"title": text.split("\n")[0].strip('"'), "text": "\n".join(text.split("\n")[1:]), "contents": text}
                for text in found
            ]
            result.append([{"document": d, "score": h.score} for d, h in zip(documents, hits, strict=True)])
        return {"result": result}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def make_corpus(path: Path, documents: int) -> list[str]:
    """Write passages whose word frequencies are as unequal as a language's; return queries."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(3, 9))) for _ in range(40_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    with path.open("w") as file:
        for row in range(documents):
            text = " ".join(draw.choices(words, weights, k=100))
            file.write(
                json.dumps({"id": str(row), "contents": f'"{" ".join(draw.choices(words, k=2))}"\n{text}'}) + "\n"
            )
    return [" ".join(draw.choices(words, weights, k=6)) for _ in range(1000)]


async def ask(url: str, queries: list[str]) -> float:
    """Return the queries per second."""
    from retrieval.client import RetrieverClient

    client, waiting = RetrieverClient([url], max_connections=CLIENTS, timeout=60), iter(queries)

    async def one() -> None:
        for query in waiting:
            await client.search([query], BEST)

    await client.search(queries[:CLIENTS], BEST)
    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(CLIENTS)))
    seconds = time.perf_counter() - began
    await client.close()
    return len(queries) / seconds


def server(folder: Path, threads: int, documents: int, asked: int) -> Iterator[str]:
    from retrieval.bm25 import build_lucene_index
    from retrieval.index import BuildIndex
    from retrieval.process import RetrieverProcess

    folder.mkdir(exist_ok=True)
    queries = make_corpus(folder / "corpus.jsonl", documents)
    index = BuildIndex(str(folder / "corpus.jsonl")).run(folder)["index"]
    if not (folder / "lucene").is_dir():  # texts are read from the index
        (folder / "documents").mkdir(exist_ok=True)
        os.link(folder / "corpus.jsonl", folder / "documents" / "corpus.jsonl")
        build_lucene_index(folder / "documents", folder / "lucene", expected=documents, options=["-storeRaw"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code = f"import benchmarks.retrieval as m; m.search_r1_form({str(folder / 'lucene')!r}, {port})"
    theirs = subprocess.Popen([sys.executable, "-c", code])
    ours = RetrieverProcess(index, threads=threads)
    try:
        sides = {"ours": ours.start(), "theirs": f"http://127.0.0.1:{port}"}
        while theirs.poll() is None and not _listens(port):
            time.sleep(0.1)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, url in sides.items():
                rates[name].append(asyncio.run(ask(url, (queries * (asked // len(queries) + 1))[:asked])))
    finally:
        theirs.kill()
        ours.stop()
    ratios = [a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True)]
    yield (
        f"BM25 over {documents:,} passages, {CLIENTS} clients: {statistics.median(rates['ours']):.0f} queries/s, "
        f"Search-R1's form {statistics.median(rates['theirs']):.0f}, ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def metrics(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    if options.kinds:
        yield from kinds(options, folder)
    if options.documents:
        yield from server(folder / "bm25", options.threads, options.documents, options.asked)


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--folder", type=Path, help="keeps vectors and indexes, which a later run takes; 5 GB a million"
    )
    parser.add_argument("--documents", type=int, default=50_000, help="that the servers search; 0: no servers")
    parser.add_argument("--asked", type=int, default=4000, help="queries of each server and round")
    options = parser.parse_args()
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        common.print_metrics(options, metrics(options, options.folder))
        return
    with tempfile.TemporaryDirectory() as name:
        common.print_metrics(options, metrics(options, Path(name)))


if __name__ == "__main__":
    main()
