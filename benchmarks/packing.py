"""Training tokens per second with packed rows against padded ones, on lengths like a search agent's.

``python -m benchmarks.packing [--rows 32] [--budget 4096] [--layers 4] [--hidden 192] [--repeats 3]``

Forward and backward through ``token_logprobs``, micro-batch by micro-batch, of one model with the same weights, rows
and budget of tokens: *packed* (no padding, first fit decreasing), *sorted* (padded, rows of like lengths together: what
the modules do without ``packing``) and *unsorted* (padded, rows as they come). The three take turns, on one thread, and
a form's time is the median of its turns in seconds of processor time, which other work on the machine disturbs least.
Tokens are real ones: padding costs time and counts for nothing. The gradients must agree.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

from benchmarks import page

FORMS = ("unsorted", "sorted", "packed")


def search_lengths(rows: int, rng: random.Random) -> list[int]:
    """100 to 1,000 tokens: a prompt, then one to five turns, most of which end with passages that were found."""
    return [min(1000, 100 + sum(rng.randint(20, 260) for _ in range(rng.randint(0, 5)))) for _ in range(rows)]


def mild_lengths(rows: int, rng: random.Random) -> list[int]:
    """400 to 500 tokens."""
    return [rng.randint(400, 500) for _ in range(rows)]


SPREADS = {"100 to 1,000 tokens": search_lengths, "400 to 500 tokens": mild_lengths}


def make_model(attention: str, layers: int, hidden: int, vocabulary: int = 4096, checkpointing: bool = False):
    """A random Qwen3 as ``load_causal_lm`` prepares it; the same weights whatever the attention."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from lightning_modules import packing
    from lightning_modules.projection import LMHead

    torch.manual_seed(0)
    packing.register(attention)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    model.get_output_embeddings().__class__ = LMHead
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_batch(lengths: Sequence[int], vocabulary: int = 4096, seed: int = 0):
    """Random tokens; a fifth of a row is its prompt, and 16 of every 40 tokens after it are the policy's."""
    import torch

    from lightning_modules.batch import TokenBatch

    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    ends = torch.tensor(lengths)
    column = torch.arange(shape[1])[None]
    real = column < ends[:, None]
    ids = torch.randint(vocabulary, shape, generator=generator) * real
    mask = (real & (column >= ends[:, None] // 5) & (column % 40 < 16)).float()
    mask[:, 0] = 0
    return TokenBatch(ids, ends, ends // 5, mask, torch.zeros(shape))


def as_they_come(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Padded micro-batches of neighbouring rows: what the budget allows without sorting."""
    groups: list[list[int]] = []
    for row, length in enumerate(lengths):
        if groups and max(length, *(lengths[i] for i in groups[-1])) * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def train(model, batch, groups: Sequence[Sequence[int]]) -> None:
    """Forward and backward, micro-batch by micro-batch."""
    from lightning_modules.policy import token_logprobs

    for group in groups:
        micro = batch.rows(group, int(batch.lengths[list(group)].max()))
        stats = token_logprobs(model, micro)
        (stats.logprobs.sum() + stats.entropy.sum()).backward()


def compare(spread: str, rows: int, budget: int, layers: int, hidden: int, repeats: int) -> dict[str, dict[str, float]]:
    """By form: tokens per second of processor time, padding as a share of what goes through the body, gradient norm."""
    from lightning_modules.batch import micro_batches

    lengths = SPREADS[spread](rows, random.Random(0))
    batch = make_batch(lengths)
    padded, packed = make_model("sdpa", layers, hidden), make_model("packed", layers, hidden)
    forms = {
        "unsorted": (padded, as_they_come(lengths, budget)),
        "sorted": (padded, micro_batches(lengths, range(rows), budget)),
        "packed": (packed, micro_batches(lengths, range(rows), budget, packed=True)),
    }
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    norms = {}
    for turn in range(repeats + 1):
        for form, (model, groups) in forms.items():
            model.zero_grad()
            start = time.process_time()
            train(model, batch, groups)
            if turn > 0:  # the first is for warming up
                seconds[form].append(time.process_time() - start)
            norms[form] = float(sum(p.grad.double().square().sum() for p in model.parameters()) ** 0.5)
    results = {}
    for form, (_, groups) in forms.items():
        through = sum(len(g) * max(lengths[i] for i in g) for g in groups)
        padding = 0.0 if form == "packed" else 1 - sum(lengths) / through
        speed = sum(lengths) / statistics.median(seconds[form])
        results[form] = {"speed": speed, "padding": padding, "gradient": norms[form], "micro_batches": len(groups)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, help="trajectories")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each form, after one that is not counted")
    page.add_option(parser)
    sizes = vars(parser.parse_args())
    markdown = sizes.pop("markdown")
    import torch

    torch.set_num_threads(1)
    figures = []
    for spread in SPREADS:
        results = compare(spread, **sizes)
        base = results["unsorted"]
        for form, r in results.items():
            error = abs(r["gradient"] / base["gradient"] - 1)
            figures.append(
                f"{spread}, {form}: {r['speed']:.0f} tokens per CPU s, ratio {r['speed'] / base['speed']:.2f}, padding "
                f"{r['padding']:.0%}, {r['micro_batches']} micro-batches; gradient norms differ by {error:.0e}"
            )
    print(page.rows(figures) if markdown else "\n".join(figures))


if __name__ == "__main__":
    main()
