"""Queries per second of the merging server against Search-R1's way: one query after another inside a request.

``python -m benchmarks.retrieval`` makes a corpus, builds its BM25 index, starts the server, and asks the same queries
in two ways at the same concurrency.  *merged* is our server as it is: whatever waits becomes one call of Lucene.
*per query* is the same server over the same index, where each call of Lucene takes a single query, as in Search-R1's
``retrieval_server.py``.  Both run in turn, several times, on the same machine under the same load; printed are
the medians and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import page
from retrieval.client import RetrieverClient
from retrieval.index import BuildIndex
from retrieval.process import RetrieverProcess


def write_corpus(path: Path, passages: int, seed: int = 0) -> list[str]:
    """Passages of about 100 words with word frequencies as in real text; returns the vocabulary."""
    draw = random.Random(seed)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(2, 4))) for _ in range(20_000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    with path.open("w") as file:
        for row in range(passages):
            title, text = " ".join(draw.choices(words, k=2)), " ".join(draw.choices(words, weights, k=100))
            file.write(json.dumps({"id": str(row), "contents": f'"{title}"\n{text}'}) + "\n")
    return words


async def measure(url: str, batches: list[list[str]], concurrency: int) -> float:
    """Queries per second over all batches, ``concurrency`` requests in flight."""
    client = RetrieverClient([url], timeout=120, max_connections=concurrency)
    started = time.perf_counter()
    await asyncio.gather(*(client.search(batch, 3) for batch in batches))
    seconds = time.perf_counter() - started
    await client.close()
    return sum(map(len, batches)) / seconds


# The same server, but every call of the searcher takes one query.
PER_QUERY = """
import sys
from retrieval import opening, server
class OneByOne(opening.Retriever):
    def search(self, queries, k):
        return [answer for query in queries for answer in super(OneByOne, self).search([query], k)]
server.Retriever = OneByOne
server.main(sys.argv[1:])
"""


class PerQueryProcess(RetrieverProcess):
    """``RetrieverProcess`` over the per-query server."""

    def _command(self, ready_fd: int) -> list[str]:
        command = super()._command(ready_fd)
        return [command[0], "-c", PER_QUERY, *command[3:]]


def compare(index: str, queries: list[str], *, threads: int, repeats: int) -> list[dict]:
    """One row per shape of request: median queries per second of both ways and their ratio."""
    shapes = [(1, 1), (1, 64), (64, 1), (64, 4)]  # queries per request, requests in flight
    processes = {"merged": RetrieverProcess(index, threads=threads), "per query": PerQueryProcess(index)}
    try:
        urls = {name: process.start() for name, process in processes.items()}
        for url in urls.values():  # Java compiles its inner loops during the first thousands of queries
            asyncio.run(measure(url, [queries[start : start + 64] for start in range(0, len(queries), 64)], 4))
        rows = []
        for size, concurrency in shapes:
            used = queries if size * concurrency > 1 else queries[:500]
            batches = [used[start : start + size] for start in range(0, len(used), size)]
            speeds: dict[str, list[float]] = {name: [] for name in urls}
            for _ in range(repeats):
                for name, url in urls.items():
                    speeds[name].append(asyncio.run(measure(url, batches, concurrency)))
            middle = {name: statistics.median(values) for name, values in speeds.items()}
            ratio = middle["merged"] / middle["per query"]
            rows.append({"queries per request": size, "requests in flight": concurrency, **middle, "ratio": ratio})
        return rows
    finally:
        for process in processes.values():
            process.close()


def figure(row: dict) -> str:
    size, flight, merged, single, ratio = row.values()
    shape = f"{size} queries per request, {flight} at once"
    return f"{shape}: merged {merged:.0f}/s, per query {single:.0f}/s, ratio {ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument("--threads", type=int, default=1, help="Java threads of the merging server")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    page.add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = write_corpus(Path(folder) / "corpus.jsonl", options.passages)
        built = BuildIndex(str(Path(folder) / "corpus.jsonl")).run(Path(folder))
        draw = random.Random(1)
        queries = [" ".join(draw.choices(words[:2000], k=8)) for _ in range(options.queries)]
        rows = compare(built["index"], queries, threads=options.threads, repeats=options.repeats)
    load = os.getloadavg()[0]
    if options.markdown:
        print(page.rows(map(figure, rows)))
    else:
        print(f"{options.passages} passages, indexed in {built['seconds']} s; load {load:.1f}, {os.cpu_count()} cores")
        print("\n".join(map(figure, rows)))
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        options.json.write_text(json.dumps({"rows": rows, "load": load, "commit": commit}, indent=1))


if __name__ == "__main__":
    main()
