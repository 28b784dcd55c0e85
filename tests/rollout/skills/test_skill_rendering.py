"""Skills as text."""

from rollout.skills.bank import Selection, SkillBank
from rollout.skills.render import render, token_counter
from tests.rollout.skills.skill_examples import bank_json

BANK = SkillBank.from_json(bank_json())
CHOSEN = Selection(BANK.general, (("clean", BANK.by_category["clean"]), ("heat", BANK.by_category["heat"])))

RELEASED = """\
### GENERAL SKILLS ###
1. Look: Look around. Apply this before every move.
2. Take: Take it. Apply this when it is seen.

### TASK: clean ###
1. Sink: Go to the sink. Apply this with dirt.
2. Rinse: Rinse it. Apply this at the sink.

### TASK: heat ###
1. Oven: Go to the oven. Apply this when cold."""
SENTENCES = "Known:\nLook around.\nTake it.\nGo to the sink.\nRinse it.\nGo to the oven."


def test_forms():
    assert render(CHOSEN) == RELEASED
    assert render(CHOSEN, header="Known:") == "Known:\n" + RELEASED
    assert render(CHOSEN, "sentences", header="Known:") == SENTENCES
    assert render(CHOSEN, "sentences") == SENTENCES.removeprefix("Known:\n")


def test_tokens_are_counted_without_special_ones():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "[START]": 1, "take": 2, "mug": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="[START] $A", special_tokens=[("[START]", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert tokenizer("take the mug")["input_ids"] == [1, 2, 0, 3]
    assert token_counter(tokenizer)("take the mug") == 3
