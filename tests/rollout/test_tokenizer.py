"""Ids and texts straight from a tokenizer's backend are those of the tokenizer itself, whatever the text."""

import random
import re
import time

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from rollout.loop.agent_loop import Budgets, FirstPrompts
from rollout.protocols.arpo_tags import ARPOProtocol
from rollout.protocols.hermes import HermesProtocol
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.tokenizer import Quotes, _any_of, decode, encode, load_tokenizer
from rollout.trajectory import Task
from tests.rollout.chat_models import chat_model, template

TEXTS = [
    "", " ", "  leading", "trailing \n", "\r\n\ttab", "a\x00b", "plain words, 1234 and it's over",
    "a<|im_end|>b", "<|im_start|>user\nhi<|im_end|>\n", "<|im_", "<|im_end|><|im_end|>", " <|endoftext|> ",
    "<think> x </think>\n<tool_call>", "</search>\n\n<information>Doc 1", "[hole]  [hole]",
    "e\u0301 \ufb01 \u2460 \u4f60\u597d \U0001f469\u200d\U0001f467 \u202e\u00a0.", "\ufffd\ue000", "x" * 3000,
]  # fmt: skip


@pytest.fixture(params=["as it is", "with what others write around texts"])
def tokenizer(request, model_dir):
    """Also one that adds a token at the beginning, takes the spaces before another, and normalises."""
    tokenizer = load_tokenizer(str(model_dir))
    if request.param != "as it is":
        tokenizer.add_tokens([AddedToken("[hole]", lstrip=True, rstrip=True, special=True)])
        begin = tokenizer.eos_token
        processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, tokenizer.eos_token_id)])
        tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


@pytest.mark.parametrize("plain", [False, True])
def test_ids_are_those_of_the_slow_call(tokenizer, plain):
    slow = [tokenizer(text, add_special_tokens=False, split_special_tokens=plain)["input_ids"] for text in TEXTS]
    encode(tokenizer, TEXTS[7], not plain)  # what the call before asked for is of no matter
    tokenizer(TEXTS[7], truncation=True, max_length=2, padding="max_length")
    assert [encode(tokenizer, text, plain) for text in TEXTS] == slow
    assert (tokenizer.eos_token_id in encode(tokenizer, TEXTS[7], plain)) is not plain


def test_texts_are_those_of_the_slow_call(tokenizer):
    for text in TEXTS:
        ids = encode(tokenizer, text)
        for part in (ids, tuple(ids[1:]), ids[:-1], ids[::-1]):  # characters cut in two as well
            slow = tokenizer.decode(list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            assert decode(tokenizer, part) == slow


def test_tags_are_found_as_by_trying_the_longest_first():
    rng = random.Random(0)
    tags = ["<a>", "<a>b", "<ab>", "<|x|>", "[I]", "<", "<unused1>", "<unused10>"]
    slow = re.compile("(" + "|".join(map(re.escape, sorted(tags, key=len, reverse=True))) + ")")
    for _ in range(2000):
        text = "".join(rng.choices([*tags, "<unused", "a", ">", "|", "x"], k=8))
        assert _any_of(tags).split(text) == slow.split(text)
    assert _any_of([]).split("<a>") == ["<a>"]


def test_thousands_of_added_tokens_cost_a_run_of_brackets_nothing(model_dir):
    tokenizer = load_tokenizer(str(model_dir))
    tokenizer.add_tokens([f"<unused{number}>" for number in range(3000)])
    quotes, text = Quotes(tokenizer), "<" * 100_000 + "<unused" * 10_000
    began = time.thread_time()
    assert quotes.quote(text) == text
    assert time.thread_time() - began < 1.0, "0.02 s; 10 s where each tag is tried"


@pytest.mark.parametrize("protocol", [SearchR1Protocol, ARPOProtocol, HermesProtocol])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r'{{ "\ud83d\ude00" }}', "\U0001f600"),  # Jinja reads the halves of a pair one by one
        (r'{{ "\ud83d" }}', "\ufffd"),
        (r'{{ "a\x00b" }}', "a\x00b"),
        (r'{{ "\ue000\ufdd0\u2028" }}', "\ue000\ufdd0\u2028"),
    ],
)
def test_odd_characters_of_a_chat_template_reach_the_model_as_they_are(tmp_path, protocol, written, read):
    """Hermes had a TypeError of tokenizers, and the others U+FFFD, for a whole pair."""
    made = protocol(chat_model(tmp_path, "qwen3", text=written + template("qwen3")))
    ids = FirstPrompts(made, Budgets()).prompt_ids(Task("t", "who?", ("1",), "x"))
    assert made.decode(ids).startswith(f"{read}<|im_start|>")


@pytest.mark.parametrize("protocol", [SearchR1Protocol, ARPOProtocol])
@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            "{{ raise_exception('System role not\\nsupported') }}",
            "cannot write the messages: System role not supported$",
        ),
        ("{{ messages[9].content }}", "cannot write the messages: list object has no element 9$"),
        ("{{ ", "cannot write the messages: unexpected"),
        ("{{ '' }}", "^task t: its prompt is empty; expected a chat template that writes the messages$"),
    ],
)
def test_a_chat_template_that_writes_no_prompt_is_an_error_of_one_line(tmp_path, protocol, written, message):
    made = protocol(chat_model(tmp_path, "qwen3", text=written))
    with pytest.raises(ValueError, match=message):
        FirstPrompts(made, Budgets()).prompt_ids(Task("t", "who?", ("1",), "x"))
