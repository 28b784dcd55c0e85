"""The flags of ``vllm serve`` by the protocol that a configuration names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from callbacks.model_export.serving import TEMPLATE, serve_flags, template_flags
from experiments.commands.export import flags_of
from rollout.protocols.hermes import HermesProtocol
from rollout.tools.schemas import SCHEMAS
from rollout.trajectory import Task
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
        ("llama3_1", HERMES, {}, [*AUTO, "llama3_json"]),
        (
            "qwen3",
            HERMES,
            {"thinking": False},
            [*AUTO, "hermes", "--default-chat-template-kwargs", '{"enable_thinking": false}'],
        ),
        ("qwen2_5", "rollout.protocols.search_r1.SearchR1Protocol", {}, []),
        ("qwen3", "rollout.programs.protocol.ProgramProtocol", {}, [*AUTO, "hermes", "--reasoning-parser", "qwen3"]),
    ],
)
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


@pytest.mark.parametrize(("name", "tools_in"), [("chatml", "auto"), ("qwen2_5", "system"), ("qwen2_5", "trained")])
def test_the_served_template_shows_a_clients_tools_where_the_rollouts_show_theirs(tmp_path, name, tools_in):
    folder = chat_model(tmp_path, "qwen2_5", CHATML if name == "chatml" else None)
    protocol = HermesProtocol(folder, tools_in=tools_in)
    assert template_flags(protocol, tmp_path, "a") == ["--chat-template", f"a/{TEMPLATE}"]
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "question"}], tools=[SCHEMAS["code_interpreter"]], add_generation_prompt=True,
        chat_template=(tmp_path / TEMPLATE).read_text(), tokenize=False,
    )  # fmt: skip
    prompt = protocol.prompt_ids(Task(id="0", question="question", golden_answers=(), data_source="test"))
    assert protocol.tokenizer(text, add_special_tokens=False)["input_ids"] == prompt
    assert ("code_interpreter" in text) is (tools_in != "trained")


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
    assert "no flags for tool calls, because the protocol cannot be loaded: " in capsys.readouterr().out
