"""PPO: a critic, GAE on the model's own tokens, and an optional KL to a reference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from common import ranks
from common.ranges import AboveOne, NonNegativeFloat, PositiveFloat, UnitInterval
from common.schedules import Coefficient, is_zero
from lightning_modules.advantage_transforms.base import (
    AdvantageTransform,
    MicroBatch,
    RolloutBatch,
    check_transforms,
    current,
    per_turn_prompts,
)
from lightning_modules.advantage_transforms.distillation import TurnWeighting, check_rows, weigh_turns
from lightning_modules.batch import LogprobBatch, PolicyOutputs, RowTensors, TokenBatch
from lightning_modules.maths import losses
from lightning_modules.maths.advantages import gae, last_token, whiten
from lightning_modules.maths.losses import Estimator, Singleton, TokenWeights, sampled_kl
from lightning_modules.training.on_policy import OnPolicyModule

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

DEFAULT_KL = 0.001


@dataclass(frozen=True, slots=True)
class PPOLossInputs(RowTensors):
    """Inputs of PPO's loss that are fixed before the update; [B, T] float32."""

    advantages: Tensor  # whitened; 0 where mask is 0
    rewards: Tensor  # outcome minus the KL if that is a reward; shown on trajectory pages, not read by the loss
    returns: Tensor  # targets of the critic
    old_logprobs: Tensor
    old_values: Tensor
    value_mask: Tensor  # tokens the critic learns from
    reference_logprobs: Tensor | None  # only if the KL is in the loss
    kl_weights: Tensor | None  # weight of each token's KL, likewise; 0 where mask is 0
    transforms: tuple[RowTensors | None, ...] = ()  # what each advantage transform keeps for its own loss


class PPO(OnPolicyModule):
    """PPO with a critic and an optional KL to a reference model, as Search-R1 runs it (arXiv 2503.09516;
    docs/algorithms/dgpo.md). The base of DGPO::

        r_t = [t last] R(y)  -  kl_coef * k_t * w        k_t estimates log pi_old(y_t) - log pi_ref(y_t); w: kl_weights
        A   = whiten(GAE(r, V; gamma, lam))              over the model's own tokens, whole batch, all ranks
        L   = mean max(-A rho, -A clip(rho, 1 - clip, 1 + clip)) - entropy_coef * mean H
              + mean 0.5 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2)

    Defaults are Search-R1's as DGPO ran them, except the warmup: 285 and 15 of 1,000 iterations for policy and critic.

    Args:
        policy: Hugging Face folder of the policy; the critic starts from its body too.
        reference: folder of the frozen model for the KL; loaded only where ``kl_coef`` is above 0. Null for no KL.
        kl_coef: weight of the KL; 0 for none. A number, or a ``Schedule``.
        kl_in: whether the KL is a token reward (inside the return) or a loss term.
        kl_estimator: k1, k2 or k3; k1 in the loss is refused, since its gradient is zero in expectation.
        kl_weights: factors of the KL by turn or trajectory, such as ``distillation.IncorrectOnly`` (DGPO); none for 1.
        advantage_transforms: applied to the whitened advantages in this order, see ``GRPO``. Transforms that compare
            the trajectories of a group are refused. Their teachers have the type of the reference.
        clip_low: how far below 1 the ratio may help.
        clip_high: how far above 1 the ratio may help.
        dual_clip: bound on the loss of tokens with negative advantage; null for none.
        value_clip: how far a value may move from the old one; null for no clipping.
        entropy_coef: weight of the entropy bonus: a number, or a ``Schedule``.
        gamma: discount per model token.
        lam: GAE's lambda.
        as_released: follow the released code: GAE, whitening and value loss over all response tokens, retrieved tokens
            included, and the outcome on the last response token. Default: only the model's own tokens.
    """

    applies_correction = True
    # Options of GRPO that advantage transforms read.
    advantage = "gae"
    singleton_advantage: Singleton = "zero"
    use_grpo = True

    def __init__(
        self,
        policy: str,
        reference: str | None = None,
        kl_coef: Coefficient = DEFAULT_KL,
        kl_in: Literal["reward", "loss"] = "reward",
        kl_estimator: Estimator = "k1",
        kl_weights: list[TurnWeighting] | None = None,
        advantage_transforms: list[AdvantageTransform] | None = None,
        clip_low: UnitInterval = 0.2,
        clip_high: NonNegativeFloat = 0.2,
        dual_clip: AboveOne | None = None,
        value_clip: PositiveFloat | None = 0.5,
        entropy_coef: Coefficient = 0.001,
        gamma: UnitInterval = 1.0,
        lam: UnitInterval = 1.0,
        as_released: bool = False,
        **kwargs,
    ) -> None:
        loaded = None if is_zero(kl_coef) else reference
        if reference is None and kl_coef != DEFAULT_KL and not is_zero(kl_coef):
            raise ValueError(f"kl_coef is {kl_coef}, but there is no reference; name one, or leave kl_coef out")
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
        self.advantage_transforms = advantage_transforms or []
        self.save_hyperparameters({"advantage_transforms": repr(self.advantage_transforms)})
        check_transforms(self)

    @property
    def compares(self) -> bool:
        return False

    def check_data(self, data: Any) -> None:
        """Refuse a data module that makes each turn a separate row if a KL weight compares the turns of a
        trajectory."""
        super().check_data(data)
        check_rows(self.kl_weights, per_turn_prompts(data))

    def token_rewards(self, trajectories: Sequence[Trajectory], batch: TokenBatch, kl_BT: Tensor | None) -> Tensor:
        """Return the reward of each token [B, T]: the outcome on the last token, minus ``kl_coef`` times the weighted
        KL."""
        totals = batch.mask.new_tensor([t.reward.total for t in trajectories if t.reward is not None])
        rewards = totals[:, None] * last_token(self._mdp_tokens(batch))
        return rewards if kl_BT is None else rewards - current(self, self.kl_coef) * kl_BT

    def _mdp_tokens(self, batch: TokenBatch) -> Tensor:
        """Return a mask [B, T] of the tokens that PPO treats as actions: the model's own, or all response tokens with
        ``as_released``."""
        return batch.response_mask if self.as_released else batch.mask

    def compute_advantages(
        self, trajectories: Sequence[Trajectory], batch: TokenBatch, scores: LogprobBatch
    ) -> PPOLossInputs:
        kl_weights = penalty = None
        if scores.reference_logprobs is not None:
            models = (scores.require("old_logprobs"), scores.reference_logprobs)
            kl_weights = batch.mask * weigh_turns(self.kl_weights, trajectories, batch, *models).weights_BT
            kl = sampled_kl(*models, self.kl_estimator)
            self.metrics.mean("train/kl", (kl * batch.mask).sum(), batch.mask.sum())
            self.metrics.mean("train/kl_paid", (kl * kl_weights).sum(), kl_weights.sum())
            penalty = kl * kl_weights if self.kl_in == "reward" else None
        rewards, tokens = self.token_rewards(trajectories, batch, penalty), self._mdp_tokens(batch)
        values = scores.require("values")
        advantages, returns = gae(rewards, values, tokens, self.gamma, self.lam)
        self._explained_variance(returns, values, batch.mask)
        in_loss, rollout_batch = self.kl_in == "loss", RolloutBatch(self, trajectories, batch, scores)
        advantages = self.assign_credit(rollout_batch, whiten(advantages, tokens, ranks.sum_over_ranks))
        advantages, kept = self.apply_transforms(rollout_batch, advantages)
        return PPOLossInputs(
            advantages=advantages,
            rewards=rewards,
            returns=returns,
            old_logprobs=scores.require("old_logprobs"),
            old_values=values,
            value_mask=tokens,
            reference_logprobs=scores.reference_logprobs if in_loss else None,
            kl_weights=kl_weights if in_loss else None,
            transforms=kept,
        )

    def streams(self, batch: TokenBatch, inputs: PPOLossInputs, weights: TokenWeights) -> Mapping[str, Tensor]:
        return {"policy": weights.aggregation, "value": inputs.value_mask}

    def loss(
        self, outputs: PolicyOutputs, batch: TokenBatch, inputs: PPOLossInputs, weights: TokenWeights
    ) -> Mapping[str, Tensor]:
        clip = (self.clip_low, self.clip_high)
        tokens = (outputs.logprobs, inputs.old_logprobs, inputs.advantages)
        policy, _ = losses.ppo_clip_loss(*tokens, weights.product, *clip, self.dual_clip)
        if not is_zero(self.entropy_coef):
            entropy, _ = losses.masked_sum(outputs.entropy, weights.aggregation)
            policy = policy - current(self, self.entropy_coef) * entropy
        if inputs.reference_logprobs is not None and inputs.kl_weights is not None:
            kl = sampled_kl(outputs.logprobs, inputs.reference_logprobs, self.kl_estimator)
            policy = policy + current(self, self.kl_coef) * losses.masked_sum(kl, inputs.kl_weights)[0]
        policy = self.add_losses(policy, MicroBatch(self, outputs, inputs.old_logprobs, weights), inputs.transforms)
        values = (outputs.require("values"), inputs.old_values, inputs.returns)
        value, _ = losses.value_loss(*values, inputs.value_mask, self.value_clip)
        with torch.no_grad():
            clipped = losses.clip_events(*tokens, *clip) * batch.mask
            ratio = losses.importance_ratio(outputs.logprobs, inputs.old_logprobs) * batch.mask
        self.metrics.mean("train/clip_fraction", clipped.sum(), batch.mask.sum())
        self.metrics.maximum("train/ratio_max", ratio.max())
        return {"policy": policy, "value": value}

    def _explained_variance(self, returns: Tensor, values: Tensor, mask: Tensor) -> None:
        """Log the critic's explained variance, 1 - Var(R - V) / Var(R), over the model's tokens of all ranks. It is
        left out if R does not vary."""
        errors, targets = (returns - values).double() * mask, returns.double() * mask
        sums = torch.stack(
            [mask.double().sum(), errors.sum(), errors.square().sum(), targets.sum(), targets.square().sum()]
        )
        n, e, ee, r, rr = (float(x) for x in ranks.sum_over_ranks(sums))
        variance = rr - r * r / max(n, 1.0)
        if variance > 1e-8 * max(n, 1.0):
            share = 1.0 / ranks.world_size()  # every rank adds the same number
            self.metrics.mean("train/explained_variance", (1.0 - (ee - e * e / n) / variance) * share, share)
