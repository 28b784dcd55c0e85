"""The embedded default engine: continuous batching over a Hugging Face model, in a child process."""

from __future__ import annotations

from rollout.engines.process import EngineProcess, check_model_folder


class TransformersEngine(EngineProcess):
    """Generates with any decoder-only model of `transformers` (Llama, Qwen2, Qwen3, ...), on CPU or CUDA.

    Requests join and leave between forward passes. A request whose ids begin like a sequence that an earlier or
    running request left in memory (the next turn of a trajectory, the other samples of a prompt, a fork) computes the
    remaining ids only; `Generation.cached_tokens` says how many were spared. Choose at least as many ``slots`` as
    there are trajectories under way at once: with fewer, waiting trajectories lose their prefixes to running ones.
    """

    def __init__(
        self,
        model: str,
        slots: int = 32,
        max_length: int = 1024,
        dtype: str = "float32",
        threads: int = 1,
        device: str = "auto",
        prefix_reuse: bool = True,
    ) -> None:
        """
        Args:
            model: Hugging Face folder (weights and tokenizer) or the name of a cached model.
            slots: sequences generated at once; each holds ``max_length`` tokens of keys and values in memory.
            max_length: given plus new tokens of a request, at most.
            dtype: "float32", "bfloat16" or "float16". On CPU use float32.
            threads: of the child process on CPU. Tiny models are fastest with 1.
            device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1", ...
            prefix_reuse: False computes every request whole. For measurements.
        """
        if slots < 1 or max_length < 2:
            raise ValueError(f"expected slots >= 1 and max_length >= 2, found {slots} and {max_length}")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {dtype!r} is unknown; expected float32, bfloat16 or float16")
        super().__init__(
            "rollout.engines.transformers_backend.TransformersBackend",
            {
                "model": str(model),
                "slots": slots,
                "max_length": max_length,
                "dtype": dtype,
                "device": device,
                "prefix_reuse": prefix_reuse,
            },
            max_length=max_length,
            threads=threads,
        )

    async def start(self) -> None:
        """See `EngineProcess.start`. Also raises FileNotFoundError if the model's folder is missing or empty."""
        check_model_folder(self._options["model"])
        await super().start()
