"""Continuous batching over a Hugging Face causal language model. Runs inside the engine's child process."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from rollout.engines.base import Generation, SamplingParams
from rollout.engines.kv_slots import KVSlots
from rollout.engines.sampler import BatchSampler, Sampled, uniforms
from rollout.engines.slot_attention import Prefill, SlotBatch, register
from rollout.engines.stopping import StopChecker
from rollout.engines.weights import WeightFiles
from rollout.versions import Runs, merged, recorded

# New prompt tokens computed in one forward pass (one request is always taken, however long): bounds the activations,
# on CPU to what the caches hold.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class Running:
    """One admitted request. ``generated[-1]`` is sampled but not computed yet."""

    request_id: int
    sampling: SamplingParams
    uniforms: list[float]
    prompt: np.ndarray
    cached: int
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    version_runs: Runs = ()  # of what was sampled before the weights changed


class TransformersBackend:
    """Requests join and leave between forward passes; every pass computes one token of each running sequence and
    the prompts of those that have just joined."""

    def __init__(
        self, model: str, slots: int, max_length: int, dtype: str, device: str, prefix_reuse: bool = True
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._device = torch.device(device)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype], attn_implementation=register())
        self._model.to(self._device).eval()
        self._tied = set(getattr(self._model, "all_tied_weights_keys", None) or ())
        config = self._model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or max_length
        if max_length > limit:
            raise ValueError(f"max_length {max_length} is beyond the {limit} positions of {model}; lower max_length")
        heads = config.num_attention_heads
        self._slots = KVSlots(
            layers=config.num_hidden_layers,
            slots=slots,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            max_length=max_length,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=DTYPES[dtype],
            device=device,
            reuse=prefix_reuse,
        )
        self._stops = StopChecker(AutoTokenizer.from_pretrained(model), config.vocab_size)
        self._prefill_tokens = PREFILL_TOKENS.get(self._device.type, PREFILL_TOKENS["cuda"])
        self._queue: deque[tuple[int, np.ndarray, SamplingParams]] = deque()
        self._interrupted: dict[int, Running] = {}  # in the queue again: the weights changed while they were running
        self._running: list[Running] = []  # row by row
        self._sampler: BatchSampler | None = None  # None: the rows have changed since it was built
        self.version = 0
        self.info = {
            "vocab_size": config.vocab_size,
            "device": device,
            "weights": {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()},
            "tied": sorted(self._tied),
        }

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._queue)

    def add(self, request_id: int, token_ids: list[int], sampling: SamplingParams) -> None:
        self._queue.append((request_id, np.asarray(token_ids, dtype=np.int64), sampling))

    def cancel(self, request_id: int) -> None:
        self._queue = deque(item for item in self._queue if item[0] != request_id)
        self._interrupted.pop(request_id, None)
        for row, running in enumerate(self._running):
            if running.request_id == request_id:
                self._remove(row)
                return

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Generation]]:
        """One forward pass; returns the requests that it finished."""
        decoding = len(self._running)
        admitted = self._admit()
        logits = self._forward(decoding, admitted)
        if self._sampler is None:
            self._sampler = BatchSampler([r.sampling for r in self._running], self._device)
        sampled = self._sampler.sample(logits, [r.uniforms[len(r.generated)] for r in self._running])
        return self._collect(sampled)

    @torch.no_grad()
    def load(self, files: WeightFiles) -> None:
        """Replace all weights, drop every prefix. Raises ValueError, and changes nothing, if they do not fit.

        Requests that are running go on with the new weights after the tokens they have, whose keys and values are
        computed anew: what follows is then sampled by the new model and by no mixture of both, and its log-probs are
        those of one forward pass."""
        targets = self._model.state_dict()  # tied names refer to the same storage
        files.validate(self.info["weights"], optional=self._tied)
        for name, tensor in files.tensors(skip=self._tied):
            targets[name].copy_(tensor)
        self._interrupt()
        self._slots.clear()

    def _interrupt(self) -> None:
        """Put what is running back to the front of the queue, in its order, with the tokens sampled so far."""
        for row in reversed(range(len(self._running))):
            running = self._running[row]
            self._remove(row)
            running.version_runs = self._versions(running)
            self._interrupted[running.request_id] = running
            ids = np.concatenate([running.prompt, np.asarray(running.generated, dtype=np.int64)])
            self._queue.appendleft((running.request_id, ids, running.sampling))

    def _versions(self, running: Running) -> Runs:
        before = sum(count for _, count in running.version_runs)
        return merged((*running.version_runs, (self.version, len(running.generated) - before)))

    def _admit(self) -> list[tuple[np.ndarray, Prefill]]:
        """Move requests from the queue into rows, first come first served, as long as there is room for them."""
        admitted: list[tuple[np.ndarray, Prefill]] = []
        position = budget = 0
        begin = len(self._running)  # packed position: one token for each decoding row comes first
        while position < len(self._queue) and len(self._running) < self._slots.slots and budget < self._prefill_tokens:
            request_id, token_ids, sampling = self._queue[position]
            placed = self._slots.admit(token_ids)
            if placed is None:  # its prefix is being computed by this very pass: leave it at its place in the queue
                position += 1
                continue
            del self._queue[position]
            new = token_ids[placed.cached :]
            admitted.append((new, Prefill(placed.row, placed.cached, begin, begin + len(new))))
            begin += len(new)
            budget += len(new)
            self._running.append(
                self._interrupted.pop(request_id, None) or _begun(request_id, sampling, token_ids, placed.cached)
            )
            self._sampler = None
        return admitted

    def _forward(self, decoding: int, admitted: list[tuple[np.ndarray, Prefill]]) -> torch.Tensor:
        """Compute all planned tokens; returns the logits [running, V] of each row's last one."""
        lengths = self._slots.lengths[:decoding].copy()
        ids = [np.fromiter((r.generated[-1] for r in self._running[:decoding]), dtype=np.int64, count=decoding)]
        positions = [lengths]
        for new, span in admitted:
            ids.append(new)
            positions.append(np.arange(span.start, span.start + len(new)))
        batch = SlotBatch(
            kv=self._slots.kv,
            positions=torch.from_numpy(lengths).to(self._device),
            longest=int(lengths.max()) + 1 if decoding else 0,
            prefills=[span for _, span in admitted],
        )
        last = 0  # all positions, when every row decodes
        if admitted:
            keep = [*range(decoding), *(span.end - 1 for _, span in admitted)]
            last = torch.tensor(keep, device=self._device)
        output = self._model(
            input_ids=torch.from_numpy(np.concatenate(ids)).to(self._device).unsqueeze(0),
            position_ids=torch.from_numpy(np.concatenate(positions)).to(self._device).unsqueeze(0),
            use_cache=False,
            logits_to_keep=last,
            slot_batch=batch,
        )
        self._slots.forward_done()
        return output.logits[0]

    def _collect(self, sampled: Sampled) -> list[tuple[int, Generation]]:
        finished = []
        for row, (running, token, logprob) in enumerate(
            zip(self._running, sampled.token_ids, sampled.logprobs, strict=True)
        ):
            if not math.isfinite(logprob):
                raise FloatingPointError(
                    f"the model's logits are not finite (weights of version {self.version}): "
                    "training has diverged, or the weights are damaged"
                )
            running.generated.append(token)
            running.logprobs.append(logprob)
            if running.sampling.top_logprobs:
                running.top.append(sampled.top[row])
            reason, stop_string = self._finish_reason(running)
            if reason is not None:
                finished.append((row, self._generation(running, reason, stop_string)))
        results = [(self._running[row].request_id, generation) for row, generation in finished]
        for row, _ in reversed(finished):  # from the back: removal moves the last row into the gap
            self._remove(row)
        if self._running:
            self._slots.append(np.fromiter((r.generated[-1] for r in self._running), np.int64, len(self._running)))
        return results

    def _finish_reason(self, running: Running) -> tuple[str | None, str | None]:
        sampling = running.sampling
        if running.generated[-1] in sampling.stop_token_ids:
            return "eos", None
        stop_string = self._stops.completed(running.generated, sampling.stop)
        if stop_string is not None:
            return "stop", stop_string
        return ("length", None) if len(running.generated) >= sampling.max_new_tokens else (None, None)

    def _generation(self, running: Running, reason: str, stop_string: str | None) -> Generation:
        return Generation(
            token_ids=tuple(running.generated),
            logprobs=tuple(running.logprobs),
            finish_reason=reason,
            policy_version=self.version,
            stop_string=stop_string,
            top_logprobs=tuple(running.top) if running.sampling.top_logprobs else None,
            cached_tokens=running.cached,
            version_runs=recorded(self._versions(running)),
        )

    def _remove(self, row: int) -> None:
        last = self._slots.release(row)
        self._running[row] = self._running[last]
        self._running.pop()
        self._sampler = None


def _begun(request_id: int, sampling: SamplingParams, prompt: np.ndarray, cached: int) -> Running:
    numbers = uniforms(sampling.seed, sampling.max_new_tokens).tolist() if sampling.temperature > 0 else ()
    return Running(request_id, sampling, numbers or [0.0] * sampling.max_new_tokens, prompt, cached)
