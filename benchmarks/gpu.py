"""GPU benchmark: speeds, memory and weight synchronisation of GRPO at the true size of published models.

    python -m benchmarks.gpu [--models qwen3-0.6b qwen3-1.7b] [--staleness 0 1] [--iterations 6]

Random weights in the shape of the published models, so that nothing is downloaded; vLLM and the trainer share one GPU;
every turn is read as a search whose answer comes after ``--latency-ms`` (log-normal, that is its median), so that all
trajectories have ``--turns`` turns and a last one. Each model and staleness is a process of its own; the first two
iterations (compilation, caches) are not counted, the medians of the others are:

* training: tokens of the trajectories per second of the training step, and model-flops utilisation (the scoring pass
  and forward and backward at 1 + 3 forwards; what gradient checkpointing computes again is not counted) against the
  chip's peak in ``experiments.registry.sizing.CHIPS``;
* sampling: sampled tokens per second of generation, by vLLM; where it is hidden behind training (staleness 1) the
  whole iteration says more;
* weight sync: seconds from the optimiser's step to an engine that holds the new weights;
* memory: the trainer's peak, as torch counts it, and the GPU's as a whole.

Without a GPU it refuses, unless ``--tiny`` asks for a model of 0.2 M parameters: that proves that the script runs, and
its metrics mean nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from experiments.registry.known_models import MODELS
from experiments.registry.sizing import CHIPS, Chip, Dimensions, Training, training_flops

TINY = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 1024, "tie_word_embeddings": True,
}  # fmt: skip
WARM_UP = 2  # iterations that are not counted
GB = 1e9
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def make_questions(path: Path, number: int, words: int) -> None:
    """Questions of about so many tokens: their contents do not matter to random weights."""
    from data_modules.datasets.questions import write_tasks
    from rollout.trajectory import Task

    draw = random.Random(0)
    texts = [" ".join(draw.choice(("town", "tower", "sea", "market")) for _ in range(words)) for _ in range(number)]
    write_tasks(path, [Task(f"q{i}", text, ("nowhere",), "bench") for i, text in enumerate(texts)])


def make_data(options: argparse.Namespace, folder: Path) -> Any:
    from benchmarks.rollouts import EveryTurnSearches, SlowSearch
    from data_modules.rollout_data_module import RolloutDataModule
    from rollout.engines.vllm_engine import VLLMEngine
    from rollout.environments.question_answering import QuestionAnswering
    from rollout.rewards.qa import ExactMatchReward
    from rollout.system import RolloutSystem

    model, length = str(folder / "model"), 1024 + (options.turns + 1) * (options.turn_tokens + 256)
    rollouts = RolloutSystem(
        VLLMEngine(model, length, "float32" if options.tiny else "bfloat16", options.engine_share),
        EveryTurnSearches(model, template="short"),
        QuestionAnswering({"search": SlowSearch(options.latency_ms / 1000)}),
        ExactMatchReward(),
        max_turns=options.turns,
        max_turn_tokens=options.turn_tokens,
        max_response_tokens=length - 1024,
        max_observation_tokens=256,
        max_length=length,
    )
    questions = folder / "questions.parquet"
    make_questions(questions, 4 * options.prompts, words=40)
    return RolloutDataModule(
        rollouts,
        [str(questions)],
        prompts_per_step=options.prompts,
        samples_per_prompt=options.samples,
        iterations=options.iterations,
        staleness=options.staleness,
    )


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """Train for a few iterations in this process; medians of what was logged.

    Args:
        settings: the options, with one model and one staleness.
    """
    options = argparse.Namespace(**settings)
    from experiments.stages.stage import quieten

    quieten()
    import lightning as L
    import torch

    from callbacks.training.throughput import Throughput
    from callbacks.training.weight_sync import WeightSync
    from lightning_modules.algorithms.grpo import GRPO

    class Watch(L.Callback):
        """Every logged metric of the iterations that count."""

        def __init__(self) -> None:
            self.logged: dict[str, list[float]] = {}

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx < WARM_UP:
                return
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            metrics["tokens"] = sum(len(t.prompt_ids) + len(t.response_ids) for t in batch)
            metrics["sampled"] = sum(sum(t.loss_mask) for t in batch)
            for name, value in metrics.items():
                self.logged.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, dtype = (TINY, "float32") if options.tiny else (MODELS[options.model], "bfloat16")
        common.save_random_model(folder / "model", dtype, **config, max_position_embeddings=32768)
        watch = Watch()
        data = make_data(options, folder)
        module = GRPO(
            str(folder / "model"), lr=1e-6, mini_batches=2, gradient_checkpointing=True,
            micro_batch_tokens=options.micro_batch_tokens,
        )  # fmt: skip
        trainer = L.Trainer(
            accelerator="auto",
            devices=1,
            precision="32-true" if options.tiny else "bf16-mixed",
            max_epochs=1,
            callbacks=[WeightSync(), Throughput(), watch],
            num_sanity_val_steps=0,
            limit_val_batches=0,
            use_distributed_sampler=False,
            default_root_dir=folder,
            **dict.fromkeys(QUIET, False),
        )
        try:
            trainer.fit(module, datamodule=data)
            memory = {}
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                memory = {"peak": torch.cuda.max_memory_allocated(), "in_use": float(total - free)}
        finally:
            data.rollouts.close()
    return {name: statistics.median(values) for name, values in watch.logged.items()} | memory


def chip_here() -> Chip | None:
    """The data sheet of this GPU; None if it is not among those known, or there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower()
    return next((chip for key, chip in CHIPS.items() if key in name), None)


def metric(options: argparse.Namespace, model: str, staleness: int, found: dict[str, float], chip: Chip | None) -> str:
    config = TINY if options.tiny else MODELS[model]
    tokens, trajectories = found["tokens"], options.prompts * options.samples
    speed = tokens / found["time/train"]
    flops = training_flops(Training(policy=Dimensions.of(config)), context=tokens / trajectories / 2)
    utilisation = f" ({speed * flops / chip.flops:.0%} of {chip.name}'s peak)" if chip else ""
    waited = found["time/rollout"]
    iteration = found["time/train"] + waited + found.get("time/sync", 0.0)
    parts = [
        f"training {speed:,.0f} tok/s{utilisation}",
        f"waiting for rollouts {waited:.2f} s ({found['sampled'] / waited:,.0f} sampled tok/s)",
        f"weight sync {found.get('time/sync', 0.0):.2f} s",
        f"iteration {iteration:.2f} s, {trajectories / iteration:.1f} trajectories/s",
    ]
    if "peak" in found:
        parts.append(f"trainer's peak {found['peak'] / GB:.1f} GB, GPU {found['in_use'] / GB:.1f} GB")
    return f"{'tiny' if options.tiny else model}, staleness {staleness}: {', '.join(parts)}"


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-1.7b"], choices=list(MODELS))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=256)
    parser.add_argument("--latency-ms", type=float, default=100.0)
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--engine-share", type=float, default=0.4)
    parser.add_argument("--tiny", action="store_true", help="a model of 0.2 M parameters, on any machine")
    options = parser.parse_args()
    if options.iterations <= WARM_UP:
        sys.exit(f"--iterations {options.iterations}: expected more than the {WARM_UP} that are not counted")
    import torch

    if not options.tiny and not torch.cuda.is_available():
        sys.exit("no GPU was found: this measures what only a GPU shows (--tiny tries the script on any machine)")
    common.print_metrics(options, metrics(options))


def metrics(options: argparse.Namespace) -> Iterator[str]:
    chip = chip_here()
    for model in options.models[: 1 if options.tiny else None]:
        for staleness in options.staleness:
            found = common.in_child(measure, vars(options) | {"model": model, "staleness": staleness})
            yield metric(options, model, staleness, found, chip)


if __name__ == "__main__":
    main()
