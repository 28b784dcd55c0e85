"""Readers of model output, tools' results and web pages: linear in the text, and equal to the plain patterns."""

import ast
import contextlib
import itertools
import random
import re
import textwrap
import time

import pytest

from data_modules.datasets.tool_prompts import _QUOTED_BOX
from data_modules.datasets.traces import MalformedTrace, cut
from experiments.worlds.repair.environment import shown_total
from experiments.worlds.shopping.pages import parse_action
from rollout.environments.notebook import _FRAMES
from rollout.protocols.arpo_tags import ARPOProtocol
from rollout.protocols.base import PromptMode
from rollout.protocols.call_formats import (
    after_thinking,
    glm45_calls,
    harmony_turn,
    kimi_k2_calls,
    mistral_calls,
    qwen3_coder_calls,
)
from rollout.protocols.episodes import ACTION, EpisodeProtocol
from rollout.protocols.hermes import HermesProtocol
from rollout.protocols.search_episodes import SearchEpisodeProtocol
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.rewards.answers import choice_letter, released_program, strict_box, submitted_program, without_quotes
from rollout.rewards.arpo import as_released, format_error, released_boxed
from rollout.rewards.arpo_evaluation import released_answer, released_f1
from rollout.rewards.judge import parse_verdict
from rollout.rewards.mathematics import math_equal
from rollout.rewards.scoring import exact_match, f1, normalize_answer, sub_exact_match
from rollout.skills.reading import _ITEM
from rollout.tags import between, boxed, closing_brace, last_between, unwrapped
from rollout.tools.python.base import dedented, readable
from rollout.tools.python.released import last_line_printed
from rollout.tools.python.tool import program_text
from rollout.tools.web.browse import final_information, passage, summary_prompt
from rollout.tools.web.page_fetcher import Page
from rollout.tools.web.web_search import is_chinese
from rollout.trajectory import Document
from tests.rollout.chat_models import chat_model

SIZE = 200_000  # characters
BOUND_S = 0.5  # of this thread's CPU: ten times what a reader takes at most; patterns that went back took 1 to 60 s
GOLDS = ["12", "x + 1", "the harbor"] * 5


def repeated(piece: str) -> str:
    return (piece * (SIZE // len(piece) + 1))[:SIZE]


def hostile(*tags: str):
    """Tags opened and never closed, closed and never opened, nested, interleaved, begun, and among white space."""
    yield from map(repeated, ["\\", "{", "<", " ", "\n", "x "])
    for tag in tags:
        yield from (repeated(tag), repeated(tag + " " * 50), tag + " " * SIZE + "x", tag + repeated(tag[:-1] or tag))
    for one, other in itertools.pairwise(tags):
        yield from (one * (SIZE // 20) + other * (SIZE // 20), repeated(other + one), repeated(f"{one}x{other}\n"))


JSON = ("<tool_call>", "</tool_call>", '["', "<think>", '{"name": "a", "arguments": {}}', "</think>", '"\\', "[")
XML = ("<tool_call>", "</tool_call>", "<function=a>", "</function>", "<parameter=b>", "</parameter>", "a", "\n", "<")
ARPO = (
    "<answer>",
    "</answer>",
    "\\boxed{",
    "<python>",
    "</python>",
    "<result>",
    "</result>",
    "<think>",
    "\\text{",
    "}",
)
SEARCH = ("<search>", "</search>", "<answer>", "</answer>")
FENCES = ("```python\n", "```\n", "'''\n", "x=1\n", "```", "</think>", '"')
EPISODE = ("<action>", "</action>", "<think>", "</think>", "your task is to: ", " [SEP] ", "Instruction:")


@pytest.fixture(scope="module")
def parsers(tmp_path_factory):
    folder = chat_model(tmp_path_factory.mktemp("qwen3"), "qwen3")
    arpo = ARPOProtocol(folder)
    llama = chat_model(tmp_path_factory.mktemp("llama3_1"), "llama3_1")
    hermes = {form: HermesProtocol(folder, call_format=form) for form in ("hermes", "verl")}
    hermes["llama3"] = HermesProtocol(llama)
    found = {form: lambda text, p=protocol: p.parse(text + p.chat.end) for form, protocol in hermes.items()}
    return found | {
        "arpo": arpo.parse,
        "arpo answering": lambda text: arpo.parse(text, PromptMode.GOLD_DIRECT),
        "search_r1": SearchR1Protocol(folder).parse,
        "episodes": EpisodeProtocol(folder, "household").parse,
        "search_episodes": SearchEpisodeProtocol(folder).parse,
    }


def check(read, *tags: str) -> None:
    for text in hostile(*tags):
        for _ in range(3):  # a busy machine may slow one attempt down, a pattern that goes back slows them all
            began = time.thread_time()
            with contextlib.suppress(MalformedTrace, ValueError):
                read(text)
            if (took := time.thread_time() - began) < BOUND_S:
                break
        assert took < BOUND_S, f"{took:.2f} s of CPU for {text[:40]!r} ... {text[-20:]!r}"


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        *[(form, JSON) for form in ("hermes", "verl", "llama3")],
        *[(name, ARPO) for name in ("arpo", "arpo answering")],
        *[(name, SEARCH) for name in ("search_r1", "search_episodes")],
        ("episodes", EPISODE),
    ],
)
def test_protocols_read_a_turn_in_linear_time(parsers, name, tags):
    check(parsers[name], *tags)


READERS = {
    after_thinking: JSON,
    mistral_calls: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "a", '{"a": ', "{}", "[", " "),
    kimi_k2_calls: ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "a:0", '{"a": ', " "),
    harmony_turn: ("<|message|>", "<|end|>", "<|channel|>final", "to=functions.a", '{"a": ', "to="),
    boxed: ARPO,
    unwrapped: ARPO,
    choice_letter: ("\\text{", "}", "\\text", "B) "),
    without_quotes: ("'", '"'),
    strict_box: ARPO,
    submitted_program: FENCES,
    released_program: FENCES,
    released_boxed: ARPO,
    format_error: ARPO,
    released_answer: ARPO,
    parse_verdict: ("not ", "correct ", "<think>", "</think>", "wrong", "n't ", "**"),
    readable: ("\x1b[", "\x1b]", "\x1b", "\r", "\x1b[0"),
    last_line_printed: FENCES,
    program_text: ("```", "```python\n", "```\n", "  ", "x=1\n"),
    shown_total: ("t = 1\n", "t = ", "1"),
    parse_action: ("search[", "]", "click["),
    final_information: ("**Final Information**", "<think>", "</think>"),
    is_chinese: ("你", "\u3042", "a "),
    cut: ARPO,
    _QUOTED_BOX.search: ("\\boxed{", "'", '"', "\\boxed{'"),
    _ITEM.fullmatch: ("1. ", "1. a", ": ", " Apply this ", "x."),
}
OTHERS = {
    "qwen3_coder": (lambda text: qwen3_coder_calls(text, {}), XML),
    "glm45": (lambda text: glm45_calls(text, {}), (*XML, "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>")),
    "answer_parts": (lambda t: [score(t, GOLDS) for score in (exact_match, f1, sub_exact_match)], ("the ", "a", "é ")),
    "released_f1": (lambda text: released_f1(text, GOLDS), ("the ", "a", "é ", ".")),
    "as_released": (lambda text: as_released(text, GOLDS), ARPO),
    "math_equal": (lambda text: math_equal(text + "x" * 2000, GOLDS), ("$", "\\(", "\\text{", "{", "}")),
    "actions": (lambda text: between(text, *ACTION), ACTION),
    "frames": (lambda text: _FRAMES.sub("", text), ("Traceback (most recent call last):\n", " File x\n", " File ")),
    "passage": (lambda text: passage(text, "the potter of the harbor"), ("a.\n", "the ", "。", ". ")),
    "snippet": (
        lambda text: summary_prompt("q", [Document("u", "t", text, 1.0)], [Page("u", "")]), ("<a ", "<b>", "&lt;", "&")
    ),
}  # fmt: skip


@pytest.mark.parametrize("read", READERS, ids=lambda read: getattr(read, "__qualname__", str(read)))
def test_readers_are_linear(read):
    check(read, *READERS[read])


@pytest.mark.parametrize("name", OTHERS)
def test_scores_and_extractors_are_linear(name):
    read, tags = OTHERS[name]
    normalize_answer.cache_clear()
    check(read, *tags)


# --- equal to the plain forms ---------------------------------------------------------------------------------------


def texts(alphabet, count=3000, longest=14):
    rng = random.Random(0)
    return ["".join(rng.choices(alphabet, k=rng.randint(0, longest))) for _ in range(count)]


def test_the_texts_between_two_tags_are_those_of_the_pattern():
    for text in texts(["<a>", "</a>", "<", "a>", "x", "\n", "<b>"]):
        assert between(text, "<a>", "</a>") == re.findall("<a>(.*?)</a>", text, re.DOTALL)
        innermost = re.findall("<a>((?:(?!<a>).)*?)</a>", text, re.DOTALL)
        assert last_between(text, "<a>", "</a>") == (innermost[-1] if innermost else None)


def test_a_closing_brace_is_the_one_that_counting_finds():
    for text in texts(["{", "}", "\\", "x"]):
        depth, found = 0, None
        for brace in re.finditer("[{}]", text):
            depth += {"{": 1, "}": -1}[brace[0]]
            if not depth and brace[0] == "}":
                found = brace.start()
                break
        assert closing_brace(text) == found


def test_a_program_loses_the_margin_that_the_standard_library_takes():
    for text in texts([" ", "\t", "\n", "x", "\x0b", "  y\n"]):
        assert dedented(text) == textwrap.dedent(text)


def is_python(text: str) -> bool:
    try:
        ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return False
    return True


def test_a_program_ends_where_python_says_that_it_is_one():
    pieces = ["```\n", "'''", '"""', "'", '"', "\\", "# ", "\n", "x = 1\n", "s = '''\n", 'f"""\n', "    "]
    valid = 0
    for text in texts(pieces, 6000):
        ends = [fence.start() for fence in re.finditer("^[ \t]*```", text, re.MULTILINE)]
        programs = [text[:end] for end in ends if is_python(text[:end])]
        if programs and programs[0].strip():
            valid += len(ends) > 1
            assert submitted_program(f"```python\n{text}") == textwrap.dedent(programs[0]).strip("\n")
    assert valid > 20  # of a program that goes on behind its first closing line
