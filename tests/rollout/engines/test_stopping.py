from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from rollout.engines.stopping import StopChecker

TEXT = "<think> birthplace of Mira Voss </think>\n<search> Grey Harbor </search>\n\n<answer> Größe </answer> end"


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


def first_stop(checker: StopChecker, ids: list[int], stop: tuple[str, ...]) -> tuple[int, str] | None:
    for end in range(1, len(ids) + 1):
        found = checker.completed(ids[:end], stop)
        if found is not None:
            return end, found
    return None


def naive(tokenizer, ids: list[int], stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Decodes everything after every token."""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        found = [(text.index(s) + len(s), s) for s in stop if s in text]
        if found:
            return end, min(found)[1]
    return None


@pytest.mark.parametrize(
    "stop",
    [
        ("</search>",),
        ("</answer>", "</search>"),
        ("</think>",),  # one added token
        ("</thi",),  # ends inside an added token
        ("th",),  # inside a longer token
        (">\n<",),  # over several tokens
        ("ö",),  # two bytes, perhaps two tokens
        ("Größe </answer> e",),
        ("never there",),
        (" ",),
    ],
)
def test_finds_what_decoding_everything_finds(tokenizer, stop):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert first_stop(StopChecker(tokenizer, 400), ids, stop) == naive(tokenizer, ids, stop)


def test_completed_inside_a_longer_token(tokenizer):
    ids = tokenizer.encode("<search> Mira", add_special_tokens=False)
    long_token = next(i for i in ids if len(tokenizer.decode([i])) > 3)
    inner = tokenizer.decode([long_token])[:-1]
    assert StopChecker(tokenizer, 400).completed(ids[: ids.index(long_token) + 1], (inner,)) == inner


def test_the_string_that_ends_first_is_named(tokenizer):
    token = next(i for i in range(400) if len(tokenizer.decode([i]).strip()) >= 5)
    piece = tokenizer.decode([token]).strip()
    assert StopChecker(tokenizer, 400).completed([token], (piece[:4], piece[:2])) == piece[:2]


def test_special_tokens_can_stop(tokenizer):
    ids = [5, tokenizer.eos_token_id]
    assert StopChecker(tokenizer, 400).completed(ids, ("<|im_end|>",)) == "<|im_end|>"


def test_only_possible_ends_are_decoded(tokenizer, monkeypatch):
    checker = StopChecker(tokenizer, 400)
    checker.completed([0], ("</search>",))
    decoded = []
    monkeypatch.setattr(checker, "_decode", lambda ids: decoded.append(ids) or "")
    for token in range(400):
        checker.completed([token], ("</search>",))
    assert 0 < len(decoded) < 60


def test_tokenizers_that_drop_the_leading_space_of_a_lone_token():
    """SentencePiece style (Llama 2, Mistral): "▁b" alone decodes to "b", after "▁a" to " b"."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, unk_token="c"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert (tokenizer.decode([1]), tokenizer.decode([0, 1])) == ("b", "a b")
    assert first_stop(StopChecker(tokenizer, 3), [2, 0, 2, 0, 1], ("a ",)) == (5, "a ")
