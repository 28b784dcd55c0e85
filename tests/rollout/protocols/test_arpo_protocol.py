"""ARPO's text format: prompts, the parser's table, results within a budget."""

import pytest

from rollout.protocols.arpo_tags import CORRECTION, ARPOProtocol
from rollout.protocols.base import PromptMode
from rollout.trajectory import Action, ActionKind, CallOutcome, Task, ToolRequest, ToolResult
from tests.rollout.scripted import TASK

CALL = Action(ActionKind.CALL, (ToolRequest("python", {"code": "1"}),))


@pytest.fixture(scope="module")
def arpo(model_dir):
    return ARPOProtocol(str(model_dir), system="none")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think> <search> Mira Voss </search>", ("search", {"query": "Mira Voss"})),
        ("<python>\nprint(1)\nprint(2)\n</python>", ("python", {"code": "print(1)\nprint(2)"})),
        ("<python> x = '<search>' </python>\n", ("python", {"code": "x = '<search>'"})),
        ("<think> I could write <search> a </think> <search> b </search>", ("search", {"query": "b"})),
        ("<search></search>", ("search", {"query": ""})),
        ("well </search>", "</search> without <search>"),
        (r"<answer> The final answer is \[ \boxed{12} \] </answer><|im_end|>", "= 12"),
        (r"<answer>\boxed{\frac{1}{2}}</answer>", r"= \frac{1}{2}"),
        (r"<answer>\boxed{\text{Grey Harbor}}</answer>", "= Grey Harbor"),
        ("<answer> Grey Harbor </answer>", "= Grey Harbor"),
        (r"<answer> \boxed{1 </answer>", r"= \boxed{1"),
        (r"<think>in <answer> I box</think><answer>\boxed{3}</answer>", "= 3"),
        ("I do not know.<|im_end|>", "neither"),
        (r"<answer> \boxed{1}", "neither"),
        (r"\boxed{1}", "neither"),
    ],
)
def test_parser_table(arpo, text, expected):
    action = arpo.parse(text)
    if isinstance(expected, tuple):
        assert action == Action(ActionKind.CALL, (ToolRequest(*expected),))
    elif expected.startswith("= "):
        assert action == Action(ActionKind.ANSWER, answer=expected[2:])
    else:
        assert action.kind is ActionKind.INVALID and expected in action.error and not action.calls


def test_a_result_is_wrapped_as_published(arpo):
    ids, cut = arpo.observation_ids(CALL, [ToolResult("19\n", CallOutcome.OK)], 100)
    assert arpo.decode(ids) == " <result>\n19\n</result>" and not cut
    ids, cut = arpo.observation_ids(Action(ActionKind.INVALID, error="?"), [], 200)
    assert arpo.decode(ids) == f" <result>\n{CORRECTION}\n</result>" and not cut


def test_a_long_result_keeps_its_tags_at_every_budget(arpo):
    result = ToolResult("é1 " * 60, CallOutcome.OK)
    whole = len(arpo.observation_ids(CALL, [result], 10_000)[0])
    shortest = None
    for budget in range(whole + 1):
        ids, cut = arpo.observation_ids(CALL, [result], budget)
        assert len(ids) <= budget
        if ids:
            shortest = shortest or budget
            text = arpo.decode(ids)
            assert text.startswith(" <result>\n") and text.endswith("\n</result>") and "\ufffd" not in text
            assert cut == (budget < whole)
    assert shortest is not None and shortest < 40


def test_a_decoder_that_drops_a_blank_at_the_start_loses_no_result(arpo, monkeypatch):
    whole = type(arpo).decode
    monkeypatch.setattr(type(arpo), "decode", lambda self, ids: whole(self, ids).removeprefix(" "))  # LlamaTokenizer's
    ids, cut = arpo.observation_ids(CALL, [ToolResult("word " * 200, CallOutcome.OK)], 60)
    assert cut and 0 < len(ids) <= 60 and whole(arpo, ids).startswith(" <result>\nword")


def test_prompts(model_dir, arpo):
    question = TASK.question
    assert arpo.decode(arpo.prompt_ids(TASK)) == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    instructed = ARPOProtocol(str(model_dir))
    text = instructed.decode(instructed.prompt_ids(TASK))
    assert text.startswith("<|im_start|>system\n") and r"\boxed{}" in text and "\b" not in text
    published = ARPOProtocol(str(model_dir), system="dataset")
    messages = (("system", "Use tools."), ("user", "Who?"))
    asked = published.decode(published.prompt_ids(Task("1", "?", ("a",), "s", prompt=messages)))
    assert "system\nUse tools." in asked and "user\nWho?" in asked


def test_gold_passages_come_as_a_result(arpo):
    task = Task("1", "Who?", ("a",), "s", gold_passages=(("T", "x"),))
    text = arpo.decode(arpo.prompt_ids(task, PromptMode.GOLD_DIRECT))
    assert text.endswith("</result><answer>") and 'Doc 1(Title: "T") x' in text
    assert arpo.parse(r" \boxed{4} </answer>", PromptMode.GOLD_DIRECT).answer == "4"


def test_system_message_of_a_question_file(model_dir, tmp_path):
    """Benchmark questions bring no prompt; they are asked as the training file asks, its backspace mended."""
    import polars as pl

    rows = [[{"role": "system", "content": "Put it in \x08oxed{}."}, {"role": "user", "content": "Who?"}]]
    pl.DataFrame({"prompt": rows}).write_parquet(tmp_path / "train.parquet")
    protocol = ARPOProtocol(str(model_dir), system=str(tmp_path / "train.parquet"))
    assert "system\nPut it in \\boxed{}.<|im_end|>" in protocol.decode(protocol.prompt_ids(TASK))
    pl.DataFrame({"prompt": [rows[0][1:]]}).write_parquet(tmp_path / "bare.parquet")
    with pytest.raises(ValueError, match="no system message"):
        ARPOProtocol(str(model_dir), system=str(tmp_path / "bare.parquet"))
