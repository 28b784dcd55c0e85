import gzip
import json
import random
import tarfile

import orjson
import polars as pl
import pytest

from retrieval.corpus import PassageStore, _SeenIds, file_sha256, passages, read_corpus, write_store
from retrieval.types import CorpusError

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


@pytest.mark.parametrize(
    ("lines", "where", "what"),
    [
        ([GOOD, "{not json"], "line 2", "not JSON"),
        (["", GOOD, " ", "{"], "line 4", "not JSON"),
        ([GOOD, '["a", "b"]'], "line 2", "found list"),
        ([GOOD, '{"contents": "\\"T\\"\\nx"}'], "line 2", "no 'id'"),
        (['{"id": "a", "contents": 3}'], "line 1", "contents is int"),
        (['{"id": true, "contents": "\\"T\\"\\nx"}'], "line 1", "id is True"),
        ([GOOD, '{"id": true, "contents": 3}'], "line 2", "id is True; .*; contents is int; expected a text"),
        ([GOOD, '{"id": "b", "contents": "no title line"}'], "line 2", "not a title line"),
        ([GOOD, GOOD.replace('"a"', '"b"'), GOOD], "line 3", "already used in line 1"),
        ([GOOD.replace('"a"', "0"), GOOD.replace('"a"', '"0"')], "line 2", "already used in line 1"),
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
    pl.DataFrame({"id": ["a"], "body": ["b"]}).write_parquet(tmp_path / "columns.parquet")
    with pytest.raises(CorpusError, match="no column text; it has id, body"):
        list(read_corpus(tmp_path / "columns.parquet"))


def test_duplicates_are_found_as_by_a_plain_set(tmp_path):
    draw = random.Random(0)
    outcomes = set()
    for _ in range(400):
        ids = [draw.choice([str(row), str(draw.randint(0, 8)), f"0{row}", f"x{row}"]) for row in range(6)]
        seen = _SeenIds()
        found = [seen.add(id_, row) for row, id_ in enumerate(ids, start=1)]
        expected = [ids.index(id_) + 1 if id_ in ids[:row] else None for row, id_ in enumerate(ids)]
        assert found == expected, ids
        outcomes.add(any(found))
    assert outcomes == {True, False}


def test_ids_that_count_up_cost_no_memory_across_rows_without_one():
    seen = _SeenIds()
    for row in range(1, 3001):
        if row not in (500, 2000):  # malformed
            assert seen.add(str(row if row < 2000 else row + 7), row) is None
    assert len(seen.starts) == 3 and not seen.others
    assert (seen.add("499", 3001), seen.add("2500", 3002), seen.add("3007", 3003)) == (499, 2493, 3000)


# --- the forms of corpora ---------------------------------------------------------------------------------------------

FORMS = {
    "Search-R1": ([{"id": 3, "contents": '"A"\nx'}], [("3", '"A"\nx')], "{id, contents}; the first line is the title"),
    "MS MARCO": (
        [{"id": "3", "contents": "x"}, {"id": "4", "contents": "y"}],
        [("3", '"3"\nx'), ("4", '"4"\ny')],
        "{id, contents}; the id replaces a missing title",
    ),
    "BEIR": (
        [{"_id": "d3", "title": "", "text": "x", "metadata": {}}, {"_id": "d4", "title": "A", "text": "y\nz"}],
        [("d3", '"d3"\nx'), ("d4", '"A"\ny\nz')],
        "{_id, title, text}; the id replaces a missing title",
    ),
    "docid": ([{"docid": 8, "text": "x"}], [("8", '"8"\nx')], "{docid, text}; the id replaces a missing title"),
    "no ids": (
        [{"text": "x"}, {"text": "y"}],
        [("0", '"0"\nx'), ("1", '"1"\ny')],
        "{text}; the id replaces a missing title; ids are the passages' numbers from 0",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_corpus_is_recognised_in_every_kind_of_file(tmp_path, name, capsys):
    rows, expected, said = FORMS[name]
    lines = b"\n".join(orjson.dumps(row) for row in rows)
    (tmp_path / "c.jsonl").write_bytes(lines)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines))
    pl.DataFrame([{key: value for key, value in row.items() if value != {}} for row in rows]).write_parquet(
        tmp_path / "c.parquet"
    )
    for path in sorted(tmp_path.iterdir()):
        assert list(read_corpus(path)) == expected, path
        assert capsys.readouterr().err == f"{path}: read as {said}\n"


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([{"_id": 1, "text": "x"}, {"id": 2, "text": "y"}], r"line 2: no '_id'; .* expected {_id, text}"),
        ([{"id": 1, "text": "x"}, {"id": 2, "contents": "y"}], r"line 2: no 'text'; .* expected {id, text}"),
        ([{"id": 1, "contents": "x"}, {"id": 2, "contents": '"A"\ny'}], "line 2: contents .* has a line break"),
        ([{"text": "x"}, {"id": 2, "text": "y"}], "line 2: found an 'id', but the first passage of the file has none"),
        ([{"id": 1, "text": " "}], "line 1: text is ' '; expected the text"),
    ],
)
def test_what_the_first_row_decides_holds_for_the_file(tmp_path, lines, what):
    (tmp_path / "c.jsonl").write_bytes(b"\n".join(orjson.dumps(row) for row in lines))
    with pytest.raises(CorpusError, match=what):
        list(read_corpus(tmp_path / "c.jsonl"))


def test_a_byte_order_mark_and_blank_lines_are_passed_over_and_lines_keep_their_numbers(tmp_path):
    text = '{"id": "a", "text": "x"}\n\n \r\n{"id": "b", "text": "y"}\n{"id": "b", "text": "z"}\n'
    (tmp_path / "c.jsonl").write_bytes(text.encode("utf-8-sig"))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(text.encode("utf-8-sig")))
    for path in tmp_path.iterdir():
        found = list(passages(path))
        assert [(line, passage) for line, passage in found[:2]] == [(1, ("a", '"a"\nx')), (4, ("b", '"b"\ny'))]
        assert "line 5: id 'b' was already used in passage 2 (blank lines do not count)" in str(found[2][1])


def test_malformed_rows_are_left_out_and_told(tmp_path, capsys):
    good = [f'{{"id": {row}, "text": "text {row}"}}' for row in range(3)]
    (tmp_path / "c.jsonl").write_text("\n".join(["{", good[0], "[]", good[1], good[0], '{"id": 9}', good[2]]))
    summary = write_store(tmp_path / "c.jsonl", tmp_path / "store", skip_malformed=True)
    store = PassageStore(tmp_path / "store")
    assert (summary.passages, summary.skipped, [store[row].id for row in range(3)]) == (3, 4, ["0", "1", "2"])
    told = capsys.readouterr().err.splitlines()
    assert told[1] == f"{tmp_path}/c.jsonl: 4 malformed rows skipped; the first:"
    assert [line.split(": ")[0].rpartition(", ")[2] for line in told[2:]] == ["line 1", "line 3", "line 5"]
    (tmp_path / "bad.jsonl").write_text('[]\n{"id": 9}\n')
    with pytest.raises(CorpusError, match="bad.jsonl: all 2 rows are malformed: .*line 1: found list"):
        write_store(tmp_path / "bad.jsonl", tmp_path / "none", skip_malformed=True)


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
    (tmp_path / "d.jsonl").write_text('{"_id": "d1", "contents": "no title,\\nbut lines"}')
    assert list(read_corpus(tmp_path / "d.jsonl", {"id": "_id", "text": "contents"})) == [
        ("d1", '"d1"\nno title,\nbut lines')
    ]


def test_all_faults_of_a_corpus_are_told_with_their_lines(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "good"}\n{oops\n{"text": " "}\n[]\n{"text": "good", "id": 0}\n')
    found = [(line, str(fault)) for line, fault in passages(tmp_path / "c.jsonl", {}) if isinstance(fault, CorpusError)]
    assert [line for line, _ in found] == [2, 3, 4, 5]
    expected = ("not JSON", "text is ' '; expected the text", "found list", "id '0' was already used in line 1")
    for (_, fault), said in zip(found, expected, strict=True):
        assert said in fault


def test_a_text_column_that_is_named_is_read_beside_a_column_contents(tmp_path):
    row = {"id": 1, "headline": "Fire", "summary": "A fire in Rome.", "contents": "One.\nTwo."}
    (tmp_path / "c.jsonl").write_text(json.dumps(row))
    [passage] = read_corpus(tmp_path / "c.jsonl", {"title": "headline", "text": "summary"})
    assert passage.contents == '"Fire"\nA fire in Rome.'
    [passage] = read_corpus(tmp_path / "c.jsonl", {})
    assert passage.contents == "One.\nTwo."


def test_a_mapping_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "c.jsonl").write_text(GOOD)
    pl.DataFrame({"body": ["x"]}).write_parquet(tmp_path / "c.parquet")
    with pytest.raises(CorpusError, match="columns.txt is not a column .*; expected id, title, text, contents"):
        list(read_corpus(tmp_path / "c.jsonl", {"txt": "x"}))
    with pytest.raises(CorpusError, match=r"line 1: no 'text', but id, contnts; say --paths"):
        (tmp_path / "d.jsonl").write_text('{"id": "1", "contnts": "x"}')
        list(read_corpus(tmp_path / "d.jsonl", {}))
    with pytest.raises(CorpusError, match=r"no line has 'hed' \(columns.title\); they have head, text"):
        (tmp_path / "e.jsonl").write_text('{"head": "A", "text": "x"}')
        list(read_corpus(tmp_path / "e.jsonl", {"title": "hed"}))
    with pytest.raises(
        CorpusError, match="no 'contents' and no 'text', but head, body; .* --paths.corpus_columns.text"
    ):
        (tmp_path / "f.jsonl").write_text('{"head": "A", "body": "x"}')
        list(read_corpus(tmp_path / "f.jsonl"))
    with pytest.raises(CorpusError, match="no column bdy; it has body"):
        list(read_corpus(tmp_path / "c.parquet", {"text": "bdy"}))
    with pytest.raises(CorpusError, match="no column text; it has body"):
        list(read_corpus(tmp_path / "c.parquet", {}))


def test_a_tar_archive_is_told_with_its_cure(tmp_path):
    """What ``gzip -d wiki-18.jsonl.gz`` leaves, and the file itself."""
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": "0", "contents": '"A"\none'}))
    for name, mode, flags in (("wiki-18.jsonl", "w", "-xOf"), ("wiki-18.jsonl.gz", "w:gz", "-xOzf")):
        with tarfile.open(tmp_path / name, mode) as archive:
            archive.add(tmp_path / "c.jsonl", "dump.jsonl")
        with pytest.raises(CorpusError, match=f"a tar archive; .*: tar {flags} {name} > corpus.jsonl"):
            list(read_corpus(tmp_path / name))
