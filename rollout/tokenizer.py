"""Loading the tokenizer of a model folder; text to ids and back without the wrapper's overhead."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

PRIVATE_USE = 0xF0000  # Unicode's first plane of private use: characters that stand in for quoted tags


def load_tokenizer(folder: str) -> Any:
    """The folder's tokenizer. Raises ValueError if there is none, or it has no EOS token."""
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"no usable tokenizer in {folder!r}; expected a Hugging Face model folder: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder!r} has no EOS token; set eos_token in tokenizer_config.json")
    return tokenizer


def encode(tokenizer: Any, text: str, plain: bool = False) -> list[int]:
    """The ids of ``tokenizer(text, add_special_tokens=False, split_special_tokens=plain)``, straight from its backend:
    what that call does besides takes longer than encoding a short text.

    Args:
        plain: control tokens written in the text become ordinary text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # one without a fast form
        return tokenizer(text, add_special_tokens=False, split_special_tokens=plain)["input_ids"]
    if backend.encode_special_tokens != plain:
        backend.encode_special_tokens = plain
    if backend.truncation is not None:  # left by whoever asked for it
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids  # fast: no offsets, in batches only


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of ids, special tokens kept, nothing tidied up."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return backend.decode(token_ids, skip_special_tokens=False)


class Quotes:
    """Keeps text from outside (what a tool returned, what a world shows) from becoming the tokenizer's own tags.

    An added token, such as Qwen's ``<tool_call>``, is one id wherever it stands in a text: a page that quotes it would
    read like a call. ``quote`` puts a character of private use in its place, and ``ids`` makes ordinary text of that,
    while tags that are not quoted, the template's own, become their ids. Special or not does not matter; added tokens
    of white space, letters and digits alone are no tags.

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
        self._stand_ins = {tag: chr(PRIVATE_USE + i) for i, tag in enumerate(self._tags)}
        self._meant = {character: tag for tag, character in self._stand_ins.items()}
        self._tag = _any_of(self._tags)
        self._special_tag = _any_of([tag for tag in self._tags if tag in special])
        # One more says that the character behind it stands for itself.
        self._escape = chr(PRIVATE_USE + len(tags))
        used = f"[{chr(PRIVATE_USE)}-{self._escape}]"
        self._quotable = re.compile(f"{self._tag.pattern}|{used}")
        self._stand_in = re.compile(f"{self._escape}(.)|({used})", re.DOTALL)

    def quote(self, text: str) -> str:
        """``text`` for a place in what ``ids`` reads."""
        return self._quotable.sub(lambda found: self._stand_ins.get(found[0]) or self._escape + found[0], text)

    def quote_special(self, text: str) -> str:
        """The same of special tokens alone: for text that may be quoted already, and whose other tags are meant (a
        prompt that asks for ``<think>``)."""
        return self._special_tag.sub(lambda tag: self._stand_ins[tag[0]], text)

    def ids(self, text: str) -> list[int]:
        """As ``encode``, but what was quoted is ordinary text."""
        return self.ids_in_pieces(text) if self._stand_in.search(text) else encode(self.tokenizer, text)

    def ids_in_pieces(self, text: str) -> list[int]:
        """``ids`` of a text that is cut at its tags."""
        ids: list[int] = []
        for piece in self._tag.split(text):
            if piece in self._tags:
                ids.append(self._tags[piece])
            elif piece:
                ids += self._plain(self._stand_in.sub(lambda found: found[1] or self._meant.get(found[2], ""), piece))
        return ids

    def _plain(self, text: str) -> list[int]:
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:  # special ones alone can be told to be text
            parts = (part for piece in self._tag.split(text) for part in (piece[:1], piece[1:]) if part)
            return [i for part in parts for i in encode(self.tokenizer, part, plain=True)]
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer's own, to which every tag is text; made where the first is quoted."""
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
    return re.compile("(" + "|".join(map(re.escape, texts)) + ")" if texts else "((?!))")
