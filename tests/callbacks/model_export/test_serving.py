"""The flags of ``vllm serve`` by the protocol that a configuration names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from callbacks.model_export.serving import TEMPLATE, serve_flags, template_flags
from experiments.commands.export import flags_of
from rollout.protocols.hermes import HermesProtocol
from rollout.tools.schemas import SCHEMAS
from rollout.trajectory import Task, ToolRequest
from tests.rollout.chat_models import chat_model, template

AUTO = ["--enable-auto-tool-choice", "--tool-call-parser"]
HERMES = "rollout.protocols.hermes.HermesProtocol"


def config(tokenizer: str, protocol: str = HERMES, **arguments):
    part = {"class_path": protocol, "init_args": {"tokenizer": tokenizer, **arguments}}
    return {"data": {"init_args": {"rollouts": {"init_args": {"protocol": part}}}}}


@pytest.mark.parametrize(
    ("name", "protocol", "arguments", "flags"),
    [
        ("qwen2_5", HERMES, {}, [*AUTO, "hermes"]),
        ("qwen2_5", HERMES, {"call_format": "verl"}, [*AUTO, "hermes"]),
        ("llama3_1", HERMES, {}, [*AUTO, "llama3_json"]),
        (
            "qwen3", HERMES, {"thinking": False},
            [*AUTO, "hermes", "--default-chat-template-kwargs", '{"enable_thinking": false}'],
        ),
        ("qwen2_5", "rollout.protocols.search_r1.SearchR1Protocol", {}, []),
        ("qwen2_5", "rollout.protocols.arpo_tags.ARPOProtocol", {}, []),
    ],
)  # fmt: skip
def test_flags_follow_the_protocol(tmp_path, name, protocol, arguments, flags):
    folder = chat_model(tmp_path, name)
    assert flags_of(config(folder, protocol, **arguments), tmp_path, "exports/a") == flags
    assert flags_of(config("/nowhere", protocol, **arguments), tmp_path, "exports/a") == flags, "by the exported one"


@pytest.mark.parametrize("thinking", [None, True])
def test_the_parser_of_thinking_is_named_where_the_template_asks_for_it(tmp_path, thinking):
    flags = serve_flags(HermesProtocol(chat_model(tmp_path / "a", "qwen3"), thinking=thinking))
    assert flags[3:5] == ["--reasoning-parser", "qwen3"]
    flags = serve_flags(HermesProtocol(chat_model(tmp_path / "b", "qwen3_instruct_2507")))
    assert "--reasoning-parser" not in flags


def test_without_tools_or_with_tags_there_is_no_parser(tmp_path):
    assert serve_flags(HermesProtocol(chat_model(tmp_path, "qwen2_5"), tools=[])) == []


CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
NO_SYSTEM = "{%- if messages[0]['role'] == 'system' %}{{- raise_exception('no system message') }}{%- endif %}" + CHATML


@pytest.mark.parametrize("text", [CHATML, NO_SYSTEM])
def test_the_served_template_writes_the_tools_as_the_rollouts_do(tmp_path, text):
    """For a template that knows no tools, also for a conversation that goes on behind a call."""
    folder = chat_model(tmp_path, "qwen2_5", text)
    protocol = HermesProtocol(folder, tools=["code_interpreter", "search"])
    assert protocol.tools_in == "system"
    assert template_flags(protocol, tmp_path, "a") == ["--chat-template", f"a/{TEMPLATE}"]
    ours = (tmp_path / TEMPLATE).read_text()
    schemas = [SCHEMAS["code_interpreter"], SCHEMAS["search"]]

    def served(messages):
        return protocol.tokenizer.apply_chat_template(
            messages, tools=schemas, chat_template=ours, tokenize=False, add_generation_prompt=True
        )

    user = {"role": "user", "content": "How many primes are below 100?"}
    prompt = protocol.prompt_ids(Task(id="0", question=user["content"], golden_answers=(), data_source="test"))
    assert protocol.tokenizer(served([user]), add_special_tokens=False)["input_ids"] == prompt
    calls = [ToolRequest("search", {"query": 'primes "é" <b>'}), ToolRequest("code_interpreter", {"code": "1\n2"})]
    rest = [protocol.chat.message(calls) | {"content": "I look."}]
    rest += [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}, user]
    for first in ([], [{"role": "system", "content": "Be brief."}]):
        conversation = [*first, user, *rest]
        assert served(conversation) == protocol.chat.render(protocol.with_tools(conversation))


def test_the_served_template_shows_no_tools_where_the_rollouts_showed_none(tmp_path):
    protocol = HermesProtocol(chat_model(tmp_path, "qwen2_5"), tools_in="trained")
    template_flags(protocol, tmp_path, "a")
    user, schemas = [{"role": "user", "content": "question"}], [SCHEMAS["code_interpreter"]]
    served = protocol.tokenizer.apply_chat_template(
        user, tools=schemas, chat_template=(tmp_path / TEMPLATE).read_text(), tokenize=False, add_generation_prompt=True
    )
    assert served == protocol.chat.render(user)


def test_the_template_is_named_where_the_exported_tokenizer_has_another(tmp_path):
    chat_model(tmp_path / "exported", "qwen3")
    ours = chat_model(tmp_path / "ours", "qwen2_5")
    found = flags_of(config(ours), tmp_path / "exported", "exports/a")
    assert found == [*AUTO, "hermes", "--chat-template", f"exports/a/{TEMPLATE}"]
    assert (tmp_path / "exported" / TEMPLATE).read_text() == template("qwen2_5")
    bare = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None))
    assert template_flags(bare, tmp_path / "exported", "a") == []


def test_an_export_without_a_protocol_or_with_one_that_cannot_be_made(tmp_path, capsys):
    assert flags_of({"data": {}}, tmp_path, "a") == [] and capsys.readouterr().out == ""
    folder = chat_model(tmp_path, "qwen2_5")
    assert flags_of(config(folder, tools=["nothing.json"]), tmp_path, "a") == []
    assert "no flags for its tool calls, since its protocol cannot be made: " in capsys.readouterr().out
