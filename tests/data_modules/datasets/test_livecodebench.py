import base64
import json
import os
import pickle
import zlib

import polars as pl
import pytest

from data_modules.datasets.benchmarks import load_benchmark
from data_modules.datasets.files import DatasetError
from data_modules.datasets.livecodebench import unpacked
from data_modules.datasets.questions import load_tasks


def packed(value, protocol: int | None = None) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def cases(*pairs, kind: str = "stdin") -> str:
    return json.dumps([{"input": a, "output": b, "testtype": kind} for a, b in pairs])


def official(**changes) -> dict:
    row = {
        "question_title": "Doubling", "question_content": "Double the number.\n", "platform": "atcoder",
        "question_id": "abc001_a", "contest_date": "2025-03-01T00:00:00", "starter_code": "", "difficulty": "easy",
        "public_test_cases": cases(("1\n", "2\n"), ("2\n", "4\n")),
        "private_test_cases": packed(cases(("30\n", "60\n"))), "metadata": "{}",
    }  # fmt: skip
    return {**row, **changes}


def of_sod(count: int = 4, **changes) -> dict:
    """A row of lcb_v6_2502_2505.parquet: JSON strings in columns."""
    truth = {"inputs": [f"{i}\n" for i in range(count)], "outputs": [f"{2 * i}\n" for i in range(count)]}
    row = {
        "problem": "Double the number.", "ability": "code", "data_source": "LiveCodeBench_v6",
        "reward_model": json.dumps({"style": "rule", "ground_truth": truth}),
        "extra_info": json.dumps({"index": 3, "split": "test"}),
    }  # fmt: skip
    return {**row, **changes}


def write(path, *rows):
    if path.suffix == ".parquet":
        pl.DataFrame(list(rows)).write_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_official_files_say_which_tests_are_public(tmp_path, suffix):
    (task,) = load_tasks(f"livecodebench_v6:{write(tmp_path / f'test6.{suffix}', official())}")
    assert (task.id, task.question, task.golden_answers) == ("livecodebench_v6_0", "Double the number.", ())
    inputs, outputs = ["1\n", "2\n", "30\n"], ["2\n", "4\n", "60\n"]
    assert task.metadata["tests"] == {"inputs": inputs, "outputs": outputs, "fn_name": None, "public": 2}
    assert (task.metadata["ability"], task.metadata["difficulty"]) == ("code", "easy")
    json.dumps(task.metadata)  # goes into files of trajectories


def test_tests_of_a_function_carry_its_name_and_the_code_to_complete(tmp_path):
    row = official(
        starter_code="class Solution:\n    def double(self, n: int) -> int:\n        ",
        public_test_cases=cases(("1", "2"), kind="functional"),
        private_test_cases=cases(("[3]", "6"), kind="functional"),  # some copies have them as JSON
        metadata=json.dumps({"func_name": "double"}),
    )
    (task,) = load_benchmark("livecodebench_v6", write(tmp_path / "test.jsonl", row))
    tests = {"inputs": ["1", "[3]"], "outputs": ["2", "6"], "fn_name": "double", "public": 1}
    assert task.metadata["tests"] == tests
    assert task.metadata["starter_code"].startswith("class Solution:")


@pytest.mark.parametrize(("count", "public"), [(1, 0), (2, 1), (3, 2), (20, 2)])
def test_of_sods_file_one_test_always_stays_hidden(tmp_path, count, public):
    (task,) = load_benchmark("livecodebench_v6", write(tmp_path / "lcb.parquet", of_sod(count)))
    tests = task.metadata["tests"]
    assert (len(tests["inputs"]), tests["public"], tests["outputs"][-1]) == (count, public, f"{2 * (count - 1)}\n")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", [""])
def test_packed_texts_of_every_pickle_protocol(protocol, text):
    assert unpacked(packed(text, protocol)) == text


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_anything_else_is_refused_unloaded(tmp_path, protocol):
    harmful = packed(Harmful(tmp_path / "made"), protocol)
    pickle.loads(zlib.decompress(base64.b64decode(harmful)))  # the control: loading it does something
    (tmp_path / "made").rmdir()
    for text in (harmful, packed(["a text"], protocol), packed(7, protocol), packed(b"bytes", protocol)):
        with pytest.raises(ValueError, match="whose pickle is not one text"):
            unpacked(text)
    assert not (tmp_path / "made").exists()


def test_what_is_not_packed_is_refused(monkeypatch):
    whole = packed("x" * 1000)
    cut = base64.b64encode(base64.b64decode(whole)[:-8]).decode()
    for text, message in (
        ("no base64!", "neither JSON nor packed"),
        (base64.b64encode(b"no zlib").decode(), "neither JSON nor packed"),
        (cut, "cut short"),
        (base64.b64encode(zlib.compress(b"no pickle")).decode(), "not a pickle"),
        (base64.b64encode(zlib.compress(pickle.dumps("x" * 99)[:50])).decode(), "not a pickle"),
    ):
        with pytest.raises(ValueError, match=message):
            unpacked(text)
    monkeypatch.setattr("data_modules.datasets.livecodebench.LARGEST_DECODED", 500)
    with pytest.raises(ValueError, match="unpack to more than 500 bytes"):
        unpacked(whole)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (official(question_content=" "), "no question"),
        (official(public_test_cases="[]", private_test_cases="[]"), "no tests"),
        (official(public_test_cases=cases(("1", "2"), kind="functional")), "no func_name in the metadata"),
        (official(public_test_cases='[{"input": "1"}]'), "public_test_cases that are not all {input, output}"),
        (official(private_test_cases=packed("no JSON")), "private_test_cases that cannot be read as JSON"),
        (official(private_test_cases=packed([1])), "whose pickle is not one text"),
        (of_sod(reward_model="{"), "reward_model that cannot be read as JSON"),
        (of_sod(reward_model='{"ground_truth": {"inputs": ["1"], "outputs": []}}'), "not as many outputs as inputs"),
    ],
)
def test_wrong_rows_are_named(tmp_path, row, message):
    right = official() if "question_content" in row else of_sod()
    path = write(tmp_path / "test.jsonl", right, row, right, row)
    with pytest.raises(DatasetError, match=f"test.jsonl: 2 of 4 rows with .*{message}.*: row 1, 3 "):
        load_benchmark("livecodebench_v6", path)


def test_columns_of_neither_shape(tmp_path):
    with pytest.raises(DatasetError, match="expected the columns question_content, .*The file has: problem, answer"):
        load_benchmark("livecodebench_v6", write(tmp_path / "test.jsonl", {"problem": "?", "answer": "1"}))
