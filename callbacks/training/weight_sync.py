"""Pushes the policy's weights into the rollout engine, and can verify that the engine uses them."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch

from callbacks.trainer import settle_parameters
from callbacks.training.optimizer_offload import offload_optimizer, reload_optimizer
from common.ranges import PositiveFloat, PositiveInt
from common.ranks import gather_objects
from rollout.engines.base import Generation
from rollout.engines.weights.push import takes_adapters
from rollout.programs.served_model import UNTRAINABLE, ServedModel
from rollout.system import RolloutSystem
from rollout.trajectory import InfrastructureError

PROBE_TEXT = "Where is the old lighthouse?"


class WeightSync(L.Callback):
    """Pushes the policy's weights into the rollout engine (``datamodule.rollouts.load_weights``, version
    ``global_step``).

    Pushes at the start of training, after each training iteration that is followed by a sampled batch, and before each
    validation and test, unless the engine already has that version. Each rank's own engine, or the servers that all
    ranks share, receives the weights. A push may wait for rollouts in flight (``rollouts.in_flight_updates: false``);
    ``seconds`` excludes this. With ``rollouts.sleep_mode: true`` a push wakes the engine, and the optimiser states stay
    in host memory from the push until the next training step.

    Args:
        during_training: False for supervised stages, whose engine only evaluates: push before validation and test only.
        probe: after each push, let each engine continue a fixed text greedily, and log the largest difference between
            its log-probs and the trainer's as ``weight_sync/probe_gap``. A stale or half-written engine shows at once;
            the numerical difference between the two implementations is included.
        probe_tokens: tokens to compare.
        probe_tolerance: a difference above this many nats is an error that names the engine. None: only log it.
        checksum: let the engine compare a checksum of every received tensor with the trainer's.
    """

    phase = "sync"

    def __init__(
        self,
        during_training: bool = True,
        probe: bool = False,
        probe_tokens: PositiveInt = 8,
        probe_tolerance: PositiveFloat | None = None,
        checksum: bool = False,
    ) -> None:
        if probe_tolerance is not None and not probe:
            raise ValueError(f"WeightSync: probe_tolerance is {probe_tolerance} without probe; expected probe: true")
        self.during_training = during_training
        self.probe = probe
        self.probe_tokens = probe_tokens
        self.probe_tolerance = probe_tolerance
        self.checksum = checksum
        self.seconds = 0.0  # spent in pushes so far; throughput.py reads it
        self.gap: float | None = None  # of the last probe
        self._pushed: int | None = None

    def accept_data(self, data: Any) -> None:
        """Raise ValueError if the data module has no rollout system, or one that takes no weights, before an engine
        loads a model."""
        if getattr(data, "rollouts", None) is None:
            raise ValueError(
                f"WeightSync needs a data module with a rollout system, found {type(data).__name__}; "
                "give it its `rollouts` option or remove WeightSync from trainer.callbacks"
            )
        if isinstance(data.rollouts.engine, ServedModel):
            raise ValueError(UNTRAINABLE)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        self.accept_data(data)
        if takes_adapters(data.rollouts.engine) and getattr(pl_module, "lora", None) is None:
            raise ValueError(
                f"the engine has adapters: true, and {type(pl_module).__name__} trains all weights; expected "
                "model.lora, or adapters: false"
            )
        self._pushed = None  # a checkpoint may be restored between two stages: the version alone proves nothing

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Not on_fit_start: DeepSpeed restores its checkpoint after that hook.
        if self._sampling_next(trainer):
            self.push(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if _rollouts(trainer).sleep_mode:
            reload_optimizer(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._sampling_next(trainer):
            self.push(trainer, pl_module)
            if self.gap is not None:
                pl_module.log("weight_sync/probe_gap", self.gap, batch_size=1)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.push(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._sampling_next(trainer):
            _rollouts(trainer).sleep()  # elsewhere the next batch is generated at once, and the data module says when

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.push(trainer, pl_module)

    def _sampling_next(self, trainer: L.Trainer) -> bool:
        # Data that mixes saved batches with sampled ones says which comes next.
        return self.during_training and getattr(trainer.datamodule, "samples_next", True)  # type: ignore[attr-defined]

    def push(self, trainer: L.Trainer, module: Any) -> None:
        """Push the policy's weights into the rollout engine, unless it already has this version. A collective."""
        version = trainer.global_step
        if self._pushed == version:
            return
        start = time.perf_counter()
        settle_parameters(trainer)
        options = {"checksum": True} if self.checksum else {}
        rollouts = _rollouts(trainer)
        if rollouts.sleep_mode:
            offload_optimizer(trainer)
        waited = rollouts.waited_s
        weights = module.scaled_adapter_weights() if takes_adapters(rollouts.engine) else module.policy_weights()
        rollouts.load_weights(weights, version, **options)
        start += rollouts.waited_s - waited  # for rollouts in flight: that is waiting for rollouts, not a push
        self._pushed = version
        if self.probe:
            self.gap = self._probe(trainer, module, version)
        self.seconds += time.perf_counter() - start

    def _probe(self, trainer: L.Trainer, module: Any, version: int) -> float:
        """Compare log-probs of the engines and the trainer on a fixed text, and return the largest difference over all
        ranks. A collective."""
        rollouts = _rollouts(trainer)
        shared = rollouts.shares_engine
        answer: tuple[list[int], dict[str, Generation], str | None] = ([], {}, None)
        if not shared or trainer.is_global_zero:
            try:
                answer = (*rollouts.probe(PROBE_TEXT, self.probe_tokens), None)
            except InfrastructureError as error:
                answer = ([], {}, str(error))
        everywhere = gather_objects(answer)
        if failed := [failure for _, _, failure in everywhere if failure is not None]:
            raise InfrastructureError(f"log-prob probe of version {version}: {failed[0]}")
        # Under ZeRO-3 a forward pass is a collective: every rank must run as many.
        ids, mine, _ = everywhere[0] if shared else answer
        gaps = {who: generation_gap(module.policy, ids, generation) for who, generation in mine.items()}
        return self._judge(gather_objects(gaps)[:1] if shared else gather_objects(gaps), version)

    def _judge(self, gaps: list[dict[str, float]], version: int) -> float:
        """Return the largest log-prob difference of all ranks. Raises ValueError if one exceeds the tolerance or is
        NaN."""
        suffix = " of rank {}" if len(gaps) > 1 else ""
        named = {who + suffix.format(rank): gap for rank, own in enumerate(gaps) for who, gap in own.items()}
        bound = float("inf") if self.probe_tolerance is None else self.probe_tolerance
        off = {who: gap for who, gap in named.items() if not gap <= bound}
        if off and self.probe_tolerance is not None:
            listed = "; ".join(f"{who}: {gap:.3g}" for who, gap in off.items())
            raise ValueError(
                f"log-prob probe of version {version}: {len(off)} of {len(named)} engines differ from the trainer by "
                f"more than probe_tolerance {bound:g} nats ({listed}). They hold other weights than were pushed, or "
                "compute in another precision: compare with weight_sync/probe_gap of a run that is known to be sound"
            )
        return max(named.values())


def _rollouts(trainer: L.Trainer) -> RolloutSystem:
    data: Any = getattr(trainer, "datamodule", None)
    return data.rollouts


@torch.no_grad()
def generation_gap(policy: torch.nn.Module, prompt_ids: list[int], generation: Generation) -> float:
    """Return the largest absolute difference, in nats, between the engine's and the policy's log-probs of a generated
    text. The text is the engine's continuation of ``prompt_ids``."""
    device = next(policy.parameters()).device
    ids = torch.tensor([[*prompt_ids, *generation.token_ids]], device=device)
    length, n = len(generation.token_ids), ids.shape[1]
    ends = torch.tensor([0, n], dtype=torch.int32, device=device)
    # Boundaries of packed sequences, here one. A model that does not pack ignores them.
    boundaries = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": n, "max_length_k": n}
    was_training = policy.training
    policy.eval()
    logits = policy(input_ids=ids, logits_to_keep=length + 1, use_cache=False, **boundaries).logits[0, :-1].float()
    policy.train(was_training)
    found = logits.log_softmax(-1).gather(1, ids[0, -length:, None]).squeeze(1)
    return float((found - torch.tensor(generation.logprobs, device=device)).abs().max())
