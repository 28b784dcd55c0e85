import json

import polars as pl
import pytest

from data_modules.datasets.benchmark_names import BENCHMARKS
from data_modules.datasets.benchmarks import load_benchmark
from data_modules.datasets.files import DatasetError
from data_modules.datasets.questions import load_tasks
from rollout.rewards.arpo import MATH_SOURCES, is_math

PUBLISHED = {
    **{name: {"question": " Who? ", "answer": ["Mira Voss", "M. Voss"]} for name in BENCHMARKS},
    "aime24": {"question": "How many?", "answer": 33},
    "aime25": {"problem": "How many?", "answer": "70"},
    "math500": {"question": "Where?", "answer": "[1, 2]", "level": 3, "subject": "Algebra"},
    "gsm8k": {"question": "How much?", "answer": "2 + 3 = <<2+3=5>>5\nso\n#### 1,005"},
    "math": {"problem": "How long?", "answer": r"\frac{1}{2}", "solution": "..."},
    "gaia": {"Question": "Which?", "answer": "egalitarian", "Level": "2"},
    "gpqa_diamond": {"problem": "Which? A: this B: that", "solution": "B", "domain": "Physics"},
    "livecodebench_v6": {
        "problem": "Double a number.",
        "ability": "code",
        "data_source": "LiveCodeBench_v6",
        "reward_model": json.dumps({"style": "rule", "ground_truth": {"inputs": ["1\n"], "outputs": ["2\n"]}}),
        "extra_info": json.dumps({"index": 0, "split": "test"}),
    },
}
GOLDS = {
    **dict.fromkeys(BENCHMARKS, ("Mira Voss", "M. Voss")),
    "aime24": ("33",), "aime25": ("70",), "math500": ("[1, 2]",), "gsm8k": ("1,005",), "math": (r"\frac{1}{2}",),
    "gaia": ("egalitarian",), "gpqa_diamond": ("B",), "livecodebench_v6": (),
}  # fmt: skip
ABILITIES = {"gpqa_diamond": "choice", "livecodebench_v6": "code", **dict.fromkeys(MATH_SOURCES, "math")}


def write(path, rows):
    if path.suffix == ".parquet":
        pl.DataFrame(rows).write_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_each_set_is_read_in_its_published_fields(tmp_path, name, suffix):
    path = write(tmp_path / f"test.{suffix}", [PUBLISHED[name]] * 2)
    first, second = load_benchmark(name, path)
    assert (first.id, second.id, first.data_source) == (f"{name}_0", f"{name}_1", name)
    assert first.question == next(v for k, v in PUBLISHED[name].items() if k == BENCHMARKS[name]).strip()
    assert first.golden_answers == GOLDS[name]
    assert first.metadata["benchmark"] == name
    assert first.metadata["ability"] == ABILITIES.get(name, "qa")
    assert is_math(first) == (name in ("aime24", "aime25", "math500", "gsm8k", "math"))
    assert load_tasks(f"{name}:{path}") == [first, second]


def test_what_sets_say_of_a_question_is_kept(tmp_path):
    assert load_benchmark("gaia", write(tmp_path / "g.jsonl", [PUBLISHED["gaia"]]))[0].metadata == {
        "ability": "qa", "benchmark": "gaia", "level": "2",
    }  # fmt: skip
    kept = load_benchmark("math500", write(tmp_path / "m.jsonl", [PUBLISHED["math500"]]))[0].metadata
    assert (kept["level"], kept["subject"]) == (3, "Algebra")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Grey Harbor", ("Grey Harbor",)),
        (["Grey Harbor", " ", "Harbor "], ("Grey Harbor", "Harbor")),
        ('["Grey Harbor", "Harbor"]', ("Grey Harbor", "Harbor")),
        (1969, ("1969",)),
    ],
)
def test_answers_of_questions(tmp_path, answer, expected):
    path = write(tmp_path / "test.json", [{"question": "?", "answer": answer}])
    assert load_benchmark("hotpotqa", path)[0].golden_answers == expected


def test_questions_and_answers_under_another_published_name(tmp_path):
    path = write(tmp_path / "test.jsonl", [{"problem": "How many?", "answer": "7"}])
    assert load_benchmark("math500", path)[0].question == "How many?"
    row = {"ID": "2024-I-1", "Problem": "How many walks?", "Solution": "By walking.", "Answer": 204}
    (task,) = load_benchmark("aime24", write(tmp_path / "aime_2024_problems.parquet", [row]))
    assert (task.question, task.golden_answers) == ("How many walks?", ("204",))


def test_letters_of_options_in_the_ways_they_are_written(tmp_path):
    rows = [{"problem": "?", "solution": v, "hint": "Look at B."} for v in ("B", " (B)", "B.", r"\boxed{B}")]
    tasks = load_benchmark("gpqa_diamond", write(tmp_path / "g.json", rows))
    assert {task.golden_answers for task in tasks} == {("B",)}
    assert tasks[0].metadata == {"ability": "choice", "benchmark": "gpqa_diamond", "hint": "Look at B."}


def test_at_most_so_many_evenly_spaced(tmp_path):
    rows = [{"question": f"number {i}", "answer": str(i)} for i in range(10)]
    path = write(tmp_path / "test.jsonl", rows)
    assert [t.id for t in load_benchmark("bamboogle", path, limit=3)] == ["bamboogle_0", "bamboogle_3", "bamboogle_6"]


def test_several_sets_and_question_files_together(tmp_path, question_file):
    math = write(tmp_path / "m.jsonl", [PUBLISHED["math"]])
    tasks = load_tasks([f"math:{math}", question_file("own", ["right"]), f"math500:{math}"])
    assert [task.id for task in tasks] == ["math_0", "q0", "math500_0"]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "gsm8k",
            [{"question": "?", "answer": "#### 5"}, {"question": "?", "answer": "5"}],
            "1 of 2 rows with no '####' before the answer in column 'answer': row 1",
        ),
        (
            "gaia",
            [{"query": "?", "answer": "x"}],
            "no column .Question. or .question. or .problem. or .Problem. for the question",
        ),
        (
            "hle",
            [{"question": "?", "answer": "x"}, {"answer": "x"}, {"question": 7, "answer": "x"}],
            r"2 of 3 rows with no text in column 'question' .the question.: row 1, 2",
        ),
        (
            "hle",
            [{"question": "?", "answer": value} for value in ("x", "", [], None, {"a": 1}, [None])],
            "5 of 6 rows with no gold answer in column 'answer' .*: row 1, 2, 3, 4, 5 ",
        ),
        ("hle", ["text"], "1 of 1 rows with no JSON object: row 0"),
    ],
)
def test_wrong_rows_are_named(tmp_path, name, rows, message):
    with pytest.raises(DatasetError, match=f"test.json.*{message}"):
        load_benchmark(name, write(tmp_path / "test.json", rows))


def test_wrong_files_and_names(tmp_path):
    path = write(tmp_path / "gsm8k.jsonl", [PUBLISHED["gsm8k"]])
    with pytest.raises(DatasetError, match="no evaluation set is called 'gsm9k'; did you mean 'gsm8k'"):
        load_tasks(f"gsm9k:{path}")
    with pytest.raises(DatasetError, match="no such file: .*gsm8.jsonl; did you mean 'gsm8k.jsonl'"):
        load_tasks(f"gsm8k:{tmp_path}/gsm8.jsonl")
    (tmp_path / "cut.jsonl").write_text('{"question": "?"}\n\n{"question": ')
    with pytest.raises(DatasetError, match="cut.jsonl, line 3: not JSON"):
        load_benchmark("hle", tmp_path / "cut.jsonl")
    (tmp_path / "cut.json").write_text('[{"question": ')
    with pytest.raises(DatasetError, match="cut.json cannot be read as JSON"):
        load_benchmark("hle", tmp_path / "cut.json")
    (tmp_path / "object.json").write_text("{}")
    with pytest.raises(DatasetError, match="is a JSON dict; expected a list"):
        load_benchmark("hle", tmp_path / "object.json")
    (tmp_path / "x.csv").write_text("question,answer\n")
    with pytest.raises(DatasetError, match="ends in '.csv'; expected .jsonl, .json or .parquet"):
        load_benchmark("hle", tmp_path / "x.csv")
    (tmp_path / "latin.jsonl").write_bytes("é".encode("latin-1"))
    with pytest.raises(DatasetError, match="is not UTF-8"):
        load_benchmark("hle", tmp_path / "latin.jsonl")


# --- the RL files ---------------------------------------------------------------------------------------------------


def rl_row(index: int, **changes) -> dict:
    """A row with the columns of ARPO's RL parquets; the values are ours."""
    row = {
        "data_source": "DR_grpo_mix",
        "prompt": [
            {"role": "system", "content": "Solve it. The answer goes into \x08oxed{}, as in \x08oxed{Question: 8}."},
            {"role": "user", "content": f"What is number {index}?"},
        ],
        "ability": "math" if index % 2 else "qa",
        "reward_model": {"ground_truth": f"answer {index}", "style": "rule"},
        "extra_info": {"index": index, "question": f"What is number {index}?", "split": "train"},
        "metadata": None,
    }
    return {**row, **changes}


def test_the_rl_files_are_read_as_they_are(tmp_path, caplog):
    path = write(tmp_path / "train_10k.parquet", [rl_row(0), rl_row(1), rl_row(2, ability=None, data_source="DR_nan")])
    tasks = load_tasks(path)
    assert [t.id for t in tasks] == ["train_0", "train_1", "train_2"]
    assert [t.question for t in tasks] == [f"What is number {i}?" for i in range(3)]
    assert [t.golden_answers for t in tasks] == [(f"answer {i}",) for i in range(3)]
    assert [t.metadata for t in tasks] == [{"ability": "qa"}, {"ability": "math"}, {}]
    assert [t.data_source for t in tasks] == ["DR_grpo_mix", "DR_grpo_mix", "DR_nan"]
    system = "Solve it. The answer goes into \\boxed{}, as in \\boxed{Question: 8}."
    assert {t.prompt[0] for t in tasks} == {("system", system)}
    assert "3 prompt messages hold a backspace before 'oxed'" in caplog.text


def test_without_extra_info_question_the_bare_user_turn_is_the_question(tmp_path):
    row = rl_row(4, extra_info={"index": 4, "split": "train"})
    assert load_tasks(write(tmp_path / "a.parquet", [row]))[0].question == "What is number 4?"
