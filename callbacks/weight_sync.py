"""The policy that samples is the policy that was trained: pushes the trainer's weights into the rollout engine."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch

from callbacks.common import settle_parameters
from rollout.engines.base import SamplingParams
from rollout.protocols.base import PromptMode
from rollout.trajectory import Task, Trajectory

PROBE_TASK = Task(
    id="weight_sync_probe", question="Where is the old lighthouse?", golden_answers=("nowhere",), data_source="probe"
)


class WeightSync(L.Callback):
    """Calls ``datamodule.rollouts.load_weights(module.policy_weights(), version=global_step)`` when training starts,
    after each training iteration, and before each validation and test, unless the engine already has that version.

    Args:
        during_training: False for supervised stages, whose engine is used for evaluation only: then weights are
            pushed before validation and test alone.
        probe: after each push, let the engine continue a fixed prompt greedily and log the largest difference
            between its log-probs and the trainer's as ``weight_sync/probe_gap``. A stale or half-written engine
            shows at once; the figure also holds the numerical difference between the two implementations.
        probe_tokens: tokens to compare.

    Where batches are generated ahead (``data.staleness``) a push may wait until what is under way is done
    (``rollouts.in_flight: finish``); ``seconds`` leaves that out.

    Every rank pushes into its own engine; ``policy_weights`` gathers collectively.
    """

    phase = "sync"

    def __init__(self, during_training: bool = True, probe: bool = False, probe_tokens: int = 8) -> None:
        if probe_tokens < 1:
            raise ValueError(f"WeightSync(probe_tokens={probe_tokens}): expected at least 1")
        self.during_training = during_training
        self.probe = probe
        self.probe_tokens = probe_tokens
        self.seconds = 0.0  # spent in pushes so far; throughput.py reads it
        self.gap: float | None = None  # of the last probe
        self._pushed: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if getattr(trainer.datamodule, "rollouts", None) is None:
            raise ValueError(
                f"WeightSync needs a data module with a rollout system, found {type(trainer.datamodule).__name__}; "
                "give it its `rollouts` option or remove WeightSync from trainer.callbacks"
            )
        self._pushed = None  # a checkpoint may be restored between two stages: the version alone proves nothing

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Not on_fit_start: DeepSpeed restores its checkpoint after that hook.
        if self.during_training:
            self.push(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.during_training:
            self.push(trainer, pl_module)
            if self.gap is not None:
                pl_module.log("weight_sync/probe_gap", self.gap, batch_size=1)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.push(trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.push(trainer, pl_module)

    def push(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Push now, if the engine does not hold this version yet. A collective over ranks."""
        version = trainer.global_step
        if self._pushed == version:
            return
        start = time.perf_counter()
        settle_parameters(trainer)
        rollouts = trainer.datamodule.rollouts
        waited = rollouts.waited_s
        rollouts.load_weights(module.policy_weights(), version)
        start += rollouts.waited_s - waited  # for rollouts under way: that is waiting for rollouts, not a push
        self._pushed = version
        if self.probe:
            self.gap = self._probe(trainer, module)
        self.seconds += time.perf_counter() - start

    def _probe(self, trainer: L.Trainer, module: L.LightningModule) -> float:
        sampling = SamplingParams(max_new_tokens=self.probe_tokens, temperature=0.0)
        (trajectory,) = trainer.datamodule.rollouts.rollout(
            [PROBE_TASK], n=1, sampling=sampling, seed=0, mode=PromptMode.CLOSED_BOOK
        )
        return logprob_gap(module.policy, trajectory)


@torch.no_grad()
def logprob_gap(policy: torch.nn.Module, trajectory: Trajectory) -> float:
    """Largest absolute difference, in nats, between the sampler's log-probs of the sampled tokens and the policy's.

    Raises:
        ValueError: nothing was sampled, so there is nothing to compare.
    """
    if not any(trajectory.loss_mask):
        raise ValueError(f"log-prob probe: {trajectory.stop_reason.value}, the engine sampled no token to compare")
    device = next(policy.parameters()).device
    ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids], device=device)
    length = len(trajectory.response_ids)
    was_training = policy.training
    policy.eval()
    logits = policy(input_ids=ids, logits_to_keep=length + 1).logits[0, :-1].float()
    policy.train(was_training)
    logprobs = logits.log_softmax(-1).gather(1, ids[0, -length:, None]).squeeze(1)
    sampled = torch.tensor(trajectory.logprobs, device=device)
    mask = torch.tensor(trajectory.loss_mask, dtype=torch.bool, device=device)
    return float((logprobs - sampled).abs()[mask].max())
