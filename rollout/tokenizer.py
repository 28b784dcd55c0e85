"""Loads the tokenizer of a model folder, and encodes and decodes without the wrapper's overhead."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from common.errors import one_line
from common.text import whole

# Two lone surrogates replace a quoted tag: external text can contain any character, but no lone surrogate.
_HALVES = range(0xD800, 0xDC00), range(0xDC00, 0xE000)
_STAND_IN = re.compile("[\ud800-\udbff][\udc00-\udfff]|[\ud800-\udfff]")


def load_tokenizer(folder: str) -> Any:
    """Load the Hugging Face tokenizer of a model folder. Raises ValueError if it is missing or has no EOS token."""
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"no usable tokenizer in {folder!r}; expected a Hugging Face model folder: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder!r} has no EOS token; set eos_token in tokenizer_config.json")
    return tokenizer


@contextmanager
def template_errors(tokenizer: Any, *also: type[Exception]) -> Iterator[None]:
    """Turn errors that a chat template raises in the block into a ValueError that names the tokenizer's folder.

    Many templates refuse some messages, such as a system message or two user messages in a row.

    Args:
        also: further exceptions to turn, where nothing but the template runs.
    """
    from jinja2 import TemplateError  # with transformers, which takes seconds to import

    try:
        yield
    except (TemplateError, *also) as error:
        name = getattr(tokenizer, "name_or_path", "")
        raise ValueError(f"the chat template of {name!r} cannot write the messages: {one_line(error)}") from error


def render_chat(tokenizer: Any, messages: Iterable[Any], **options: Any) -> str:
    """Return the text that the tokenizer's chat template writes for ``messages``. Takes the options of
    ``apply_chat_template``. Raises ValueError where the template refuses the messages."""
    with template_errors(tokenizer, TypeError):
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def encode(tokenizer: Any, text: str, plain: bool = False) -> list[int]:
    """Return the token ids of a text, as ``tokenizer(text, add_special_tokens=False, split_special_tokens=plain)``
    does.

    Calls the tokenizer's backend, which is faster for short texts. Lone surrogates, which a chat template can write,
    become U+FFFD.

    Args:
        plain: treat control tokens in the text as ordinary text.
    """
    text = whole(text)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer
        return tokenizer(text, add_special_tokens=False, split_special_tokens=plain)["input_ids"]
    if backend.encode_special_tokens != plain:
        backend.encode_special_tokens = plain
    if backend.truncation is not None:  # set by an earlier caller
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids  # fast: no offsets, in batches only


def decode(tokenizer: Any, token_ids: Sequence[int], skip_special: bool = False) -> str:
    """Return the text of token ids. Keeps all white space, and special tokens unless ``skip_special``."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    return backend.decode(token_ids, skip_special_tokens=skip_special)


class Quotes:
    """Keeps external text (tool results, observations) from turning into the tokenizer's tags.

    An added token, such as Qwen's ``<tool_call>``, is one id anywhere in a text, so a page that quotes it would look
    like a call. ``quote`` replaces the tag by two code points that no text can contain, and ``ids`` encodes these as
    ordinary text. The template's own tags are not quoted and become their ids. Tags are special tokens and other added
    tokens, except added tokens of only white space, letters and digits.

    Args:
        tokenizer: Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = set(tokenizer.all_special_tokens)
        special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        tags = special | {token for token in added if not all(c.isalnum() or c.isspace() for c in token)}
        self._tags = {tag: tokenizer.convert_tokens_to_ids(tag) for tag in sorted(tags, key=lambda t: (-len(t), t))}
        self._stand_ins = {
            tag: chr(high) + chr(low) for tag, (high, low) in zip(self._tags, itertools.product(*_HALVES), strict=False)
        }
        self._meant = {stand_in: tag for tag, stand_in in self._stand_ins.items()}
        self._tag = _any_of(self._tags)
        self._special_tag = _any_of([tag for tag in self._tags if tag in special])

    def quote(self, text: str) -> str:
        """Replace the tokenizer's tags in external text by stand-ins, which ``ids`` encodes as ordinary text."""
        return self._tag.sub(lambda tag: self._stand_ins[tag[0]], whole(text))

    def quote_special(self, text: str) -> str:
        """Replace only special tokens in a text by stand-ins. The text may be quoted already, and keeps other tags,
        such as ``<think>``."""
        return self._special_tag.sub(lambda tag: self._stand_ins[tag[0]], text)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text. Quoted tags (see ``quote``) are encoded as ordinary text."""
        return self.ids_in_pieces(text) if _STAND_IN.search(text) else encode(self.tokenizer, text)

    def ids_in_pieces(self, text: str) -> list[int]:
        """Return the token ids of a text, encoded piece by piece and cut at the tokenizer's tags."""
        ids: list[int] = []
        for piece in self._tag.split(text):
            if piece in self._tags:
                ids.append(self._tags[piece])
            elif piece:
                ids += self._plain(_STAND_IN.sub(lambda found: self._meant.get(found[0]) or whole(found[0]), piece))
        return ids

    def _plain(self, text: str) -> list[int]:
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:  # slow: only special tokens can be text
            parts = (part for piece in self._tag.split(text) for part in (piece[:1], piece[1:]) if part)
            return [i for part in parts for i in encode(self.tokenizer, part, plain=True)]
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _backend(self) -> Any:
        """A copy of the tokenizer's backend that encodes every tag as ordinary text. Made when the first tag is
        quoted."""
        from tokenizers import Tokenizer

        settings = json.loads(self.tokenizer.backend_tokenizer.to_str())
        for token in settings["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._tags
        backend = Tokenizer.from_str(json.dumps(settings))
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        return backend


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a regular expression that matches any of the texts, the longest first. Common prefixes are shared, so that
    a run of ``<`` takes no longer with thousands of tags."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(f"({_branches(tree)})" if tree else "((?!))")


def _branches(node: dict[str, Any]) -> str:
    found = "|".join(re.escape(character) + _branches(rest) for character, rest in node.items() if character)
    return f"(?:{found})" + "?" * ("" in node) if found else ""
