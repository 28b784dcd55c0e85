r"""The reward of mathematics, choices and programs; figures worked out by hand from docs/algorithms/sod.md."""

import asyncio

import pytest

from rollout.rewards.answers import choice_letter, released_program, strict_box, submitted_program, without_quotes
from rollout.rewards.base import AsyncReward, Scorer
from rollout.rewards.reasoning import ReasoningReward, ability, overlong, shaped
from rollout.tokenizer import load_tokenizer
from rollout.tools.python.base import Run
from rollout.tools.python.local import LocalSandbox
from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    InfrastructureError,
    StopReason,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
    Trajectory,
    Turn,
)  # fmt: skip

# --- what an answer says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        *[(text, "B") for text in ("B", " b ", "(B)", "B.", "B)", "B:", r"\text{B}", r"\textbf{(B)}", r"\mathrm{B}.")],
        *[(text, "B") for text in ("$B$", r"\(B\)", "**B**", "'B'", '"B"', r"\text{\textbf{B}}")],
        *[(text, "B") for text in ("B. 42 m/s", "(B) the dog", "B) A", "Option B", "answer: B", "The answer is (B)")],
        ("J", "J"),
        *[(text, None) for text in ("", "BC", "B or C", "A, B", "Bob", "K", "42", "A dog", "not B", "(B", None)],
    ],
)
def test_the_letter_of_a_choice(answer, letter):
    assert choice_letter(answer) == letter


@pytest.mark.parametrize(
    ("answer", "bare"),
    [
        ("'42'", "42"),
        ("f'", "f'"),
        ("'", "'"),
        ("f'(x) + g'", "f'(x) + g'"),
        ("'a' + 'b'", "'a' + 'b'"),
        ("'42\"", "'42\""),
    ],
)
def test_quotes_around_all_of_an_answer(answer, bare):
    assert without_quotes(answer) == bare


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 42 }", " 42 "),
        (r"\boxed{'42'}", "'42'"),
        (r"\boxed{42}" + "x" * 90, "42"),
        (r"\boxed{42}" + "x" * 91, None),
        (r"\boxed{1} \boxed{42", None),
    ],
)
def test_the_box_as_released(text, box):
    assert strict_box(text) == box


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("first\n```python\nx = 1\n```\nthen\n```python\nx = 2\n```\nend", "x = 2"),
        ("```python\nx\n```</think>\nI do not know", None),
        ("```python\nx\n```</think>\n```python\ny\n```", "y"),
        ("```python\nprint('\\n')\n```", "print('\\n')"),
        ("```Python3 \r\nx = 1\r\nx\r\n```", "x = 1\nx"),
        ("```python\nx = '```'\n```", "x = '```'"),
        ("```python\nx", None),
        ("```\nx\n```", None),
        ("print(1)", None),
        ("```python\nprint('</think>')\n```", "print('</think>')"),
        ("<think>\n```python\nx\n```\n</think>\n```python\nprint('</think>')\n```\nDone", "print('</think>')"),
        ("I would start with\n```python\nx = \n</think>\n```python\ny\n```", "y"),
        ('```python\n"""\n```\nx\n```\n"""\ny\n```\nend', '"""\n```\nx\n```\n"""\ny'),
        ('```python\n"""\n```\n"""\ny\n```\n```python\nz\n```', "z"),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)"),
        ("Input\n```\n1\n```\n```python\nprint(1)\n```", "print(1)"),
    ],
)
def test_the_submitted_program(text, program):
    assert submitted_program(text) == program


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx\n```", "x\n"),
        ("```python\nx\n```\n```python\ny```", "y"),
        ("tool: ```python\nx\n```", "x\n"),
        ('```python\n"""\n```\n"""\n```', '"""\n'),
        ("```Python\nx\n```", None),
        ("```python\nx\n```</think>```python\ny\n```</think>```python\nz\n```", "y\n"),
    ],
)
def test_the_program_as_released(text, program):
    assert released_program(text) == program


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "rounds", "intended"),
    [
        (-1.0, 0, -1.0),
        (-1.0, 2, -0.8),
        (-1.0, 4, -0.6),
        (-1.0, 5, -0.6),
        (0.0, 5, 0.0),
    ],
)
def test_shaping(value, rounds, intended):
    assert shaped(value, rounds, "none") == value
    assert shaped(value, rounds, "intended") == pytest.approx(intended)
    assert shaped(value, rounds, "as_released") == pytest.approx(-1.1 if value < 0 else value)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (19456, 0.0),
        (19457, -1 / 1024),
        (20480, -1.0),
        (20992, -1.5),
    ],
)
def test_the_penalty_of_long_responses(length, expected):
    assert overlong(length, limit=20480, buffer=1024, penalty=1.0) == pytest.approx(expected)
    assert overlong(length, limit=20480, buffer=1024, penalty=0.5) == pytest.approx(expected / 2)


@pytest.mark.parametrize(
    ("metadata", "source", "expected"),
    [
        ({"ability": "math"}, "livecodebench_v6", "math"),
        ({"ability": "code"}, "x", "code"),
        ({}, "LiveCodeBench_v6", "code"),
        ({}, "GPQA_diamond", "choice"),
        ({}, "aime24", "math"),
    ],
)
def test_which_kind_of_task(metadata, source, expected):
    assert ability(Task("t", "?", (), source, metadata=metadata)) == expected


# --- trajectories ---------------------------------------------------------------------------------------------------

MATH = Task("m", "How much?", ("42",), "aime24")
CHOICE = Task("g", "Which?", ("B",), "gpqa_diamond")
TESTS = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "4", "9", "16"], "fn_name": None, "public": 1}
CODE = Task("c", "Square it.", (), "skywork_code", metadata={"tests": TESTS})


@pytest.fixture(scope="module")
def make(model_dir):
    """A trajectory of ``rounds`` tool rounds and a last turn."""
    tokenizer = load_tokenizer(str(model_dir))

    def trajectory(task, last, answer=None, rounds=0, outcome=CallOutcome.OK, kind=ActionKind.ANSWER, result="1"):
        ids, mask, turns, calls = [], [], [], []

        def add(text, sampled):
            new = tokenizer.encode(text, add_special_tokens=False)
            ids.extend(new)
            mask.extend([int(sampled)] * len(new))

        for turn in range(rounds):
            start, request = len(ids), ToolRequest("code_interpreter", {"code": "1"})
            add("<tool_call> calculate </tool_call><|im_end|>", True)
            end = len(ids)
            add(f"\n{result}\n", False)
            turns.append(Turn(start, end, Action(ActionKind.CALL, (request,)), "eos", 0, len(ids)))
            calls.append(ToolCall(turn, request, ToolResult(result, outcome), 0.0))
        start = len(ids)
        add(last + "<|im_end|>", True)
        turns.append(Turn(start, len(ids), Action(kind, answer=answer), "eos", 0, len(ids)))
        stop = StopReason.ANSWER if kind is ActionKind.ANSWER else StopReason.LENGTH
        logprobs = tuple(-1.0 if m else 0.0 for m in mask)
        return Trajectory(task, (1,), tuple(ids), tuple(mask), logprobs, tuple(turns), tuple(calls), stop, task.id, 0,
                          answer=answer)  # fmt: skip

    return trajectory


@pytest.fixture(scope="module")
def judge(model_dir):
    """One loop and sandbox for all; ``judge(trajectory, **options)``."""
    loop, sandbox = asyncio.new_event_loop(), LocalSandbox(timeout_s=30)

    def scored(trajectory, runner=sandbox, **options):
        return loop.run_until_complete(Scorer(ReasoningReward(str(model_dir), runner, **options)).score(trajectory))

    yield scored
    loop.run_until_complete(sandbox.close())
    loop.close()


def parts(acc, answered, value, **others):
    return {"acc": acc, "answered": answered, "score": value, "shaping": 0.0, "overlong": 0.0, **others}


def test_mathematics(make, judge):
    for answer, total in (("42", 1.0), ("'42'", 1.0), (r"\frac{84}{2}", 1.0), ("24", -1.0), ("", -1.0)):
        reward = judge(make(MATH, f"So \\boxed{{{answer}}}.", answer))
        assert (reward.total, reward.parts) == (total, parts(float(total > 0), 1.0, total)), answer
    silent = judge(make(MATH, "I do not know."))
    assert (silent.total, silent.parts) == (-1.0, parts(0.0, 0.0, -1.0))


def test_mathematics_as_released(make, judge):
    def total(last, answer=None, **options):
        return judge(make(MATH, last, answer, **options), math="strict_box").total

    assert total(r"So \boxed{42}.") == 1.0
    assert total(r"So \boxed{'42'}.", "'42'") == total(r"So \boxed{42.0}.", "42.0") == -1.0
    assert total(r"\boxed{42}" + " and so on" * 10, "42") == -1.0  # 110 characters from the end
    assert judge(make(MATH, r"\boxed{42}" + " and so on" * 10, "42")).total == 1.0
    # all that was decoded, tool results too; and the special token at the end is no character
    cut_off = make(MATH, "Then", rounds=1, result=r"\boxed{42}", kind=ActionKind.INVALID)
    assert judge(cut_off, math="strict_box").total == 1.0 and judge(cut_off).total == -1.0
    assert total(r"\boxed{42}" + "x" * 90) == 1.0
    missing = judge(make(MATH, "42"), math="strict_box")
    assert missing.parts == parts(0.0, 0.0, -1.0)


def test_choices(make, judge):
    for answer, total in (("B", 1.0), (r"\text{B}", 1.0), ("(B)", 1.0), ("B. 42 m", 1.0), ("C", -1.0), (None, -1.0)):
        reward = judge(make(CHOICE, f"\\boxed{{{answer}}}", answer))
        assert (reward.total, reward.parts["answered"]) == (total, float(answer is not None)), answer
        strict = judge(make(CHOICE, f"\\boxed{{{answer}}}", answer), math="strict_box")
        assert strict.total == (1.0 if answer == "B" else -1.0), answer
    with pytest.raises(ValueError, match=r"task g: a choice with the gold answers \('second',\); expected a letter"):
        judge(make(Task("g", "?", ("second",), "gpqa"), r"\boxed{B}", "B"))


def block(program):
    return f"I tried.\n```python\n{program}\n```\nDone."


@pytest.mark.parametrize(
    ("last", "total", "expected"),
    [
        (block("print(int(input()) ** 2)"), 1.0, (1.0, 1.0, 1.0)),
        (block("x = int(input())\nprint('\\n'.join([str(x * x)]))"), 1.0, (1.0, 1.0, 1.0)),
        (block("print(int(input()))"), 0.25, (0.0, 1.0, 0.25)),
        (block("x = int(input())\nprint(x * x if x < 4 else 0)"), 0.75, (0.0, 1.0, 0.75)),
        (block("print('none')"), 0.0, (0.0, 1.0, 0.0)),
        (block("def f(:"), -1.0, (0.0, 1.0, 0.0)),
        ("print(int(input()) ** 2)", -1.0, (0.0, 0.0, 0.0)),
        (block("print(int(input()) ** 2)") + "</think>nothing", -1.0, (0.0, 0.0, 0.0)),
    ],
)
def test_programs(last, total, expected, make, judge):
    reward = judge(make(CODE, last))
    acc, answered, share = expected
    assert reward.total == total
    shown = float(share > 0)  # the one public test has the input 1
    assert reward.parts == parts(acc, answered, total, tests_passed=share, acc_public=shown, acc_hidden=acc)


def test_tests_that_may_be_shown_are_counted_apart(make, judge):
    def found(program, **tests):
        task = Task("c", "Square it.", (), "skywork_code", metadata={"tests": {**TESTS, **tests}})
        said = judge(make(task, program)).parts
        return said.get("acc_public"), said.get("acc_hidden"), said["acc"]

    right, first_two = block("print(int(input()) ** 2)"), block("x = int(input())\nprint(x * x if x < 3 else 0)")
    but_first = block("x = int(input())\nprint(x * x if x > 1 else 0)")
    assert found(right, public=2) == (1.0, 1.0, 1.0)
    assert found(first_two, public=2) == found(first_two) == (1.0, 0.0, 0.0)
    assert found(but_first) == (0.0, 1.0, 0.0) and found(but_first, public=0) == (None, 0.0, 0.0)
    assert found(right, public=4) == (1.0, None, 1.0) and found("none", public=4) == (0.0, None, 0.0)
    assert found("none") == found(block("def f(:")) == (0.0, 0.0, 0.0)
    task = Task("c", "Square it.", (), "code", metadata={"tests": {"test_code": "assert f(3) == 9", "public": 1}})
    assert judge(make(task, block("def f(x): return x * x"))).parts["acc_hidden"] == 1.0
    assert "acc_public" not in judge(make(task, "none")).parts and judge(make(task, "none")).parts["acc_hidden"] == 0.0


def test_a_program_counts_in_the_last_turn_and_as_an_answer_only(make, judge):
    program = block("print(int(input()) ** 2)")
    assert judge(make(CODE, program, kind=ActionKind.INVALID)).total == -1.0
    assert judge(make(CODE, "I do not know.", rounds=1, result=program)).total == -1.0
    literal = block("x = int(input())\\nprint(x * x)")
    assert judge(make(CODE, literal)).total == -1.0


def test_programs_as_released(make, judge):
    """The last block anywhere in the response, however the trajectory ended; each backslash-n is a line break."""

    def total(*arguments, **options):
        return judge(make(CODE, *arguments, **options), code_as_released=True).total

    program = block("print(int(input()) ** 2)")
    assert total(program) == total(program, kind=ActionKind.INVALID) == 1.0
    assert total("I do not know.", rounds=1, result=program) == 1.0
    assert total(block("x = int(input())\\nprint(x * x)")) == 1.0
    assert total(block("print(int(input()) ** 2, end='\\n')")) == total("none") == -1.0
    assert total("```python\n```") == 0.0, "a program without a word fails its tests"


def test_the_share_of_tests_passed_is_the_score(make, judge):
    judged = judge(make(CODE, block("x = int(input())\nprint(x * x if x != 2 else 0)")))
    assert judged.total == 0.75 and judged.parts["acc"] == 0.0


@pytest.mark.parametrize(
    ("outcome", "rounds", "intended"),
    [(CallOutcome.OK, 2, -0.8), (CallOutcome.ERROR, 3, -0.7), (CallOutcome.REFUSED, 3, -1.0),
     (CallOutcome.OK, 6, -0.6)],
)  # fmt: skip
def test_shaping_counts_rounds_in_which_something_ran(outcome, rounds, intended, make, judge):
    wrong = make(MATH, r"\boxed{1}", "1", rounds, outcome)
    reward = judge(wrong, tool_shaping="intended")
    assert reward.total == pytest.approx(intended) and reward.parts["shaping"] == pytest.approx(intended + 1)
    assert (reward.parts["score"], reward.parts["acc"]) == (-1.0, 0.0)
    released = judge(wrong, tool_shaping="as_released")
    assert released.total == pytest.approx(-1.1) and released.parts["shaping"] == pytest.approx(-0.1)
    right = make(MATH, r"\boxed{42}", "42", rounds, outcome)
    assert judge(right, tool_shaping="intended").total == judge(right, tool_shaping="as_released").total == 1.0


def test_long_responses_are_measured_with_tool_results(make, judge):
    right = make(MATH, r"\boxed{42}", "42", 2, result="x" * 50)
    length, sampled = len(right.response_ids), sum(right.loss_mask)
    assert sampled < length
    reward = judge(right, overlong_buffer=8, max_response_tokens=length + 2)
    assert reward.total == pytest.approx(1 - 6 / 8) and reward.parts["overlong"] == pytest.approx(-6 / 8)
    assert (reward.parts["score"], reward.parts["acc"]) == (1.0, 1.0)
    assert judge(right, overlong_buffer=8, max_response_tokens=length + 8).parts["overlong"] == 0.0
    both = {"overlong_buffer": 8, "max_response_tokens": length, "overlong_penalty": 0.5, "tool_shaping": "intended"}
    assert judge(make(MATH, r"\boxed{24}", "24", 2, result="x" * 50), **both).total == pytest.approx(-0.8 - 0.5)


class Broken:
    max_output = 100

    async def run(self, code: str, stdin: str = "") -> Run:
        raise InfrastructureError("the sandbox is down")

    async def close(self) -> None:
        return None


def test_a_failing_sandbox_is_no_score(make, judge, monkeypatch):
    monkeypatch.setattr("rollout.rewards.code.solution_tests.BACKOFF_S", 0.001)
    with pytest.raises(InfrastructureError, match="the sandbox is down"):
        judge(make(CODE, block("print(1)")), runner=Broken())
    assert judge(make(CODE, "no program"), runner=Broken()).total == -1.0


def test_what_cannot_be_judged(make, judge):
    with pytest.raises(ValueError, match=r"task c \(skywork_code\) is answered by a program.*set runner"):
        judge(make(CODE, block("print(1)")), runner=None)
    assert judge(make(MATH, r"\boxed{42}", "42"), runner=None).total == 1.0
    with pytest.raises(ValueError, match="answered by a program, and its metadata has no tests"):
        judge(make(Task("c", "?", (), "code"), block("print(1)")))
    with pytest.raises(ValueError, match="task q: ability is 'qa'; expected one of math, choice, code"):
        judge(make(Task("q", "?", (), "nq", metadata={"ability": "qa"}), "x"))


def test_it_starts_and_closes_its_runner(model_dir):
    events = []

    class Runner(Broken):
        async def start(self):
            events.append("start")

        async def close(self):
            events.append("close")

    async def scenario(runner):
        reward = ReasoningReward(str(model_dir), runner)
        assert isinstance(reward, AsyncReward)
        await reward.start()
        await reward.close()

    asyncio.run(scenario(Runner()))
    asyncio.run(scenario(None))
    assert events == ["start", "close"]
