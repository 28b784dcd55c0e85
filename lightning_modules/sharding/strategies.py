"""DeepSpeed ZeRO under Lightning, on CUDA and on CPU ranks (gloo), with workarounds for their known faults.

Faults of lightning 2.6.6 with deepspeed 0.19.8, and the workaround of each:

1. the loss is divided twice by the accumulation count             -> ``backward`` switches DeepSpeed's division off
2. a second backward in one training_step overwrites the first     -> ``backward`` opens a new micro-step each time
3. stage 3 applies last step's gradient again to idle parameters   -> ``optimizer_step`` clears the buffer afterwards
4. manual accumulation is silently wrong at stage 2                -> ``managed_gradient_accumulation: false``
5. accumulation counters of the two drift apart between epochs     -> automatic accumulation is refused
6. validate/test with ckpt_path fails at stage 3                   -> ``load_checkpoint`` supplies the missing method

Checkpoints of another number of ranks, other sub-groups, the other stage or another strategy can be resumed, too
(resharding.py).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from common.ranges import NonNegativeInt, PositiveInt
from lightning_modules.sharding import resharding


class ZeRO(DeepSpeedStrategy):
    """Base of ``ZeRO2`` and ``ZeRO3``: one DeepSpeed engine around the LightningModule shards policy, critic and frozen
    teacher together.

    It expects manual optimisation, as all modules here have. The engine clips gradients jointly over all trained parts
    (the modules set it from their ``max_grad_norm``).

    Args:
        offload_optimizer: keep the optimiser state in host memory.
        offload_parameters: keep the parameters in host memory (stage 3).
        bucket_elements: elements per communication bucket; DeepSpeed's 2e8 takes 0.8 GB in float32.
        persistence_threshold: parameters smaller than this stay whole on every rank (stage 3).
        live_parameters: largest number of parameter elements gathered at once (stage 3). DeepSpeed's 1e9 keeps a
            smaller model whole on every rank from forward to backward.
        sub_group_size: elements of a rank's shard per update of the optimizer (stage 3), which takes 8 to 12 bytes for
            each. Lightning's default updates the whole shard at once.
        exclude_frozen_parameters: leave frozen models out of checkpoints; they are loaded from their folder again.

    Raises:
        ValueError: an option of stage 3 at stage 2.
    """

    STAGE: ClassVar[Literal[2, 3]]
    ONLY_STAGE_3 = ("offload_parameters", "persistence_threshold", "live_parameters", "sub_group_size")

    def __init__(
        self,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        bucket_elements: PositiveInt = 200_000_000,
        persistence_threshold: NonNegativeInt = 100_000,
        live_parameters: PositiveInt = 1_000_000_000,
        sub_group_size: PositiveInt = 100_000_000,
        exclude_frozen_parameters: bool = True,
        **kwargs: Any,
    ) -> None:
        given, stage = dict(locals()), self.STAGE
        defaults = inspect.signature(ZeRO.__init__).parameters
        if stage == 2 and (idle := [n for n in self.ONLY_STAGE_3 if given[n] != defaults[n].default]):
            raise ValueError(f"{', '.join(idle)}: no effect at stage 2, which keeps parameters whole; take ZeRO3")
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at deepspeed's first import
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            sub_group_size=sub_group_size,
            allgather_bucket_size=bucket_elements,
            reduce_bucket_size=bucket_elements,
            logging_batch_size_per_gpu=1,  # else lightning asks the loader for a batch sampler; ours yield whole lists
            overlap_comm=stage == 2,  # unmanaged accumulation allows it at stage 2 only
            exclude_frozen_parameters=exclude_frozen_parameters,
            **kwargs,
        )
        assert isinstance(self.config, dict)
        self.config["managed_gradient_accumulation"] = False
        self.config["data_types"] = {"grad_accum_dtype": "fp32"}  # its default is the type of the weights
        self.config["communication_data_type"] = (
            "fp32"  # gradients are reduced in it, as in DGPO (docs/algorithms/dgpo.md)
        )
        self.config["zero_force_ds_cpu_optimizer"] = False  # torch's AdamW also works with offload, without a compiler
        if stage == 3:
            self.config["zero_optimization"] |= {
                "stage3_param_persistence_threshold": persistence_threshold,
                "stage3_max_live_parameters": live_parameters,
                "stage3_max_reuse_distance": live_parameters,  # what is needed again within it is not let go
                "stage3_prefetch_bucket_size": min(50_000_000, live_parameters // 4),  # the former is DeepSpeed's
            }

    def setup_environment(self) -> None:
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_environment()
            return
        # DeepSpeed wants numbered devices and a count of them; torch takes cpu:1 as cpu.
        devices = self.parallel_devices or []
        self.parallel_devices = [torch.device("cpu", i) for i in range(len(devices))]
        os.environ["LOCAL_SIZE"] = str(len(devices))
        import deepspeed.ops

        # Would compile for a minute, for an operation that only inference uses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super(DeepSpeedStrategy, self).setup_environment()  # past the parent, which refuses everything but CUDA

    def setup(self, trainer: Any) -> None:
        if trainer.accumulate_grad_batches != 1 or trainer.lightning_module.automatic_optimization:
            raise ValueError(
                f"accumulate_grad_batches is {trainer.accumulate_grad_batches}, automatic_optimization is "
                f"{trainer.lightning_module.automatic_optimization}; ZeRO here wants 1 and manual optimisation: "
                "set the module's max_tokens_per_micro_batch instead"
            )
        super().setup(trainer)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("scale_wrt_gas", False)
        engine_optimizer: Any = self.deepspeed_engine.optimizer
        if hasattr(engine_optimizer, "clear_backward_seen_flag"):
            engine_optimizer.clear_backward_seen_flag()
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        stale = getattr(self.deepspeed_engine.optimizer, "grad_partitions_flat_buffer", None)
        if stale is not None:
            stale.zero_()
        return result

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        engine_optimizer: Any = self.deepspeed_engine.optimizer
        if not hasattr(engine_optimizer, "_restore_from_bit16_weights"):
            engine_optimizer._restore_from_bit16_weights = lambda: None  # nothing to restore without an optimiser
        fitting = self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if fitting and resharding.written_otherwise(Path(checkpoint_path), self.deepspeed_engine):
            return resharding.load_into_engine(self.deepspeed_engine, Path(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only)


class ZeRO2(ZeRO):
    """DeepSpeed strategy that shards gradients and optimiser state. For options see ``ZeRO``."""

    STAGE = 2


class ZeRO3(ZeRO):
    """DeepSpeed strategy that shards parameters, gradients and optimiser state. For options see ``ZeRO``."""

    STAGE = 3


# `trainer.strategy: zero3`: experiments/stages/validate.py imports this module before a Trainer is made
for _name, _class in (("zero2", ZeRO2), ("zero3", ZeRO3)):
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, _class, description=f"DeepSpeed {_class.__name__}, CUDA or CPU ranks")

# `ddp`, and `auto` on several devices: gradients lie in the buckets that are reduced. By default DDP holds them twice,
# 4 bytes per parameter more.
if not StrategyRegistry["ddp"]["init_params"].get("gradient_as_bucket_view"):
    settings = StrategyRegistry["ddp"]["init_params"] | {"gradient_as_bucket_view": True}
    StrategyRegistry.register("ddp", DDPStrategy, description="DDP", override=True, **settings)
