"""Tokenizers made here that carry published chat templates, as folders; and the words their tests share."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.worlds.tokenizer_training import train_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
QWEN = ("qwen2_5", "qwen3", "qwen3_instruct_2507")
LLAMA = ("llama3_1", "llama3_2")
LLAMA_TOKENS = tuple(
    f"<|{name}|>" for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
)
TEXTS = [
    "How many primes are below 100? <think>\nI count.\n</think>\n\n<tool_call>\n"
    '{"name": "code_interpreter", "arguments": {"code": "print(25)"}}\n</tool_call>',
    "<tool_response>\n25\n</tool_response>",
    "# Tools\n\nYou may call one or more functions to assist with the user query. function parameters string object",
    "system user assistant tool ipython The answer is \\boxed{25}. print(sum(range(10)))\n\nTraceback.\n",
] * 4


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def chat_model(folder: Path, name: str, text: str | None = None) -> str:
    """A folder with a tokenizer of 600 entries; ``text``: a template of one's own under the tokens of ``name``."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=600)
    if name in LLAMA:
        tokenizer.add_special_tokens({"additional_special_tokens": list(LLAMA_TOKENS)})
        tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    tokenizer.chat_template = template(name) if text is None else text
    tokenizer.save_pretrained(folder)
    if name in LLAMA:  # as published: <|eom_id|> ends a turn, too
        ids = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"])
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return str(folder)
