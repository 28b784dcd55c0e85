"""Chat templates as published, out of two packages (`make templates`): none of them is in the repository.

A family is its template and the control tokens of its tokenizer, special or not as the model has them; the words are
those of a tokenizer that is trained here. A family without a published template in the packages has one that is
written here in its form ("form only"). docs/chat_formats.md shows the outcome by family.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from experiments.worlds.tokenizer_training import train_tokenizer
from rollout.protocols.hermes import HermesProtocol
from rollout.protocols.text_protocol import eos_token_ids
from rollout.tokenizer import load_tokenizer
from rollout.trajectory import ActionKind, ToolRequest
from tests.rollout.chat_models import TEXTS

PUBLISHED = Path(__file__).parents[3] / ".templates"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no .templates here (make templates)"),
]


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        templates: files of ``.templates``, or keys of ``FORMS``.
        special: tokens that are skipped on decoding; they include ``eos``, ``ends`` and ``bos``.
        added: tokens that are not.
        bos: None: the tokenizer has none.
        ends: of a turn, where generation_config.json lists more than ``eos``.
    """

    templates: tuple[str, ...]
    special: tuple[str, ...]
    eos: str
    added: tuple[str, ...] = ()
    bos: str | None = None
    ends: tuple[str, ...] = ()


def piped(names: str, bar: str = "|") -> tuple[str, ...]:
    return tuple(f"<{bar}{name}{bar}>" for name in names.split())


def paired(names: str) -> tuple[str, ...]:
    return tuple(f"<{slash}{name}>" for name in names.split() for slash in ("", "/"))


def qwen(*templates: str, added: str = "tool_call tool_response think") -> Family:
    special = piped("endoftext im_start im_end vision_start vision_end image_pad video_pad")
    return Family(templates, special, "<|im_end|>", paired(added), ends=piped("im_end endoftext"))


def llama(*templates: str) -> Family:
    special = piped("begin_of_text end_of_text start_header_id end_header_id eom_id eot_id python_tag")
    return Family(templates, special, "<|eot_id|>", (), "<|begin_of_text|>", piped("end_of_text eom_id eot_id"))


def mistral(template: str, names: str) -> Family:
    """Mistral's pairs are those of ``PAIRED``; mistral-common's ``SpecialTokens`` closes no others."""
    pairs = tuple(f"[/{name}]" for name in names.split() if name in PAIRED)
    brackets = (*(f"[{name}]" for name in names.split()), *pairs)
    return Family((template,), ("<s>", "</s>", "<unk>", "<pad>", *brackets), "</s>", (), "<s>")


def deepseek(*templates: str, added: tuple[str, ...] = ()) -> Family:
    tools = "tool▁calls▁begin tool▁calls▁end tool▁call▁begin tool▁call▁end tool▁outputs▁begin tool▁outputs▁end "
    tools += "tool▁output▁begin tool▁output▁end tool▁sep User Assistant"
    bos, eos = piped("begin▁of▁sentence end▁of▁sentence", "｜")
    return Family(templates, (bos, eos), eos, (*piped(tools, "｜"), *paired("think"), *added), bos)


def granite(template: str, names: str = "", special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> Family:
    piped_names = f"end_of_text start_of_role end_of_role start_of_plugin end_of_plugin {names}"
    return Family((template,), (*piped(piped_names), *special), "<|end_of_text|>", added, "<|end_of_text|>")


def granite_4(template: str) -> Family:
    special = ("<think_on>", "<think_off>", *paired("schema tools documents"))
    return granite(template, "unused_1", special, paired("think tool_call tool_response"))


def glm(template: str) -> Family:
    special = ("[gMASK]", "<sop>", *piped("endoftext system user assistant observation"))
    return Family((template,), special, "<|endoftext|>", GLM_TAGS, ends=piped("endoftext user observation"))


def lfm2(*templates: str) -> Family:
    special = piped(
        "startoftext endoftext im_start im_end tool_list_start tool_list_end tool_call_start tool_call_end "
        "tool_response_start tool_response_end"
    )
    return Family(templates, special, "<|im_end|>", paired("think"), "<|startoftext|>")


PAIRED = "INST AVAILABLE_TOOLS TOOL_RESULTS SYSTEM_PROMPT THINK".split()
GEMMA_TAGS = "tool tool_call tool_response channel turn".split()
GEMMA_4 = [f"<{a}{name}{b}>" for name in GEMMA_TAGS for a, b in (("|", ""), ("", "|"))]
GLM_TAGS = paired("think tool_call tool_response arg_key arg_value")
KIMI = "im_end im_user im_assistant im_system im_middle media_start media_content media_end media_pad"
KIMI_TOOLS = "tool_calls_section_begin tool_calls_section_end tool_call_begin tool_call_end tool_call_argument_begin"
COMMAND = "START_OF_TURN_TOKEN END_OF_TURN_TOKEN USER_TOKEN CHATBOT_TOKEN SYSTEM_TOKEN"
COMMAND_TAGS = "START_THINKING END_THINKING START_ACTION END_ACTION START_TOOL_RESULT END_TOOL_RESULT START_RESPONSE"
APERTUS = "system developer user assistant"

# Each comment names a model: its tokenizer_config.json says the tokens, its generation_config.json the ends of a turn.
# Compared in November 2026 with published copies of these files, or with code and notes that quote them:
# tokens and ends: Qwen2.5, Qwen3, Llama 3.1, Llama 4, Phi-4; ends alone: GLM-4.5, Gemma 3, Gemma 4, gpt-oss, OLMo 3,
# Phi-4-mini; tokens alone: SmolLM2, SmolLM3, Mistral (mistral-common), Granite 3.3, Granite 4.0, GLM-4.5 but its tags.
# Not compared: whether the tags of GLM-4.5, Phi-4-mini and SmolLM3 are special, and all families that are not named.
# Special tags change no outcome (`test_tags_may_be_special`).
FAMILIES = {
    # Qwen/Qwen2.5-7B-Instruct: only <tool_call> is a token; eos <|im_end|>, <|endoftext|>
    "Qwen2.5": qwen("trl/qwen2_5", "llama/Qwen-Qwen2.5-7B-Instruct", added="tool_call"),
    # Qwen/Qwen3-8B, Qwen/QwQ-32B, Qwen/Qwen3-Coder-30B-A3B-Instruct, Qwen/Qwen3.5-4B: all six tags, not special
    "Qwen3": qwen("trl/qwen3", "llama/Qwen-Qwen3-0.6B"),
    "Qwen3-2507": qwen("trl/qwen3_instruct_2507"),
    "Qwen3.5": qwen("llama/Qwen3.5-4B", "trl/qwen3_5_think", "trl/qwen3_5_nothink"),
    "Qwen3.6": qwen("trl/qwen3_6"),
    "Qwen3-Coder": qwen("llama/Qwen3-Coder"),
    "QwQ": qwen("llama/Qwen-QwQ-32B"),
    # meta-llama/Llama-3.1-8B-Instruct: eos <|end_of_text|>, <|eom_id|>, <|eot_id|>
    "Llama 3.1": llama("trl/llama3_1", "llama/meta-llama-Llama-3.1-8B-Instruct"),
    "Llama 3.2": llama("trl/llama3_2", "llama/meta-llama-Llama-3.2-3B-Instruct"),
    "Llama 3.3": llama("llama/meta-llama-Llama-3.3-70B-Instruct"),
    # meta-llama/Llama-4-Scout-17B-16E-Instruct: eos <|end_of_text|>, <|eom|>, <|eot|>
    "Llama 4": Family(
        ("form/llama4",),
        piped("begin_of_text end_of_text header_start header_end eom eot python_start python_end"),
        "<|eot|>",
        bos="<|begin_of_text|>",
        ends=piped("end_of_text eom eot"),
    ),
    # HuggingFaceTB/SmolLM2-135M-Instruct: bos <|im_start|>
    "SmolLM2": Family(("form/smollm2",), piped("endoftext im_start im_end"), "<|im_end|>", (), "<|im_start|>"),
    # HuggingFaceTB/SmolLM3-3B: tags are tokens, not special
    "SmolLM3": Family(
        ("llama/HuggingFaceTB-SmolLM3-3B",),
        piped("begin_of_text end_of_text im_start im_end"),
        "<|im_end|>",
        paired("think tool_call tool_response code"),
    ),
    # google/gemma-3-4b-it: eos <eos>, <end_of_turn>
    "Gemma 3": Family(
        ("trl/gemma3",),
        ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        "<eos>",
        bos="<bos>",
        ends=("<eos>", "<end_of_turn>"),
    ),
    # google/gemma-4-E2B-it: eos <eos>, <turn|>, <|tool_response>
    "Gemma 4": Family(
        ("llama/google-gemma-4-31B-it", *(f"trl/gemma4{revision}" for revision in ("", "_v2", "_v3", "_v4", "_v5"))),
        ("<bos>", "<eos>", "<pad>", '<|"|>', *piped("think image audio video"), *GEMMA_4),
        "<eos>",
        bos="<bos>",
        ends=("<eos>", "<turn|>", "<|tool_response>"),
    ),
    # microsoft/Phi-3.5-mini-instruct: eos <|end|>, <|assistant|>, <|endoftext|>
    "Phi-3.5": Family(
        ("trl/phi3_5", "llama/microsoft-Phi-3.5-mini-instruct"),
        ("<s>", *piped("endoftext end system user assistant")),
        "<|endoftext|>",
        bos="<s>",
        ends=piped("end assistant endoftext"),
    ),
    # microsoft/phi-4: eos <|im_end|>, <|endoftext|>
    "Phi-4": Family(
        ("form/phi4",),
        piped("endoftext im_start im_end im_sep"),
        "<|im_end|>",
        bos="<|endoftext|>",
        ends=piped("endoftext im_end"),
    ),
    # microsoft/Phi-4-mini-instruct: eos <|end|>, <|endoftext|>
    "Phi-4-mini": Family(
        ("form/phi4_mini",),
        piped("endoftext end system user assistant tool /tool tool_call /tool_call tool_response"),
        "<|endoftext|>",
        bos="<|endoftext|>",
        ends=piped("end endoftext"),
    ),
    # mistralai's tokenizers: control tokens in brackets, all special; eos </s>
    "Mistral Nemo": mistral(
        "llama/mistralai-Mistral-Nemo-Instruct-2407", "INST AVAILABLE_TOOLS TOOL_RESULTS TOOL_CALLS"
    ),
    "Mistral Small 3.2": mistral(
        "llama/Mistral-Small-3.2-24B-Instruct-2506",
        "INST AVAILABLE_TOOLS TOOL_RESULTS TOOL_CALLS SYSTEM_PROMPT TOOL_CONTENT ARGS CALL_ID IMG",
    ),
    "Ministral 3": mistral(
        "llama/mistralai-Ministral-3-14B-Reasoning-2512",
        "INST AVAILABLE_TOOLS TOOL_RESULTS TOOL_CALLS SYSTEM_PROMPT ARGS THINK IMG",
    ),
    "Devstral": mistral(
        "llama/unsloth-mistral-Devstral-Small-2507",
        "INST AVAILABLE_TOOLS TOOL_RESULTS TOOL_CALLS SYSTEM_PROMPT ARGS IMG",
    ),
    # ibm-granite/granite-3.3-2b-instruct: thinking is text; ibm-granite/granite-4.0-h-tiny: tags are tokens
    "Granite 3.3": granite("llama/ibm-granite-granite-3.3-2B-Instruct", "tool_call start_of_cite end_of_cite"),
    "Granite 4.0": granite_4("llama/ibm-granite-granite-4.0"),
    "Granite 4.1": granite_4("llama/ibm-granite-granite-4.1"),
    # zai-org/GLM-4.5: eos <|endoftext|>, <|user|>, <|observation|>
    "GLM-4.5": glm("trl/glm4moe"),
    "GLM-4.6": glm("llama/GLM-4.6"),
    "GLM-4.7": glm("llama/GLM-4.7-Flash"),
    # openai/gpt-oss-20b: eos <|return|>, <|endoftext|>, <|call|>
    "gpt-oss": Family(
        ("trl/gptoss", "llama/openai-gpt-oss-120b"),
        piped("startoftext endoftext return constrain channel start end message call"),
        "<|return|>",
        bos="<|startoftext|>",
        ends=piped("return endoftext call"),
    ),
    # deepseek-ai/DeepSeek-R1-Distill-Qwen-7B, DeepSeek-V3.1: all but bos and eos are tokens that are not special
    "DeepSeek R1 distills": deepseek(
        "trl/deepseek_r1_distill",
        "llama/deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "llama/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    ),
    "DeepSeek V3": deepseek("trl/deepseekv3"),
    "DeepSeek V3.1": deepseek("llama/deepseek-ai-DeepSeek-V3.1"),
    "DeepSeek V3.2": deepseek("llama/deepseek-ai-DeepSeek-V3.2", added=("｜DSML｜",)),
    # moonshotai/Kimi-K2-Instruct: the tool tokens are not special; eos <|im_end|>
    "Kimi K2": Family(
        ("llama/moonshotai-Kimi-K2",), ("[BOS]", "[EOS]", *piped(KIMI)), "<|im_end|>", piped(KIMI_TOOLS), "[BOS]"
    ),
    # CohereLabs/c4ai-command-r7b-12-2024: the tags are not special
    "Command R7B": Family(
        ("llama/CohereForAI-c4ai-command-r7b-12-2024-tool_use",),
        ("<BOS_TOKEN>", "<EOS_TOKEN>", *piped(COMMAND)),
        "<|END_OF_TURN_TOKEN|>",
        piped(f"{COMMAND_TAGS} END_RESPONSE"),
        "<BOS_TOKEN>",
    ),
    # LiquidAI/LFM2-1.2B: the tool tokens are special
    "LFM2": lfm2("trl/lfm2", "trl/lfm2_v2", "llama/LFM2-8B-A1B"),
    "LFM2.5": lfm2("trl/lfm2_2_5", "trl/lfm2_2_5_v2", "llama/LFM2.5-8B-A1B"),
    # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16: eos </s>, <|im_end|>
    "Nemotron 3": Family(
        ("trl/nemotron_3_nano", "trl/nemotron_3_super", "trl/nemotron_3_ultra"),
        ("<s>", "</s>", *piped("im_start im_end")),
        "<|im_end|>",
        paired("think tool_call tool_response"),
        "<s>",
        ends=("</s>", "<|im_end|>"),
    ),
    # MiniMaxAI/MiniMax-M2: eos [e~[; the tags are tokens that are not special
    "MiniMax M2": Family(
        ("llama/MiniMax-M2",), ("]~!b[", "]~b]", "[e~["), "[e~[", paired("think minimax:tool_call"), "]~!b["
    ),
    # NousResearch/Hermes-3-Llama-3.1-8B: ChatML on Llama's tokenizer
    "Hermes 3": Family(
        ("llama/NousResearch-Hermes-3-Llama-3.1-8B-tool_use",),
        piped("begin_of_text end_of_text im_start im_end"),
        "<|im_end|>",
        paired("tool_call tool_response"),
        "<|begin_of_text|>",
    ),
    # allenai/Olmo-3-7B-Instruct: the tags are text; eos <|im_end|>, <|endoftext|>
    "OLMo 3": Family(("form/olmo3",), piped("endoftext im_start im_end"), "<|im_end|>", ends=piped("im_end endoftext")),
    # ByteDance-Seed/Seed-OSS-36B-Instruct
    "Seed-OSS": Family(
        ("llama/ByteDance-Seed-OSS",),
        ("<seed:bos>", "<seed:eos>", "<seed:pad>", *paired("seed:think seed:tool_call seed:cot_budget_reflect")),
        "<seed:eos>",
        bos="<seed:bos>",
    ),
    # swiss-ai/Apertus-8B-Instruct-2509
    "Apertus": Family(
        ("llama/Apertus-8B-Instruct",),
        (
            "<s>",
            *piped(" ".join(f"{role}_{end}" for role in APERTUS.split() for end in ("start", "end"))),
            *piped("inner_prefix inner_suffix tools_prefix tools_suffix"),
        ),
        "<|assistant_end|>",
        bos="<s>",
    ),
}

# Templates in the form of families whose own is in none of the packages, in words of our own.
FORMS = {
    # the first user message lists the tools; a call is JSON behind the (empty) code block
    "llama4": """{{- bos_token }}
{%- for m in messages %}
  {%- if m.tool_calls %}
    {{- '<|header_start|>assistant<|header_end|>\n\n<|python_start|>' + (m.content or '') + '<|python_end|>' }}
    {%- for call in m.tool_calls %}
      {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
    {%- endfor %}
    {{- '<|eot|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|header_start|>ipython<|header_end|>\n\n' + m.content | tojson + '<|eom|>' }}
  {%- else %}
    {{- '<|header_start|>' + m.role + '<|header_end|>\n\n' }}
    {%- if tools and loop.first %}{{- 'Call {"name": ..., "parameters": ...}:\n' + tools | tojson + '\n' }}{% endif %}
    {{- m.content + '<|eot|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}""",
    # ChatML with a system message by default; tools are ignored
    "smollm2": """{%- for m in messages %}
  {%- if loop.first and m.role != 'system' %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}""",
    # ChatML with <|im_sep|> for a line break; tools are ignored
    "phi4": """{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    # tools are those of a field of the system message, not the list that templates are given
    "phi4_mini": """{%- for m in messages %}
  {{- '<|' + m.role + '|>' + m.content }}
  {%- if m.role == 'system' and m.tools %}{{- '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}
  {{- '<|end|>' }}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt else eos_token }}""",
    # calls as Python, one a line; results of tools come from the environment
    "olmo3": """{%- if messages[0].role != 'system' %}
  {{- '<|im_start|>system\nYou help.' }}
  {%- if tools %}{{- ' <functions>' + tools | tojson + '</functions>' }}{% endif %}
  {{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
  {{- '<|im_start|>' + ('environment' if m.role == 'tool' else m.role) + '\n' + (m.content or '') }}
  {%- if m.role == 'system' and tools %}{{- ' <functions>' + tools | tojson + '</functions>' }}{% endif %}
  {%- if m.tool_calls %}
    {{- '<function_calls>\n' }}
    {%- for call in m.tool_calls %}
      {{- call.function.name + '(' }}
      {%- for key, value in call.function.arguments.items() %}
        {{- key + '=' + value | tojson + ('' if loop.last else ', ') }}
      {%- endfor %}
      {{- ')\n' }}
    {%- endfor %}
    {{- '</function_calls>' }}
  {%- endif %}
  {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}""",
}
CASES = {template: family for family in FAMILIES.values() for template in family.templates}
CONTROL = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|\[/?[A-Z_]{3,20}\]|<(?:start|end)_of_turn>|<seed:\w+>|</?s>")
ANY_TAG = re.compile(
    rf"{CONTROL.pattern}|<\|[^|<>\s]+>|<[^|<>\s]+\|>|</?[a-z_:]+>|<SPECIAL_\d+>|\]~!?b[\[\]]|\[e~\[|\]<\]minimax\[>\["
)
PLAIN_TAG = re.compile(r"</?[a-z_:]{2,}>")
QUESTION = {"role": "user", "content": "question"}
PARAMETERS = {
    "query": {"type": "string", "description": "What to look for."},
    "count": {"type": "integer"},
    "exact": {"type": "boolean"},
    "where": {"type": "object"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {"type": "object", "properties": PARAMETERS, "required": []},
    },
}
CALLS = (
    {"query": "the capital of France"},
    {"query": "x < 3 and \"y\" > 'z'\n\nprint(1)\n", "count": 2, "exact": True},
    {"where": {"city": "Zürich", "near": {"lake": 1}}, "tags": ["a", "b c"]},
    {"query": "12"},
)
# How the protocol reads the published templates of the families: where the tools are shown and the call format.
# All others are refused.
READ = {
    "template hermes": (
        "trl/qwen2_5",
        "llama/Qwen-Qwen2.5-7B-Instruct",
        "trl/qwen3",
        "llama/Qwen-Qwen3-0.6B",
        "trl/qwen3_instruct_2507",
        "llama/Qwen-QwQ-32B",
        "llama/ibm-granite-granite-4.0",
        "llama/ibm-granite-granite-4.1",
        "llama/NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    ),
    "template qwen3_coder": (
        "llama/Qwen3.5-4B",
        "trl/qwen3_5_think",
        "trl/qwen3_5_nothink",
        "trl/qwen3_6",
        "llama/Qwen3-Coder",
        "trl/nemotron_3_nano",
        "trl/nemotron_3_super",
        "trl/nemotron_3_ultra",
    ),
    "template llama3": (
        "trl/llama3_1",
        "llama/meta-llama-Llama-3.1-8B-Instruct",
        "trl/llama3_2",
        "llama/meta-llama-Llama-3.2-3B-Instruct",
        "llama/meta-llama-Llama-3.3-70B-Instruct",
        "form/llama4",
    ),
    "template mistral": (
        "llama/mistralai-Mistral-Nemo-Instruct-2407",
        "llama/Mistral-Small-3.2-24B-Instruct-2506",
        "llama/mistralai-Ministral-3-14B-Reasoning-2512",
        "llama/unsloth-mistral-Devstral-Small-2507",
    ),
    "template glm45": ("trl/glm4moe", "llama/GLM-4.6", "llama/GLM-4.7-Flash"),
    "template harmony": ("trl/gptoss", "llama/openai-gpt-oss-120b"),
    "template deepseek_v32": ("llama/deepseek-ai-DeepSeek-V3.2",),
    "template kimi_k2": ("llama/moonshotai-Kimi-K2",),
    "template minimax_m2": ("llama/MiniMax-M2",),
    "template olmo3": ("form/olmo3",),
    "system hermes": (
        "form/smollm2",
        "llama/HuggingFaceTB-SmolLM3-3B",
        "trl/gemma3",
        "trl/phi3_5",
        "llama/microsoft-Phi-3.5-mini-instruct",
        "form/phi4",
        "form/phi4_mini",
        "llama/ibm-granite-granite-3.3-2B-Instruct",
        "trl/deepseek_r1_distill",
        "llama/deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "llama/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "trl/deepseekv3",
        "llama/deepseek-ai-DeepSeek-V3.1",
        "trl/lfm2",
        "trl/lfm2_v2",
        "llama/LFM2-8B-A1B",
    ),
}
NEEDS_TOOLS = (*READ["template harmony"], "llama/NousResearch-Hermes-3-Llama-3.1-8B-tool_use")
EXPECTED = {name: read for read, names in READ.items() for name in names}


def template(name: str) -> str:
    folder, _, file = name.partition("/")
    return FORMS[file] if folder == "form" else (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")


def others() -> list[str]:
    """The published templates of no family above."""
    found = [path.relative_to(PUBLISHED).with_suffix("").as_posix() for path in sorted(PUBLISHED.glob("*/*.jinja"))]
    return [name for name in found if name not in CASES]


def derived(text: str, folder: Path) -> Family:
    """A family for a template alone: the tokens that it writes; EOS is the last of those behind the text of a turn."""
    turns = [QUESTION, {"role": "assistant", "content": "said"}]
    family, rendered = Family((), ("<s>", "</s>"), "</s>", (), "<s>"), ""
    with suppress(Exception):  # templates raise what they like
        tokenizer = load_tokenizer(chat_folder(folder, text, family))
        rendered = tokenizer.apply_chat_template(turns, tools=[TOOL], tokenize=False)
    tokens = sorted({*ANY_TAG.findall(text + rendered), *family.special}, key=len, reverse=True)
    one = "|".join(map(re.escape, tokens))
    end = re.match(rf"\s*(?:{one})*({one})", rendered.rpartition("said")[2])
    eos = end[1] if end else family.eos
    added = tuple(token for token in tokens if PLAIN_TAG.fullmatch(token) and token != eos)
    return replace(family, eos=eos, added=added, special=tuple(token for token in tokens if token not in added))


@cache
def words() -> str:
    """The backend of a tokenizer without Qwen's control tokens, which come last."""
    backend = json.loads(train_tokenizer(TEXTS, vocab_size=600).backend_tokenizer.to_str())
    backend["added_tokens"] = []
    return json.dumps(backend)


def chat_folder(folder: Path, text: str, family: Family) -> str:
    """A folder with the tokenizer of a family and a chat template."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(words())
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    named = {"bos_token": family.bos} if family.bos else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.eos, chat_template=text, **named)
    tokenizer.save_pretrained(folder)
    if family.ends:
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids(list(family.ends))})
        )
    return str(folder)


@pytest.mark.parametrize("name", CASES)
def test_a_template_renders_and_its_control_tokens_are_one_id_each(name, tmp_path):
    family = CASES[name]
    folder = chat_folder(tmp_path, template(name), family)
    tokenizer = load_tokenizer(folder)
    rendered = tokenizer.apply_chat_template([QUESTION], tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert "question" in rendered
    for token in {*family.special, *family.added, *CONTROL.findall(rendered)}:
        assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1, token
    ends = {tokenizer.convert_tokens_to_ids(token) for token in (family.eos, *family.ends)}
    assert set(eos_token_ids(folder, tokenizer)) == ends


@pytest.mark.parametrize("name", [*CASES, *others()])
def test_calls_survive_or_the_template_is_refused_in_one_line(name, tmp_path):
    text = template(name)
    folder = chat_folder(tmp_path, text, CASES.get(name) or derived(text, tmp_path))
    try:
        protocol = HermesProtocol(folder, tools=[TOOL], max_parallel_calls=None)
    except ValueError as refusal:
        assert folder in str(refusal) and "\n" not in str(refusal)
        assert name not in EXPECTED, refusal
        return
    found = f"{protocol.tools_in} {protocol.call_format}"
    assert found == EXPECTED.get(name, found if name not in CASES else "refused")
    calls = [ToolRequest("search", arguments) for arguments in CALLS]
    turns = [[call] for call in calls] + ([calls[:2]] if protocol.max_parallel_calls > 1 else [])
    for turn in turns:
        written = protocol.chat.written_call(turn, [TOOL])
        if not written.startswith(protocol.chat.opened):  # the template drops the thinking of earlier turns
            written = protocol.chat.opened + protocol.chat.thinking_tags[1] + written
        action = protocol.parse(written.removeprefix(protocol.chat.opened) + protocol.chat.call_end)
        assert (action.kind, list(action.calls)) == (ActionKind.CALL, turn), written


@pytest.mark.parametrize("name", [name for name in CASES if name in EXPECTED])
def test_a_served_models_turn_is_read_back_from_its_tokens(name, tmp_path):
    protocol = HermesProtocol(chat_folder(tmp_path, template(name), CASES[name]), tools=[TOOL], max_parallel_calls=None)
    calls = [ToolRequest("search", CALLS[0])]
    for content, made in (("It is \\boxed{25}.", []), ("", calls)):
        ids = protocol.chat.turn_ids(content, None, made)
        text, ended = protocol.chat.without_end(protocol.decode(ids))
        opening, closing = protocol.chat.thinking_tags
        whole = protocol.chat.header.rpartition("question")[2] + text
        assert ended and whole.count(closing) == whole.count(opening) <= 1, whole
        action = protocol.parse(protocol.decode(ids))
        if made:
            assert (action.kind, list(action.calls)) == (ActionKind.CALL, made), text
        else:
            assert (action.kind, action.answer) == (ActionKind.ANSWER, "25"), text


@pytest.mark.parametrize("name", CASES)
def test_every_template_takes_the_tools_in_the_system_message_and_shows_them_once(name, tmp_path):
    try:
        protocol = HermesProtocol(chat_folder(tmp_path, template(name), CASES[name]), tools=[TOOL], tools_in="system")
    except ValueError:
        assert name in NEEDS_TOOLS
        return
    assert protocol.call_format == "hermes" and protocol.chat.header.count("What to look for.") == 1


@pytest.mark.parametrize("name", [name for name, family in CASES.items() if family.added and name in EXPECTED])
def test_tags_may_be_special(name, tmp_path):
    family = CASES[name]
    folder = chat_folder(tmp_path, template(name), replace(family, special=family.special + family.added, added=()))
    protocol = HermesProtocol(folder, tools=[TOOL], max_parallel_calls=None)
    assert f"{protocol.tools_in} {protocol.call_format}" == EXPECTED[name]
