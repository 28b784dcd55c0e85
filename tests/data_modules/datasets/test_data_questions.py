import json
from dataclasses import replace

import polars as pl
import pytest

from data_modules.datasets.files import DatasetError, expand
from data_modules.datasets.questions import load_tasks, write_tasks
from rollout.trajectory import Task

TASKS = [
    Task("q1", "Who wrote Silent Harbor?", ("Mira Voss", "M. Voss"), "fictional_1hop",
         (("Silent Harbor", "By Mira Voss."),),
         {"hops": 1, "split": "train", "relations": ["author"]}),
    Task("q2", "Wo liegt Ärmel?", ("Übersee",), "fictional_2hop"),
]  # fmt: skip


def search_r1_row(index: int, **changes) -> dict:
    """A row exactly as in the released nq_hotpotqa files."""
    question = f"who was number {index}?"
    row = {
        "id": f"train_{index}",
        "question": question,
        "golden_answers": [f"Person {index}", f"P. {index}"],
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Answer ... <answer> Beijing </answer>. Question: {question}\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [f"Person {index}", f"P. {index}"]}},
        "extra_info": {"split": "train", "index": index},
    }
    return {**row, **changes}


def write_rows(path, rows, drop=()):
    pl.DataFrame(rows).drop(drop).write_parquet(path)
    return str(path)


@pytest.fixture
def released(tmp_path):
    def make(rows=None, drop=(), name="train.parquet"):
        return write_rows(tmp_path / name, rows or [search_r1_row(i) for i in range(3)], drop)

    return make


def test_written_tasks_come_back_equal(tmp_path):
    write_tasks(tmp_path / "sub" / "t.parquet", TASKS)
    loaded = load_tasks(tmp_path / "sub" / "t.parquet")
    assert loaded[0].prompt == (("user", "Question: Who wrote Silent Harbor?\n"),)
    assert [replace(task, prompt=()) for task in loaded] == TASKS
    write_tasks(tmp_path / "again.parquet", loaded, render=lambda task: "unused: they have prompts")
    assert load_tasks(tmp_path / "again.parquet") == loaded


def test_written_file_has_the_released_schema(tmp_path, released):
    write_tasks(tmp_path / "ours.parquet", TASKS, render=lambda task: f"Please. Question: {task.question}\n")
    ours, theirs = pl.read_parquet(tmp_path / "ours.parquet"), pl.read_parquet(released())
    for name, dtype in theirs.schema.items():
        if isinstance(dtype, pl.Struct):  # field order is no part of the meaning
            assert {f.name: f.dtype for f in dtype.fields} == {f.name: f.dtype for f in ours.schema[name].fields}
        else:
            assert ours.schema[name] == dtype, name
    assert set(ours.columns) - set(theirs.columns) == {"gold_passages", "metadata"}
    assert ours["prompt"][0][0]["content"] == "Please. Question: Who wrote Silent Harbor?\n"


def test_released_schema_is_read(released):
    tasks = load_tasks(released())
    wording = "Answer ... <answer> Beijing </answer>. Question: who was number 1?\n"
    expected = Task("train_1", "who was number 1?", ("Person 1", "P. 1"), "nq", prompt=(("user", wording),))
    assert tasks[1] == expected


def test_a_data_set_without_prompts_gives_tasks_without(released):
    assert {task.prompt for task in load_tasks(released(drop=["prompt"]))} == {()}
    as_text = [search_r1_row(0, prompt="Answer this: who was number 0?")]
    assert load_tasks(released(as_text))[0].prompt == ()
    broken = [search_r1_row(0), search_r1_row(1, prompt=[{"role": "user", "content": None}])]
    with pytest.raises(DatasetError, match="1 of 2 rows with a prompt message without role or content: row 1"):
        load_tasks(released(broken))


def test_answers_come_from_reward_model_where_golden_answers_are_missing_or_null(released):
    path = released(drop=["golden_answers"])
    assert load_tasks(path)[0].golden_answers == ("Person 0", "P. 0")
    rows = [search_r1_row(0), search_r1_row(1, golden_answers=None), search_r1_row(2, golden_answers=["", "x"])]
    expected = [("Person 0", "P. 0"), ("Person 1", "P. 1"), ("x",)]
    assert [t.golden_answers for t in load_tasks(released(rows))] == expected


def test_question_comes_from_the_prompt_where_the_column_is_missing(released):
    rows = [search_r1_row(0), search_r1_row(1)]
    rows[1]["prompt"][0]["content"] = "Think first. Question: is 'Question: x' a title?\n"
    assert [t.question for t in load_tasks(released(rows, drop=["question"]))] == [
        "who was number 0?", "is 'Question: x' a title?",
    ]  # fmt: skip


def test_id_comes_from_extra_info_where_the_column_is_missing(released):
    assert [t.id for t in load_tasks(released(drop=["id"]))] == ["train_0", "train_1", "train_2"]


def test_ids_shared_by_two_sources_are_told_apart_also_over_files(released):
    rows = [search_r1_row(0), search_r1_row(0, data_source="hotpotqa"), search_r1_row(1)]
    expected = ["nq/train_0", "hotpotqa/train_0", "train_1"]
    assert [t.id for t in load_tasks(released(rows))] == expected
    parts = [released(rows[:1], name="a.parquet"), released(rows[1:], name="b.parquet")]
    assert [t.id for t in load_tasks(parts)] == expected


def test_metadata_as_struct_json_or_null(released):
    struct = {"level": "hard", "n": 2, "context": {"title": ["a"]}}
    rows = [search_r1_row(0, metadata=struct), search_r1_row(1, metadata=None)]
    assert [t.metadata for t in load_tasks(released(rows))] == [{"level": "hard", "n": 2}, {}]
    rows = [search_r1_row(0, metadata=json.dumps({"a": [1, {"b": 2}]})), search_r1_row(1, metadata=None)]
    assert [t.metadata for t in load_tasks(released(rows))] == [{"a": [1, {"b": 2}]}, {}]


@pytest.mark.parametrize(
    ("rows", "drop", "message"),
    [
        ([search_r1_row(0), search_r1_row(1, question="  ")], [], r"1 of 2 rows with an empty question: row 1"),
        ([search_r1_row(i, question="") for i in range(9)], [], r"9 of 9 .* row 0, 1, 2, 3, 4 and 4 more"),
        ([search_r1_row(0, golden_answers=["", " "], reward_model=None)], [], "no gold answer: row 0"),
        (
            [search_r1_row(0)],
            ["golden_answers", "reward_model"],
            "no column 'golden_answers' .nor reward_model.ground_truth",
        ),
        ([search_r1_row(0, golden_answers="Person")], [], "golden_answers that are not a list of strings: row 0"),
        ([search_r1_row(0, question=7)], [], "a question that is int, expected text: row 0"),
        ([search_r1_row(0, metadata="[1]")], [], "metadata that is not a JSON object: row 0"),
        ([search_r1_row(0, gold_passages=["text"])], [], "a gold passage without title or text: row 0"),
        ([search_r1_row(0), search_r1_row(0)], [], "'nq/train_0' in rows 0, 1"),
        (
            [search_r1_row(0, prompt=[{"role": "user", "content": "no marker"}])],
            ["question"],
            "no text after 'Question:'",
        ),
    ],
)
def test_wrong_rows_and_columns_are_named(released, rows, drop, message):
    with pytest.raises(DatasetError, match=message):
        load_tasks(released(rows, drop))


def test_expand_takes_files_and_folders_in_order(tmp_path):
    folder = tmp_path / "folder"
    for name in ("b.parquet", "a.parquet"):
        write_tasks(folder / name, TASKS)
    (folder / ".a.parquet.12.tmp").write_text("half")
    assert expand([str(folder)]) == [folder / "a.parquet", folder / "b.parquet"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="holds no parquet file"):
        expand([str(tmp_path / "empty")])
