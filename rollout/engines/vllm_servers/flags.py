"""The ``vllm serve`` command of an engine: ``make engine`` runs it, and the pages on clusters have the same flags."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from common.ranges import MAX_TOP_LOGPROBS
from common.secret import is_local
from rollout.engines.vllm_cpu import CPU_BLOCK, CPU_KV_CACHE_BYTES, CPU_STEP_TOKENS

FILES = "compact_agents_files"  # weight transfer backend of `worker.FileTransfer`
NCCL = "nccl"  # vLLM's own
MAX_LOGPROBS = MAX_TOP_LOGPROBS + 1  # the sampled token is one of vLLM's, so k others need k + 1
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes
REQUIRED_VARIABLE = "COMPACT_AGENTS_SECRET_REQUIRED"  # see `secret_middleware`
PACKAGE = __name__.rpartition(".")[0]


def serve_command(
    options: Mapping[str, Any], port: int, host: str, on_cpu: bool, transport: str, lora_rank: int, flags: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves the model of a ``VLLMEngine``, and its environment variables beside those of this
    process.

    Args:
        options: ``init_args`` of the engine.
        transport: of weights, "files" or "nccl".
        lora_rank: largest rank of adapters that trainers push; 0: they push whole weights.
        flags: further flags of ``vllm serve``, which replace the ones here.

    Raises:
        ValueError: ``flags`` has the host, the port or a middleware.
    """
    if any(flag.partition("=")[0] in ("--host", "--port", "--middleware") for flag in flags):
        raise ValueError(f"--flags has {' '.join(flags)}; give --host and --port to make engine, and no --middleware")
    max_length, dtype = options.get("max_length", 1024), options.get("dtype", "float32")
    words = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(options["model"])),
        *("--host", host, "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", str(max_length)),
        *("--max-num-seqs", str(options.get("max_num_seqs", 256))),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_LOGPROBS)),
        *("--generation-config", "vllm", "--enable-prompt-tokens-details", "--enable-scale-out"),
        *("--weight-transfer-config", json.dumps({"backend": NCCL if transport == "nccl" else FILES})),
        *("--worker-extension-cls", f"{PACKAGE}.worker.ServedWorker"),
        *("--middleware", f"{PACKAGE}.secret_middleware.SecretMiddleware", "--disable-uvicorn-access-log"),
    ]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if not is_local(host):
        environment[REQUIRED_VARIABLE] = "1"
    environment["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    cache_bytes = options.get("kv_cache_bytes")
    if on_cpu:
        words += ["--block-size", str(CPU_BLOCK), "--enforce-eager", "--no-enable-chunked-prefill"]
        words += ["--max-num-batched-tokens", str(max(max_length, CPU_STEP_TOKENS))]
        environment |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "TORCHDYNAMO_DISABLE": "1"}
        threads = str(options.get("threads", 1))  # more would change the last bits of float32
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        cache_bytes = cache_bytes or CPU_KV_CACHE_BYTES
    else:
        words += ["--gpu-memory-utilization", str(options.get("gpu_memory_utilization", 0.5))]
        words += ["--tensor-parallel-size", str(options.get("tensor_parallel_size", 1))]
        words += ["--seed", str(secrets.randbits(31))]  # of requests without seeds, which would be alike on all servers
    if cache_bytes:
        words += ["--kv-cache-memory-bytes", str(cache_bytes)]
    if not options.get("prefix_reuse", True):
        words += ["--no-enable-prefix-caching"]
    if lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(lora_rank), "--max-loras", "3", "--max-cpu-loras", "3"]
        words += ["--api-server-count", "1"]  # vLLM loads adapters in one front end alone
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return [*words, *flags], environment
