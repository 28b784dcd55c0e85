"""Memory of each of two CPU ranks while a model is trained whose states outweigh everything else, by strategy.

``python -m benchmarks.sharding [--layers 6] [--hidden 1024] [--cases ddp zero3 ...] [--markdown]``

A random Qwen3 (99 M parameters unless told otherwise) is trained in float32 by this project's modules and strategies:
two processes over gloo, three steps of 64 tokens. Figures are resident memory above what the process held before the
model was built, of the rank that has most: the peak while the model is loaded, while the strategy wraps it, in the last
forward and backward pass and in the last optimiser step, and what is held between steps. Beside them stands what
``make size`` counts (experiments/sizing.py) for the same training; its allowance for CUDA is left out.

Ranks are forks of one process that has imported everything and used nothing, so that imports belong to no case. With
offloading, host and device are the same memory here: the figure is all that there is of a rank, wherever it would lie.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines advertise AMX and cannot run it

import argparse
import ctypes
import multiprocessing
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  # what importing it takes belongs to no case
import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from transformers import Qwen3Config, Qwen3ForCausalLM

import lightning as L
from benchmarks import page
from data_modules.tokenizer import train_tokenizer
from experiments import sizing
from experiments.nodes import free_port
from experiments.sizing import Adapters, Dimensions, Training
from lightning_modules.dgpo import DGPO
from lightning_modules.lora import LoRA
from lightning_modules.sft import SFT
from lightning_modules.strategies import ZeRO2, ZeRO3
from rollout.trajectory import Action, ActionKind, Reward, StopReason, Task, Trajectory, Turn

RANKS, STEPS, TOKENS, PROMPT, VOCABULARY, RANK, SECONDS = 2, 3, 64, 16, 4096, 16, 900
MIB = 2**20
PHASES = ("loading", "wrapping", "backward", "step", "between")


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, and how it is spread over ranks.

    Attributes:
        algorithm: ``sft``, ``lora`` (SFT of adapters) or ``dgpo`` (policy, critic, teacher of half the layers each).
        strategy: in the words of ``sizing``.
        few: a fifth of the parameters are gathered at once at most.
        options: of the strategy; numbers are shares of the parameters.
    """

    algorithm: str
    strategy: sizing.Strategy
    few: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


OFFLOADED = {"offload_optimizer": True, "offload_parameters": True}
CASES = {
    "ddp": Case("sft", "ddp"),
    "zero2": Case("sft", "zero2"),
    "zero3": Case("sft", "zero3"),
    "zero3-few": Case("sft", "zero3", few=True),
    "zero3-few-sub-groups": Case("sft", "zero3", few=True, options={"sub_group_size": 0.05}),
    "lora-ddp": Case("lora", "ddp"),
    "dgpo-ddp": Case("dgpo", "ddp"),
    "dgpo-zero3-few": Case("dgpo", "zero3", few=True),
    "zero3-few-offload": Case("sft", "zero3", few=True, options=OFFLOADED),
}


def resident(name: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Recorder(L.Callback):
    """Bytes above what there was before the model was built: the peak of each phase, and ``between`` steps."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.before = 0

    def end(self, phase: str) -> None:
        self.found[phase] = resident("VmHWM") - self.before
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak begins anew

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        wrap = trainer.strategy.setup

        def measured(trainer: L.Trainer) -> None:
            self.end("loading")
            wrap(trainer)
            self.end("wrapping")

        trainer.strategy.setup = measured  # type: ignore[method-assign]  # no hook of Lightning's lies between the two
        self.before = resident("VmRSS")
        self.end("loading")

    def on_train_batch_start(self, *_: Any) -> None:
        self.found["between"] = resident("VmRSS") - self.before
        self.end("last step")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.end("backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self.end("step")


def make_model(folder: Path, layers: int, hidden: int) -> None:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": hidden // 8}  # as Qwen3-0.6B has them
    sizes |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    config = Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    train_tokenizer([Path(__file__).read_text()], vocab_size=512).save_pretrained(folder)


def make_row() -> Trajectory:
    ids = tuple(random.Random(0).randrange(VOCABULARY) for _ in range(TOKENS))
    n = TOKENS - PROMPT
    return Trajectory(
        task=Task("0", "?", (), "benchmark"), prompt_ids=ids[:PROMPT], response_ids=ids[PROMPT:], loss_mask=(1,) * n,
        logprobs=(-8.0,) * n, turns=(Turn(0, n, Action(ActionKind.ANSWER, answer=""), "eos", 0, n),), calls=(),
        stop_reason=StopReason.ANSWER, group="0", index=0, reward=Reward(0.0, {"em": 0.0}),
    )  # fmt: skip


def make_module(algorithm: str, folder: Path) -> L.LightningModule:
    if algorithm == "dgpo":
        return DGPO(str(folder / "half"), str(folder / "teacher"), mini_batches=1, logits_chunk=TOKENS)
    lora = LoRA(RANK) if algorithm == "lora" else None
    return SFT(str(folder / "whole"), schedule="constant", logits_chunk=TOKENS, lora=lora)


def make_strategy(case: Case, parameters: int) -> Any:
    if case.strategy == "ddp":
        return "ddp"
    options = {k: int(v * parameters) if isinstance(v, float) else v for k, v in case.options.items()}
    options["bucket_elements"] = parameters // 20 * 2  # stage 2 wants an even number
    if case.few:
        options["live_parameters"] = parameters // 5
    return (ZeRO2 if case.strategy == "zero2" else ZeRO3)(**options)


def counted(case: Case, dimensions: Dimensions) -> dict[str, float]:
    """Bytes of a rank as ``make size`` has them, by component."""
    dgpo = case.algorithm == "dgpo"
    training = Training(
        policy=dimensions,
        critic=dimensions if dgpo else None,
        frozen=(("teacher", dimensions, 4),) if dgpo else (),
        strategy=case.strategy,
        gpus=RANKS,
        adapters=Adapters(RANK) if case.algorithm == "lora" else None,
        micro_batch_tokens=TOKENS,
        logits_chunk=TOKENS,
        **({"live_parameters": dimensions.parameters // 5} if case.few else {}),
    )
    parts = sizing.memory(training, sizing.CHIPS["h100"])
    return {name: size for name, size in parts.items() if name not in ("overhead", "engine")}


STATES = ("weights", "gradients", "master weights", "optimizer", "teacher")  # what is held between steps


def train(case: Case, folder: Path, parameters: int, rank: int, port: int, pipe: Connection) -> None:
    """Be one of the ranks."""
    m_mmap_threshold = -3  # malloc.h: blocks from 1 MiB go back at once, so that the peak counts live tensors
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 20)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    torch.set_num_threads(1)
    recorder = Recorder()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=RANKS, strategy=make_strategy(case, parameters),
        callbacks=[recorder], **quiet,
    )  # fmt: skip
    batches = [[make_row()]] * (STEPS * RANKS)
    trainer.fit(make_module(case.algorithm, folder), torch.utils.data.DataLoader(batches, batch_size=None))
    pipe.send({phase: recorder.found[phase] for phase in PHASES})


def in_forks(function: Callable[..., None], *arguments: Any, count: int = RANKS) -> list[Any]:
    """What ``function(*arguments, rank, port, pipe)`` sends from each of so many forks of this process.

    Raises:
        RuntimeError: one of them ended without a word, or none was heard of in time; the others are stopped.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    forks = [context.Process(target=function, args=(*arguments, i, port, pipes[i][1])) for i in range(count)]
    try:
        for fork, (_, there) in zip(forks, pipes, strict=True):
            fork.start()
            there.close()  # so that its end is read as the end
        if not all(here.poll(SECONDS) for here, _ in pipes):
            raise RuntimeError(f"a rank was not done after {SECONDS} s; take fewer --layers")
        return [here.recv() for here, _ in pipes]
    except EOFError as error:
        raise RuntimeError("a rank ended without a figure; what it said stands above") from error
    finally:
        for fork in forks:
            fork.join(10)
            fork.kill()


def save_models(folder: Path, layers: int, hidden: int, rank: int, port: int, pipe: Connection) -> None:
    make_model(folder / "whole", layers, hidden)
    for name in ("half", "teacher"):
        make_model(folder / name, max(1, layers // 2), hidden)
    sizes = {}
    for name in ("whole", "half"):
        sizes[name] = Dimensions.of(Qwen3Config.from_pretrained(folder / name).to_dict())
    pipe.send(sizes)


def row(name: str, found: Mapping[str, int], parts: Mapping[str, float], naive: tuple[float, float] | None) -> str:
    peak, sum_ = max(found.values()), sum(parts.values())
    states = sum(size for part, size in parts.items() if part in STATES)
    ratio = "the naive form" if naive == (peak, sum_) else "no ddp beside it"
    if naive is not None and naive != (peak, sum_):
        ratio = f"naive / this {naive[0] / peak:.2f}, counted {naive[1] / sum_:.2f}"
    phases = ", ".join(f"{phase} {found[phase] / MIB:.0f}" for phase in PHASES[:-1])
    return (
        f"{name}: peak +{peak / MIB:.0f} MiB a rank, counted {sum_ / MIB:.0f} ({phases}); between steps "
        f"{found['between'] / MIB:.0f}, counted {states / MIB:.0f}; {ratio}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which to measure")
    page.add_option(parser)
    options = parser.parse_args()
    naive: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = in_forks(save_models, folder, options.layers, options.hidden, count=1)[0]
        for name, case in CASES.items():  # in this order: the naive forms first
            if name not in options.cases:
                continue
            dimensions = sizes["half" if case.algorithm == "dgpo" else "whole"]
            ranks = in_forks(train, case, folder, dimensions.parameters)
            found = {phase: max(rank[phase] for rank in ranks) for phase in PHASES}
            parts, against = counted(case, dimensions), "dgpo" if case.algorithm == "dgpo" else "sft"
            if name in ("ddp", "dgpo-ddp"):
                naive[against] = (max(found.values()), sum(parts.values()))
            figure = row(name, found, parts, naive.get(against))
            print(page.rows([figure]) if options.markdown else figure, flush=True)


if __name__ == "__main__":
    main()
