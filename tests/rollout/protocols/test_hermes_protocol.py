"""Tool calls in published chat formats: prompts, exact boundaries, the parser's table, results within a budget."""

import dataclasses
import json

import pytest
from transformers import AutoTokenizer

from rollout.protocols.arpo_tags import ARPOProtocol
from rollout.protocols.base import PromptMode, TurnPrompt
from rollout.protocols.call_formats import FORMATS, SYSTEM
from rollout.protocols.hermes import CUT, NOT_EXECUTED, UNCLOSED, HermesProtocol
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.tokenizer import encode
from rollout.tools.schemas import SCHEMAS
from rollout.trajectory import Action, ActionKind, CallOutcome, Task, ToolCall, ToolRequest, ToolResult, Turn
from tests.rollout.chat_models import LLAMA, QWEN, chat_model, template

TASK = Task("q1", "How many primes are below 100?", ("25",), "toy")
CODE = {"code": "print(25)"}
CALL = Action(ActionKind.CALL, (ToolRequest("code_interpreter", CODE),))
RESULT = ToolResult("25\n", CallOutcome.OK)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: chat_model(tmp_path_factory.mktemp(name), name) for name in (*QWEN, *LLAMA)}


@pytest.fixture(scope="module")
def protocols(folders):
    return {name: HermesProtocol(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def qwen(protocols):
    return protocols["qwen3"]


def call_text(protocol, end=True, **arguments):
    name = "parameters" if protocol.call_format == "llama3" else "arguments"
    value = json.dumps({"name": "code_interpreter", name: arguments or CODE})
    text = f"<tool_call>\n{value}\n</tool_call>" if name == "arguments" else value
    return text + (protocol.chat.end if end else "")


@pytest.mark.parametrize("name", [*QWEN, *LLAMA])
def test_prompts_are_the_templates(protocols, name):
    protocol = protocols[name]
    messages = [{"role": "user", "content": TASK.question}]
    for mode, tools in ((PromptMode.AGENT, protocol.chat.tools), (PromptMode.CLOSED_BOOK, None)):
        rendered = protocol.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        ids = protocol.prompt_ids(TASK, mode)
        assert protocol.decode(ids) == rendered
        assert ("code_interpreter" in rendered) == (tools is not None)
        encoded = protocol.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert ids == encoded


@pytest.mark.parametrize("name", [*QWEN, *LLAMA])
def test_the_loop_of_ids_is_the_templates_rendering_of_the_conversation(protocols, name):
    """Two rounds and an answer: the newline behind the end of a turn (verl #6501) and every header in its place."""
    protocol = protocols[name]
    thought = "<think>\nI count.\n</think>\n\n" if name == "qwen3" else ""
    ids = protocol.prompt_ids(TASK)
    for _ in range(2):
        sampled = thought + call_text(protocol)
        action = protocol.parse(sampled)
        assert action == CALL
        observation, cut = protocol.observation_ids(action, [RESULT], 1000)
        ids += [*protocol.chat.ids(sampled), *observation]
        assert not cut
    ids += protocol.chat.ids(thought + "It is \\boxed{25}." + protocol.chat.end)
    function = {"name": "code_interpreter", "arguments": CODE}
    calls = [{"type": "function", "function": function}]
    said = [
        {"role": "assistant", "content": thought.strip("\n"), "tool_calls": calls},
        {"role": "tool", "content": "25"},
    ]
    messages = [{"role": "user", "content": TASK.question}, *said, *said]
    messages.append({"role": "assistant", "content": thought + "It is \\boxed{25}."})
    rendered = protocol.chat.render(messages, open_turn=False)
    whole = rendered.removesuffix("\n")  # behind the last end of turn, which nobody samples
    assert protocol.decode(ids) == whole
    assert ids == protocol.chat.ids(whole)


def test_what_follows_an_end_of_turn(protocols):
    qwen = "\n<|im_start|>user\n<tool_response>\n25\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    llama = header.format("ipython") + '"25"<|eot_id|>' + header.format("assistant")
    for name, protocol in protocols.items():
        ids, cut = protocol.observation_ids(CALL, [RESULT], 1000)
        assert protocol.decode(ids) == (qwen if name in QWEN else llama) and not cut
        # a turn that was cut is closed first
        unended = Action(ActionKind.INVALID, error="25", ended=False)
        assert protocol.observation_ids(unended, [], 1000) == ([protocol.chat.end_id, *ids], False)


def test_adjacent_results_share_a_turn_where_the_template_merges_them(protocols):
    both = Action(ActionKind.CALL, CALL.calls, error="not run")
    text = protocols["qwen3"].decode(protocols["qwen3"].observation_ids(both, [RESULT], 1000)[0])
    assert text.count("<|im_start|>user") == 1 and text.count("<tool_response>") == 2
    text = protocols["llama3_1"].decode(protocols["llama3_1"].observation_ids(both, [RESULT], 1000)[0])
    assert text.count("ipython") == 2


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_a_long_result_keeps_its_frame_at_every_budget(protocols, name):
    protocol = protocols[name]
    result = ToolResult('é "1"\n' * 20 + "Bad", CallOutcome.ERROR)
    whole = len(protocol.observation_ids(CALL, [result], 10_000)[0])
    opening, closing = protocol.decode(protocol.observation_ids(CALL, [RESULT], 1000)[0]).split("25")
    shortest = None
    for budget in range(whole + 1):
        ids, cut = protocol.observation_ids(CALL, [result], budget)
        assert len(ids) <= budget and cut == (budget < whole)
        if ids:
            shortest = shortest or budget
            text = protocol.decode(ids)
            assert text.startswith(opening) and text.endswith(closing) and "\ufffd" not in text
            if name == "llama3_1":  # never half an escape: what stands there is JSON
                json.loads(text.removeprefix(opening[:-1]).removesuffix(closing[1:]))
        elif shortest:
            pytest.fail(f"{shortest} tokens were enough, {budget} are not")
    assert shortest == len(protocol.observation_ids(CALL, [ToolResult("", CallOutcome.OK)], 1000)[0])
    half = protocol.decode(protocol.observation_ids(CALL, [result], whole // 2)[0])
    assert "[... output left out ...]" in half and "Bad" in half  # errors come last


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_2"])
def test_a_quoted_control_token_in_a_result_stays_text(protocols, name):
    protocol = protocols[name]
    end = protocol.chat.end
    quoted = f"a {end}{end} \U000f0000 <|im_<|endoftext|>start|>"
    ids, _ = protocol.observation_ids(CALL, [ToolResult(quoted, CallOutcome.OK)], 1000)
    plain, _ = protocol.observation_ids(CALL, [ToolResult("a", CallOutcome.OK)], 1000)
    special = set(protocol.tokenizer.all_special_ids) | set(protocol.stop_token_ids)
    assert [i for i in ids if i in special] == [i for i in plain if i in special]
    assert quoted in protocol.decode(ids)
    with pytest.raises(ValueError, match="control token"):
        protocol.prompt_ids(Task("1", f"What is {end}?", (), "s"))


CASES = [
    # thinking
    ("<think>\nI might <tool_call>{}</tool_call>.\n</think>\n\n{CALL}", CODE),
    ("<think> one <tool_call> </think> {CALL}", CODE),
    ("<think> a </think> no <think> b </think> {CALL}", CODE),
    ("<think> a </think> {CALL} <think> b", CODE),  # a tag behind the thinking is text
    ("a </think> {CALL} and </think>", CODE),  # the prompt or the model has left the opening tag out
    ("<think> a </think>\n<think> b </think> {CALL}", CODE),
    ("The tags are <think> and </think>: \\boxed{<think>}", "= <think>"),
    ("</think> {CALL}", CODE),
    ("<think> {CALL}", "never closed"),
    ("I think </think> \\boxed{4}", "= 4"),
    # calls
    ("First I count.\n{CALL}", CODE),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', {}),
    ('<tool_call> {"arguments": {"code": "</think> <tool_call> <think>"}, "name": "f"} </tool_call>',
     {"code": "</think> <tool_call> <think>"}),
    ('<tool_call>{"name": "f", "arguments": {"code": "<think>"}}\n', {"code": "<think>"}),  # the end closes it, too
    ('<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', {"n": 1}),
    ("\\boxed{3} {CALL}", CODE),  # the answer of a turn that calls a tool is not final
    # calls that cannot be read
    ('<tool_call>{"name": "f", "arguments": {"code": "1}}</tool_call>', "Unterminated string"),
    ('<tool_call>{"name": "f", "arguments": {"code": "a\nb"}}</tool_call>', "Invalid control character"),
    ("<tool_call></tool_call>", "Expecting value"),
    ('<tool_call>{"arguments": {}}</tool_call>', '"name" is missing'),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '"name" is no text'),
    ('<tool_call>{"name": "f"}</tool_call>', '"arguments" is missing'),
    ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "not valid JSON"),
    ('<tool_call>{"name": "f", "arguments": "{} x"}</tool_call>', "found text"),
    ('<tool_call>{"name": "f", "arguments": "[]"}</tool_call>', "found a list"),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "found null"),
    ('<tool_call>["f"]</tool_call>', "expected a JSON object, found a list"),
    ('<tool_call>{"name": "f", "arguments": {}} and</tool_call>', "no </tool_call>"),
    ('<tool_call>{"name": "f", "arguments": {}} and', "no </tool_call>"),
    ('{"name": "f", "arguments": {}}</tool_call>', "without <tool_call>"),
    ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is no JSON number"),
    ('<tool_call>{"name": "f", "arguments": {"x": "\\ud83d"}}</tool_call>', "surrogates not allowed"),
    ('<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 100_000, "nested too deeply"),
    ('<tool_call>{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}</tool_call>", "not valid JSON"),
    # answers
    ("It is \\boxed{25}.", "= 25"),
    ("\\boxed{1}, no: \\boxed{\\text{Grey Harbor}}", "= Grey Harbor"),
    ("<think> \\boxed{1} </think> It is 2.", None),
    ("I do not know.", None),
    ("", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_parser_table(qwen, text, expected):
    action = qwen.parse(text.replace("{CALL}", call_text(qwen, end=False)) + "<|im_end|>")
    assert action.ended
    if isinstance(expected, dict):
        [request] = action.calls
        assert (action.kind, request.arguments, action.error) == (ActionKind.CALL, expected, None)
    elif expected is None or expected.startswith("= "):
        assert action == Action(ActionKind.ANSWER, answer=expected and expected[2:])
    else:
        assert action.kind is ActionKind.INVALID and expected in action.error and not action.calls


@pytest.fixture(scope="module")
def verl(folders):
    return HermesProtocol(folders["qwen3"], call_format="verl", newline=False)


@pytest.mark.parametrize(
    ("text", "expected"),  # the arguments of the call that is executed; None: the trajectory ends
    [
        ("{CALL}", CODE),
        ("{CALL}{CALL}", CODE),
        ("<think> {CALL}", CODE),
        ("<tool_call>{]</tool_call>{CALL}", CODE),
        ('<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', {}),
        ('<tool_call>{"name": "f", "arguments": {}}', None),
        ('<tool_call>{"name": "f"}</tool_call>', None),
        ("<tool_call>{]</tool_call>", None),
    ],
)
def test_calls_as_verl_reads_them(verl, text, expected):
    action = verl.parse(text.replace("{CALL}", call_text(verl, end=False)) + "<|im_end|>")
    assert action.error is None
    if expected is None:
        assert action == Action(ActionKind.ANSWER, answer=None)
    else:
        assert (action.kind, [request.arguments for request in action.calls]) == (ActionKind.CALL, [expected])


def test_a_function_of_yours_reads_the_calls(folders):
    path = "rollout.protocols.call_formats.hermes_calls"
    protocol = HermesProtocol(folders["qwen3"], call_format=path)
    assert protocol.parse(f"Now.\n{call_text(protocol)}") == CALL and protocol.reader.beginning == "<tool_call>"
    assert "<tool_call>" in protocol.parse("<tool_call>{<|im_end|>").error
    with pytest.raises(ValueError, match="call_format .* cannot be imported: .*expected MODULE.FUNCTION"):
        HermesProtocol(folders["qwen3"], call_format=f"{path}s")


def test_a_turn_without_its_end_is_cut(qwen):
    for text in (call_text(qwen, end=False), "It is \\boxed{25}.", "", "<|im_end|> more"):
        assert qwen.parse(text) == Action(ActionKind.INVALID, error=CUT, ended=False)
    assert qwen.parse("<think> a<|im_end|>") == Action(ActionKind.INVALID, error=UNCLOSED.format(closing="</think>"))


def test_llama_calls(protocols):
    llama = protocols["llama3_1"]
    assert (llama.call_format, protocols["qwen2_5"].call_format) == ("llama3", "hermes")
    good = call_text(llama, end=False)
    for text in (good, f"<|python_tag|>{good}", f"I compute.\n{good}", good.replace("parameters", "arguments")):
        for end in ("<|eot_id|>", "<|eom_id|>"):
            assert llama.parse(text + end) == CALL
    assert llama.parse(f"{good}; {good}<|eot_id|>").error == NOT_EXECUTED.format(limit=1, found=2)
    for text, reason in (
        ("<|python_tag|>print(25)", "not valid JSON"),
        ('{"name": "f", "parameters": 3}', "found a number"),
        ('{"name": "f"}', '"parameters" is missing'),
        (good[:-1], "not valid JSON"),
    ):
        action = llama.parse(text + "<|eot_id|>")
        assert action.kind is ActionKind.INVALID and reason in action.error
    for text, answer in (("The set {1} is \\boxed{1}", "1"), ('{"x": 1}', None), ("<tool_call>{}</tool_call>", None)):
        assert llama.parse(text + "<|eot_id|>") == Action(ActionKind.ANSWER, answer=answer)


def test_calls_beyond_the_limit_are_answered(qwen, folders):
    text = call_text(qwen, end=False) * 3 + "<|im_end|>"
    action = qwen.parse(text)
    assert (len(action.calls), action.error) == (1, NOT_EXECUTED.format(limit=1, found=3))
    assert action.error in qwen.decode(qwen.observation_ids(action, [RESULT], 1000)[0])
    three = HermesProtocol(folders["qwen3"], max_parallel_calls=3).parse(text)
    assert (len(three.calls), three.error) == (3, None)


def test_thinking_is_passed_to_the_template(folders, tmp_path):
    off = HermesProtocol(folders["qwen3"], thinking=False)
    silent = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert off.decode(off.prompt_ids(TASK)).endswith(silent)
    assert off.decode(off.observation_ids(CALL, [RESULT], 1000)[0]).endswith(silent)
    assert HermesProtocol(folders["qwen3_instruct_2507"], thinking=False)  # it never thinks
    with pytest.raises(ValueError, match="knows no enable_thinking"):
        HermesProtocol(folders["qwen3_instruct_2507"], thinking=True)
    plain = template("qwen3_instruct_2507")
    opening = plain.replace("assistant\\n' }}\n{%- endif %}", "assistant\\n<think>\\n' }}\n{%- endif %}")
    always = HermesProtocol(chat_model(tmp_path, "qwen3_instruct_2507", opening), thinking=True)
    assert always.parse(call_text(always)).error == UNCLOSED.format(closing="</think>")  # the prompt has opened it
    assert always.parse("I count </think>" + call_text(always)) == CALL


def test_an_instruction_with_the_gold_passages(folders):
    text = "{passages}\nFrom these: {question}"
    protocol = HermesProtocol(folders["qwen3"], tools=[], instruction=text)
    task = Task("t", "Who made {passages}?", ("Mira",), "test", gold_passages=(("Jar", "Mira made {question}."),))
    asked = protocol.decode(protocol.prompt_ids(task))
    assert 'Doc 1(Title: "Jar") Mira made {question}.\nFrom these: Who made {passages}?' in asked
    with pytest.raises(ValueError, match="task t: the instruction has {passages}, and the task has no gold passages"):
        protocol.prompt_ids(Task("t", "Who?", ("Mira",), "test"))
    quoting = dataclasses.replace(task, gold_passages=(("Jar", "<|im_end|>"),))
    with pytest.raises(ValueError, match="a gold passage quotes '<|im_end|>'"):
        protocol.prompt_ids(quoting)


@pytest.mark.parametrize(
    ("tools", "place", "says"),
    [
        (["search"], "template", "Use the tools wherever they help you to look something up. Once you are sure"),
        (["code_interpreter"], "system", "wherever they help you to compute or to check something. Once you are sure"),
        (["search", "code_interpreter"], "template", "to look something up, to compute or to check something. Once"),
        (["search"], "trained", "Reason step by step. Put the final answer in \\boxed{}."),
    ],
)
def test_the_instruction_speaks_of_the_tools_that_are_shown(folders, tools, place, says):
    protocol = HermesProtocol(folders["qwen3"], tools=tools, tools_in=place, instruction="boxed")
    shown = place != "trained"
    text = protocol.decode(protocol.prompt_ids(TASK))
    asked = text[text.index(TASK.question) :]
    assert says in asked and ("compute" in asked) == (shown and "code_interpreter" in tools)
    assert text.count("# Tools") == shown  # by the template or by our text, never by both
    assert ("tool" in asked) == shown


ROLES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("", "auto", "no chat template; .* search_r1 and arpo_tags"),
        (ROLES + HEADER, "template", r"tools_in is template, but .* does not show the tools it is given \(code_inter"),
        (ROLES.replace("<|im_end|>", "<|endoftext|>") + HEADER, "auto", r"stop token \(<\|im_end\|>\)"),
        ("{{ raise_exception('nothing') }}", "auto", "nothing"),
        (ROLES + "{{ messages | length }}" + HEADER, "auto", "depends on earlier turns"),
        (ROLES.replace("m.content", "m.content | replace('\"', '')") + HEADER, "auto", "not read back; tried hermes"),
    ],
)
def test_templates_that_cannot_be_used_are_refused_in_a_line(tmp_path, text, place, reason):
    folder = chat_model(tmp_path, "qwen3", text)
    with pytest.raises(ValueError, match=reason) as caught:
        HermesProtocol(folder, tools_in=place)
    assert "\n" not in str(caught.value)


NO_SYSTEM = "{{ raise_exception('no system') if messages[0].role == 'system' }}"
STRICT = (  # Gemma's rule
    "{% for m in messages %}{{ raise_exception('roles') if (m.role == 'user') != (loop.index0 % 2 == 0) }}{% endfor %}"
)


@pytest.mark.parametrize("before", ["", NO_SYSTEM, NO_SYSTEM + STRICT])
def test_a_template_without_tools_gets_them_in_the_system_message(tmp_path, before):
    protocol = HermesProtocol(chat_model(tmp_path, "qwen3", before + ROLES + HEADER))
    assert (protocol.tools_in, protocol.call_format) == ("system", "hermes")
    prompt = protocol.decode(protocol.prompt_ids(TASK))
    role = "user" if before else "system"
    assert prompt.startswith(f"<|im_start|>{role}\n# Tools") and prompt.count("# Tools") == 1
    assert json.dumps(SCHEMAS["code_interpreter"]) in prompt and FORMATS["hermes"].form in prompt
    assert prompt.endswith(f"{TASK.question}<|im_end|>\n<|im_start|>assistant\n")
    assert protocol.parse(call_text(protocol)) == CALL
    text = protocol.decode(protocol.observation_ids(CALL, [RESULT], 1000)[0])
    response = "<|im_start|>user\n<tool_response>\n25\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert text == f"\n{response}"
    two = Action(ActionKind.CALL, CALL.calls, error="no second call")
    text = protocol.decode(protocol.observation_ids(two, [RESULT], 1000)[0])
    assert text.count("<|im_start|>user") == 1 and text.count("<tool_response>") == 2
    closed = protocol.decode(protocol.prompt_ids(TASK, PromptMode.CLOSED_BOOK))
    assert "# Tools" not in closed
    own = Task("1", "?", (), "s", prompt=(("system", "Be brief."), ("user", "Who?")))
    asked = HermesProtocol(protocol.tokenizer.name_or_path, instruction="dataset").prompt_ids(own)
    assert "Be brief.\n\n# Tools" in protocol.decode(asked)


def test_without_tools_every_turn_is_an_answer(folders):
    protocol = HermesProtocol(folders["qwen3"], tools=[])
    assert protocol.tools == () and "# Tools" not in protocol.decode(protocol.prompt_ids(TASK))
    said = f"<think> \\boxed{{1}} </think> {call_text(protocol, end=False)} \\boxed{{2}}<|im_end|>"
    assert protocol.parse(said) == Action(ActionKind.ANSWER, answer="2")
    assert protocol.parse("<think> a<|im_end|>").kind is ActionKind.INVALID


STRIPPING = "{% set said = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}"
SERVED = {"qwen3": None, "stripping": ROLES.replace("{{ m.content", STRIPPING + "{{ said") + HEADER}


@pytest.mark.parametrize("name", SERVED)
def test_history_as_the_template_writes_it(tmp_path, name):
    """A prompt for every turn, equal to the tokens of the messages that a chat server would be sent."""
    folder = chat_model(tmp_path, "qwen3", SERVED[name])
    protocol = HermesProtocol(folder, tools=["search", "code_interpreter"], history="template")
    assert protocol.per_turn_prompts and not HermesProtocol(folder).per_turn_prompts
    said = "<think>\nI count.\n</think>\n\nFirst this. " + call_text(protocol, code="'<|im_end|>'")
    turns, calls, sampled = [], [], []
    for text, result in ((said, "25 <tool_call>"), ("<tool_call>{]</tool_call><|im_end|>", None)):
        action = protocol.parse(text)
        turns.append(Turn(0, 0, action, "eos", 0, 0))
        sampled.append(encode(protocol.tokenizer, text))
        if result is not None:
            calls.append(ToolCall(0, action.calls[0], ToolResult(result, CallOutcome.OK), latency_s=0.0))
    assert protocol.turn_prompt(TASK, [], []).ids == tuple(protocol.prompt_ids(TASK))
    prompt = protocol.turn_prompt(TASK, turns, calls, sampled=sampled)
    text = protocol.decode(prompt.ids)
    arguments = {"code": "'<|im_end|>'"}
    asked = {"role": "user", "content": TASK.question}
    failed = turns[1].action.error
    if name == "qwen3":
        call = {"type": "function", "function": {"name": "code_interpreter", "arguments": arguments}}
        thought = {"role": "assistant", "content": "<think>\nI count.\n</think>\n\nFirst this.", "tool_calls": [call]}
        messages = [asked, thought, {"role": "tool", "content": "25 <tool_call>"}]
        messages += [{"role": "assistant", "content": "<tool_call>{]</tool_call>"}, {"role": "tool", "content": failed}]
    else:
        schemas = "".join(json.dumps(SCHEMAS[tool]) + "\n" for tool in protocol.tools)
        results = [f"<tool_response>\n{text}\n</tool_response>" for text in ("25 <tool_call>", failed)]
        messages = [{"role": "system", "content": schemas.join(SYSTEM)}, asked]
        called = f"\n\nFirst this.\n{call_text(protocol, end=False, code=arguments['code'])}"
        messages += [{"role": "assistant", "content": called}, {"role": "user", "content": results[0]}]
        messages += [
            {"role": "assistant", "content": "<tool_call>{]</tool_call>"},
            {"role": "user", "content": results[1]},
        ]
    plain = AutoTokenizer.from_pretrained(folder)
    tools = protocol.chat.tools if name == "qwen3" else None
    assert text == plain.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    ends = [i for i in prompt.ids if i == protocol.chat.end_id]
    assert len(ends) == text.count("<|im_end|>") - 1  # the one that the model has written is text
    assert ("I count." in text) == (name == "qwen3")  # Qwen3 keeps thinking since the latest question
    short = protocol.turn_prompt(TASK, turns, calls, len(prompt.ids) - 20, sampled=sampled)
    assert short.cut and 0 < len(short.ids) <= len(prompt.ids) - 20 and "left out" in protocol.decode(short.ids)
    assert protocol.turn_prompt(TASK, turns, calls, 10, sampled=sampled) == TurnPrompt((), 0, True)


def test_a_base_model_begins_with_bos(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(chat_model(tmp_path / "chat", "llama3_1"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    made = [protocol(str(tmp_path / "base")).prompt_ids(TASK) for protocol in (SearchR1Protocol, ARPOProtocol)]
    assert all(ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in ids[1:] for ids in made)
    tokenizer.bos_token = None
    tokenizer.save_pretrained(tmp_path / "base")
    assert SearchR1Protocol(str(tmp_path / "base")).prompt_ids(TASK) == made[0][1:]
