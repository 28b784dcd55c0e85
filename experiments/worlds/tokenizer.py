"""A small byte-level BPE tokenizer with Qwen3's special tokens and chat format, trained on given texts.

Qwen3 pre-tokenises with one regular expression (letters with an optional leading symbol, single digits, runs of
punctuation, line breaks); the same split is used here, so that whatever is learnt about token boundaries at tag
strings carries over to the real models.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Order and special-ness as in Qwen3's tokenizer_config.json: the control tokens are special (skipped on decode when
# asked), the tag tokens are ordinary added tokens.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen's chat format in our own words: a system message that lists the tools, calls between <tool_call> tags, and the
# results of tools as <tool_response> blocks in a user's turn, adjacent ones in one turn. Without tools, plain turns.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, digits: int = 1, spaced_numbers: bool = False
) -> PreTrainedTokenizerFast:
    """Train on ``texts``; the result has at most ``vocab_size`` entries, added tokens included.

    ``digits``: of a number stay together, counted from its left: 1 as Qwen, 3 as Llama 3. A tiny model copies tokens,
    not orders of digits. ``spaced_numbers``: a number holds the space before it, as words do. To copy " 47" a tiny
    model looks for the word that came before; with Qwen's split a bare space comes before every number.

    EOS is ``<|im_end|>`` and padding is ``<|endoftext|>``: two different ids, so that a real EOS is never mistaken
    for padding. Deterministic: the same texts in the same order give the same tokenizer.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pattern = PRE_TOKENIZER_PATTERN % (" ?" if spaced_numbers else "", digits)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(CONTROL_TOKENS) + len(TAG_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
