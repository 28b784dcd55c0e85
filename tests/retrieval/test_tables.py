"""One corpus in every form and under every name; files that are no table are refused in one line."""

import gzip
import json

import polars as pl
import pytest

from common.errors import FileError
from common.tables import open_table
from retrieval.corpus import passages, read_corpus
from retrieval.types import CorpusError

ROWS = [
    {"id": "1", "title": "Zoë", "text": 'a comma, a "quote"\nand a second line'},
    {"id": "2", "title": "B", "text": "x" * 200_000},  # longer than Python's csv takes by itself
]
EXPECTED = [("1", '"Zoë"\na comma, a "quote"\nand a second line'), ("2", '"B"\n' + "x" * 200_000)]


def contents(form):
    frame = pl.DataFrame(ROWS)
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    if form == "json":
        return json.dumps(ROWS, indent=1).encode()
    if form == "tsv":
        return frame.write_csv(separator="\t").encode("utf-8-sig")
    return frame.write_csv(separator=";").encode()


@pytest.mark.parametrize("name", ["c.csv", "c.jsonl", "c.csv.gz"])
@pytest.mark.parametrize("form", ["jsonl", "json", "tsv", "semicolons"])
def test_a_corpus_in_every_form_under_every_name(tmp_path, form, name):
    text = contents(form)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert list(read_corpus(path)) == EXPECTED
    if not name.endswith(".gz"):
        path.write_bytes(gzip.compress(text))  # compressed, against its name
        assert list(read_corpus(path)) == EXPECTED


@pytest.mark.parametrize("name", ["c.parquet", "c.jsonl", "c.csv"])
def test_parquet_is_known_by_its_first_bytes(tmp_path, name):
    pl.DataFrame(ROWS).write_parquet(tmp_path / name)
    assert list(read_corpus(tmp_path / name)) == EXPECTED
    assert open_table(tmp_path / name).unit == "row"


def test_rows_of_csv_have_the_line_on_which_they_begin(tmp_path):
    (tmp_path / "c.csv").write_text('id,text\n1,"two\nlines"\n\n2\n1,again\n')
    found = list(passages(tmp_path / "c.csv"))
    assert [line for line, _ in found] == [2, 5, 6]
    assert str(found[1][1]) == f"{tmp_path}/c.csv, line 5: 1 fields, expected the 2 of the first line"
    assert "line 6: id '1' was already used" in str(found[2][1])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.txt", b"id,text\n1,x\n", "c.txt ends in '.txt'; expected .tsv, .csv, .jsonl, .json or .parquet"),
        ("c.jsonl", b"%PDF-1.7\n\0\1", "c.jsonl is not UTF-8 text"),
        ("c.csv", "id,text\n1,ü\n".encode("latin-1"), "c.csv cannot be read in UTF-8 after line"),
        ("c.csv", b'id,text\n1,"x\n', "c.csv cannot be read as CSV after line"),
        ("c.json", b'[{"id": "1", "text"', "c.json cannot be read as JSON"),
        ("c.parquet", b"PAR1 and no more", "c.parquet cannot be read as parquet"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError, match=message) as caught:
        list(open_table(tmp_path / name).rows)
    assert "\n" not in str(caught.value)
    with pytest.raises(CorpusError, match=message):
        list(passages(tmp_path / name))
