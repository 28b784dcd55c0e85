"""The flags of ``vllm serve`` by the protocol that a configuration names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from callbacks.model_export.serving import TEMPLATE, serve_flags, template_flags
from experiments.commands.export import flags_of
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


def test_a_protocol_names_the_parsers_itself():
    named = SimpleNamespace(serve_tool_parser="qwen3_coder", serve_reasoning_parser="qwen3", call_format="hermes")
    assert serve_flags(named) == [*AUTO, "qwen3_coder", "--reasoning-parser", "qwen3"]
    assert serve_flags(SimpleNamespace(serve_tool_parser=None, call_format="hermes")) == []


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
