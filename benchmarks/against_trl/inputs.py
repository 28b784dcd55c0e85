"""Makes the folder that both sides read: models, tokenizer, questions, prompts, completions."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.against_trl.cases import Inputs
from data_modules.datasets.questions import write_tasks
from experiments.worlds.tokenizer_training import train_tokenizer
from rollout.protocols.base import PromptMode
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.trajectory import Action, ActionKind, Task

QUESTIONS = "questions.parquet"
SIZES = {  # vocabulary, hidden size and layers of student and teacher
    "small": {"small": (1024, 128, 4), "small_teacher": (1024, 192, 6)},
    "wide": {"wide": (32768, 64, 2), "wide_teacher": (32768, 96, 2)},
}
WORDS = "where which town river tower market harbour lies near of the old and whose bridge was built first".split()


class OneTurn(SearchR1Protocol):
    """A question and any text as its answer: no tools, no tags."""

    tools = ()
    stop = ()

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        return Action(ActionKind.ANSWER, answer=text)


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast, sizes: tuple[int, int, int], mean: int) -> None:
    """Make a random Qwen3 in which one id in ``mean`` ends the text, so lengths are geometric."""
    vocabulary, hidden, layers = sizes
    torch.manual_seed(hidden)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # vLLM's CPU attention needs 32
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, **heads, "num_hidden_layers": layers}
    shape["initializer_range"] = 0.05  # teacher and student must differ, and no id may be much more likely than others
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, max_position_embeddings=1024, **shape))
    ends = [tokenizer.eos_token_id, *range(vocabulary - vocabulary // mean, vocabulary - 1)]
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id, model.config.pad_token_id = ends, tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_questions(prompts: int, draw: random.Random) -> list[Task]:
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(8, 40))) for _ in range(prompts)]
    return [Task(str(i), text, ("nowhere",), "made_up") for i, text in enumerate(texts)]


def prepare(folder: Path, model: str, prompts: int, samples: int, completion_tokens: int) -> None:
    """Write the model, the tokenizer and the batch into the folder.

    Args:
        folder: an existing, empty folder.
        model: small or wide.
        prompts: prompts per batch.
        samples: completions per prompt.
        completion_tokens: greatest length. ``geometric`` lengths have half of it as their mean before the cut;
            ``equal`` lengths all have it.
    """
    draw, mean = random.Random(0), max(completion_tokens // 2, 2)
    tokenizer = train_tokenizer([" ".join(draw.choices(WORDS, k=400))], vocab_size=512)
    for name, sizes in SIZES[model].items():
        make_model(folder / name, tokenizer, sizes, mean)
    tasks = make_questions(prompts, draw)
    write_tasks(folder / QUESTIONS, tasks)
    protocol = OneTurn(str(folder / model), template="short")
    ids = [protocol.prompt_ids(task) for task in tasks]

    def completion(length: int) -> list[int]:
        return [draw.randrange(len(tokenizer)) for _ in range(length - 1)] + [tokenizer.eos_token_id]

    rows = prompts * samples
    geometric = [min(1 + int(draw.expovariate(1 / mean)), completion_tokens) for _ in range(rows)]
    completions = {
        "geometric": [completion(length) for length in geometric],
        "equal": [completion(completion_tokens) for _ in range(rows)],
    }
    texts = [protocol.decode(row) for row in ids]
    Inputs(texts, ids, samples, completion_tokens, completions).write(folder)
