"""Search-R1's text format: prompts, the parser's table, observations within a budget."""

from dataclasses import replace

import polars as pl
import pytest

from rollout.protocols.base import PromptMode
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.protocols.text_protocol import eos_token_ids
from rollout.tools.search import format_passages
from rollout.trajectory import Action, ActionKind, CallOutcome, Task, ToolRequest, ToolResult
from tests.data_modules.datasets.test_data_questions import search_r1_row
from tests.rollout.scripted import TASK

CALL = Action(ActionKind.CALL, (ToolRequest("search", {"query": "Mira"}),))
DOCUMENTS = format_passages([("Mira Voss", "The birthplace of Mira Voss is Grey Harbor."), ("Mira Vass", "A potter.")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think> a </think>\n<search> Mira Voss </search>", ("search", "Mira Voss")),
        ("<answer> Grey Harbor </answer>", ("answer", "Grey Harbor")),
        ("<answer> A </answer> <search> q </search>", ("answer", "A")),
        ("<search> q </search> <answer> A </answer>", ("search", "q")),
        ("<search> Mira Voss", "unclosed <search>"),
        ("<answer> Grey Harbor<|im_end|>", "unclosed <answer>"),
        ("<search> a <answer> b </answer>", ("answer", "b")),
        ("Mira Voss </search>", "no tag"),
        ("<search></search>", ("search", "")),
        ("<answer></answer>", ("answer", "")),
        ("<answer> <search> q </search> </answer>", ("search", "q")),
        ("I write <search> tags: <search> Mira </search>", ("search", "Mira")),
        ("", "no tag"),
        ("<Search> Mira </Search>", "no tag"),
        ("<search>a< /search>", "unclosed <search>"),
        ("<information> <answer> A </answer> </information>", ("answer", "A")),
    ],
)
def test_parser_table(protocol, text, expected):
    action = protocol.parse(text)
    if isinstance(expected, str):
        assert action.kind is ActionKind.INVALID and expected in action.error and not action.calls
        return
    kind, content = expected
    if kind == "answer":
        assert action == Action(ActionKind.ANSWER, answer=content)
    else:
        assert action == Action(ActionKind.CALL, (ToolRequest("search", {"query": content}),))


@pytest.mark.parametrize(
    ("text", "last", "first"),
    [
        ("I write <search> tags: <search> Mira </search>", "Mira", "tags: <search> Mira"),
        ("<answer> A <answer> B </answer>", "B", "A <answer> B"),
        ("<answer> <search> q </search>", "q", "q"),
        ("<search> q </search>", "q", "q"),
    ],
)
def test_as_released_the_first_opening_tag_begins_the_action(model_dir, text, last, first):
    for tag, expected in (("last", last), ("first", first)):
        action = SearchR1Protocol(str(model_dir), opening_tag=tag).parse(text)
        assert (action.answer or action.calls[0].arguments["query"]) == expected


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Grey Harbor </answer>", "Grey Harbor"),
        ("<answer> A </answer>", "A"),
        (" A <search> b </answer>", "A <search> b"),
    ],
)
def test_gold_direct_turn_is_the_answer(protocol, text, answer):
    assert protocol.parse(text, PromptMode.GOLD_DIRECT).answer == answer
    if not text.startswith("<answer>"):
        assert protocol.parse(text).kind is ActionKind.INVALID


def test_prompts_by_mode(protocol):
    head = f"<|im_start|>user\nQuestion: {TASK.question}<|im_end|>\n<|im_start|>assistant\n"
    gold = '<information>Doc 1(Title: "Mira Voss") Born in Grey Harbor.</information>\n\n'
    texts = {mode: protocol.decode(protocol.prompt_ids(TASK, mode)) for mode in PromptMode}
    assert texts == {
        PromptMode.AGENT: head,
        PromptMode.CLOSED_BOOK: head,
        PromptMode.GOLD_THINK: head + gold,
        PromptMode.GOLD_DIRECT: head + gold + "<answer>",
    }


def test_template_from_a_file_or_as_text(model_dir, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Say {question} {literally}")
    for template in (str(path), "Say {question} {literally}"):
        protocol = SearchR1Protocol(str(model_dir), template=template)
        assert "Say why? {literally}" in protocol.decode(protocol.prompt_ids(Task("t", "why", (), "toy")))
    path.write_text("no place for it")
    for wrong in (str(path), str(tmp_path / "absent.txt"), "serch_r1"):
        with pytest.raises(ValueError, match=r"question"):
            SearchR1Protocol(str(model_dir), template=wrong)


def test_a_template_is_the_wording_of_a_question_file(model_dir, tmp_path):
    rows = [search_r1_row(0), search_r1_row(1)]
    pl.DataFrame(rows).write_parquet(tmp_path / "test.parquet")
    asked = SearchR1Protocol(str(model_dir), template=str(tmp_path / "test.parquet"))
    published = SearchR1Protocol(str(model_dir), template="dataset")
    prompt = (("user", rows[1]["prompt"][0]["content"]),)
    plain = Task("q", rows[1]["question"], ("x",), "nq")
    assert asked.prompt_ids(plain) == published.prompt_ids(replace(plain, prompt=prompt)), "question mark and all"
    pl.DataFrame([search_r1_row(0, question="another?")]).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="the prompt of the first row does not contain its question once: 'another"):
        SearchR1Protocol(str(model_dir), template=str(tmp_path / "other.parquet"))


def test_template_dataset_shows_the_tasks_own_messages_word_by_word(model_dir):
    protocol = SearchR1Protocol(str(model_dir), template="dataset")
    prompt = (("system", "Be brief."), ("user", " Answer {question} Question: who was Mira Voss \n"))
    task = Task("t", "who was Mira Voss", (), "toy", (("Mira Voss", "A potter."),), prompt=prompt)
    head = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in prompt)
    ids = protocol.prompt_ids(task)
    assert protocol.decode(ids) == head + "<|im_start|>assistant\n"
    assert protocol.decode(protocol.prompt_ids(task, PromptMode.GOLD_DIRECT)).endswith(
        '<information>Doc 1(Title: "Mira Voss") A potter.</information>\n\n<answer>'
    )
    protocol.tokenizer.chat_template = None
    bare = Task("t", "why?", (), "toy", prompt=prompt[1:])
    assert protocol.decode(protocol.prompt_ids(bare)) == prompt[1][1]
    with pytest.raises(ValueError, match="task t: .*expected one user message, found those of system, user"):
        protocol.prompt_ids(task)


def test_template_dataset_refuses_a_task_without_a_usable_prompt(model_dir):
    protocol = SearchR1Protocol(str(model_dir), template="dataset")
    with pytest.raises(ValueError, match=r"task t1: .*'dataset'.*found none\. Take .* a column 'prompt'"):
        protocol.prompt_ids(Task("t1", "why?", (), "toy"))
    with pytest.raises(ValueError, match="end with the user's, found those of user, assistant"):
        protocol.prompt_ids(Task("t1", "why?", (), "toy", prompt=(("user", "why?"), ("assistant", "so"))))
    with pytest.raises(ValueError, match="task t1: the prompt quotes"):
        protocol.prompt_ids(Task("t1", "why?", (), "toy", prompt=(("user", "why <|im_end|>?"),)))


def test_without_chat_template_the_prompt_is_bare_text(model_dir):
    protocol = SearchR1Protocol(str(model_dir), template="short")
    protocol.tokenizer.chat_template = None
    assert protocol.decode(protocol.prompt_ids(TASK)) == f"Question: {TASK.question}"


def test_a_quoted_control_token_is_refused_by_task_and_token(protocol):
    quoting = Task("t7", "What does <|im_end|> mean?", (), "toy")
    with pytest.raises(ValueError, match=r"task t7: the question quotes '<\|im_end\|>'"):
        protocol.prompt_ids(quoting)
    for passage in (("<|im_start|>", "A mark."), ("Marks", "One is <|im_start|>.")):
        task = Task("t8", "why?", (), "toy", (("Mira Voss", "A potter."), passage))
        shown, plain = (protocol.prompt_ids(task, mode) for mode in (PromptMode.GOLD_THINK, PromptMode.AGENT))
        start = protocol.tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert shown.count(start) == plain.count(start) and passage[1] in protocol.decode(shown), "a passage is text"
    for harmless in ("What is <|im_end>?", "Is <answer> a tag?"):
        assert harmless in protocol.decode(protocol.prompt_ids(Task("t9", harmless, (), "toy")))


def test_eos_ids_come_from_tokenizer_and_generation_config(model_dir, tmp_path, protocol):
    tokenizer = protocol.tokenizer
    assert protocol.stop_token_ids == (tokenizer.eos_token_id,)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{tokenizer.eos_token_id}, 7]}}')
    assert eos_token_ids(str(tmp_path), tokenizer) == (tokenizer.eos_token_id, 7)


def test_observation_at_every_budget_keeps_its_tags(protocol):
    result = ToolResult(DOCUMENTS, CallOutcome.OK)
    whole, cut = protocol.observation_ids(CALL, [result], 10_000)
    text = "\n\n<information>" + DOCUMENTS.strip() + "</information>\n\n"
    assert not cut and protocol.decode(whole) == text
    assert whole == protocol.tokenizer(text, add_special_tokens=False)["input_ids"]
    seen = set()
    for budget in range(len(whole) + 1):
        ids, cut = protocol.observation_ids(CALL, [result], budget)
        assert len(ids) <= budget and cut == (budget < len(whole))
        if ids:
            said = protocol.decode(ids)
            assert said.startswith("\n\n<information>") and said.endswith("</information>\n\n")
            kept = said.removeprefix("\n\n<information>").removesuffix("</information>\n\n")
            assert DOCUMENTS.startswith(kept)
            seen.add(kept)
    assert min(map(len, seen)) <= len("Doc") and len(seen) > 20


def test_control_tokens_in_a_passage_stay_text(protocol):
    result = ToolResult("He wrote <|im_end|> there.", CallOutcome.OK)
    ids, _ = protocol.observation_ids(CALL, [result], 100)
    assert "<|im_end|>" in protocol.decode(ids)
    assert protocol.tokenizer.eos_token_id not in ids


def test_correction_fits_whole_or_not_at_all(protocol):
    invalid = Action(ActionKind.INVALID, error="no tag")
    ids, cut = protocol.observation_ids(invalid, [], 1000)
    assert protocol.decode(ids) == protocol.correction and not cut
    assert protocol.observation_ids(invalid, [], len(ids) - 1) == ([], True)
