"""vLLM backend of the engine process: steps vLLM's ``LLMEngine``. Written for vLLM 0.32.

Replaces vLLM's detokenizer and log-probs processor of each request (vllm/v1/engine/), which decode every token if there
are stop strings, and create an object for every log-prob, in the thread that also steps.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import warnings
from bisect import bisect_left
from functools import lru_cache
from typing import Any

import torch

from common.ranges import MAX_TOP_LOGPROBS
from rollout.engines.base import Generation, SamplingParams
from rollout.engines.vllm_cpu import CPU_BLOCK, CPU_KV_CACHE_BYTES, CPU_STEP_TOKENS
from rollout.engines.weights.files import WeightFiles, names_and_shapes
from rollout.engines.weights.ipc import memory_of
from rollout.trajectory import PermanentFailure, Runs, merged, recorded

_SETS = 32  # sets of stop strings whose tokens are cached
_BETWEEN = "\uffff"  # separates texts of tokens; no stop string contains it


class StopStrings:
    """Finds the token that completes a stop string.

    Decodes only at tokens that can complete one: their text begins with the end of a stop string, or contains one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer: Any = getattr(tokenizer, "_tokenizer", None)  # of the tokenizers library
        self._sorted: list[tuple[str, int]] | None = None  # (text, id) of every token, made on demand
        self.ends = lru_cache(_SETS)(self._find_ends)

    def can_find(self, stop: tuple[str, ...]) -> bool:
        """Return whether this class can find the stop strings. Otherwise vLLM must decode, because at spaces and within
        characters a token's text depends on its neighbours."""
        return self._tokenizer is not None and all(s and s.isascii() and s == s.strip() for s in stop)

    def _find_ends(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Return the ids of the tokens that may complete a stop string. Their text begins with the end of a stop string
        (a range of the sorted texts), or contains all of it."""
        if self._sorted is None:
            ids = range(max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
            texts = self._tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
            self._sorted = sorted(zip(texts, ids, strict=True))
            self._joined = _BETWEEN.join(text for text, _ in self._sorted)
        found: set[int] = set()
        for end in {s[i:] for s in stop for i in range(len(s))}:
            first = bisect_left(self._sorted, (end,))
            last = bisect_left(self._sorted, (end[:-1] + chr(ord(end[-1]) + 1),), first)
            found.update(token for _, token in self._sorted[first:last])
        inside = [s for s in set(stop) if s in self._joined]  # usually no token contains a whole stop string
        if inside:
            search = re.compile("|".join(map(re.escape, inside))).search
            found.update(token for text, token in self._sorted if search(text))
        return frozenset(found)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class SampledTokens:
    """Replaces vLLM's ``IncrementalDetokenizer``: keeps the token ids and decodes no text."""

    def __init__(self, stops: StopStrings, stop: tuple[str, ...]) -> None:
        self.output_token_ids: list[int] = []
        self._stops, self._stop, self._ends = stops, stop, stops.ends(stop)
        self._window = max(map(len, stop)) + 1  # tokens; each is at least one byte, and the first may lose a space

    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Append sampled token ids, and return the stop string that one of them completes, or None. Later tokens are
        dropped."""
        for token in new_token_ids:
            self.output_token_ids.append(token)
            if token in self._ends:
                text = self._stops.decode(self.output_token_ids[-self._window :])
                found = [(text.index(s) + len(s), i) for i, s in enumerate(self._stop) if s in text]
                if found:
                    return self._stop[min(found)[1]]
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        return ""


class SampledLogprobs:
    """Replaces vLLM's ``LogprobsProcessor``: keeps log-probs as floats, without an object for each."""

    prompt_logprobs = prompt_token_id_logprobs = None
    cumulative_logprob = 0.0

    def __init__(self, k: int) -> None:
        self.values: list[float] = []  # of the sampled tokens
        self.top: list[dict[int, float]] = []  # the k most likely tokens; the sampled one, if among them, first
        self._k = k

    @property
    def logprobs(self) -> SampledLogprobs:
        return self

    def update_from_output(self, output: Any) -> None:
        ids, logprobs, ranks, _ = output.new_logprobs  # [n, 1 + at least k]: the sampled token, then the best ones
        for row in range(len(ranks)):
            self.values.append(float(logprobs[row, 0]))
            if self._k:
                chosen, *best = ids[row, : self._k + 1].tolist()
                entry = dict(zip((chosen, *best), logprobs[row, : self._k + 1].tolist(), strict=True))
                if ranks[row] > self._k and chosen not in best:
                    del entry[chosen]
                self.top.append(entry)


TRANSFER_METHODS = (
    "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
    "shutdown_weight_transfer_engine",
)  # fmt: skip


class WorkerExtension:
    """Methods added to vLLM's workers, called by `collective_rpc`."""

    model_runner: Any  # of the worker
    reload_weights: Any  # of the worker
    weight_transfer_engine: Any
    _weight_update_active: bool

    def load_files(self, paths: list[str], skip: list[str]) -> None:
        self.reload_weights(weights_iterator=WeightFiles(paths).tensors(skip=skip))
        self.repack_tied_head(bool(skip))

    def repack_tied_head(self, tied: bool) -> None:
        repack_tied_head(self.model_runner.get_model(), tied)

    def abandon_weight_update(self) -> None:
        """End an unfinished weight transfer. Otherwise vLLM would add the tensors of the next transfer to its counts
        (``LayerReloadingInfo.load_numel``), and treat layers as complete too early."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):  # pyright: ignore[reportAttributeAccessIssue]  # the worker's
            self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def clear_cache(self) -> None:
        """Set the key/value cache to zero: attention multiplies unused entries by 0, and nan times 0 is nan."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def report_untruncated_logprobs(self) -> bool:
        """Let vLLM report log-probs before top-k and top-p; its "processed_logprobs" are those after. Returns False,
        with no change, for an unknown sampler. Idempotent."""
        sampler: Any = getattr(self.model_runner, "sampler", None)
        if getattr(sampler, "reports_untruncated", False):
            return True
        if hasattr(sampler, "topk_topp_sampler"):
            _report_untruncated_v1(sampler.topk_topp_sampler)
        elif hasattr(sampler, "_sample_random"):
            _report_untruncated_v2(sampler)
        else:
            return False
        sampler.reports_untruncated = True
        return True


def repack_tied_head(model: Any, tied: bool) -> None:
    """Repack vLLM's output head after a weight update, if it is ``tied`` to the embedding and on CPU. There it keeps a
    packed copy of the old embedding."""
    head = getattr(model, "lm_head", None)
    if tied and head is not None and next(head.parameters()).device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)


def _report_untruncated_v1(sampler: Any) -> None:
    """Let vLLM's ``TopKTopPSampler`` return log-probs before truncation (first model runner,
    vllm/v1/sample/ops/topk_topp_sampler.py)."""
    truncate_and_sample = sampler.forward

    def forward(logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if k is None and p is None:
            return truncate_and_sample(logits, generators, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)  # before the logits are changed in place
        return truncate_and_sample(logits, generators, k, p)[0], logprobs

    sampler.forward = forward


def _report_untruncated_v2(sampler: Any) -> None:
    """Let vLLM's ``Sampler`` return logits before truncation (second model runner,
    vllm/v1/worker/gpu/sample/sampler.py)."""
    truncate_and_sample = sampler._sample_random

    def sample(logits: torch.Tensor, mapping: Any, rows: Any, positions: Any, k: Any, p: Any, fused: bool) -> Any:
        if k is None and p is None:
            return truncate_and_sample(logits, mapping, rows, positions, k, p, fused)
        untruncated = logits.clone()  # before they may be changed in place
        return truncate_and_sample(logits, mapping, rows, positions, k, p, fused)[0], untruncated

    sampler._sample_random = sample


def configure_amx() -> None:
    """Ask Linux for the permission to use AMX, or let vLLM's CPU kernels leave it alone where oneDNN must
    (``ONEDNN_MAX_CPU_ISA``, which stages set) or Linux refuses. vLLM 0.32's attention asks nobody: it dies by SIGILL
    unless oneDNN has asked before."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    if limit not in ("ALL", "DEFAULT") and "AMX" not in limit or not torch.cpu._init_amx():
        torch.cpu._is_amx_tile_supported = lambda: False


def _prepare_cpu(max_length: int) -> dict[str, Any]:
    """Configure vLLM for a machine without a GPU, and return further arguments of ``EngineArgs``."""
    configure_amx()
    # Do not compile: a few decorated functions would cost 2 s at the first token.
    torch._dynamo.config.disable = True
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # exactness was measured with the first model runner
    # A prompt in chunks rewinds its generator, which CPU generators do not support ("CPU Generator does not use offset"
    # ends the engine). Without chunks a step must fit the longest prompt.
    step_tokens = max(max_length, CPU_STEP_TOKENS)
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": step_tokens}
    return {"block_size": CPU_BLOCK, "enforce_eager": True, **whole}


class VLLMBackend:
    """Implements `worker.Backend` with vLLM's ``LLMEngine``: continuous batching, prefix caching, paged attention."""

    def __init__(
        self,
        model: str,
        max_length: int,
        kv_cache_bytes: int | None,
        prefix_reuse: bool = True,
        transport: str = "auto",
        request_seeds: bool | None = None,
        sleeps: bool = False,
        **engine_args: Any,
    ) -> None:
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # no Triton on a CPU
        warnings.filterwarnings(
            "ignore", ".*torch.distributed.reduce_op.*", FutureWarning
        )  # vLLM inspects torch's names
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        if on_cpu:
            engine_args |= _prepare_cpu(max_length)
        if kv_cache_bytes is not None or on_cpu:
            engine_args["kv_cache_memory_bytes"] = kv_cache_bytes or CPU_KV_CACHE_BYTES
        by_ipc = transport == "ipc" or transport == "auto" and not on_cpu
        by_ipc = by_ipc and engine_args.get("tensor_parallel_size", 1) == 1
        if by_ipc:
            from rollout.engines.weights.ipc_receiver import register

            engine_args["weight_transfer_config"] = {"backend": register()}
        if sleeps and not on_cpu:  # vLLM refuses the option on CPU, where the calls only keep their order
            engine_args["enable_sleep_mode"] = True
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                max_model_len=max_length,
                max_logprobs=MAX_TOP_LOGPROBS,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # without the model folder's temperature, top-p and EOS ids
                enable_prefix_caching=prefix_reuse,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                worker_extension_cls=f"{__name__}.{WorkerExtension.__name__}",
                # Without seeds of requests, equal seeds of two engines would give two group members the same tokens.
                seed=0 if on_cpu else secrets.randbits(31),
                **engine_args,
            )
        )
        # The first model runner samples row by row if requests have seeds; on CPU it always does.
        seeds_are_free = on_cpu or self._engine.vllm_config.use_v2_model_runner
        self._seeds = seeds_are_free if request_seeds is None else request_seeds
        self._truncates = all(self._engine.collective_rpc("report_untruncated_logprobs"))
        self._expected, self._tied = names_and_shapes(model)
        self._stops = StopStrings(self._engine.get_tokenizer())
        self._versions: dict[int, Runs] = {}  # request id -> versions of its tokens before the latest weight update
        self._finished: list[
            tuple[int, Generation | Exception]
        ] = []  # results of `_finish_step` that `step` has not returned
        self._receiving = False  # a transfer is in progress
        self._infected = False  # the cache may contain numbers that are not finite
        self._unused = False  # such a cache has no needed entry
        self.version = 0
        vocab_size = self._engine.model_config.get_vocab_size()
        self.info = {
            "vocab_size": vocab_size,
            "device": current_platform.device_type,
            "dtype": str(self._engine.model_config.dtype).removeprefix("torch."),
            "truncation": self._truncates,
            "request_seeds": self._seeds,
            "weights": self._expected,
            "tied": sorted(self._tied),
            "ipc_memory": memory_of(torch.device(current_platform.device_type)) if by_ipc else None,
        }

    @property
    def has_work(self) -> bool:
        return bool(self._finished) or self._engine.has_unfinished_requests()

    def add(self, request_id: int, token_ids: list[int], sampling: SamplingParams) -> None:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._infected and not self._engine.has_unfinished_requests():
            self._finish_step()
            self._recompute()
        ours = not sampling.stop or self._stops.can_find(sampling.stop)
        params = VLLMSamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.temperature > 0 else 1.0,
            top_k=sampling.top_k if sampling.temperature > 0 else -1,
            repetition_penalty=sampling.repetition_penalty,
            stop=[] if ours else list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop_token_ids has the caller's EOS ids
            seed=sampling.seed if self._seeds else None,
            logprobs=sampling.top_logprobs,
            detokenize=not ours,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        internal_id = self._engine.add_request(str(request_id), {"prompt_token_ids": token_ids}, params)
        state: Any = self._engine.output_processor.request_states[internal_id]
        state.logprobs_processor = SampledLogprobs(sampling.top_logprobs)
        if ours and sampling.stop:
            state.detokenizer = SampledTokens(self._stops, sampling.stop)

    def cancel(self, request_id: int) -> None:
        self._engine.abort_request([str(request_id)])
        self._versions.pop(request_id, None)

    def step(self) -> list[tuple[int, Generation | Exception]]:
        finished, self._finished = self._finished, []
        return finished or self._step()

    def _step(self) -> list[tuple[int, Generation | Exception]]:
        if self._unused:  # not at the weight update, when the cache may be asleep
            self._engine.collective_rpc("clear_cache")
            self._infected = self._unused = False
        return [(int(output.request_id), self._generation(output)) for output in self._engine.step() if output.finished]

    def check(self, files: WeightFiles) -> None:
        """Check that weight files fit the model, because a failed reload makes it unusable. Raises ValueError."""
        files.validate(self._expected, optional=self._tied)

    def load(self, files: WeightFiles) -> None:
        """Replace all weights by those in ``files``, and drop the prefix cache."""
        self._finish_step()
        self._abandon_transfer()
        self._engine.collective_rpc("load_files", args=(files.paths, sorted(self._tied)))
        self._recompute()

    def transfer(self, method: str, arguments: dict[str, Any]) -> None:
        """Make one call of vLLM's weight transfer API (vllm/v1/worker/gpu_worker.py). Between start and finish the
        model is incomplete, and `step` must not be called."""
        if method not in TRANSFER_METHODS:
            raise ValueError(
                f"{method} is not a call of a weight transfer; expected one of {', '.join(TRANSFER_METHODS)}"
            )
        if method in ("init_weight_transfer_engine", "start_weight_update"):
            self._abandon_transfer()
        if method == "start_weight_update":
            self._finish_step()
            self._receiving = True
        self._engine.collective_rpc(method, kwargs=arguments)
        if method == "finish_weight_update":
            self._receiving = False
            self._engine.collective_rpc("repack_tied_head", args=(bool(self._tied),))
            self._recompute()

    def _abandon_transfer(self) -> None:
        if self._receiving:
            self._engine.collective_rpc("abandon_weight_update")
            self._receiving = False

    def _finish_step(self) -> None:
        """Finish the engine step that asynchronous scheduling (CUDA) keeps in flight, before the weights change.

        The step reads the old weights, and vLLM would drop its tokens."""
        from vllm.v1.core.sched.interface import PauseState

        core: Any = self._engine.engine_core.engine_core  # pyright: ignore[reportAttributeAccessIssue]  # in-process
        before = core.scheduler.pause_state  # `sleep` pauses it until the cache is awake
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                self._finished += self._step()
        finally:
            core.scheduler.set_pause_state(before)

    def _recompute(self) -> None:
        """Let requests in flight continue with new weights. They keep their tokens, and their keys and values are
        recomputed (``Scheduler.reset_prefix_cache`` of vLLM 0.32)."""
        for state in self._engine.output_processor.request_states.values():
            assert state.detokenizer is not None  # every sampling request has one
            request_id, sampled = int(state.external_req_id), state.detokenizer.num_output_tokens()
            self._versions[request_id] = self._runs(request_id, sampled)
        unfinished = self._engine.has_unfinished_requests()
        if not self._engine.reset_prefix_cache(reset_running_requests=unfinished):
            raise RuntimeError("vLLM did not drop its prefix cache after a weight update")
        self._unused = self._infected

    def sleep(self) -> None:
        """Free device memory by vLLM's sleep level 1: drop the cache, and move the weights to host memory.

        Level 2 would drop the weights and also tensors that a push does not send (vllm-project/vllm#29341)."""
        if self.has_work:  # vLLM would abort them
            raise RuntimeError("the engine was told to sleep with requests in flight; expected none")
        self._finish_step()  # vLLM would wait for this step before it sleeps
        self._engine.sleep(level=1)  # also pauses the scheduler and drops all prefixes

    def wake_up(self, part: str) -> None:
        awake = self._engine.wake_up(tags=[part])
        if part == "kv_cache" and not awake:  # otherwise the scheduler stays paused, and requests wait forever
            raise RuntimeError("vLLM is still asleep with its cache awake; wake its weights first")

    def _runs(self, request_id: int, sampled: int) -> Runs:
        before = self._versions.get(request_id, ())
        return merged((*before, (self.version, sampled - sum(count for _, count in before))))

    def _generation(self, output: Any) -> Generation | PermanentFailure:
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended request {output.request_id} with {completion.finish_reason!r}")
        stop_string = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        reason = completion.finish_reason
        if reason == "stop" and stop_string is None:
            reason = "eos"
        ids, logprobs = tuple(completion.token_ids), completion.logprobs
        runs = self._runs(int(output.request_id), len(ids))
        self._versions.pop(int(output.request_id), None)
        if not all(map(math.isfinite, logprobs.values)):
            self._infected = True
            return PermanentFailure(
                f"the model's logits are not finite (weights of version {self.version}): training has diverged, or the "
                "weights are damaged; continue from an earlier checkpoint"
            )
        return Generation(
            token_ids=ids,
            logprobs=tuple(logprobs.values),
            finish_reason=reason,
            policy_version=self.version,
            stop_string=stop_string,
            top_logprobs=tuple(logprobs.top) or None,
            cached_tokens=output.num_cached_tokens or 0,
            version_runs=recorded(runs),
        )
