"""Halves of surrogate pairs: mended in what servers and tools return, a fault of a row in files."""

import json
from dataclasses import dataclass

import pytest

from common.text import HalfPair, strict_json, whole
from retrieval.client import parse_answer
from retrieval.corpus import write_store
from retrieval.types import CorpusError

HALF = "half \ud83d pair"


@dataclass(frozen=True, slots=True)
class Pair:
    first: str
    second: tuple


def test_halves_become_u_fffd_and_pairs_their_character():
    assert whole("\ud83d\ude00 \ude00\ud83d x") == "\U0001f600 \ufffd\ufffd x"
    assert whole({HALF: [HALF, (HALF, 1, None)]}) == {
        "half \ufffd pair": ["half \ufffd pair", ("half \ufffd pair", 1, None)]
    }
    assert whole(Pair(HALF, (HALF,))) == Pair("half \ufffd pair", ("half \ufffd pair",))
    for text in ("", "a", "é \U0001f600 \ufeff \uffff \U0010ffff \ue000 \x00", '"\\ud83d"'):
        assert whole(text) == text


def test_json_with_a_half_is_refused():
    assert strict_json('["\\ud83d\\ude00", "\\\\ud83d"]') == ["\U0001f600", "\\ud83d"]
    for text in ('["\\ud83d"]', '{"a": {"\\ude00": 1}}', b'"\\uDBFF x"'):
        with pytest.raises(HalfPair, match=r"^half of a surrogate pair, \\ud[8-f][0-9a-f]{2}; expected whole char"):
            strict_json(text)
    with pytest.raises(UnicodeDecodeError):
        strict_json(b'"\xed\xa0\xbd"')  # the half itself, in bytes


@pytest.mark.parametrize(("name", "where"), [("c.jsonl", "line 2"), ("c.json", "row 2")])
def test_a_row_of_a_corpus_with_a_half_is_named(tmp_path, name, where):
    rows = [{"id": "a", "contents": '"T"\nx'}, {"id": "b", "contents": f'"T"\n{HALF}'}]
    path = tmp_path / name
    path.write_text(json.dumps(rows) if name.endswith("json") else "\n".join(map(json.dumps, rows)))
    with pytest.raises(CorpusError, match=rf"{name}, {where}: .*surrogate"):
        write_store(path, tmp_path / "store")
    assert write_store(path, tmp_path / "rest", skip_malformed=True)[0] == 1


def test_a_search_server_may_send_halves():
    hit = {"document": {"id": "7\ude00", "contents": f'"T\ud83d"\n{HALF}'}, "score": 1}
    [[document]] = parse_answer(json.dumps({"result": [[hit]]}).encode(), 1, 3)
    assert (document.id, document.title, document.text) == ("7\ufffd", "T\ufffd", "half \ufffd pair")
    assert document.heading == '"T\ufffd"' and document.score == 1.0
