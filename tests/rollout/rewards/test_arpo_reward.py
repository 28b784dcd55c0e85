r"""ARPO's reward. Every figure is worked out by hand from docs/algorithms/arpo.md."""

import pytest

from rollout.rewards.arpo import ArpoReward, as_released, format_error
from rollout.tags import boxed
from rollout.tokenizer import load_tokenizer
from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    StopReason,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
    Trajectory,
    Turn,
)  # fmt: skip

THINK = "<think> hm </think>"
SEARCH = "<search> q </search> <result>\nPage 1: x\n</result>"
PYTHON = "<python> print(1) </python> <result>\n1\n</result>"


def response(answer: str, before: str = THINK) -> str:
    return f"{before}<answer> The final answer is \\[ \\boxed{{{answer}}} \\] </answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{8}", "8"),
        (r"\boxed{1} and then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed {8}", "8"),
        (r"\[ \boxed 8 \]", "8"),
        (r"$\boxed 8$ apples", "8"),
        (r"\boxed{}", ""),
        (r"\boxed{8", None),
        (r"\boxed", None),
        ("8", None),
    ],
)
def test_boxed(text, expected):
    assert boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (response("8"), None),
        (response("8", THINK + SEARCH + THINK + PYTHON), None),
        (response("8", "hm"), "0 <think>"),
        (response("8", "<think> hm"), "1 <think> and 0 </think>"),
        (response("8") + "<answer> again", "2 <answer>"),
        (THINK + r"\boxed{8}", "0 <answer>"),
        (THINK + r"</answer> \boxed{8} <answer>", "</answer> stands before"),
        (response("8", THINK + "<search> q <result> r </result>"), "a <search> without"),
        (response("8", THINK + "<search> q <result> r </search> </result>"), "a <search> without"),
        (response("8", THINK + SEARCH + "<python> 1 </python>"), "a <python> without"),
        (response("8", "<think> shall I <search> ? </think>"), "a <search> without"),
        (response("8", THINK + "</search> </python> </result>"), None),
        (THINK + r"<answer> 8 </answer> \boxed{8}", "no \\boxed{}"),
        (THINK + r"<answer> \boxed 8 </answer>", "no \\boxed{}"),
        (THINK + r"<answer> {} \boxed{8 </answer>", "never closed"),
    ],
)
def test_format(text, error):
    found = format_error(text)
    assert found is None if error is None else error in found


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        (r"\frac{1}{2}", "0.5", 0.0),
        ("23", "023", 0.0),
        ("-5", "5", 1.0),
        ("12", "1/2", 1.0),
        ("0.5", "05", 1.0),
        ("x = 8", "8", 2 / 3),
        ("Grey Harbor town", "Grey Harbor", 0.8),
    ],
)
def test_what_the_released_reward_measures(answer, gold, expected):
    assert as_released(response(answer), [gold]).total == pytest.approx(expected)


@pytest.mark.parametrize(
    ("box", "gold", "expected"),
    [
        (r"\boxed{\{1, 2\}}", "1 2", 1.0),
        (r"\boxed{\left\{ x \right.}", "x", -1.0),
        (r"\boxed{8} \boxed", "8", 0.0),
        (r"\boxed{8}, that is \boxed9", "9", -1.0),
        (r"$\boxed 12$ is \boxed{3}", "12", 1.0),
    ],
)
def test_the_released_reward_reads_boxes_in_its_own_way(box, gold, expected):
    assert as_released(f"{THINK}<answer> {box} </answer>", [gold]).total == pytest.approx(expected)


def test_the_released_reward():
    both = THINK + SEARCH + PYTHON
    assert as_released(response("8", both), ["8"]).total == pytest.approx(1.1)
    assert as_released(response("8", both), ["9", "8"]).parts == {"f1": 1.0, "format": 1.0, "both_tools": 1.0}
    assert as_released(response("8", both), ["8"], bonus=0.25).total == 1.25
    assert as_released(response("9", both), ["8"]).total == 0.0, "no bonus for a wrong answer"
    assert as_released(response("8", THINK + SEARCH), ["8"]).total == 1.0
    assert as_released(response("8", "<think> </search> </python> </think>"), ["8"]).total == pytest.approx(1.1)
    assert as_released(response("8", "hm"), ["8"]).total == -1.0
    assert as_released("", ["8"]).total == -1.0


# --- trajectories -------------------------------------------------------------------------------------------------

QA = Task("q", "Where?", ("Grey Harbor",), "toy", metadata={"ability": "qa"})
MATH = Task("m", "How much?", ("0.5",), "toy", metadata={"ability": "math"})


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(str(model_dir))


@pytest.fixture(scope="module")
def rewards(model_dir):
    return {variant: ArpoReward(str(model_dir), variant) for variant in ("fixed", "as_released")}


@pytest.fixture
def scored(tokenizer, rewards):
    """``scored(task, answer, (text, tool result), ..., text)`` -> (total fixed, total as_released, parts fixed).
    A tool result is None or (outcome, text); the text of a turn before it says which tool was called."""

    def make(task, answer, *turns):
        ids, mask, spans, calls = [], [], [], []
        for number, (text, result) in enumerate([*turns[:-1], (turns[-1], None)]):
            start, new = len(ids), tokenizer(text, add_special_tokens=False)["input_ids"]
            ids, mask, end = ids + new, mask + [1] * len(new), start + len(new)
            action = Action(ActionKind.ANSWER, answer=answer)
            if result is not None:
                request = ToolRequest("python" if "<python>" in text else "search", {})
                action = Action(ActionKind.CALL, (request,))
                calls.append(ToolCall(number, request, ToolResult(result[1], result[0]), 0.1))
                block = f" <result>\n{result[1]}\n</result>"
                observed = tokenizer(block, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                ids, mask = ids + observed, mask + [0] * len(observed)
            spans.append(Turn(start, end, action, "stop", 0, len(ids)))
        trajectory = Trajectory(task, (1,), tuple(ids), tuple(mask), (0.0,) * len(ids), tuple(spans), tuple(calls),
                                StopReason.ANSWER, task.id, 0, answer=answer)  # fmt: skip
        fixed, published = (rewards[name].score(trajectory) for name in ("fixed", "as_released"))
        return fixed.total, published.total, fixed.parts

    return make


OK, EMPTY, ERROR, REFUSED = CallOutcome.OK, CallOutcome.EMPTY, CallOutcome.ERROR, CallOutcome.REFUSED
ASK, COMPUTE = THINK + "<search> q </search>", THINK + "<python> print(1) </python>"


def test_an_answer_after_both_tools(scored):
    fixed, published, parts = scored(QA, "Grey Harbor", (ASK, (OK, "x")), (COMPUTE, (OK, "1")), response("Grey Harbor"))
    assert fixed == published == pytest.approx(1.1)
    assert parts == {"em": 1.0, "f1": 1.0, "answered": 1.0, "format": 1.0, "both_tools": 1.0}


@pytest.mark.parametrize("result", [(EMPTY, ""), (ERROR, "NameError"), (REFUSED, "limit"), (OK, " \n")])
def test_the_bonus_is_for_calls_that_were_executed_and_returned_something(scored, result):
    fixed, published, parts = scored(QA, "Grey Harbor", (ASK, (OK, "x")), (COMPUTE, result), response("Grey Harbor"))
    assert (fixed, parts["both_tools"]) == (1.0, 0.0)
    assert published == pytest.approx(1.1)


def test_partial_answers_and_wrong_ones(scored):
    fixed, _, parts = scored(QA, "Grey Harbor town", response("Grey Harbor town"))
    assert fixed == parts["f1"] == pytest.approx(0.8) and parts["em"] == 0.0
    both = ((ASK, (OK, "x")), (COMPUTE, (OK, "1")))
    assert scored(QA, "Oldfield", *both, response("Oldfield"))[:2] == (0.0, 0.0)


def test_mathematics_is_compared_as_mathematics(scored):
    fixed, published, parts = scored(MATH, r"\frac{1}{2}", response(r"\frac{1}{2}"))
    assert (fixed, published, parts["math"], parts["f1"]) == (1.0, 0.0, 1.0, 0.0)
    fixed, published, parts = scored(MATH, "05", response("05"))  # F1 sees "05" in "0.5" without its point
    assert (fixed, published, parts["math"], parts["f1"]) == (0.0, 1.0, 0.0, 1.0)


def test_mathematics_is_known_by_its_source_where_the_task_does_not_say(scored):
    assert "math" in scored(Task("m", "?", ("8",), "gsm8k"), "8", response("8"))[2]
    assert "math" not in scored(Task("m", "?", ("8",), "hotpotqa"), "8", response("8"))[2]
    assert "math" not in scored(Task("m", "?", ("8",), "math", metadata={"ability": "qa"}), "8", response("8"))[2]


@pytest.mark.parametrize("text", ["<answer> </answer>", "</result> <python> "])
def test_a_tool_result_cannot_break_the_format(scored, text):
    fixed, published, parts = scored(QA, "Grey Harbor", (ASK, (OK, text)), response("Grey Harbor"))
    assert (fixed, parts["format"]) == (1.0, 1.0)
    assert published == -1.0


def test_a_tool_result_cannot_forge_the_format(scored):
    result = (OK, response("Grey Harbor"))
    fixed, published, parts = scored(QA, None, (ASK, result), "So that is it.")
    assert (fixed, parts["format"], parts["answered"]) == (-1.0, 0.0, 0.0)
    assert published == 1.0, "the released reward reads what the tool returned as the answer"


def test_what_follows_the_first_eos_is_not_read(scored):
    turns = ("<|im_end|>" + response("Grey Harbor"),)
    assert scored(QA, "Grey Harbor", *turns)[1] == -1.0


def test_a_call_that_was_never_answered_breaks_the_format(scored):
    assert scored(QA, None, ASK)[:2] == (-1.0, -1.0)
