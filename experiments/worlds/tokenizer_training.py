"""A small byte-level BPE tokenizer with Qwen3's special tokens and chat format, trained on given texts.

The text is first split as in Qwen3 (letters with an optional leading symbol, single digits, runs of punctuation, line
breaks), so token boundaries at tags are the same as in the real models.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# In the order of Qwen3's tokenizer_config.json. Control tokens are special (decode can skip them); tags are ordinary
# added tokens.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen's chat format in our own words: a system message lists the tools, calls stand between <tool_call> tags, and
# adjacent tool results share one user message as <tool_response> blocks. Without tools, the turns are plain.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, digits: int = 1, spaced_numbers: bool = False
) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer trained on ``texts``. Its vocabulary has at most ``vocab_size`` entries, added tokens
    included.

    ``digits`` is the number of digits in one token, counted from the left: 1 as in Qwen, 3 as in Llama 3. A tiny model
    can copy tokens but not the order of digits. With ``spaced_numbers`` a number includes the space before it, as words
    do. To copy " 47" a tiny model looks for the word before the number; in Qwen's split a bare space precedes every
    number.

    EOS is ``<|im_end|>`` and padding is ``<|endoftext|>``, so a real EOS is never taken for padding. Deterministic: the
    same texts in the same order give the same tokenizer.
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
