"""Rows about training: fast forms against plain ones, a GRPO step, its memory and speed, DeepSpeed on one rank."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import lightning as L
import torch

from benchmarks.gpu.frame import Finding, Setting
from benchmarks.gpu.shapes import FEW, chip_here, model_folder, shape_of, trajectories
from callbacks.training.throughput import Throughput
from experiments.registry import sizing
from experiments.registry.shapes import GB, Dimensions, GPUSpec
from experiments.registry.sizing import Training
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.models.lora import LoRA
from lightning_modules.models.policy import output_head
from lightning_modules.models.projection import LOGITS_CHUNK, LMHead, TokenStatistics
from rollout.trajectory import Trajectory

QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
GRADIENT_ERROR = {"bf16-mixed": 0.05, "32-true": 1e-3}  # relative; attention to a wrong token gives tens of per cent
LOGPROB_ERROR = {"bf16-mixed": 0.02, "32-true": 1e-4}  # nats, mean
CHUNKED_ERROR = 1.5  # times the error of log_softmax in the same precision
MEMORY_ERROR = 0.15  # of the counted peak
VOCABULARY_SHARE = 0.25  # of a training step, at most
UTILISATION = 0.1  # of the chip's peak, at least
ITERATIONS = 4  # iterations of a timed training; the first compiles and is not counted


def precision(setting: Setting) -> str:
    return "32-true" if setting.cpu else "bf16-mixed"


def fit(setting: Setting, module: GRPO, batches: Sequence[list[Trajectory]], **options: Any) -> L.Trainer:
    """Train on the given rollout batches, one iteration for each."""
    options = {"accelerator": "cpu" if setting.cpu else "cuda", "precision": precision(setting), **options}
    trainer = L.Trainer(devices=1, max_steps=len(batches), **dict.fromkeys(QUIET, False), **options)
    trainer.fit(module, train_dataloaders=torch.utils.data.DataLoader(list(batches), None))
    return trainer


# ---------------------------------------------------------------------- two forms of one step
class GradientStep(GRPO):
    """Takes a plain SGD step at learning rate 1, so the step is the gradient. AdamW's first step is near the gradient's
    sign, which noise can flip."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.policy.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)}


class Weights(L.Callback):
    """Keeps the policy's weights before and after the training, in float32, on the host."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.start = self.of(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.end = self.of(trainer, module)

    @property
    def moved(self) -> float:
        """The largest change of a weight."""
        return max(float((self.end[name] - start).abs().max()) for name, start in self.start.items())

    @staticmethod
    def of(trainer: L.Trainer, module: Any) -> dict[str, torch.Tensor]:
        whole = torch.Tensor.detach
        if hasattr(trainer.strategy, "deepspeed_engine"):
            from deepspeed.utils import safe_get_full_fp32_param as whole
        return {name: whole(p).float().to("cpu", copy=True) for name, p in module.policy.named_parameters()}


@dataclasses.dataclass
class Step:
    """Result of one optimiser step: log-probs [tokens] before it, and the gradient by name."""

    logprobs: torch.Tensor
    gradient: dict[str, torch.Tensor]


def one_step(setting: Setting, trainer: dict[str, Any] | None = None, **model: Any) -> Step:
    """Take one step on a model with few layers, with rows of several lengths in two micro-batches or more."""
    folder = model_folder(setting, FEW)
    lengths = [20, 60, 33, 51] if setting.cpu else [130, 700, 311, 1000, 64, 257, 512, 900]
    rows = trajectories(lengths, 4, shape_of(setting)["vocab_size"])
    torch.manual_seed(0)  # adapters start at random
    weights = Weights()
    module = GradientStep(
        folder, temperature=1.0, max_tokens_per_micro_batch=2 * max(lengths), logits_chunk=256, max_grad_norm=0.0,
        num_mini_batches=1, **model,
    )  # fmt: skip
    fit(setting, module, [rows], callbacks=[weights], **trainer or {})
    logprobs = [x for _, values in module.last_token_values for x in values["old_logprobs"]]
    step = {name: weights.start[name] - end for name, end in weights.end.items()}
    return Step(torch.tensor(logprobs), step)


@cache
def expected(setting: Setting, lora: LoRA | None = None) -> tuple[Step, tuple[float, float]]:
    """Return the padded form in float32, and the errors of the padded form in bfloat16."""
    exact = one_step(setting, {"precision": "32-true"}, lora=lora)
    return exact, (0.0, 0.0) if setting.cpu else differences(exact, one_step(setting, lora=lora))


def compared(
    setting: Setting, instead: str, trainer: dict[str, Any] | None = None, lora: LoRA | None = None, **model: Any
) -> Finding:
    """Compare the optimiser step in one form (packed, chunked, ...) with the padded form in float32."""
    # first, because Liger and ZeRO-3 change how models are built
    exact, (plain_gap, plain_error) = expected(setting, lora)
    gap, error = differences(exact, one_step(setting, trainer, lora=lora, **model))
    most = LOGPROB_ERROR[precision(setting)], GRADIENT_ERROR[precision(setting)]
    figure = f"log-probs off by {gap:.0e} nats of {most[0]:g} at most, gradient by {error:.1e} of {most[1]:g}"
    if not setting.cpu:
        figure += f" (bfloat16 without it: {plain_gap:.0e}, {plain_error:.1e})"
    return Finding(gap <= most[0] and error <= most[1], figure, f"train {instead}, and report this row")


def differences(exact: Step, found: Step) -> tuple[float, float]:
    """Return the mean difference of the log-probs in nats, and the norm of the gradients' difference over the exact
    norm."""
    squares = [float((found.gradient[k] - g).double().square().sum()) for k, g in exact.gradient.items()]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in exact.gradient.values()))
    if not norm > 0:
        raise ValueError(f"the gradient's norm is {norm}; rewards that differ should give one above 0")
    return float((found.logprobs - exact.logprobs).abs().mean()), math.sqrt(sum(squares)) / norm


def sharded(setting: Setting, strategy: str) -> Finding:
    import lightning_modules.sharding.strategies  # noqa: F401  # registers zero2 and zero3

    return compared(setting, "with --trainer.strategy ddp", {"strategy": strategy})


packed = partial(compared, instead="with --model.packing false", packing=True)
lora = partial(compared, instead="without model.lora", lora=LoRA(), packing=True)
liger = partial(compared, instead="with --model.liger false", liger=True)
zero2 = partial(sharded, strategy="zero2")
zero3 = partial(sharded, strategy="zero3")


# ---------------------------------------------------------------------- the output layer alone
def log_softmax(head: LMHead, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Compute log-probs of the targets and entropies [N, 2] in the plain form, which holds all logits."""
    logits = head(hidden)
    logprobs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return torch.stack([logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)], -1)


def chunked(setting: Setting) -> Finding:
    """Measure the errors against float64 of log-probs, entropies and their gradients, once computed in chunks and
    once by log_softmax in the same precision."""
    n, size, vocabulary = (64, 32, 1024) if setting.cpu else (1024, 1024, 151_936)
    device = "cpu" if setting.cpu else "cuda"
    torch.manual_seed(0)
    head = LMHead(size, vocabulary, bias=False, device=device)
    torch.nn.init.normal_(head.weight, std=1.6 / math.sqrt(size))
    hidden, factors = torch.randn(n, size, device=device), torch.randn(n, 2, device=device)
    targets = torch.multinomial((head(hidden.detach()).detach() / 0.7).softmax(-1), 1)[:, 0]

    def differentiated(form: Callable[[LMHead, torch.Tensor], torch.Tensor], *to: torch.dtype) -> list[torch.Tensor]:
        layer = copy.deepcopy(head).to(*to)
        states = hidden.to(*to).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=not setting.cpu and not to):
            columns = form(layer, states)
        gradients = torch.autograd.grad((columns * factors).sum(), [states, layer.weight])
        return [x.detach().double() for x in (*columns.unbind(-1), *gradients)]

    def plain(layer: LMHead, states: torch.Tensor) -> torch.Tensor:
        return log_softmax(layer, states, targets, 0.7)

    def in_chunks(layer: LMHead, states: torch.Tensor) -> torch.Tensor:
        return layer(states, function=TokenStatistics(0.7, entropy=True), rows=(targets,), chunk=n // 4)

    exact = differentiated(plain, torch.float64)
    errors = [
        [float((found - x).norm() / x.norm()) for found, x in zip(differentiated(form), exact, strict=True)]
        for form in (in_chunks, plain)
    ]
    names = "log-probs", "entropies", "gradient of hidden states", "gradient of the matrix"
    figure = ", ".join(f"{name} {a:.1e} ({b:.1e})" for name, a, b in zip(names, *errors, strict=True))
    ok = all(a <= CHUNKED_ERROR * b + 1e-6 for a, b in zip(*errors, strict=True))
    figure = f"relative errors (of log_softmax in the same precision): {figure}; at most {CHUNKED_ERROR:g} times those"
    return Finding(ok, figure, "report this row; it is computed in lightning_modules/models/projection.py")


# ---------------------------------------------------------------------- a training step at full size
class Measured(L.Callback):
    """Measures the seconds of the output layer, forward and backward, in the last iteration, and keeps the metrics of
    each."""

    def __init__(self, last: int) -> None:
        self.last, self.head_s, self.metrics = last, 0.0, []
        self._began = 0.0

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        head = output_head(module.policy)
        head.register_forward_pre_hook(self._begin)
        head.register_forward_hook(self._end)
        head.register_full_backward_pre_hook(self._begin)
        head.register_full_backward_hook(self._end)
        self.cuda = module.device.type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.timed = batch_idx == self.last

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.peak = torch.cuda.max_memory_allocated() if self.cuda else None

    def _begin(self, *_: Any) -> None:
        if self.timed:
            self._began = self._now()

    def _end(self, *_: Any) -> None:
        if self.timed:
            self.head_s += self._now() - self._began

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclasses.dataclass
class Trained:
    """Result of a training of ``ITERATIONS`` rollout batches: logged metrics, and changes of the model."""

    metrics: list[dict[str, float]]
    moved: float  # largest change of a weight
    peak: int | None  # bytes, as torch counts them
    head_s: float
    counted: Training  # for ``make size``
    longest: int  # tokens of a trajectory
    tokens: int  # of a rollout batch

    @property
    def seconds(self) -> float:
        return statistics.median(m["time/train"] for m in self.metrics[1:])


@cache
def trained(setting: Setting, liger: bool = False) -> Trained:
    """Train packed, with gradient checkpointing and full micro-batches."""
    longest, micro, chunk = (64, 256, 64) if setting.cpu else (2048, 16384, LOGITS_CHUNK)
    config = shape_of(setting)
    rows = trajectories([longest] * (2 * micro // longest), 4, config["vocab_size"])
    limits: dict[str, Any] = {"max_tokens_per_micro_batch": micro, "logits_chunk": chunk}
    module = GRPO(
        model_folder(setting), lr=1e-6, num_mini_batches=2, importance_cap=2.0, packing=True,
        gradient_checkpointing=True, liger=liger, **limits,
    )  # fmt: skip
    watch, weights, speed = Measured(-1 if liger else ITERATIONS - 1), Weights(), Throughput(on_policy=False)
    fit(setting, module, [rows] * ITERATIONS, callbacks=[watch, weights, speed])
    kind = "float32" if setting.cpu else "autocast"
    training = Training(policy=Dimensions.of(config), precision=kind, checkpointing=True, **limits)
    return Trained(watch.metrics, weights.moved, watch.peak, watch.head_s, training, longest, longest * len(rows))


def step(setting: Setting) -> Finding:
    run = trained(setting)
    last = run.metrics[-1]
    loss, norm = last["train/loss_policy"], last["train/grad_norm"]
    ok = math.isfinite(loss) and math.isfinite(norm) and norm > 0 and run.moved > 0
    figure = f"loss {loss:.3g}, grad_norm {norm:.3g}, a weight moved by {run.moved:.1e}, {run.seconds:.2f} s"
    return Finding(ok, figure, "look at the rows above: a wrong product, kernel or driver shows there first")


def peak(setting: Setting) -> Finding:
    run = trained(setting)
    assert run.peak is not None
    chip = chip_here() or GPUSpec("this GPU", torch.cuda.get_device_properties(0).total_memory, 1.0, 1.0)
    parts = sizing.memory(run.counted, chip)
    counted = sum(parts.values()) - parts["overhead"] - parts.get("engine", 0.0)  # not torch's, or not installed
    off = run.peak / counted - 1
    figure = f"{run.peak / GB:.2f} GB measured, {counted / GB:.2f} counted by make size: {off:+.0%}"
    cure = f"correct experiments/registry/sizing.py; leave {run.peak / counted:.2f} times as much room till then"
    return Finding(abs(off) <= MEMORY_ERROR, f"{figure}, at most {MEMORY_ERROR:.0%}", cure)


def vocabulary(setting: Setting) -> Finding:
    run = trained(setting)
    share = run.head_s / run.metrics[-1]["time/train"]
    figure = f"{share:.0%} of a step in the output layer and its statistics"
    if setting.cpu:
        return Finding(0 < share < 1, figure)
    cure = "--model.logits_chunk 4096 where memory allows; then profile lightning_modules/models/projection.py"
    return Finding(share <= VOCABULARY_SHARE, f"{figure}, at most {VOCABULARY_SHARE:.0%}", cure)


def speed(setting: Setting) -> Finding:
    """Measure training in tokens per second and model FLOPs utilisation, with Liger's kernels if installed.
    Recomputation by gradient checkpointing is not counted."""
    kernels = not setting.cpu and find_spec("liger_kernel") is not None
    run = trained(setting, liger=True) if kernels else trained(setting)
    rate, chip = run.tokens / run.seconds, chip_here()
    figure = f"{rate:,.0f} tokens/s{' with Liger' if kernels else ''}"
    if chip is None:
        return Finding(True, figure)
    whole = dataclasses.replace(run.counted, checkpointing=False)
    used = rate * sizing.training_flops(whole, context=run.longest / 2) / chip.flops
    cure = "see with nvidia-smi what else runs, the power limit and the clocks"
    return Finding(used >= UTILISATION, f"{figure}, {used:.0%} of {chip.name}'s peak, at least {UTILISATION:.0%}", cure)
