"""Seconds per training iteration when batches are generated ahead of the training, against when each is waited for.

    python -m benchmarks.staleness [--prompts 4] [--samples 4] [--turns 2] [--iterations 6] [--repeats 2]

GRPO on a random Qwen3 (4 layers, hidden 128) with everything that a training has: data module, rollout system, the
embedded engine in its process, weight updates. Each trajectory is ``turns`` turns of up to 24 tokens, each read as a
search, and a last one; a search takes a log-normal time with medians of 0, 50 and 200 ms. Trainer and engine have one
thread each. The modes take turns within each repeat, on the same engine: ``staleness: 0``, ``staleness: 1`` with
``in_flight: finish``, and the same with ``continue``. The first two iterations of each are not counted (the first batch
is never ahead). Medians over iterations and repeats; the ratio is seconds at staleness 0 by seconds in the mode.

What can be hidden is the shorter of training and generation. Where both compute on the same cores the gain is what
cores are idle: on two cores that nothing else uses both run at full speed; time spent waiting for tools is hidden
anywhere.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import lightning as L
from benchmarks import page
from benchmarks.rollouts import MEDIANS_S, TURN_TOKENS, EveryTurnSearches, SlowSearch, make_model
from callbacks.throughput import Throughput
from callbacks.weight_sync import WeightSync
from data_modules.datasets.questions import write_tasks
from data_modules.rollout_data_module import RolloutDataModule
from lightning_modules.grpo import GRPO
from rollout.engines.transformers_engine import TransformersEngine
from rollout.environments.question_answering import QuestionAnswering
from rollout.sampling import derive_seed
from rollout.system import InFlight, RolloutSystem
from rollout.trajectory import Reward, Task, Trajectory

SKIPPED = 2
MODES: dict[str, tuple[int, InFlight]] = {
    "staleness 0": (0, "finish"),
    "staleness 1, finish": (1, "finish"),
    "staleness 1, continue": (1, "continue"),
}
FIGURES = {"waits": "time/rollout", "hidden": "throughput/hidden_generation", "lag": "train/version_lag"}


class ArbitraryReward:
    """0 or 1 by the response, so that there is something to learn from."""

    def score(self, trajectory: Trajectory) -> Reward:
        return Reward(float(derive_seed(trajectory.response_ids) % 2))


class Clock(L.Callback):
    """By iteration: seconds since the one before, and what was logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._last = 0.0

    def on_train_start(self, *_: Any) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now, logged = time.perf_counter(), trainer.callback_metrics
        self.rows.append({"seconds": now - self._last, **{k: float(logged[name]) for k, name in FIGURES.items()}})
        self._last = now


def train(system: RolloutSystem, model: Path, questions: Path, mode: str, options: argparse.Namespace) -> list[Any]:
    """One short training; the figures of the iterations that count."""
    staleness, system.in_flight = MODES[mode]
    data = RolloutDataModule(
        system, [str(questions)], prompts_per_step=options.prompts, samples_per_prompt=options.samples,
        iterations=options.iterations, staleness=staleness, seed=0,
    )  # fmt: skip
    clock = Clock()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [Throughput(), clock, WeightSync()]
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, limit_val_batches=0, callbacks=callbacks, **quiet)
    trainer.fit(GRPO(str(model), mini_batches=2, importance_cap=2.0, micro_batch_tokens=4096), datamodule=data)
    return clock.rows[SKIPPED:]


def measure(options: argparse.Namespace, folder: Path) -> list[str]:
    model, questions = make_model(folder / "model"), folder / "questions.parquet"
    count = options.prompts * options.iterations
    write_tasks(questions, [Task(f"q{i}", f"What lies near town {i}?", ("x",), "bench") for i in range(count)])
    search = SlowSearch(0.0)
    trajectories = options.prompts * options.samples
    system = RolloutSystem(
        TransformersEngine(str(model), slots=2 * trajectories, max_length=1024),
        EveryTurnSearches(str(model), template="short"),
        QuestionAnswering({"search": search}),
        ArbitraryReward(),
        max_turns=options.turns,
        max_turn_tokens=TURN_TOKENS,
        max_length=1024,
    )
    lines = []
    try:
        for search.median_s in MEDIANS_S:
            found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
            for _ in range(options.repeats):
                for mode, rows in found.items():
                    rows += train(system, model, questions, mode, options)
            lines += [figure(mode, search.median_s, found) for mode in MODES]
    finally:
        system.close()
    return lines


def figure(mode: str, median_s: float, found: dict[str, list[dict[str, float]]]) -> str:
    def median(which: str, name: str) -> float:
        return statistics.median(row[name] for row in found[which])

    seconds, naive = median(mode, "seconds"), median("staleness 0", "seconds")
    return (
        f"search takes {1000 * median_s:.0f} ms (median), {mode}: {seconds:.2f} s per iteration, "
        f"{median(mode, 'waits'):.2f} s of them waiting for rollouts, {median(mode, 'hidden'):.0%} of the generation "
        f"hidden, tokens {median(mode, 'lag'):.2f} iterations old, ratio {naive / seconds:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=6, help=f"the first {SKIPPED} of them are not counted")
    parser.add_argument("--repeats", type=int, default=2)
    page.add_option(parser)
    options = parser.parse_args()
    if options.iterations <= SKIPPED:
        parser.error(f"--iterations {options.iterations}: expected more than {SKIPPED}, which are not counted")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(options, Path(folder))
    print(page.rows(lines) if options.markdown else "\n".join(lines))


if __name__ == "__main__":
    main()
