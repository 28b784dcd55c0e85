"""Tokens and trajectories per second of the engines, on the tiny experiments' kind of load.

    python -m benchmarks.engines [--prompts 16] [--samples 4] [--skip-vllm]

A random Qwen3 (4 layers, hidden 128, vocabulary 1,024) writes two turns per trajectory: turns of up to 48 tokens with
an observation of 120 tokens between them, 4 trajectories per prompt. Every engine gets the same prompts and the same
1 thread. ``transformers generate`` is the naive way: one padded batch per turn, prompts computed anew each turn.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import importlib.util
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import page
from rollout.engines.base import SamplingParams
from rollout.engines.transformers_engine import TransformersEngine
from rollout.engines.vllm_engine import VLLMEngine

VOCABULARY, OBSERVATION, NEW_TOKENS, TURNS, MAX_LENGTH = 1024, 120, 48, 2, 1024
END = 3  # a stop token: with random weights turns end at random lengths


@dataclass(frozen=True)
class Result:
    name: str
    seconds: float
    cpu_seconds: float  # of the generating process: what other programs on the machine do not change
    sampled: int
    trajectories: int
    spared: int  # given tokens that needed no computation


def write_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from data_modules.tokenizer import train_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    train_tokenizer(["any text will do for a tokenizer"], 300).save_pretrained(folder)


def load(prompts: int, samples: int) -> tuple[list[list[int]], list[list[int]]]:
    draw = random.Random(0)
    starts = [[draw.randrange(4, VOCABULARY) for _ in range(draw.randrange(90, 130))] for _ in range(prompts)]
    observations = [[draw.randrange(4, VOCABULARY) for _ in range(OBSERVATION)] for _ in range(prompts * samples)]
    return [start for start in starts for _ in range(samples)], observations


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def run_engine(name, engine, starts, observations) -> Result:
    """Every trajectory is its own task: no barrier between turns."""

    async def trajectory(index: int) -> tuple[int, int]:
        ids, sampled, spared = list(starts[index]), 0, 0
        for turn in range(TURNS):
            sampling = SamplingParams(NEW_TOKENS, seed=index * TURNS + turn, stop_token_ids=(END,), stop=("</x>",))
            generation = await engine.generate(ids, sampling)
            sampled, spared = sampled + len(generation.token_ids), spared + generation.cached_tokens
            ids += [*generation.token_ids, *observations[index]]
        return sampled, spared

    await engine.start()
    try:
        await engine.generate(starts[0][:40], SamplingParams(8, temperature=0))  # warm
        begin, cpu = time.perf_counter(), cpu_seconds(engine.pid)
        done = await asyncio.gather(*(trajectory(i) for i in range(len(starts))))
        seconds, cpu = time.perf_counter() - begin, cpu_seconds(engine.pid) - cpu
    finally:
        await engine.close()
    return Result(name, seconds, cpu, sum(s for s, _ in done), len(starts), sum(c for _, c in done))


def run_generate(folder: Path, starts, observations) -> Result:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    sequences, sampled = [list(s) for s in starts], 0
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(TURNS):
        longest = max(map(len, sequences))
        ids = torch.tensor([[0] * (longest - len(s)) + s for s in sequences])
        mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences])
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            top_k=0,
            eos_token_id=END,
            pad_token_id=0,
        )
        for i, new in enumerate(out[:, longest:].tolist()):
            new = new[: new.index(END) + 1] if END in new else new
            sampled += len(new)
            sequences[i] += new + observations[i]
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return Result("transformers generate", seconds, cpu, sampled, len(starts), 0)


def figure(r: Result, base: Result) -> str:
    """Rates per processor second of the generating process; ``ratio``: trajectories, to those of ``base``."""
    ratio = (r.trajectories / r.cpu_seconds) / (base.trajectories / base.cpu_seconds)
    return (
        f"{r.name}: {r.seconds:.2f} s, {r.cpu_seconds:.2f} CPU s, {r.sampled / r.cpu_seconds:.0f} tokens per CPU s, "
        f"{r.trajectories / r.cpu_seconds:.1f} trajectories per CPU s, ratio {ratio:.2f}, "
        f"{r.spared} prefix tokens spared"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="trajectories per prompt")
    parser.add_argument("--skip-vllm", action="store_true")
    page.add_option(parser)
    options = parser.parse_args()
    starts, observations = load(options.prompts, options.samples)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        results = [run_generate(Path(folder), starts, observations)]
        engine = TransformersEngine(folder, slots=len(starts), max_length=MAX_LENGTH)
        results.append(asyncio.run(run_engine("TransformersEngine", engine, starts, observations)))
        if not options.skip_vllm and importlib.util.find_spec("vllm") is not None:
            engine = VLLMEngine(folder, max_length=MAX_LENGTH, max_num_seqs=len(starts))
            results.append(asyncio.run(run_engine("VLLMEngine", engine, starts, observations)))
    if options.markdown:
        print(page.rows(figure(r, results[0]) for r in results))
    else:
        print(f"{len(starts)} trajectories, {TURNS} turns, 1 thread, load average {os.getloadavg()[0]:.1f}")
        print("\n".join(figure(r, results[0]) for r in results))


if __name__ == "__main__":
    main()
