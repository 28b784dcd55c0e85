"""PPO: a critic, GAE on the model's own tokens, and an optional KL to a reference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from common.ranges import AboveOne, NonNegativeFloat, PositiveFloat, UnitInterval
from lightning_modules import ranks
from lightning_modules.annotations import base
from lightning_modules.annotations.base import Annotation, per_turn_prompts
from lightning_modules.annotations.signal_weights import SignalWeight, check_rows, weigh
from lightning_modules.batch import RowTensors, TokenBatch
from lightning_modules.maths import losses
from lightning_modules.maths.advantages import gae, last_token, whiten
from lightning_modules.maths.divergences import Estimator, sampled_kl
from lightning_modules.maths.group_advantages import Lone
from lightning_modules.training.on_policy import OnPolicyModule
from lightning_modules.training.scoring import Outputs, Scores
from lightning_modules.training.token_weights import TokenWeights

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class PPONotes(RowTensors):
    """Per-token inputs of PPO's loss beside the batch; [B, T] float32."""

    advantages: Tensor  # whitened; 0 where mask is 0
    rewards: Tensor  # outcome minus the KL if that is paid as a reward; the loss does not read it, people do
    returns: Tensor  # targets of the critic
    old_logprobs: Tensor
    old_values: Tensor
    value_mask: Tensor  # tokens the critic learns from
    reference_logprobs: Tensor | None  # only if the KL is in the loss
    kl_weights: Tensor | None  # what the KL of each token weighs, likewise; 0 where mask is 0
    annotations: tuple[RowTensors | None, ...] = ()  # what each of PPO's annotations keeps for its loss


class PPO(OnPolicyModule):
    """Search-R1's PPO (arXiv 2503.09516; docs/papers/dgpo.md 2.3), the stage DGPO stands on::

        r_t = [t last] R(y)  -  kl_coef * k_t * w        k_t estimates log pi_old(y_t) - log pi_ref(y_t); w: kl_weights
        A   = whiten(GAE(r, V; gamma, lam))              over the model's own tokens, whole batch, all ranks
        L   = mean max(-A rho, -A clip(rho, 1 - clip, 1 + clip)) - entropy_coef * mean H
              + mean 0.5 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2)

    Defaults are Search-R1's as DGPO ran them; it took 285 and 15 warmup iterations of 1000 for policy and critic.

    Args:
        policy: Hugging Face folder of the policy; the critic starts from its body too.
        reference: folder of the frozen model for the KL; loaded only where ``kl_coef`` is above 0. Null for no KL.
        kl_coef: weight of the KL; 0 for none.
        kl_in: whether the KL is a token reward (inside the return) or a loss term.
        kl_estimator: k1, k2 or k3; k1 in the loss is refused, since its gradient is zero in expectation.
        kl_weights: factors of the KL by step or trajectory, such as ``signal_weights.WrongOnly`` (DGPO); none for 1.
        annotations: what changes whitened advantages or adds a loss, in this order; see ``GRPO``. Those that compare
            the trajectories of a group are refused. Their teachers have the type of the reference.
        clip_low: how far below 1 the ratio may help.
        clip_high: how far above 1 the ratio may help.
        dual_clip: bound on the loss of tokens with negative advantage; null for none.
        value_clip: how far a value may move from the old one; null for no clipping.
        entropy_coef: weight of the entropy bonus.
        gamma: discount per model token.
        lam: GAE's lambda.
        as_released: as the released code does it: GAE, whitening and value loss over all response tokens, retrieved
            ones included, and the outcome on the last response token. Default: over the model's own tokens.
    """

    applies_correction = True
    # Options of GRPO that annotations ask for.
    advantage = "gae"
    lone: Lone = "zero"
    use_grpo = True

    def __init__(
        self,
        policy: str,
        reference: str | None = None,
        kl_coef: NonNegativeFloat = 0.001,
        kl_in: Literal["reward", "loss"] = "reward",
        kl_estimator: Estimator = "k1",
        kl_weights: list[SignalWeight] | None = None,
        annotations: list[Annotation] | None = None,
        clip_low: UnitInterval = 0.2,
        clip_high: NonNegativeFloat = 0.2,
        dual_clip: AboveOne | None = None,
        value_clip: PositiveFloat | None = 0.5,
        entropy_coef: NonNegativeFloat = 0.001,
        gamma: UnitInterval = 1.0,
        lam: UnitInterval = 1.0,
        as_released: bool = False,
        **kwargs,
    ) -> None:
        if kl_coef < 0:
            raise ValueError(f"kl_coef is {kl_coef}; expected 0 (no KL, and no reference is loaded) or more")
        loaded = reference if kl_coef > 0 else None
        if kl_in == "loss" and kl_estimator == "k1" and loaded is not None:
            raise ValueError("kl_in: loss with kl_estimator: k1 has a gradient of zero mean; take k2 or k3")
        if kl_weights and (loaded is None or any(weight.reads_advantages for weight in kl_weights)):
            raise ValueError(
                f"kl_weights is {kl_weights}, reference {reference} and kl_coef {kl_coef}; expected weights that read "
                "no advantages (PPO's come after the KL), and a reference with a kl_coef above 0"
            )
        super().__init__(policy=policy, reference=loaded, critic=policy, **kwargs)
        self.save_hyperparameters({"kl_weights": repr(kl_weights)})  # checkpoints hold plain types only
        self.kl_weights = kl_weights or []
        self.kl_coef, self.kl_in = kl_coef, kl_in
        self.kl_estimator: Estimator = kl_estimator
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self.value_clip, self.entropy_coef = value_clip, entropy_coef
        self.gamma, self.lam, self.as_released = gamma, lam, as_released
        self.annotations = annotations or []
        self.save_hyperparameters({"annotations": repr(self.annotations)})
        base.check_annotations(self)

    @property
    def compares(self) -> bool:
        return False

    def check_data(self, data: Any) -> None:
        """Refuse steps that cannot be compared."""
        super().check_data(data)
        check_rows(self.kl_weights, per_turn_prompts(data))

    def token_rewards(self, trajectories: Sequence[Trajectory], batch: TokenBatch, kl_BT: Tensor | None) -> Tensor:
        """r [B, T]: the outcome on the last token, minus ``kl_coef`` times the KL where it counts."""
        totals = batch.mask.new_tensor([t.reward.total for t in trajectories if t.reward is not None])
        rewards = totals[:, None] * last_token(self._steps(batch))
        return rewards if kl_BT is None else rewards - self.kl_coef * kl_BT

    def _steps(self, batch: TokenBatch) -> Tensor:
        """[B, T]: which tokens are steps of the decision process."""
        return batch.response_mask if self.as_released else batch.mask

    def annotate(self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: Scores) -> PPONotes:
        kl_weights = penalty = None
        if scores.reference_logprobs is not None:
            models = (scores.known("old_logprobs"), scores.reference_logprobs)
            kl_weights = batch.mask * weigh(self.kl_weights, trajectories, batch, *models).weights_BT
            kl = sampled_kl(*models, self.kl_estimator)
            self.metrics.mean("train/kl", (kl * batch.mask).sum(), batch.mask.sum())
            self.metrics.mean("train/kl_paid", (kl * kl_weights).sum(), kl_weights.sum())
            penalty = kl * kl_weights if self.kl_in == "reward" else None
        rewards, steps = self.token_rewards(trajectories, batch, penalty), self._steps(batch)
        values = scores.known("values")
        advantages, returns = gae(rewards, values, steps, self.gamma, self.lam)
        self._explained_variance(returns, values, batch.mask)
        in_loss, rollout = self.kl_in == "loss", base.RolloutBatch(self, trajectories, batch, scores)
        advantages = base.credit(rollout, whiten(advantages, steps, ranks.sum_over_ranks))
        advantages, own = base.annotate(rollout, advantages)
        return PPONotes(
            advantages=advantages,
            rewards=rewards,
            returns=returns,
            old_logprobs=scores.known("old_logprobs"),
            old_values=values,
            value_mask=steps,
            reference_logprobs=scores.reference_logprobs if in_loss else None,
            kl_weights=kl_weights if in_loss else None,
            annotations=own,
        )

    def streams(self, batch: TokenBatch, notes: PPONotes, weights: TokenWeights) -> Mapping[str, Tensor]:
        return {"policy": weights.aggregation, "value": notes.value_mask}

    def loss(self, outputs: Outputs, batch: TokenBatch, notes: PPONotes, weights: TokenWeights) -> Mapping[str, Tensor]:
        clip = (self.clip_low, self.clip_high)
        tokens = (outputs.logprobs, notes.old_logprobs, notes.advantages)
        policy, _ = losses.ppo_clip_loss(*tokens, weights.product, *clip, self.dual_clip)
        if self.entropy_coef:
            policy = policy - self.entropy_coef * losses.entropy_sum(outputs.entropy, weights.aggregation)[0]
        if notes.reference_logprobs is not None and notes.kl_weights is not None:
            kl = sampled_kl(outputs.logprobs, notes.reference_logprobs, self.kl_estimator)
            policy = policy + self.kl_coef * losses.masked_sum(kl, notes.kl_weights)[0]
        micro = base.MicroBatch(self, outputs, notes.old_logprobs, weights)
        policy = base.add_losses(policy, micro, notes.annotations)
        values = (outputs.known("values"), notes.old_values, notes.returns)
        value, _ = losses.value_loss(*values, notes.value_mask, self.value_clip)
        with torch.no_grad():
            clipped = losses.clip_events(*tokens, *clip) * batch.mask
            ratio = losses.importance_ratio(outputs.logprobs, notes.old_logprobs) * batch.mask
        self.metrics.mean("train/clip_fraction", clipped.sum(), batch.mask.sum())
        self.metrics.maximum("train/ratio_max", ratio.max())
        return {"policy": policy, "value": value}

    def _explained_variance(self, returns: Tensor, values: Tensor, mask: Tensor) -> None:
        """1 - Var(R - V) / Var(R) over the model's tokens of all ranks; left out if R does not vary."""
        errors, targets = (returns - values).double() * mask, returns.double() * mask
        sums = torch.stack(
            [mask.double().sum(), errors.sum(), errors.square().sum(), targets.sum(), targets.square().sum()]
        )
        n, e, ee, r, rr = (float(x) for x in ranks.sum_over_ranks(sums))
        variance = rr - r * r / max(n, 1.0)
        if variance > 1e-8 * max(n, 1.0):
            share = 1.0 / ranks.world_size()  # every rank adds the same number
            self.metrics.mean("train/explained_variance", (1.0 - (ee - e * e / n) / variance) * share, share)
