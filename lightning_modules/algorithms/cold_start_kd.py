"""Cold-start knowledge distillation: the student learns from the teacher's own correct trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from common.ranges import BelowOne, NonNegativeFloat, PositiveFloat, UnitInterval
from lightning_modules.batch import TokenBatch
from lightning_modules.maths.divergences import (
    Divergence,
    DivergenceName,
    TAIDSchedule,
    forward_kl,
    log_distributions,
    make_divergence,
    refuse_unused,
    taid,
)
from lightning_modules.models.policy import (
    DType,
    gathered,
    hidden_before,
    load_frozen_lm,
    output_head,
    partitioned,
    positions,
    require_rows,
    require_same_tokenizer,
)
from lightning_modules.training.supervised import SupervisedModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ColdStartKD(SupervisedModule):
    """Cold-start distillation: cross-entropy on a teacher's trajectories plus a divergence to the teacher. This is
    DGPO's phase 1 (arXiv 2508.20324 eq. 1, as quoted in docs/algorithms/kd.md)::

        L = 1/N sum_t m_t [ ce_coef * (-log pi_S(y_t | h_t)) + kl_coef * D(pi_T(. | h_t), pi_S(. | h_t)) ]

    D is over the full vocabulary, in float32, for ``logits_chunk`` tokens at a time. Both vocabularies are cut to the
    smaller one before the softmax. The logged KL is the true KL, not the cross-entropy form. The coefficients (1, 1)
    are the paper's; (0, 1) is the default of TAID's code. Like that code, it has no T^2 factor.

    TAID replaces D by the cross-entropy to a target that moves from the student to the teacher
    (docs/algorithms/kd.md). TAID's code and DGPO's baseline have ``ce_coef: 0``. t is logged as ``train/taid_t`` and
    checkpointed.

    Args:
        policy: Hugging Face folder of the student.
        teacher: Hugging Face folder of the teacher; it must share the student's tokenizer.
        ce_coef: weight of the cross-entropy on the teacher's sampled tokens.
        kl_coef: weight of the divergence.
        divergence: forward_kl (KD), reverse_kl, jsd (GKD), skew_forward and skew_reverse (DistiLLM), tvd, or taid.
        jsd_beta: interpolation of jsd: 0 is forward KL, 1 is reverse KL.
        skew_alpha: skew of the DistiLLM divergences.
        taid_t_start: t of the first step; the least t rises from here to 1 linearly over the training.
        taid_alpha: largest increase of t in a step.
        taid_beta: momentum of the relative fall of the loss.
        temperature: divides both logits before the softmax.
        teacher_dtype: type of the teacher's parameters.
    """

    def __init__(
        self,
        policy: str,
        teacher: str,
        ce_coef: NonNegativeFloat = 1.0,
        kl_coef: NonNegativeFloat = 1.0,
        divergence: DivergenceName | Literal["taid"] = "forward_kl",
        jsd_beta: UnitInterval = 0.5,
        skew_alpha: BelowOne = 0.1,
        taid_t_start: UnitInterval = 0.4,
        taid_alpha: NonNegativeFloat = 5e-4,
        taid_beta: UnitInterval = 0.99,
        temperature: PositiveFloat = 1.0,
        teacher_dtype: DType = "float32",
        **kwargs,
    ) -> None:
        super().__init__(policy, **kwargs)
        require_rows(policy, teacher, sampled=False)
        self.teacher_path = teacher
        self.ce_coef, self.kl_coef, self.temperature = ce_coef, kl_coef, temperature
        if ce_coef == kl_coef == 0:
            raise ValueError("ce_coef and kl_coef are 0, so there is no loss; set one of them above 0")
        self.taid: TAIDSchedule | None = None
        refuse_unused(divergence, jsd_beta, skew_alpha)
        taid = (taid_t_start, taid_alpha, taid_beta)
        if divergence != "taid" and taid != (0.4, 5e-4, 0.99):
            raise ValueError(f"taid_t_start, _alpha, _beta are {taid}: no effect with divergence {divergence}")
        if divergence == "taid":  # the number of steps is known once training starts
            self.taid = TAIDSchedule(1, t_start=taid_t_start, alpha=taid_alpha, beta=taid_beta)
        else:
            self.divergence = make_divergence(divergence, beta=jsd_beta, alpha=skew_alpha)
        self.teacher_dtype: DType = teacher_dtype
        self.teacher: PreTrainedModel = cast("Any", None)  # built in build_models

    def frozen_models(self) -> dict[str, tuple[str, DType]]:
        return {"teacher": (self.teacher_path, self.teacher_dtype)}

    def build_models(self) -> None:
        super().build_models()
        require_same_tokenizer(self.policy_path, self.teacher_path)
        self.teacher = load_frozen_lm(self.teacher_path, self.teacher_dtype, self.attention)

    @property
    def imitates_tokens(self) -> bool:
        return self.ce_coef > 0

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.taid is not None:
            self.taid.total_steps = self.trainer.estimated_stepping_batches

    def after_step(self, metrics: dict[str, float]) -> None:
        if self.taid is None:
            return
        used = self.taid.t
        if "train/divergence" in metrics:  # a step without loss tokens has no divergence
            self.taid.update(metrics["train/divergence"], self.trainer.global_step - 1)  # of all ranks
        metrics["train/taid_t"] = used

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.taid is not None:
            checkpoint["taid"] = {name: getattr(self.taid, name) for name in self.taid.STATE}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state of the TAID schedule. Raises ValueError if the checkpoint is of another model, or lacks
        this state."""
        super().on_load_checkpoint(checkpoint)
        if self.taid is None:
            return
        if "taid" not in checkpoint:
            raise ValueError(
                "the checkpoint has no state of TAID, so its divergence was another; start from the beginning"
            )
        vars(self.taid).update(checkpoint["taid"])

    def token_losses(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        at = positions(batch.mask)
        with torch.no_grad():
            teacher_hidden = hidden_before(self.teacher, batch, at)
        hidden = hidden_before(self.policy, batch, at)
        teacher_head = output_head(self.teacher)
        columns = output_head(self.policy)(
            hidden,
            function=partial(
                kd_columns,
                teacher_head=teacher_head,
                divergence=self.divergence if self.taid is None else partial(taid, t=self.taid.t),
                temperature=self.temperature,
            ),
            rows=(batch.input_ids[at], teacher_hidden),
            chunk=self.logits_chunk,
            context=partial(gathered, list(teacher_head.parameters()))
            if partitioned(teacher_head.parameters())
            else None,
        )
        ce, kd, kl, accuracy = columns.unbind(-1)
        return {
            "loss": self.ce_coef * ce + self.kl_coef * kd,
            "ce": ce.detach(),
            "divergence": kd.detach(),
            "kl": kl.detach(),
            "token_accuracy": accuracy.detach(),
        }


def kd_columns(
    logits: Tensor,
    targets: Tensor,
    teacher_hidden: Tensor,
    teacher_head: nn.Linear,
    divergence: Divergence,
    temperature: float,
) -> Tensor:
    """Return four values per token [n, 4]: cross-entropy, divergence, forward KL (for the log, no gradient) and
    accuracy."""
    log_p, log_q = log_distributions(logits, teacher_hidden, teacher_head, temperature)  # for the loss and the log
    distance = divergence(log_p, log_q, normalised=True)
    if divergence is forward_kl:
        kl = distance.detach()
    else:
        kl = forward_kl(log_p.detach(), log_q, normalised=True)
    ce = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    accuracy = (logits.detach().argmax(-1) == targets).float()
    return torch.stack([ce, distance, kl, accuracy], dim=-1)
