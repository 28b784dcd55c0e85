"""How much GPU memory a training needs, and how fast it can be at most: arithmetic over a model's dimensions.

Nothing is loaded and nothing is measured here. What is counted, and how near it comes:

* parameters: exactly, as ``transformers`` makes these models (tests/experiments/registry/test_sizing.py);
* activations: what autograd keeps of transformers' Qwen2, Qwen3 and Llama layers with SDPA, to 2 % (same test);
* the whole: within 15 % of the tensors alive at the peak of a real step (same test). What a layer needs besides while
  it runs, fragmentation and the CUDA context are the allowance ``OVERHEAD``;
* speeds: the roofline, that is, what the chip's arithmetic or its memory allows. Trainings reach a part of it;
  ``hours`` takes ``EFFICIENCY`` for that part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

GB = 1e9
OVERHEAD = 3 * GB  # CUDA context, NCCL's buffers, fragmentation: an allowance, not a count
ENGINE_WORK = 1 * GB  # vLLM's activations and sampler within its share: an allowance
ENGINE_ASLEEP = 1 * GB  # what a sleeping vLLM keeps (CUDA context, graphs): an allowance
LOGITS = 1  # [logits_chunk, vocabulary] in the type of the products (models/projection.py), counted in the test
BLOCK = 2**24  # elements of which float32 copies exist besides: four, two of float32 (the same, LARGE_BLOCK)
EFFICIENCY = 0.35  # of the roofline that a run reaches, training and sampling: an assumption, nothing was measured
ADAM = 8  # bytes per trained parameter: two moments in float32
LIVE_PARAMETERS = 1e9  # DeepSpeed's stage3_max_live_parameters: gathered at once, at most
Precision = Literal["float32", "autocast", "bfloat16"]
Strategy = Literal["single", "ddp", "zero2", "zero3"]


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Of a Llama-like transformer: grouped-query attention, gated MLP."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool  # embedding and output matrix are one
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Dimensions:
        """From a Hugging Face config.json of type qwen2, qwen3 or llama. Raises ValueError for another."""
        kind = config.get("model_type")
        if kind not in ("qwen2", "qwen3", "llama"):
            raise ValueError(f"model_type is {kind!r}; sizes are known of qwen2, qwen3 and llama")
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Elements of one layer's matrices."""
        return 2 * self.hidden * (self.query + self.key) + 3 * self.hidden * self.mlp

    @property
    def parameters(self) -> int:
        small = 2 * self.hidden
        small += (self.query + 2 * self.key) if self.qkv_bias else 0
        small += 2 * self.head_dim if self.qk_norm else 0
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden
        return self.layers * (self.layer_matrices + small) + ends

    @property
    def body(self) -> int:
        """Parameters of a critic: no output matrix, a head of one column."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden) + self.hidden + 1

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of one layer's linear modules, by name."""
        h, m = self.hidden, self.mlp
        attention = {"q_proj": (h, self.query), "k_proj": (h, self.key), "v_proj": (h, self.key)}
        return attention | {"o_proj": (self.query, h), "gate_proj": (h, m), "up_proj": (h, m), "down_proj": (m, h)}

    def kv_bytes(self, element: int = 2) -> int:
        """Keys and values of one token in the engine's cache."""
        return 2 * self.layers * self.key * element

    def layer_bytes(self, precision: Precision) -> float:
        """What autograd keeps of one layer per token: inputs of norms and matrices, queries, keys, values, the MLP's
        two halves and their product. Norms compute in float32; under autocast the residual stream is, too."""
        hidden, element = {"float32": (24, 4), "autocast": (26, 2), "bfloat16": (16, 2)}[precision]
        normed = {"float32": 8, "autocast": 6, "bfloat16": 6}[precision] if self.qk_norm else 0
        per_head = (2 * element + normed) * (self.query + self.key)
        return hidden * self.hidden + 4 * element * self.mlp + per_head + 4 * self.heads

    def residual_bytes(self, precision: Precision) -> int:
        """One layer's input of one token: all that gradient checkpointing keeps of the layer."""
        return self.hidden * (2 if precision == "bfloat16" else 4)

    def forward_flops(self, context: float) -> float:
        """Floating-point operations of one token after ``context`` others, output matrix included."""
        matrices = self.layers * self.layer_matrices + self.vocabulary * self.hidden
        return 2 * matrices + 4 * self.layers * self.query * context


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU as its maker's data sheet has it: dense bfloat16, no sparsity."""

    name: str
    memory: float  # bytes
    flops: float  # per second
    bandwidth: float  # bytes per second


# NVIDIA's data sheets (A100, H100 and H200 are SXM) and its Ampere, Ada and Blackwell GeForce white papers (their rows
# with float32 accumulation)
CHIPS = {
    "a100-40": Chip("A100 40 GB", 40 * GB, 312e12, 1.555e12),
    "a100": Chip("A100 80 GB", 80 * GB, 312e12, 2.039e12),
    "h100": Chip("H100 80 GB", 80 * GB, 989e12, 3.35e12),
    "h200": Chip("H200 141 GB", 141 * GB, 989e12, 4.8e12),
    "l40s": Chip("L40S 48 GB", 48 * GB, 362e12, 0.864e12),
    "l4": Chip("L4 24 GB", 24 * GB, 121e12, 0.3e12),
    "a10": Chip("A10 24 GB", 24 * GB, 125e12, 0.6e12),
    "3090": Chip("RTX 3090 24 GB", 24 * GB, 71e12, 0.936e12),
    "4090": Chip("RTX 4090 24 GB", 24 * GB, 165e12, 1.008e12),
    "5090": Chip("RTX 5090 32 GB", 32 * GB, 209e12, 1.792e12),
}


@dataclass(frozen=True, slots=True)
class Adapters:
    """Of LoRA: two matrices of a low rank beside each matrix that is named."""

    rank: int
    targets: tuple[str, ...] = ()  # linear modules by name; none: all

    def of(self, d: Dimensions) -> int:
        """Parameters that they add to a model."""
        return d.layers * self.rank * sum(n + m for n, m in self._shapes(d))

    def inputs(self, d: Dimensions) -> int:
        """Numbers per token that one layer's adapters read."""
        return sum(n for n, _ in self._shapes(d))

    def _shapes(self, d: Dimensions) -> list[tuple[int, int]]:
        return [shape for name, shape in d.linear.items() if not self.targets or name in self.targets]


@dataclass(frozen=True, slots=True)
class Training:
    """What of a configuration decides memory and speed."""

    policy: Dimensions
    critic: Dimensions | None = None
    frozen: tuple[tuple[str, Dimensions, int], ...] = ()  # name, dimensions, bytes per parameter
    strategy: Strategy = "single"
    gpus: int = 1
    precision: Precision = "float32"
    offload_optimizer: bool = False
    offload_parameters: bool = False
    live_parameters: float = LIVE_PARAMETERS  # gathered at once under ZeRO-3, at most
    adapters: Adapters | None = None  # LoRA; None: all is trained
    checkpointing: bool = False
    micro_batch_tokens: int = 16384
    logits_chunk: int = 1024
    engine_share: float = 0.0  # of the GPU's memory, for vLLM (gpu_memory_utilization)
    sleep_mode: bool = False  # the engine has its share only while the trainer's states are in host memory
    max_length: int = 4096

    @property
    def sharded(self) -> bool:
        return self.strategy in ("zero2", "zero3")

    @property
    def half_engine(self) -> bool:
        """DeepSpeed with weights of 16 bits, and float32 masters of what is trained."""
        return self.sharded and self.precision != "float32"

    @property
    def element(self) -> int:
        """Bytes of a weight that LoRA leaves as it is."""
        return 2 if self.precision == "bfloat16" or self.half_engine else 4

    @property
    def frozen_base(self) -> int:
        """Parameters of policy and critic that LoRA leaves as they are."""
        if self.adapters is None:
            return 0
        return self.policy.parameters + (self.critic.body - self.critic.hidden - 1 if self.critic else 0)

    @property
    def trained(self) -> int:
        """Trained parameters; with LoRA the adapters, and a critic's head."""
        if self.adapters is None:
            return self.policy.parameters + (self.critic.body if self.critic else 0)
        critic = self.adapters.of(self.critic) + self.critic.hidden + 1 if self.critic else 0
        return self.adapters.of(self.policy) + critic


@dataclass(frozen=True, slots=True)
class Run:
    """How much a training does. Trajectories are taken to be half as long as they may be."""

    iterations: int
    trajectories: int  # of an iteration
    rows: float = 1.0  # of a trajectory: turns that have prompts of their own
    sampled: float = 0.0  # tokens of a trajectory; observations counted
    epochs: int = 1


def memory(training: Training, chip: Chip) -> dict[str, float]:
    """Bytes per GPU while it trains, by component; what is offloaded to the host is not among them."""
    t = training
    shard = t.gpus if t.strategy == "zero3" else 1  # of parameters
    shard_states = t.gpus if t.sharded else 1
    parts = {
        "weights": weights(t),
        # Summed over micro-batches in float32 (strategies.py); DeepSpeed keeps the sums where the optimizer is.
        "gradients": 0.0 if t.offload_optimizer else 4 * t.trained / shard_states,
        "master weights": masters(t),
        "optimizer": 0.0 if t.offload_optimizer else ADAM * t.trained / shard_states,
        **frozen(t),
    }
    if shard > 1 or t.offload_parameters:
        largest = max(d.hidden * max(d.vocabulary, d.mlp) for d in (t.policy, t.critic) if d)  # never in parts
        gathered = min(max(t.live_parameters, largest), t.frozen_base + t.trained)
        parts["gathered parameters"] = t.element * gathered
    # A layer that is computed again keeps its activations when the logits are gone.
    work = {"activations": activations(t) + max(0.0, recomputed(t) - logits(t)), "logits": logits(t)}
    if t.precision == "autocast" and not t.sharded:
        work["autocast's copies"] = autocast_copies(t)
    # AdamW's step takes a root of every second moment at once, when the others are gone; DeepSpeed steps in groups.
    step = 0.0 if t.sharded else 4.0 * t.trained
    parts |= work | {"optimizer's step": max(0.0, step - sum(work.values()))}
    if t.engine_share:
        parts["engine"] = ENGINE_ASLEEP if t.sleep_mode else t.engine_share * chip.memory
    parts["overhead"] = OVERHEAD
    return parts


def sampling_memory(t: Training, chip: Chip) -> dict[str, float]:
    """Bytes per GPU while an engine samples that sleeps in training: the trainer's weights, masters and frozen models
    stay, its gradients are gone, and the optimizer is in host memory (callbacks/training/optimizer_offload.py). Empty
    for an engine that keeps its share."""
    if not t.sleep_mode or not t.engine_share:
        return {}
    kept = {"weights": weights(t), "master weights": masters(t), **frozen(t)}
    return kept | {"engine": t.engine_share * chip.memory, "overhead": OVERHEAD}


def peak(t: Training, chip: Chip) -> float:
    """Bytes per GPU: of training or of sampling, whichever needs more."""
    return max(sum(memory(t, chip).values()), sum(sampling_memory(t, chip).values()))


def weights(t: Training) -> float:
    """Bytes of policy and critic."""
    trained = 2 if t.half_engine else 4  # adapters are float32 beside a base of 16 bits
    whole = t.element * t.frozen_base + trained * t.trained
    return 0.0 if t.offload_parameters else whole / (t.gpus if t.strategy == "zero3" else 1)


def masters(t: Training) -> float:
    """Bytes of DeepSpeed's float32 weights, which it keeps in float32 training, too."""
    return 4.0 * t.trained / t.gpus if t.sharded and not t.offload_optimizer else 0.0


def frozen(t: Training) -> dict[str, float]:
    """Bytes of each model that is not trained."""
    shard = t.gpus if t.strategy == "zero3" else 1
    return {name: 0.0 if t.offload_parameters else size * d.parameters / shard for name, d, size in t.frozen}


def logits(t: Training) -> float:
    """Bytes that a chunk's logits take with what is made of them, and with the gradient of an output matrix that is
    trained: its sum in float32, and one chunk's product in the type of the products."""
    d, exact = t.policy, t.precision == "float32"
    element, elements = 4 if exact else 2, t.logits_chunk * d.vocabulary
    matrix = 0 if t.adapters else (4 + element) * d.vocabulary * d.hidden
    return float(LOGITS * element * elements + (8 if exact else 16) * min(BLOCK, elements) + matrix)


def activations(t: Training) -> float:
    """Bytes that a micro-batch keeps for its backward pass, of policy and critic together: their losses are one."""
    models = [d for d in (t.policy, t.critic) if d is not None]
    if t.checkpointing:
        precision: Precision = "bfloat16" if t.half_engine else t.precision
        return t.micro_batch_tokens * sum(d.layers * d.residual_bytes(precision) for d in models)
    return t.micro_batch_tokens * sum(d.layers * layer_bytes(t, d) for d in models)


def recomputed(t: Training) -> float:
    """Bytes of the one layer at a time that gradient checkpointing computes again."""
    models = [d for d in (t.policy, t.critic) if d is not None]
    return t.micro_batch_tokens * max(layer_bytes(t, d) for d in models) if t.checkpointing else 0.0


def layer_bytes(t: Training, d: Dimensions) -> float:
    """Of one token in one layer."""
    cast = t.adapters if t.precision != "float32" and not t.sharded else None  # peft casts inputs
    precision: Precision = "bfloat16" if t.half_engine else t.precision
    return d.layer_bytes(precision) + (2 * cast.inputs(d) if cast else 0)


def autocast_copies(t: Training) -> float:
    """Bytes of the bfloat16 copies that a graph holds of float32 matrices: of one at a time where layers are computed
    again, as the output matrix always is."""
    if t.checkpointing:
        return 2.0 * max(max(d.layer_matrices, d.vocabulary * d.hidden) for d in (t.policy, t.critic) if d)
    layers = sum(d.layers * d.layer_matrices for d in (t.policy, t.critic) if d)
    return 2.0 * (layers + t.policy.vocabulary * t.policy.hidden)


def training_flops(t: Training, context: float, epochs: int = 1) -> float:
    """Per token of a trajectory: the passes that score it, then forward and backward (checkpointing: forward again)."""
    forward = t.policy.forward_flops(context)
    passes = (4 if t.checkpointing else 3) * epochs
    total = forward * (1 + passes)
    if t.critic is not None:
        total += t.critic.forward_flops(context) * (1 + passes)
    return total + sum(d.forward_flops(context) for _, d, _ in t.frozen)


def training_speed(t: Training, chip: Chip, context: float) -> float:
    """Tokens per second of all GPUs if they did nothing but arithmetic at their peak."""
    return t.gpus * chip.flops / training_flops(t, context)


def cache_tokens(t: Training, chip: Chip) -> int:
    """Tokens whose keys and values fit beside the engine's weights (bfloat16), per GPU."""
    room = t.engine_share * chip.memory - engine_memory(t, 0)
    return max(0, int(room // t.policy.kv_bytes()))


def engine_memory(t: Training, tokens: float) -> float:
    """Bytes that an engine needs for its weights (bfloat16) and a cache of so many tokens."""
    return 2 * t.policy.parameters + ENGINE_WORK + tokens * t.policy.kv_bytes()


def largest_share(t: Training, chip: Chip) -> float:
    """Of the GPU's memory that the trainer leaves to the engine: a hundredth, 0.9 at most."""
    others = sampling_memory(t, chip) or memory(t, chip)
    return min(0.9, math.floor(100 * (1 - sum(others.values()) / chip.memory + t.engine_share) + 1e-6) / 100)


def generation_speed(t: Training, chip: Chip, sequences: int, context: float) -> float:
    """Tokens per second of all GPUs' engines: each step reads the weights and every sequence's cache once, and computes
    a token per sequence; whichever takes longer."""
    if not sequences:
        return 0.0
    reading = (2 * t.policy.parameters + sequences * context * t.policy.kv_bytes()) / chip.bandwidth
    computing = sequences * t.policy.forward_flops(context) / chip.flops
    return t.gpus * sequences / max(reading, computing)


def hours(t: Training, chip: Chip, run: Run, sequences: int) -> float:
    """An estimate of what ``run`` takes at ``EFFICIENCY`` of the roofline. Tools, evaluation, weight updates and what
    offloading moves are left out.

    Args:
        sequences: that a GPU's engine holds at once; 0: never done.
    """
    if not sequences:
        return math.inf
    context = t.max_length / 2
    tokens = run.trajectories * run.rows * context
    reading = tokens * t.policy.forward_flops(context) / (t.gpus * chip.flops)  # of prompts and observations
    sampling = run.trajectories * run.sampled / generation_speed(t, chip, sequences, context) + reading
    training = tokens * training_flops(t, context, run.epochs) / (t.gpus * chip.flops)
    return run.iterations * (sampling + training) / EFFICIENCY / 3600
