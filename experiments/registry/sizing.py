"""Estimates GPU memory and hours of a training run from the shapes of its models. Loads and measures nothing.

tests/experiments/registry/test_sizing.py checks the accuracy: parameters are exact; activations agree with what
autograd keeps to 2 %; the sum is within 15 % of the tensors alive at the peak of a real step. ``GPUSpec.overhead``
allows for what a layer needs while it runs, fragmentation and the CUDA context. Speeds are the roofline, what the
chip's arithmetic or memory allows at most; ``hours`` assumes that a run reaches ``GPUSpec.efficiency`` of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from experiments.registry.shapes import GB, Dimensions, GPUSpec, Precision

ENGINE_WORK = 1 * GB  # allowance: vLLM's activations and sampler within its share
ENGINE_ASLEEP = 1 * GB  # allowance: CUDA context and graphs of a sleeping vLLM
LOGITS = 1  # copies of [logits_chunk, vocabulary] in the type of the products (models/projection.py)
BLOCK = 2**24  # elements with two further float32 copies (the same file, LARGE_BLOCK)
ADAM = 8  # bytes per trained parameter: two moments in float32
LIVE_PARAMETERS = 1e9  # DeepSpeed's stage3_max_live_parameters: gathered at once, at most
Strategy = Literal["single", "ddp", "zero2", "zero3"]


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters: two matrices of a low rank beside each linear module named in ``targets`` (empty: all)."""

    rank: int
    targets: tuple[str, ...] = ()

    def of(self, d: Dimensions) -> int:
        """Return the number of parameters that the adapters add to a model."""
        return d.layers * self.rank * sum(n + m for n, m in self._shapes(d))

    def inputs(self, d: Dimensions) -> int:
        """Return the summed widths of the inputs that one layer's adapters read, in numbers per token."""
        return sum(n for n, _ in self._shapes(d))

    def _shapes(self, d: Dimensions) -> list[tuple[int, int]]:
        return [shape for name, shape in d.linear.items() if not self.targets or name in self.targets]


@dataclass(frozen=True, slots=True)
class Training:
    """The settings of a training run that decide its memory and speed."""

    policy: Dimensions
    critic: Dimensions | None = None
    frozen: tuple[tuple[str, Dimensions, int], ...] = ()  # name, shape, bytes per parameter
    strategy: Strategy = "single"
    gpus: int = 1
    precision: Precision = "float32"
    offload_optimizer: bool = False
    offload_parameters: bool = False
    live_parameters: float = LIVE_PARAMETERS
    adapters: Adapters | None = None  # None: all parameters are trained
    checkpointing: bool = False
    max_tokens_per_micro_batch: int = 16384
    logits_chunk: int = 1024
    engine_share: float = 0.0  # of the GPU's memory, for vLLM (gpu_memory_utilization)
    engine_element: int = 2  # bytes of a number in the engine
    guide_share: float = 0.0  # likewise, for the engine of a guide (Guided-OPD)
    scores: bool = True  # the policy scores the batch before the update
    sleep_mode: bool = False  # the engine has its share only while the trainer's states are in host memory
    max_length: int = 4096

    @property
    def models(self) -> list[Dimensions]:
        """The shapes of the trained models: policy and critic."""
        return [d for d in (self.policy, self.critic) if d is not None]

    @property
    def sharded(self) -> bool:
        return self.strategy in ("zero2", "zero3")

    @property
    def half_engine(self) -> bool:
        """Whether DeepSpeed keeps 16-bit weights, and float32 masters of the trained ones."""
        return self.sharded and self.precision != "float32"

    @property
    def shards(self) -> int:
        """The number of GPUs that share the parameters (more than one with ZeRO 3)."""
        return self.gpus if self.strategy == "zero3" else 1

    @property
    def element(self) -> int:
        """The size in bytes of each weight that LoRA freezes."""
        return 2 if self.precision == "bfloat16" or self.half_engine else 4

    @property
    def frozen_base(self) -> int:
        """The number of parameters in policy and critic that LoRA freezes."""
        if self.adapters is None:
            return 0
        return self.policy.parameters + (self.critic.body - self.critic.hidden - 1 if self.critic else 0)

    @property
    def trained(self) -> int:
        """The number of trained parameters; with LoRA those of the adapters and of a critic's head."""
        if self.adapters is None:
            return self.policy.parameters + (self.critic.body if self.critic else 0)
        critic = self.adapters.of(self.critic) + self.critic.hidden + 1 if self.critic else 0
        return self.adapters.of(self.policy) + critic

    @property
    def context(self) -> float:
        """The mean number of tokens that a token attends to, estimated as half of the longest trajectory."""
        return self.max_length / 2


@dataclass(frozen=True, slots=True)
class Run:
    """The amount of work in a training run: iterations, trajectories and tokens. Trajectories are taken as half as long
    as they may be."""

    iterations: int
    trajectories: int  # per iteration
    rows: float = 1.0  # per trajectory: turns with separate prompts
    sampled: float = 0.0  # tokens per trajectory, observations included
    epochs: int = 1


def memory(t: Training, chip: GPUSpec) -> dict[str, float]:
    """Return the bytes per GPU while it trains, by component. Offloaded parts are left out."""
    states = t.gpus if t.sharded else 1
    parts = {
        "weights": weights(t),
        # Summed over micro-batches in float32 (strategies.py); DeepSpeed keeps the sums where the optimizer is.
        "gradients": 0.0 if t.offload_optimizer else 4 * t.trained / states,
        "master weights": masters(t),
        "optimizer": 0.0 if t.offload_optimizer else ADAM * t.trained / states,
        **frozen(t),
    }
    if t.shards > 1 or t.offload_parameters:
        largest = max(d.hidden * max(d.vocabulary, d.mlp) for d in t.models)  # a matrix is gathered whole
        parts["gathered parameters"] = t.element * min(max(t.live_parameters, largest), t.frozen_base + t.trained)
    # The layer that checkpointing recomputes keeps its activations after the logits are freed.
    work = {"activations": activations(t) + max(0.0, recomputed_activations(t) - logits(t)), "logits": logits(t)}
    if t.precision == "autocast" and not t.sharded:
        work["autocast's copies"] = autocast_copies(t)
    # AdamW takes a root of all second moments at once, after the rest is freed; DeepSpeed steps in groups.
    step = 0.0 if t.sharded else 4.0 * t.trained
    parts |= work | {"optimizer's step": max(0.0, step - sum(work.values()))}
    if t.engine_share:
        parts["engine"] = ENGINE_ASLEEP if t.sleep_mode else t.engine_share * chip.memory
    if t.guide_share:
        parts["guide"] = t.guide_share * chip.memory
    return parts | {"overhead": chip.overhead}


def sampling_memory(t: Training, chip: GPUSpec) -> dict[str, float]:
    """Return the bytes per GPU, by component, while an engine samples that sleeps during training; {} for other
    engines.

    Weights, masters and frozen models stay; gradients are freed, and the optimizer is in host memory
    (callbacks/training/optimizer_offload.py).
    """
    if not t.sleep_mode or not t.engine_share:
        return {}
    kept = {"weights": weights(t), "master weights": masters(t), **frozen(t)}
    return kept | {"engine": t.engine_share * chip.memory, "overhead": chip.overhead}


def peak(t: Training, chip: GPUSpec) -> float:
    """Return the bytes per GPU that training or sampling needs, whichever is more."""
    return max(sum(memory(t, chip).values()), sum(sampling_memory(t, chip).values()))


def weights(t: Training) -> float:
    """Return the bytes per GPU of the weights of policy and critic."""
    trained = 2 if t.half_engine else 4  # adapters are float32 beside a 16-bit base
    return 0.0 if t.offload_parameters else (t.element * t.frozen_base + trained * t.trained) / t.shards


def masters(t: Training) -> float:
    """Return the bytes per GPU of DeepSpeed's float32 master weights, which it keeps in float32 training, too."""
    return 4.0 * t.trained / t.gpus if t.sharded and not t.offload_optimizer else 0.0


def frozen(t: Training) -> dict[str, float]:
    """Return the bytes per GPU of each model that is not trained, by name."""
    return {name: 0.0 if t.offload_parameters else size * d.parameters / t.shards for name, d, size in t.frozen}


def logits(t: Training) -> float:
    """Return the bytes of a chunk's logits and of their gradients. This includes the gradient of a trained output
    matrix: its float32 sum, and one chunk's product in the type of the products."""
    exact, elements = t.precision == "float32", t.logits_chunk * t.policy.vocabulary
    element = 4 if exact else 2
    matrix = 0 if t.adapters else (4 + element) * t.policy.output_matrix
    return float(LOGITS * element * elements + 8 * min(BLOCK, elements) + matrix)


def activations(t: Training) -> float:
    """Return the bytes of activations that a micro-batch keeps for its backward pass. Policy and critic add up: they
    share one loss."""
    precision: Precision = "bfloat16" if t.half_engine else t.precision
    per_token = (d.layers * (d.residual_bytes(precision) if t.checkpointing else layer_bytes(t, d)) for d in t.models)
    return t.max_tokens_per_micro_batch * sum(per_token)


def recomputed_activations(t: Training) -> float:
    """Return the bytes of activations that gradient checkpointing holds while it recomputes one layer, the largest. 0
    without checkpointing."""
    return t.max_tokens_per_micro_batch * max(layer_bytes(t, d) for d in t.models) if t.checkpointing else 0.0


def layer_bytes(t: Training, d: Dimensions) -> float:
    """Return the bytes of activations per token that one layer keeps, LoRA included."""
    cast = t.adapters if t.precision != "float32" and not t.sharded else None  # peft casts inputs
    return d.layer_bytes("bfloat16" if t.half_engine else t.precision) + (2 * cast.inputs(d) if cast else 0)


def autocast_copies(t: Training) -> float:
    """Return the bytes of the bfloat16 copies that autocast makes of float32 matrices. Checkpointing holds one matrix
    at a time; the output matrix is always recomputed."""
    if t.checkpointing:
        return 2.0 * max(max(d.layer_matrices, d.output_matrix) for d in t.models)
    return 2.0 * (sum(d.layers * d.layer_matrices for d in t.models) + t.policy.output_matrix)


def training_flops(t: Training, context: float, epochs: int = 1) -> float:
    """Return the floating-point operations per trained token: a scoring pass if there is one, then forward and backward
    (checkpointing: forward again)."""
    passes = t.scores + (4 if t.checkpointing else 3) * epochs
    trained = sum(d.forward_flops(context) for d in t.models)
    return passes * trained + sum(d.forward_flops(context) for _, d, _ in t.frozen)


def training_speed(t: Training, chip: GPUSpec) -> float:
    """Return the tokens per second that all GPUs together train on at their peak speed."""
    return t.gpus * chip.flops / training_flops(t, t.context)


def cache_tokens(t: Training, chip: GPUSpec) -> int:
    """Return the number of tokens per GPU whose keys and values fit beside the engine's weights."""
    free = t.engine_share * chip.memory - t.engine_element * t.policy.parameters - ENGINE_WORK
    return max(0, int(free // t.policy.kv_bytes(t.engine_element)))


def generation_speed(t: Training, chip: GPUSpec, sequences: int) -> float:
    """Return the tokens per second that all engines together sample. Each step reads the weights and every sequence's
    cache once and computes one token per sequence; the slower of both counts."""
    if not sequences:
        return 0.0
    cache = sequences * t.context * t.policy.kv_bytes(t.engine_element)
    reading = (t.engine_element * t.policy.parameters + cache) / chip.bandwidth
    computing = sequences * t.policy.forward_flops(t.context) / chip.flops
    return t.gpus * sequences / max(reading, computing)


def hours(t: Training, chip: GPUSpec, run: Run, sequences: int) -> float:
    """Return the estimated hours of a training run that reaches the share ``efficiency`` of the GPUs' peak speed.
    Tools, evaluation, weight updates and offloading come on top.

    Args:
        sequences: that a GPU's engine holds at once; 0: the run never ends.
    """
    if not sequences:
        return math.inf
    tokens = run.trajectories * run.rows * t.context
    reading = tokens * t.policy.forward_flops(t.context) / (t.gpus * chip.flops)  # prompts and observations
    sampling = run.trajectories * run.sampled / generation_speed(t, chip, sequences) + reading
    training = tokens * training_flops(t, t.context, run.epochs) / (t.gpus * chip.flops)
    return run.iterations * (sampling + training) / chip.efficiency / 3600
