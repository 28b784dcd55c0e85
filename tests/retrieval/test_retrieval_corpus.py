import random

import orjson
import polars as pl
import pytest

from retrieval.corpus import PassageStore, _SeenIds, file_sha256, passages, read_corpus, write_store
from retrieval.types import CorpusError, Document, split_contents

GOOD = '{"id": "a", "contents": "\\"Title\\"\\ntext"}'


def test_store_gives_back_every_passage_across_parts(corpus, tmp_path):
    summary = write_store(corpus.path, tmp_path, part_size=64)
    store = PassageStore(tmp_path)
    assert sorted(path.name for path in (tmp_path / "passages").iterdir()) == [f"0000{part}.jsonl" for part in range(4)]
    assert [tuple(store[row]) for row in range(len(store))] == list(zip(corpus.ids, corpus.contents, strict=True))
    assert (summary.passages, summary.sha256) == (200, file_sha256(corpus.path))
    with pytest.raises(IndexError):
        store[200]
    with pytest.raises(IndexError):
        store[-1]


def test_parquet_and_json_lines_are_the_same_corpus(corpus, tmp_path):
    path = tmp_path / "corpus.parquet"
    pl.DataFrame({"contents": corpus.contents, "other": 1, "id": corpus.ids}).write_parquet(path)
    assert list(read_corpus(path)) == list(read_corpus(corpus.path))


def test_text_outside_ascii_and_line_breaks_survive(tmp_path):
    contents = '"Zoë ☃"\nfirst\nsecond \u2028 third 😀'
    (tmp_path / "c.jsonl").write_bytes(orjson.dumps({"id": 7, "contents": contents}))
    write_store(tmp_path / "c.jsonl", tmp_path / "store")
    document = PassageStore(tmp_path / "store").document(0, 0.0)
    assert (document.id, document.title, document.contents) == ("7", "Zoë ☃", contents)
    assert document.text == contents.partition("\n")[2]


def test_title_and_text_as_in_search_r1():
    assert split_contents('"A "B" C"\ntext\nmore') == ('A "B" C', "text\nmore")
    assert Document("1", "T", "x", 1.0).contents == '"T"\nx'


@pytest.mark.parametrize(
    ("lines", "where", "what"),
    [
        ([GOOD, "{not json"], "line 2", "not JSON"),
        ([GOOD, ""], "line 2", "not JSON"),
        ([GOOD, '["a", "b"]'], "line 2", "found list"),
        (['{"id": "a"}'], "line 1", "no 'contents'"),
        (['{"contents": "\\"T\\"\\nx"}'], "line 1", "no 'id'"),
        (['{"id": "a", "contents": null}'], "line 1", "no 'contents'"),
        (['{"id": "a", "contents": 3}'], "line 1", "contents is int"),
        (['{"id": true, "contents": "\\"T\\"\\nx"}'], "line 1", "id is True"),
        (['{"id": "", "contents": "\\"T\\"\\nx"}'], "line 1", "id is ''"),
        (['{"id": "a", "contents": "no title line"}'], "line 1", "not a title line"),
        (['{"id": "a", "contents": "\\"T\\"\\n  "}'], "line 1", "not a title line"),
        ([GOOD, GOOD.replace('"a"', '"b"'), GOOD], "line 3", "already used in line 1"),
        ([GOOD.replace('"a"', "0"), GOOD.replace('"a"', '"0"')], "line 2", "already used in line 1"),
        ([GOOD.replace('"a"', '"1"'), GOOD.replace('"a"', '"1"')], "line 2", "already used in line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, where, what):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(CorpusError, match=what) as caught:
        write_store(path, tmp_path / "store")
    assert str(path) in str(caught.value) and where in str(caught.value)


def test_empty_missing_and_broken_files_are_named(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(CorpusError, match="no passages"):
        write_store(tmp_path / "empty.jsonl", tmp_path / "store")
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(CorpusError, match="not a parquet file"):
        list(read_corpus(tmp_path / "text.parquet"))
    pl.DataFrame({"id": ["a"], "text": ["b"]}).write_parquet(tmp_path / "columns.parquet")
    with pytest.raises(CorpusError, match="no column contents; it has id, text"):
        list(read_corpus(tmp_path / "columns.parquet"))


def test_duplicates_are_found_as_by_a_plain_set(tmp_path):
    draw = random.Random(0)
    outcomes = set()
    for _ in range(400):
        ids = [draw.choice([str(row), str(draw.randint(0, 8)), f"0{row}", f"x{row}"]) for row in range(6)]
        seen, found = _SeenIds(tmp_path, "line"), None
        for row, id_ in enumerate(ids):
            try:
                seen.add(id_, row + 1)
            except CorpusError as error:
                found = (row, f"line {ids.index(id_) + 1};" in str(error))
                break
        first = next((row for row, id_ in enumerate(ids) if id_ in ids[:row]), None)
        assert found == (None if first is None else (first, True)), ids
        outcomes.add(found is None)
    assert outcomes == {True, False}


def test_row_number_ids_cost_no_memory(tmp_path):
    seen = _SeenIds(tmp_path, "line")
    for row in range(1000):
        seen.add(str(row), row + 1)
    assert not seen.others


# --- a corpus of your own shape ---------------------------------------------------------------------------------------


def test_title_and_text_of_your_own_become_passages_with_ids(tmp_path):
    rows = [{"head": "A\ntitle", "body": "first"}, {"head": None, "body": "second"}]
    (tmp_path / "c.jsonl").write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    pl.DataFrame(rows).write_parquet(tmp_path / "c.parquet")
    for name in ("c.jsonl", "c.parquet"):
        found = list(read_corpus(tmp_path / name, {"title": "head", "text": "body"}))
        assert found == [("0", '"A title"\nfirst'), ("1", '"1"\nsecond')], name


def test_your_own_ids_and_search_r1s_contents_are_kept(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"key": "k7", "text": "alone"}\n' + GOOD)
    assert list(read_corpus(tmp_path / "c.jsonl", {"id": "key"})) == [("k7", '"k7"\nalone'), ("1", '"Title"\ntext')]


def test_all_faults_of_a_corpus_are_told_with_their_lines(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "good"}\n{oops\n{"text": " "}\n[]\n{"text": "good", "id": 0}\n')
    found = [(line, str(fault)) for line, fault in passages(tmp_path / "c.jsonl", {}) if isinstance(fault, CorpusError)]
    assert [line for line, _ in found] == [2, 3, 4, 5]
    expected = ("not JSON", "text is ' '; expected the text", "found list", "id '0' was already used in line 1")
    for (_, fault), said in zip(found, expected, strict=True):
        assert said in fault


def test_a_mapping_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "c.jsonl").write_text(GOOD)
    pl.DataFrame({"body": ["x"]}).write_parquet(tmp_path / "c.parquet")
    with pytest.raises(CorpusError, match="columns.txt is no column of a corpus; expected id, title, text, contents"):
        list(read_corpus(tmp_path / "c.jsonl", {"txt": "x"}))
    with pytest.raises(CorpusError, match=r"line 1: no 'text', but id, contnts; say --paths"):
        (tmp_path / "d.jsonl").write_text('{"id": "1", "contnts": "x"}')
        list(read_corpus(tmp_path / "d.jsonl", {}))
    with pytest.raises(CorpusError, match=r"no line has 'hed' \(columns.title\); they have head, text"):
        (tmp_path / "e.jsonl").write_text('{"head": "A", "text": "x"}')
        list(read_corpus(tmp_path / "e.jsonl", {"title": "hed"}))
    with pytest.raises(CorpusError, match="no column bdy; it has body"):
        list(read_corpus(tmp_path / "c.parquet", {"text": "bdy"}))
    with pytest.raises(CorpusError, match="no column text; it has body"):
        list(read_corpus(tmp_path / "c.parquet", {}))
