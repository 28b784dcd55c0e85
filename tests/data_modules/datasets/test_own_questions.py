"""Question files of any shape: CSV, JSON lines and parquet, mapped columns, made ids, every fault by its line."""

import gzip
import json
import logging

import polars as pl
import pytest

from data_modules.datasets.files import DatasetError
from data_modules.datasets.questions import load_tasks
from data_modules.datasets.splits import Splits
from data_modules.evaluation_data import EvaluationData
from data_modules.rollout_data_module import RolloutDataModule
from rollout.trajectory import Task

MAPPING = {"question": "prompt", "golden_answers": "answer"}
ROWS = [{"prompt": "How much is 1 + 1?", "answer": "2"}, {"prompt": "A colour,\nand why?", "answer": '["red", "blue"]'}]


def written(path, rows):
    if path.suffix == ".csv":
        pl.DataFrame(rows).write_csv(path)
    elif path.suffix == ".parquet":
        pl.DataFrame(rows).write_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("ending", "lines"), [("csv", (2, 3)), ("jsonl", (1, 2)), ("json", (1, 2)), ("parquet", (1, 2))]
)
def test_every_format_gives_the_same_tasks(tmp_path, ending, lines):
    tasks = load_tasks(written(tmp_path / f"mine.{ending}", ROWS), columns=MAPPING)
    assert tasks == [
        Task(f"mine_{lines[0]}", "How much is 1 + 1?", ("2",), "mine"),
        Task(f"mine_{lines[1]}", "A colour,\nand why?", ("red", "blue"), "mine"),
    ]


@pytest.mark.parametrize("name", ["mine.csv.gz", "mine.json", "mine.csv"])
@pytest.mark.parametrize("form", ["csv", "jsonl", "json", "parquet"])
def test_a_file_is_read_as_what_it_is_whatever_its_name(tmp_path, name, form):
    content = (tmp_path / written(tmp_path / f"as.{form}", ROWS)).read_bytes()
    if form == "parquet" and name.endswith(".gz"):
        return  # parquet has a compression of its own
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    tasks = load_tasks(tmp_path / name, columns=MAPPING)
    assert [(t.question, t.golden_answers) for t in tasks] == [
        ("How much is 1 + 1?", ("2",)),
        ("A colour,\nand why?", ("red", "blue")),
    ]


def test_a_long_field_of_a_csv_file_is_read(tmp_path):
    [task] = load_tasks(
        written(tmp_path / "q.csv", [{"question": "why? " * 60_000, "golden_answers": "x"}]), columns={}
    )
    assert len(task.question) == 299_999


def test_gold_answers_may_be_numbers(tmp_path):
    rows = [{"question": "q", "golden_answers": value} for value in (4, 0.5, [1, "one", None], "[2, 3]", 10**30)]
    tasks = load_tasks(written(tmp_path / "q.jsonl", rows), columns={})
    assert [t.golden_answers for t in tasks] == [("4",), ("0.5",), ("1", "one"), ("[2, 3]",), (str(10**30),)]
    shared = {"id": ["a", "b"], "question": ["q", "r"], "data_source": ["s", "s"]}
    pl.DataFrame(shared | {"golden_answers": [[1, 2], [30]]}).write_parquet(tmp_path / "lists.parquet")
    assert [t.golden_answers for t in load_tasks(tmp_path / "lists.parquet")] == [("1", "2"), ("30",)]
    truths = [{"ground_truth": 72}, {"ground_truth": 8}]
    pl.DataFrame(shared | {"reward_model": truths}).write_parquet(tmp_path / "truths.parquet")
    assert [t.golden_answers for t in load_tasks(tmp_path / "truths.parquet")] == [("72",), ("8",)]
    targets = [{"ground_truth": {"target": [1.5]}}, {"ground_truth": {"target": [float("nan"), 2.0]}}]
    pl.DataFrame(shared | {"reward_model": targets}).write_parquet(tmp_path / "targets.parquet")
    assert [t.golden_answers for t in load_tasks(tmp_path / "targets.parquet")] == [("1.5",), ("2.0",)]
    (tmp_path / "bool.jsonl").write_text('{"question": "q", "golden_answers": true}\n')
    with pytest.raises(DatasetError, match="golden_answers that are not a list of strings"):
        load_tasks(tmp_path / "bool.jsonl", columns={})


def test_all_faults_of_a_row_come_at_once(tmp_path):
    row = {
        "id": 1.5, "data_source": None, "question": 3, "golden_answers": {"a": 1}, "metadata": "[", "hint": 3,
        "prompt": [{"role": "user", "content": None}], "gold_passages": [{"title": "T"}],
    }  # fmt: skip
    faults = (
        "an id that is float, expected text", "no data source", "a question that is int, expected text",
        "golden_answers that are not a list of strings", "metadata that is not a JSON object", "a hint that is int",
        "a prompt message without role or content", "a gold passage without title or text",
    )  # fmt: skip
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row) + '\n{"question": "q", "golden_answers": "a", "data_source": "s", "id": "2"}\n')
    with pytest.raises(DatasetError) as caught:
        load_tasks(path, columns={})
    assert str(caught.value).startswith(f"{path}: 1 lines cannot be used: ")
    assert all(f"line 1 with {fault}" in str(caught.value) for fault in faults), caught.value
    assert [t.id for t in load_tasks(path, "drop", columns={})] == ["2"]
    row = {"id": "a", "data_source": None, "question": " ", "golden_answers": [], "hint": "", "metadata": "3"}
    pl.DataFrame([row, row | {"data_source": "s"}]).cast({"golden_answers": pl.List(pl.String)}).write_parquet(
        tmp_path / "q.parquet"
    )
    with pytest.raises(DatasetError) as caught:
        load_tasks(tmp_path / "q.parquet")
    said = str(caught.value)
    assert "2 of 2 rows are invalid" in said and "1 with no data source: row 0" in said
    for fault in ("an empty question", "metadata that is not a JSON object", "no gold answer"):
        assert f"2 with {fault}: row 0, 1" in said


def test_many_faults_of_a_kind_are_five_and_a_count(tmp_path):
    good, bad = '{"question": "q", "golden_answers": "a"}', '{"question": "q"}'
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f"{good}\n{bad}\n" for _ in range(100)) + "".join(f"{{oops{'x' * n}\n" for n in range(50)))
    with pytest.raises(DatasetError) as caught:
        load_tasks(path, columns={})
    said = str(caught.value)
    assert "150 lines cannot be used: lines 2, 4, 6, 8, 10 and 95 more with no gold answer; " in said
    assert "lines 201-250 with no JSON (Expecting property name" in said
    assert len(said) < 600
    rows = [{"question": "q", "golden_answers": "a", "id": n % 20} for n in range(40)]
    written(path, rows)
    with pytest.raises(DatasetError) as caught:
        load_tasks(path, columns={})
    said = str(caught.value)
    assert said.count("has already") == 5 and "; 15 more lines with a fault of this kind; correct them" in said


def test_what_is_left_out_of_a_shared_file_is_said_once(make_system, tmp_path, caplog):
    path = tmp_path / "q.jsonl"
    rows = [{"question": f"Question {i}", "golden_answers": "a" if i % 4 else ""} for i in range(40)]
    files = [written(path, rows)]
    data = RolloutDataModule(
        make_system(), files, prompts_per_iteration=2, val_files=files, test_files=files, columns={}, splits=Splits(),
        on_invalid_row="drop",
    )  # fmt: skip
    data.setup("fit")
    told = f"{path}: 10 of 40 lines are left out: lines 1, 5, 9, 13, 17 and 5 more with no gold answer"
    assert caplog.text.count("left out") == 1 and told in caplog.text and "correct" not in caplog.text


def test_all_faults_come_at_once_with_their_lines(tmp_path):
    path = tmp_path / "q.jsonl"
    good = '{"question": "q", "golden_answers": "a"}'
    none = '{"question": "q", "golden_answers": ""}'
    path.write_text("\n".join([good, "{oops", none, none, "", none, '{"question": 3, "golden_answers": "a"}', "[1]"]))
    with pytest.raises(DatasetError) as caught:
        load_tasks(path, columns={})
    said = str(caught.value)
    assert f"{path}: 6 lines cannot be used: " in said
    for fault in (
        "line 2 with no JSON (Expecting property name",
        "lines 3-4, 6 with no gold answer",
        "line 7 with a question that is int, expected text",
        "line 8 with no JSON object",
    ):
        assert fault in said


def test_faulty_lines_can_be_left_out_and_are_logged(tmp_path, caplog):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "q", "golden_answers": "a"}\n{oops\n')
    with caplog.at_level(logging.WARNING):
        assert [task.id for task in load_tasks(path, "drop", columns={})] == ["q_1"]
    assert "line 2 with no JSON" in caplog.text
    path.write_text("{oops\n")
    with pytest.raises(DatasetError, match="line 1 with no JSON"):
        load_tasks(path, "drop", columns={})


def test_lines_of_a_csv_file_are_those_of_an_editor(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text('id,question,golden_answers\n1,"two\nlines",a\n1,again,a\n3,short\n4,,a\n')
    with pytest.raises(DatasetError) as caught:
        load_tasks(path, columns={})
    said = str(caught.value)
    assert "line 4 with the id '1', which line 2 has already" in said
    assert "line 5 with 2 fields, expected the 3 of the first line" in said
    assert "line 6 with an empty question" in said


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "no column 'question'; name yours .*--data.columns.question NAME. The file has: prompt, answer$"),
        ({"question": "prompt"}, "no column 'golden_answers'.*--data.columns.golden_answers answer"),
        ({"question": "promt"}, r"no column 'promt' \(columns.question\); the file has: prompt, answer"),
        ({"answers": "answer"}, "columns.answers is not a known column; expected id, question, golden_answers"),
    ],
)
def test_a_column_that_is_missing_is_named_with_what_to_say(tmp_path, columns, message):
    with pytest.raises(DatasetError, match=message):
        load_tasks(written(tmp_path / "q.csv", ROWS), columns=columns)


def test_tasks_of_a_program_that_scores_itself_need_no_answers(tmp_path):
    path = written(tmp_path / "q.csv", [{"question": "Say 1."}, {"question": "Say 2."}])
    assert [task.golden_answers for task in load_tasks(path, answers=False, columns={})] == [(), ()]
    with pytest.raises(DatasetError, match="no column 'golden_answers'"):
        load_tasks(path, columns={})


def test_other_files_are_refused(tmp_path):
    with pytest.raises(DatasetError, match="no such file"):
        load_tasks(tmp_path / "q.csv", columns={})
    for name, text, message in (
        ("q.txt", "x", "expected .tsv, .csv, .jsonl, .json or .parquet"),
        ("q.csv", "question\n", "no rows"),
        ("q.csv", "question\n\xff", "in UTF-8"),
        ("q.json", "{}", "is a JSON dict"),
    ):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        with pytest.raises(DatasetError, match=message):
            load_tasks(tmp_path / name, columns={})


# --- splits -------------------------------------------------------------------------------------------------------


def tasks_of(number):
    return [Task(str(i), f"question {i // 2}", ("a",), "s") for i in range(number)]  # each question is asked twice


def test_parts_are_disjoint_whole_and_drawn_by_the_seed():
    tasks = tasks_of(80)
    parts = {name: Splits(0.1, 0.2).part(tasks, name) for name in ("train", "val", "test")}
    assert {name: len(part) for name, part in parts.items()} == {"train": 56, "val": 8, "test": 16}
    assert sorted((t for part in parts.values() for t in part), key=tasks.index) == tasks
    asked = [{t.question for t in part} for part in parts.values()]
    assert not asked[0] & asked[1] and not asked[0] & asked[2] and not asked[1] & asked[2]
    turned = Splits(0.1, 0.2).part(tasks[::-1], "test")
    assert turned[::-1] == parts["test"], "the place in the file does not matter"
    assert Splits(0.1, 0.2, seed=1).part(tasks, "test") != parts["test"]


def test_data_modules_train_and_test_on_their_parts_of_one_file(make_system, tmp_path):
    rows = [{"prompt": f"Question {i} right", "answer": f"answer {i}"} for i in range(20)]
    files = [written(tmp_path / "q.csv", rows)]
    data = RolloutDataModule(
        make_system(),
        files,
        prompts_per_iteration=2,
        val_files=files,
        test_files=files,
        columns=MAPPING,
        splits=Splits(),
    )
    data.setup("fit")
    own = [{t.question for t in tasks} for tasks in (data.training_questions, data._tasks["val"], data._tasks["test"])]
    assert [len(part) for part in own] == [16, 2, 2]
    assert len(set.union(*own)) == 20


def test_splits_of_different_files_are_refused(make_system):
    with pytest.raises(ValueError, match="give the same files, or splits: null"):
        EvaluationData(make_system(), val_files=["a.csv"], test_files=["b.csv"], splits=Splits())
    with pytest.raises(ValueError, match="give the same files, or splits: null"):
        RolloutDataModule(make_system(), ["a.csv"], 1, test_files=["b.csv"], splits=Splits())


@pytest.mark.parametrize("column", ["prompt", "answer"])
@pytest.mark.parametrize(("ending", "where"), [("jsonl", "line 2"), ("json", "row 2")])
def test_half_a_surrogate_pair_is_a_fault_of_its_row(tmp_path, ending, where, column):
    path = written(tmp_path / f"mine.{ending}", [ROWS[0], ROWS[1] | {column: "half \ud83d pair"}])
    with pytest.raises(DatasetError, match=rf"mine.{ending}.*{where} with .*half of a surrogate pair, .ud83d"):
        load_tasks(path, columns=MAPPING)
    assert [task.question for task in load_tasks(path, "drop", columns=MAPPING)] == [ROWS[0]["prompt"]]
