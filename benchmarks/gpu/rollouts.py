"""Rows about the engine: speeds, weight pushes, whole GRPO iterations beside it, a resume."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import gc
import math
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.gpu.frame import ROOT, Finding, Setting
from benchmarks.gpu.searches import EveryTurnSearches, SlowSearch
from benchmarks.gpu.shapes import RewardInTurn, make_questions, model_folder
from benchmarks.gpu.training import QUIET, Weights, precision
from callbacks.training.resume import IterationCheckpoint, find_checkpoint
from callbacks.training.throughput import Throughput
from callbacks.training.weight_sync import PROBE_TEXT, WeightSync, generation_gap
from data_modules.rollout_data_module import RolloutDataModule
from experiments.commands.command import answers
from experiments.registry.shapes import GB
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.batch import collate
from lightning_modules.models.policy import load_causal_lm, named_weights, token_logprobs
from rollout.engines.base import Engine, SamplingParams
from rollout.engines.vllm_engine import VLLMEngine
from rollout.engines.vllm_servers.engine import VLLMServers
from rollout.engines.vllm_servers.flags import serve_command
from rollout.environments.question_answering import QuestionAnswering
from rollout.system import RolloutSystem
from rollout.trajectory import Task, Trajectory

GAP = 0.05  # nats between log-probs of engine and trainer with the same weights
TOLD_APART = 3  # least ratio of the distance to other weights; below it the comparison proves nothing
ENGINE_SHARE = 0.35
ALONE = 0.7  # the engine's share in the row in which the trainer yields its memory
ASLEEP = 3 * GB  # most memory of a sleeping engine: its CUDA context and graphs
PROBED = 8  # tokens
SERVER_STARTS_S = 600.0
ROUNDS = 20  # most rollouts until a push cuts a turn


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the rollouts."""

    prompts: int
    samples: int
    turns: int
    turn_tokens: int
    latency_s: float
    max_tokens_per_micro_batch: int
    at_once: int  # sequences
    new_tokens: int  # of each of those
    lr: float  # large, so that the weights move measurably

    @property
    def max_length(self) -> int:
        return 512 + (self.turns + 1) * (self.turn_tokens + 256)


def sizes(setting: Setting) -> Sizes:
    if setting.cpu:
        return Sizes(2, 2, 1, 24, 0.005, 2048, 8, 16, lr=3e-2)
    return Sizes(16, 8, 3, 256, 0.1, 8192, 256, 256, lr=1e-3)


def own_engine(setting: Setting, share: float = ENGINE_SHARE, **options: Any) -> VLLMEngine:
    dtype = "float32" if setting.cpu else "bfloat16"
    return VLLMEngine(model_folder(setting), sizes(setting).max_length, dtype, share, **options)


def make_system(setting: Setting, engine: Engine, **options: Any) -> RolloutSystem:
    """Make a system that reads every turn as a search, so that all trajectories have the same number of turns."""
    size = sizes(setting)
    return RolloutSystem(
        engine,
        EveryTurnSearches(model_folder(setting), template="short"),
        QuestionAnswering({"search": SlowSearch(size.latency_s)}),
        RewardInTurn(),
        max_turns=size.turns,
        max_turn_tokens=size.turn_tokens,
        max_response_tokens=size.max_length - 512,
        max_observation_tokens=256,
        **options,
    )


# ---------------------------------------------------------------------- the engine alone
@cache
def system(setting: Setting) -> RolloutSystem:
    found = make_system(setting, own_engine(setting, request_seeds=True), in_flight_updates=True)
    found.start()
    return found


def sequences(setting: Setting) -> Finding:
    """Measure tokens per second of many sequences: without seeds, with a seed per request, and with stop strings (which
    need decoding)."""
    rollouts, size = system(setting), sizes(setting)
    prompts = [list(range(100 + i % 100, 164 + i % 100)) for i in range(size.at_once)]
    plain = SamplingParams(size.new_tokens)
    kinds = {"plain": plain, "seeds": plain, "stop strings": replace(plain, stop=("</search>", "</answer>"))}
    rates = {}
    for name, sampling in kinds.items():
        for new_tokens in (4, size.new_tokens):  # the first warms up
            asked = [
                replace(sampling, max_new_tokens=new_tokens, seed=i if name == "seeds" else None)
                for i in range(size.at_once)
            ]
            began = time.perf_counter()
            made = rollouts.background(_all(rollouts.engine, prompts, asked)).result()
            rates[name] = sum(len(one.token_ids) for one in made) / (time.perf_counter() - began)
    figure = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    slowest = min(rates.values()) / rates["plain"]
    figure = f"{size.at_once} sequences, tokens/s: {figure}; the slowest at {slowest:.0%} of plain"
    cure = "take seeds and stop strings out (data.rollouts.protocol), or report this row"
    return Finding(setting.cpu or slowest >= 0.25, figure, cure)


async def _all(engine: Engine, prompts: Sequence[list[int]], asked: Sequence[SamplingParams]) -> list[Any]:
    return await asyncio.gather(*(engine.generate(ids, one) for ids, one in zip(prompts, asked, strict=True)))


def between_steps(setting: Setting) -> Finding:
    """Push two models alternately during sampling. Each token's log-prob must be that of the model whose version it
    names."""
    rollouts, size = system(setting), sizes(setting)
    device, dtype = ("cpu", "float32") if setting.cpu else ("cuda", "bfloat16")
    models = [load_causal_lm(model_folder(setting), dtype).to(device) for _ in range(2)]
    torch.manual_seed(0)
    with torch.no_grad():
        for p in models[1].parameters():
            if p.dim() > 1:
                p += p.std() * torch.randn_like(p)
    tasks = [Task(f"q{i}", f"Who lives near tower {i}?", ("nobody",), "check") for i in range(size.prompts)]
    sampling = SamplingParams(size.turn_tokens)
    first = version = rollouts.policy_version
    done: list[Trajectory] = []
    cut = 0
    for batch in range(ROUNDS):  # a push on a busy machine may fall between two turns
        future = rollouts.background(rollouts.roll_out(tasks, n=size.samples, sampling=sampling, seed=0, batch=batch))
        while not future.done():
            time.sleep(0.1)
            version += 1
            rollouts.load_weights(named_weights(models[(version - first) % 2]), version)
        done += future.result()
        cut = sum(bool(turn.version_runs) for t in done for turn in t.turns)
        if cut:
            break
    batch = collate(done, device)
    with torch.no_grad():
        logprobs = [_scored(model, batch, size.max_tokens_per_micro_batch) for model in models]
    own, other = [], []
    for row, t in enumerate(done):
        at = len(t.prompt_ids)
        for i, (sampled, mask) in enumerate(zip(t.token_versions, t.loss_mask, strict=True)):
            if mask:
                gaps = [abs(x[row][at + i] - t.logprobs[i]) for x in logprobs]
                own.append(gaps[(sampled - first) % 2])
                other.append(gaps[1 - (sampled - first) % 2])
    gap, wrong = statistics.fmean(own), statistics.fmean(other)
    figure = (
        f"{version - first} pushes, {cut} turns cut by one; {gap:.1e} nats off their models, {wrong:.1e} off others"
    )
    ok = cut > 0 and gap < GAP and wrong > TOLD_APART * max(gap, 1e-9)
    return Finding(ok, f"{figure}; below {GAP:g} expected", "train with --data.rollouts.in_flight_updates false")


def _scored(model: Any, batch: Any, budget: int) -> list[list[float]]:
    """Return log-probs [B, T], computed row by row in micro-batches."""
    from lightning_modules.batch import score

    return score(batch, lambda micro: token_logprobs(model, micro).logprobs, budget).tolist()


# ---------------------------------------------------------------------- iterations beside the engine
class Run(L.Callback):
    """Measures a training: before each push how far the engine's weights are from the module's, and memory.

    Must be the first callback.

    Args:
        look: whether to measure the distance, which wakes a sleeping engine.
    """

    moved: float  # largest change of a weight
    last_step: int  # global_step at the end
    trainer_peak = in_use = total = math.nan  # bytes of the GPU: as torch counts them, of all processes, whole

    def __init__(self, look: bool) -> None:
        self.look = look
        self.metrics: list[dict[str, float]] = []  # of each iteration
        self.stale: list[float] = []  # nats between the engine's old weights and the trainer's new ones
        self.first_step: int | None = None  # global_step at the start
        self.training = self.generating = 0.0  # bytes that are not the trainer's, while it trains and after a push

    def median(self, name: str) -> float:
        """Return the median over the iterations without the first, which compiles."""
        return statistics.median(m.get(name, 0.0) for m in self.metrics[1:] or self.metrics)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.first_step is None:
            self.first_step = trainer.global_step
        self.training = max(self.training, others())

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.look:
            return
        rollouts: RolloutSystem = trainer.datamodule.rollouts  # type: ignore[attr-defined]
        ids, made = rollouts.probe(PROBE_TEXT, PROBED)
        self.stale.append(max(generation_gap(module.policy, ids, one) for one in made.values()))


class Logged(L.Callback):
    """Callback that collects the logged metrics. Must be the last callback."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics["tokens"] = sum(len(t.prompt_ids) + len(t.response_ids) for t in batch)
        metrics["sampled"] = sum(sum(t.loss_mask) for t in batch)
        self.run.metrics.append(metrics)
        self.run.generating = max(self.run.generating, others())


def others() -> float:
    """Return the bytes of the GPU that are not this process's tensors: the engine and both CUDA contexts."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def train(
    setting: Setting,
    engine: Engine,
    steps: int,
    max_off_policy_iterations: int = 0,
    sleep_mode: bool = False,
    keep: bool = False,
    resume: bool = False,
) -> Run:
    """Train GRPO with rollouts until ``global_step == steps``.

    Args:
        keep: write a checkpoint at the end, in the folder ``run``.
        resume: continue from that checkpoint.
    """
    gc.collect()  # from an earlier training
    torch.cuda.empty_cache()
    size, folder = sizes(setting), Path(setting.folder) / "run"
    folder.mkdir(exist_ok=True)
    questions = folder / "questions.parquet"
    make_questions(questions, 4 * size.prompts, words=40)
    data = RolloutDataModule(
        make_system(setting, engine, sleep_mode=sleep_mode),
        [str(questions)],
        prompts_per_iteration=size.prompts,
        group_size=size.samples,
        iterations=8,
        max_off_policy_iterations=max_off_policy_iterations,
    )
    module = GRPO(
        model_folder(setting), lr=size.lr, num_mini_batches=2, gradient_checkpointing=True, packing=True,
        importance_cap=2.0, max_tokens_per_micro_batch=size.max_tokens_per_micro_batch,
    )  # fmt: skip
    run, weights = Run(look=not sleep_mode), Weights()
    callbacks: list[L.Callback] = [run, WeightSync(probe=True, probe_tokens=PROBED), Throughput(), weights]
    if keep:
        callbacks.append(IterationCheckpoint(every_n_iterations=steps, keep_best=False))
    trainer = L.Trainer(
        accelerator="cpu" if setting.cpu else "cuda",
        devices=1,
        precision=precision(setting),
        max_epochs=1,
        max_steps=steps,
        callbacks=[*callbacks, Logged(run)],
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=folder,
        **(dict.fromkeys(QUIET, False) | {"enable_checkpointing": keep}),
    )
    try:
        trainer.fit(module, datamodule=data, ckpt_path=str(find_checkpoint(folder)) if resume else None)
        if not setting.cpu:
            free, run.total = torch.cuda.mem_get_info()
            run.trainer_peak, run.in_use = torch.cuda.max_memory_allocated(), run.total - free
    finally:
        data.rollouts.close()
    run.moved, run.last_step = weights.moved, trainer.global_step
    return run


def steps_of(setting: Setting) -> int:
    return 2 if setting.cpu else 3


@cache
def run_once(setting: Setting) -> Run:
    return train(setting, own_engine(setting, transport="ipc"), steps_of(setting), keep=True)


@cache
def run_ahead(setting: Setting) -> Run:
    return train(setting, own_engine(setting, transport="files"), steps_of(setting), max_off_policy_iterations=1)


def timed(found: Run, setting: Setting) -> str:
    """Measure the seconds of an iteration and of its parts."""
    size, training, waiting = sizes(setting), found.median("time/train"), found.median("time/rollout")
    whole = training + waiting + found.median("time/sync") + found.median("time/checkpoint")
    return (
        f"{whole:.2f} s an iteration: training {training:.2f} ({found.median('tokens') / training:,.0f} tokens/s), "
        f"waiting for rollouts {waiting:.2f} ({found.median('sampled') / waiting:,.0f} sampled tokens/s), weight sync "
        f"{found.median('time/sync'):.2f}; {size.prompts * size.samples / whole:.1f} trajectories/s"
    )


def iterations(setting: Setting) -> Finding:
    found = run_once(setting)
    numbers = [m[name] for m in found.metrics for name in ("train/loss_policy", "train/grad_norm")]
    norm = min(m["train/grad_norm"] for m in found.metrics)
    ok = all(map(math.isfinite, numbers)) and norm > 0 and found.moved > 0 and found.last_step == steps_of(setting)
    figure = f"{timed(found, setting)}; grad_norm at least {norm:.2g}"
    return Finding(ok, figure, "look at the rows of tier A first")


def beside(setting: Setting) -> Finding:
    found = run_once(setting)
    if setting.cpu:
        return Finding(found.last_step == steps_of(setting), "both ran; memory is shared out on a GPU only")
    figure = (
        f"trainer's peak {found.trainer_peak / GB:.1f} GB, engine's share {ENGINE_SHARE * found.total / GB:.1f}, "
        f"in use {found.in_use / GB:.1f} of {found.total / GB:.1f}"
    )
    cure = "a smaller --data.rollouts.engine.gpu_memory_utilization or --model.max_tokens_per_micro_batch (make size)"
    return Finding(found.in_use < 0.97 * found.total, figure, cure)


def pushed_by_ipc(setting: Setting) -> Finding:
    return synchronised(run_once(setting), "train with --data.rollouts.engine.transport files, and report this row")


def pushed_by_files(setting: Setting) -> Finding:
    return synchronised(run_ahead(setting), "--data.rollouts.engine.dtype float32 tells rounding from wrong weights")


def synchronised(found: Run, cure: str) -> Finding:
    """Check by log-probs of a continuation that the engine has the moved weights."""
    gap, stale = max(m["weight_sync/probe_gap"] for m in found.metrics), min(found.stale)
    figure = f"{found.median('time/sync'):.2f} s; {gap:.1e} nats after the push, {stale:.1e} before it"
    ok = gap < GAP and stale > TOLD_APART * gap
    return Finding(ok, f"{figure}; below {GAP:g} expected, and {TOLD_APART} times as far before", cure)


def asleep(setting: Setting) -> Finding:
    """Repeat the iterations with ``sleep_mode: true`` and an engine that would not fit beside the trainer's states."""
    found = train(setting, own_engine(setting, ALONE), steps_of(setting), sleep_mode=True)
    gap = max(m["weight_sync/probe_gap"] for m in found.metrics)
    figure = f"{timed(found, setting)}; {gap:.1e} nats after a push"
    if not setting.cpu:
        figure += f"; beside the trainer {found.training / GB:.1f} GB asleep, {found.generating / GB:.1f} awake"
    ok = found.last_step == steps_of(setting) and gap < GAP and found.training <= ASLEEP
    return Finding(ok, f"{figure}; at most {ASLEEP / GB:.0f} GB asleep", "train with --data.rollouts.sleep_mode false")


def resumed(setting: Setting) -> Finding:
    """Resume training from the checkpoint of the row "GRPO iterations", in a new process with a new engine."""
    checkpoint, done = find_checkpoint(Path(setting.folder) / "run"), steps_of(setting)
    if checkpoint is None:
        return Finding(False, "there is no checkpoint", "mend 'GRPO iterations', which writes it (--only needs both)")
    found = train(setting, own_engine(setting), done + 1, resume=True)
    gap = found.metrics[-1]["weight_sync/probe_gap"]
    ok = (found.first_step, found.last_step, len(found.metrics)) == (done, done + 1, 1) and gap < GAP
    figure = f"from global_step {found.first_step} to {found.last_step}, {done} to {done + 1} expected; {gap:.1e} nats"
    return Finding(ok, figure, "look at 'push by IPC'; if that is well, report this row")


def ahead(setting: Setting) -> Finding:
    """Generate the next batch while training on this one (one iteration off-policy)."""
    found = run_ahead(setting)
    hidden = found.median("throughput/hidden_generation")
    return Finding(found.last_step == steps_of(setting), f"{timed(found, setting)}; {hidden:.0%} of generation hidden")


def pushed_by_nccl(setting: Setting) -> Finding:
    """Push by NCCL to a server on the second GPU."""
    with served(setting) as url:
        engine = VLLMServers([url], model_folder(setting), sizes(setting).max_length, transport="nccl")
        found = train(setting, engine, steps_of(setting))
    return synchronised(found, "NCCL_DEBUG=INFO says how the GPUs are connected; else transport: files")


@contextmanager
def served(setting: Setting) -> Iterator[str]:
    options = {"model": model_folder(setting), "max_length": sizes(setting).max_length, "dtype": "bfloat16"}
    options["gpu_memory_utilization"] = ENGINE_SHARE
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command, added = serve_command(options, port, "127.0.0.1", False, "nccl", 0, [])
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environment = os.environ | added | {"CUDA_VISIBLE_DEVICES": devices[1]}
    server = subprocess.Popen(command, cwd=ROOT, env=environment)
    deadline, url = time.monotonic() + SERVER_STARTS_S, f"http://127.0.0.1:{port}"
    try:
        while not answers(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not answer at {url} within {SERVER_STARTS_S:g} s; see its output")
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait()
