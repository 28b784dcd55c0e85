"""``python -m retrieval build`` makes an index folder; ``... serve`` is ``python -m retrieval.server``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from retrieval.index import BuildIndex, EncoderConfig
from retrieval.types import RetrievalFailure


def _build(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m retrieval build", description="Build OUTPUT/index from a corpus.")
    parser.add_argument("--corpus", required=True, help=".jsonl, .jsonl.gz or .parquet file of passages")
    parser.add_argument("--skip-malformed", action="store_true", help="leave out rows that cannot be used")
    parser.add_argument("--passages-of", help="an index of the same corpus: its passages are linked, not stored again")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--kind", default="bm25", choices=("bm25", "dense_flat", "dense_hnsw"))
    parser.add_argument("--encoder", help="Hugging Face folder, for the dense kinds")
    parser.add_argument("--query-prefix", default="", help='e5 wants "query: "')
    parser.add_argument("--passage-prefix", default="", help='e5 wants "passage: "')
    parser.add_argument("--max-length", type=int, default=256, help="tokens per text")
    parser.add_argument("--vectors", help="a Faiss index of the corpus' vectors, taken instead of encoding it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--java-heap", default="1g", help="memory of Lucene's indexer")
    options = parser.parse_args(arguments)
    encoder = None
    if options.encoder:
        encoder = EncoderConfig(
            options.encoder, options.query_prefix, options.passage_prefix, max_length=options.max_length
        )
    try:
        stage = BuildIndex(
            options.corpus, options.kind, encoder,
            vectors=options.vectors, threads=options.threads, java_heap=options.java_heap,
            skip_malformed=options.skip_malformed, passages_of=options.passages_of,
        )  # fmt: skip
        print(json.dumps(stage.run(options.output), indent=1))
    except (RetrievalFailure, ValueError, OSError) as error:
        sys.exit(f"index: {error}")


def main() -> None:
    command, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command == "build":
        _build(arguments)
    elif command == "serve":
        from retrieval.server import main as serve

        serve(arguments)
    else:
        sys.exit(f"python -m retrieval build|serve [options]; found {command!r}")


if __name__ == "__main__":
    main()
