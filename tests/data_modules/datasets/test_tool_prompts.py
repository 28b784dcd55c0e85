import dataclasses

import pytest

from data_modules.datasets.files import DatasetError
from data_modules.datasets.tool_prompts import (
    BEGIN,
    CONTEST,
    FORMAT,
    FUNCTION,
    LETTER,
    NO_UNITS,
    STARTER,
    STDIN,
    STRATEGY,
    SUBMIT,
    TOOL,
    tool_prompt,
    with_tool_prompts,
)  # fmt: skip
from rollout.rewards.answers import submitted_program
from rollout.tags import boxed
from rollout.trajectory import Task

TESTS = {"inputs": ["in-0\n", "in-1\n", "in-2\n"], "outputs": ["out-0\n", "out-1\n", "out-2\n"], "fn_name": None}


def make(source: str, question: str = "What is it?", ability: str | None = "math", **metadata) -> Task:
    named = {"ability": ability} if ability else {}
    return Task(f"{source}_0", question, () if "tests" in metadata else ("4",), source, metadata={**named, **metadata})


def contest(public: int = 2, **changes) -> Task:
    tests = {**TESTS, "public": public, **changes.pop("tests", {})}
    return make("livecodebench_v6", "Double it.", "code", benchmark="livecodebench_v6", tests=tests, **changes)


def rules(*texts: str) -> str:
    return "\n".join(f"- {text}" for text in texts)


MATH, SCIENCE = BEGIN.format(kind="math"), BEGIN.format(kind="science")
CASES = {
    "aime": (make("aime24", benchmark="aime24"), [MATH, "What is it?", rules(TOOL, STRATEGY, FORMAT)]),
    "skywork": (make("train-math-still3"), [MATH, "What is it?", rules(TOOL, STRATEGY, FORMAT, NO_UNITS)]),
    "prepared": (make("math_dapo", "Box it: \\boxed{}."), ["Box it: \\boxed{}.", NO_UNITS]),
    "prepared, choice": (make("mega-science", "Box it: \\boxed{}.", "choice"), ["Box it: \\boxed{}.", NO_UNITS]),
    "unprepared": (make("mega-science"), [SCIENCE, "What is it?", rules(TOOL, STRATEGY, FORMAT, NO_UNITS)]),
    "gpqa": (
        make("gpqa_diamond", ability="choice", benchmark="gpqa_diamond", domain="Chemistry"),
        [BEGIN.format(kind="Chemistry"), "What is it?", rules(TOOL, STRATEGY, FORMAT, LETTER)],
    ),
    "choice": (
        make("mega-science", ability="choice"),
        [BEGIN.format(kind="multiple-choice"), "What is it?", rules(TOOL, STRATEGY, FORMAT, LETTER)],
    ),
    "program": (make("train-code-taco", "Sort it.", "code", tests=TESTS), ["Sort it.", rules(STRATEGY, SUBMIT)]),
    "contest": (
        contest(),
        [CONTEST, "Double it.", "Example 1, input:\nin-0\nOutput:\nout-0", "Example 2, input:\nin-1\nOutput:\nout-1",
         STDIN, rules(STRATEGY, SUBMIT)],
    ),
    "contest, starter": (
        contest(0, starter_code="class Solution: ..."),
        [CONTEST, "Double it.", STARTER.format(code="class Solution: ..."), rules(STRATEGY, SUBMIT)],
    ),
    "contest, function": (
        contest(1, tests={"fn_name": "double", "inputs": ["1"], "outputs": ["2"]}),
        [CONTEST, "Double it.", "Example 1, input:\n1\nOutput:\n2", FUNCTION.format(name="double"),
         rules(STRATEGY, SUBMIT)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_data_source_has_its_parts(case):
    task, parts = CASES[case]
    assert tool_prompt(task) == "\n\n".join(parts)


def test_every_row_of_a_mixed_file_gets_its_own():
    """The released code words all rows as the first one."""
    tasks = [task for task, _ in CASES.values()]
    for order in (tasks, tasks[::-1]):
        worded = with_tool_prompts(order)
        assert [t.prompt for t in worded] == [(("user", tool_prompt(t)),) for t in order]
        assert [dataclasses.replace(t, prompt=()) for t in worded] == order


def test_the_forms_that_are_asked_for_are_those_that_are_read():
    for text in (FORMAT, NO_UNITS, LETTER, rules(TOOL, STRATEGY, FORMAT)):
        assert boxed(text) == ""
        assert boxed(text.replace("\\boxed{}", "\\boxed{42}")) == "42"
    for text in (SUBMIT, rules(STRATEGY, SUBMIT), *(tool_prompt(CASES[case][0]) for case in ("program", "contest"))):
        assert submitted_program(text) == "# the program"
        assert submitted_program(text.replace("# the program", "print(1)\nprint(2)")) == "print(1)\nprint(2)"


@pytest.mark.parametrize(
    ("public", "limit", "shown"),
    [
        (2, 2, 2),
        (3, 2, 2),
        (0, 2, 0),
    ],
)
def test_hidden_tests_are_never_shown(public, limit, shown):
    prompt = tool_prompt(contest(public), lcb_examples=limit)
    for i in range(3):
        assert (f"in-{i}" in prompt) == (f"out-{i}" in prompt) == (i < shown)


@pytest.mark.parametrize(
    ("first", "expected"),  # what the program behind it is asked for
    [
        (make("train-math-still3"), [MATH, "Sort it.", rules(TOOL, STRATEGY, FORMAT, NO_UNITS)]),
        (make("math_dapo", "Box it: \\boxed{}."), ["Sort it.", NO_UNITS]),
        (make("train-code-taco", "Add.", "code", tests=TESTS), ["Sort it.", rules(STRATEGY, SUBMIT)]),
    ],
)
def test_as_released_the_first_row_words_all_training_rows(first, expected):
    program = make("train-code-taco", "Sort it.", "code", tests=TESTS)
    aime = make("aime24", benchmark="aime24")
    tasks = with_tool_prompts([first, program, aime], by_first_row=True)
    assert [task.question for task in tasks] == [first.question, "Sort it.", "What is it?"]
    assert tasks[1].prompt == (("user", "\n\n".join(expected)),)
    assert (tasks[0].prompt, tasks[2].prompt) == tuple((("user", tool_prompt(task)),) for task in (first, aime))


def test_as_released_the_tests_that_score_are_shown():
    prompt = tool_prompt(contest(1), lcb_examples=None)
    assert all(f"{side}-{i}" in prompt for side in ("in", "out") for i in range(3))
    asserted = contest(0, tests={"test_code": "assert f(17) == 4"})
    assert "17" not in tool_prompt(asserted, lcb_examples=None)


def test_tests_of_training_programs_are_never_shown():
    for tests in ({**TESTS, "public": 0}, {"test_code": "assert f(17) == 4", "entry_point": "f", "public": 0}):
        prompt = tool_prompt(make("train-code-taco", "Sort it.", "code", tests=tests))
        assert "in-0" not in prompt and "out-0" not in prompt and "17" not in prompt


def test_questions_of_other_kinds_are_refused_by_data_source():
    tasks = [make("aime24"), make("nq", ability="qa"), make("nq", ability=None), make("lost", ability="code")]
    with pytest.raises(DatasetError, match=r"for tasks whose ability is math, choice or code; .* lost \(1\), nq \(2\)"):
        with_tool_prompts(tasks)
    assert with_tool_prompts([make("math500", ability=None)])[0].prompt  # known by its name
