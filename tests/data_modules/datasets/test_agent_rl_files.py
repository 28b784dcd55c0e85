"""Files as Open-AgentRL-30K.parquet: mathematics, science and programs in one, told apart row by row."""

import json
import re

import polars as pl
import pytest

from data_modules.datasets.files import DatasetError
from data_modules.datasets.ground_truths import read_tests
from data_modules.datasets.questions import load_tasks, write_tasks
from rollout.rewards.scoring import exact_match

STDIN = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
FUNCTION = {"fn_name": "double", "inputs": [[1], [2]], "outputs": [[2], [4]]}
CHECK = "def check(f):\n    assert f(2) == 4"
ASSERTS = {"entry_point": "Solution().double", "import_prefix": "import math\n", "test_code": CHECK}
PYTEST = {**ASSERTS, "test_code": "def test_a(): assert f()"}


def row(source: str, content: str, truth, index=0, **changes) -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": index},
        **changes,
    }


MIXED = [
    row("math_dapo", "Solve it and box it: \\boxed{'...'}. Question: what is 2 + 2?\n", "4"),
    row("mega-science", "Which? Box the letter.", "C", ability="science"),
    row("mega-science", "How fast? Box the number.", "3.5", 1, ability="science"),
    row("train-math-deepscaler", "What is 1 / 2?", '["\\\\frac{1}{2}", "0.5"]'),
    row("train-math-still3", "Which interval?", "[1, 2]"),
    row("train-code-taco-hard", "Double it.", json.dumps(STDIN), ability="code"),
    row("train-code-taco-hard", "Double it in a function.", json.dumps(FUNCTION), 1, ability=None),
    row("train-code-leetcode-Easy", "Double it in a class.", json.dumps(ASSERTS), ability="CODE"),
    row("gpqa_diamond", "Which of four?", "B", ability="Physics"),
]


@pytest.fixture
def file(tmp_path):
    def make(rows, name="rl.parquet"):
        pl.DataFrame(rows).write_parquet(tmp_path / name)
        return str(tmp_path / name)

    return make


def test_a_mixed_file_is_told_apart_row_by_row(file):
    tasks = load_tasks(file(MIXED))
    abilities = ["math", "choice", "math", "math", "math", "code", "code", "code", "choice"]
    assert [t.metadata["ability"] for t in tasks] == abilities
    golds = [("4",), ("C",), ("3.5",), ("\\frac{1}{2}", "0.5"), ("[1, 2]",), (), (), (), ("B",)]
    assert [t.golden_answers for t in tasks] == golds
    assert [t.question for t in tasks] == [r["prompt"][0]["content"].strip() for r in MIXED]
    assert [t.prompt for t in tasks] == [(("user", r["prompt"][0]["content"]),) for r in MIXED]
    assert [t.metadata.get("tests") for t in tasks[4:]] == [
        None,
        {**STDIN, "fn_name": None, "public": 0},
        {"fn_name": "double", "inputs": ["1", "2"], "outputs": ["2", "4"], "public": 0},
        {**ASSERTS, "public": 0},
        None,
    ]
    ids = [t.id for t in tasks]
    assert ids[:3] == ["math_dapo_0", "mega-science_0", "mega-science_1"] and len(set(ids)) == len(MIXED)


def test_no_gold_answer_means_that_exact_match_is_zero_and_files_keep_the_tests(file, tmp_path):
    tasks = load_tasks(file(MIXED))
    assert exact_match("print(2)", tasks[5].golden_answers) == 0.0
    write_tasks(tmp_path / "again.parquet", tasks)
    assert load_tasks(tmp_path / "again.parquet") == tasks


def test_tests_in_structs(file):
    """Parquet gives every row all fields; what a row has not is null."""
    rows = [
        row("train-code-taco", "Double it.", {**STDIN, "fn_name": None, "target": None}),
        row("train-code-taco", "Double it again.", {**STDIN, "fn_name": "double", "target": None}, 1),
    ]
    expected = [{**STDIN, "fn_name": None, "public": 0}, {**STDIN, "fn_name": "double", "public": 0}]
    assert [t.metadata["tests"] for t in load_tasks(file(rows))] == expected
    for line in rows:
        del line["reward_model"]["ground_truth"]["target"]
    assert [t.metadata["tests"] for t in load_tasks(file(rows))] == expected
    assert [t.question for t in load_tasks(file(rows))] == ["Double it.", "Double it again."]
    answer = {"inputs": None, "outputs": None, "fn_name": None, "target": ["4"]}
    rows = [row("math_dapo", "What is 2 + 2?", answer), row("train-code-taco", "Double it.", {**answer, **STDIN})]
    assert [t.golden_answers for t in load_tasks(file(rows))] == [("4",), ()]
    assert [t.metadata["ability"] for t in load_tasks(file(rows))] == ["math", "code"]


@pytest.mark.parametrize(
    ("given", "inputs", "outputs"),
    [
        ({"inputs": [["a", 1], [[2], None]], "outputs": [["x"], [[3]]]}, ['"a"\n1', "[2]\nnull"], ['"x"', "[3]"]),
        ({"inputs": [[1], [2]], "outputs": ["x", True]}, ["1", "2"], ['"x"', "true"]),
        ({"inputs": [1, "Ä"], "outputs": [2, "Ä"]}, ["1", '"Ä"'], ["2", '"Ä"']),
        ({"inputs": ["[1]\n2", "[]\n0"], "outputs": ["[3]", "x"]}, ["[1]\n2", "[]\n0"], ["[3]", "x"]),
    ],
)
def test_arguments_and_results_of_functions_become_json(given, inputs, outputs):
    tests = read_tests({**given, "fn_name": "f"})
    assert tests == {"inputs": inputs, "outputs": outputs, "fn_name": "f", "public": 0}


def test_lines_of_programs_become_text():
    tests = read_tests({"inputs": [["2", "a b"], "3\n", 4], "outputs": [["x", 7], "y", 1.5], "fn_name": ""}, public=1)
    assert tests == {"inputs": ["2\na b", "3\n", "4"], "outputs": ["x\n7", "y", "1.5"], "fn_name": None, "public": 1}


def test_hints_for_a_teacher(file):
    rows = [
        row("math_dapo", "What is 2 + 2?", "4", extra_info={"index": 0, "hint": "Count."}),
        row("math_dapo", "What is 2 + 3?", "5", extra_info={"index": 1, "hint": None}),
    ]
    assert [t.metadata.get("hint") for t in load_tasks(file(rows))] == ["Count.", None]
    assert "hint" not in load_tasks(file(rows))[1].metadata
    rows = [{**r, "hint": hint} for r, hint in zip(rows, ["Count on fingers.", " "], strict=True)]
    assert [t.metadata.get("hint") for t in load_tasks(file(rows))] == ["Count on fingers.", None]
    with pytest.raises(DatasetError, match="a hint that is int, expected text"):
        load_tasks(file([{**r, "hint": 7} for r in rows]))


def test_ids_where_the_index_does_not_tell_rows_apart(file, caplog):
    same = [row("math_dapo", "a?", "1"), row("math_dapo", "b?", "2"), row("mega-science", "c?", "3")]
    ids = ["math_dapo_rl_0", "math_dapo_rl_1", "mega-science_rl_2"]
    assert [t.id for t in load_tasks(file(same))] == ids
    assert "ids are made of row numbers" in caplog.text
    missing = [row("math_dapo", "a?", "1", extra_info={"index": index}) for index in ("u-1", None)]
    assert [t.id for t in load_tasks(file(missing))] == ids[:2]
    caplog.clear()
    texts = [row("math_dapo", "a?", "1", extra_info={"index": index, "split": None}) for index in ("u-1", "u-2")]
    assert [t.id for t in load_tasks(file(texts))] == ["math_dapo_u-1", "math_dapo_u-2"]
    assert not caplog.text
    twice = [file(same, "a.parquet"), file(same, "b.parquet")]
    assert len({t.id for t in load_tasks(twice)}) == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (row("math_dapo", "?", None), "no gold answer"),
        (row("math_dapo", "?", "[]"), None),
        (row("math_dapo", " ", "4"), "no text in the prompt's last user turn"),
        (row("train-code-taco", "?", "4", ability=None), "no tests, though they ask for a program"),
        (row("train-code-taco", "?", '{"inputs": ["1"], "outputs": []}'), "not as many outputs as inputs in the tests"),
        (
            row("train-code-taco", "?", '{"fn_name": "a.b", "inputs": [[1]], "outputs": [[1]]}'),
            "not the name of a function",
        ),
        (row("train-code-taco", "?", '{"test_code": "assert x"}'), "test_code without an entry_point"),
        (row(" ", "?", "4"), "no data source"),
        (row("gpqa", "?", "the second", ability="Physics"), "a gold answer that names no letter"),
        (row("train-code-taco", "?", json.dumps(PYTEST)), "asserts nothing"),
    ],
)
def test_wrong_rows_are_named(file, wrong, message):
    wrong = {**wrong, "extra_info": {"index": 1}}
    path = file([row("math_dapo", "a?", "1"), wrong, row("math_dapo", "b?", "2", 2)])
    if message is None:
        assert load_tasks(path)[1].golden_answers == ("[]",)
        return
    with pytest.raises(DatasetError, match=f"rl.parquet: 1 of 3 rows with .*{re.escape(message)}.*: row 1 "):
        load_tasks(path)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"inputs": ["1"], "outputs": []}, "faulty metadata.tests: .* as long as each other"),
        ({"inputs": ["1"], "outputs": [1]}, "faulty metadata.tests: .* texts as inputs and outputs; found int"),
    ],
)
def test_tests_of_the_metadata_column_are_checked(file, tests, message):
    good = {"tests": {"inputs": ["1"], "outputs": ["1"]}}
    rows = [row("own", "a?", "1", i, metadata=json.dumps(own)) for i, own in enumerate([good, {"tests": tests}])]
    with pytest.raises(DatasetError, match=f"1 of 2 rows with {message}.*: row 1 "):
        load_tasks(file(rows))


BROKEN = [
    row("math_dapo", "a?", "1", 0),
    row("math_dapo", " ", "1", 1),
    row(" ", "b?", "1", 2),
    row("math_dapo", "c?", None, 3),
    row("math_dapo", "d?", "", 4, metadata="[1]"),
    row("math_dapo", "e?", "1", 5, gold_passages=[{"title": "t", "text": None}]),
    row("gpqa", "f?", "second", 6, ability="Physics"),
    row("math_dapo", "g?", None, 7),
    row("math_dapo", None, "1", 8),
    row("gpqa", "h?", "C", 9, ability="Physics", gold_passages=[{"title": "t", "text": "x"}]),
]


def test_faulty_rows_are_left_out_on_request(file, caplog):
    path = file([{"metadata": None, "gold_passages": [], **line} for line in BROKEN])
    left = load_tasks(path, "drop")
    found = [(t.id, t.question, t.golden_answers) for t in left]
    assert found == [("math_dapo_0", "a?", ("1",)), ("gpqa_9", "h?", ("C",))]
    assert "8 of 10 rows are left out" in caplog.text and "3 with no gold answer: row 3, 4, 7" in caplog.text
    caplog.clear()
    assert len(load_tasks(file(MIXED), "drop")) == len(MIXED) and "left out" not in caplog.text
    with pytest.raises(DatasetError, match="all 1 rows are invalid: 1 with no gold answer: row 0"):
        load_tasks(file([row("math_dapo", "a?", " ")]), "drop")
