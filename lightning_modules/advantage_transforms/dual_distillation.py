"""DOPD: every token is distilled from a teacher or from the policy itself, both told more than the student
(arXiv 2606.30626)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common import ranks
from common.ranges import BelowOne, NonNegativeFloat, PositiveInt
from common.schedules import Coefficient, is_zero
from lightning_modules.advantage_transforms.base import Algorithm, MicroBatch, RolloutBatch, current
from lightning_modules.advantage_transforms.teacher_prompts import TeacherPrompts
from lightning_modules.advantage_transforms.teachers import Judged, TaughtTransform, rows_of, top_of
from lightning_modules.batch import RowTensors, TokenBatch, TokenRows
from lightning_modules.maths.divergences import LOGIT_FLOOR, jsd, reverse_kl, with_rest
from lightning_modules.maths.losses import masked_sum
from lightning_modules.models.policy import positions, scatter
from lightning_modules.models.projection import Reading
from lightning_modules.models.remote_teacher import RemoteTeacher

REGIMES = ("low_teacher", "low_self", "high_teacher", "high_self")


@dataclass(frozen=True, slots=True)
class DualJudged(Judged):
    """``ids`` and ``support`` hold the likeliest tokens of the teacher, then those of the told policy."""

    self_logprobs: Tensor | None = None  # [B, T] of the sampled tokens, of the told policy


@dataclass(frozen=True, slots=True)
class DualInputs(RowTensors):
    """What ``DualDistillation`` keeps for its loss; no gradient."""

    dual_weights: Tensor  # [B, T] float32, of the token's regime; 0 where nothing is learnt
    regimes: Tensor  # [B, T] int64, 1 + the place in ``REGIMES``
    ids: TokenRows
    support: TokenRows


def regimes_of(teacher: Tensor, own: Tensor, outliers: float) -> Tensor:
    """Return the regime of each token [n] int64, its place in ``REGIMES``, from log-probs of the sampled tokens under
    the teacher and under the told policy [n]. Every rank must call.

    The gap |teacher - own| is high above its mean, which leaves out the share ``outliers`` of the largest gaps. A high
    gap follows whoever finds the token likelier; a low one follows the teacher where the sum of both probabilities is
    above its mean, else the policy. Means are over all tokens of all ranks.
    """
    gap, sure = (teacher - own).abs(), teacher.exp() + own.exp()
    gaps, sums = ranks.gather_values(gap), ranks.gather_values(sure)
    kept = gaps.sort().values[: max(1, round(len(gaps) * (1 - outliers)))]
    high = gap > (kept.mean() if len(gaps) else 0.0)
    low = torch.where(sure > (sums.mean() if len(sums) else 0.0), 0, 1)
    return torch.where(high, torch.where(teacher >= own, 2, 3), low)


class DualDistillation(TaughtTransform):
    """Adds a divergence to a teacher or to the policy itself, whichever a token's regime names. Both read the same
    additional text (``prompts``), which the student does not::

        A = |T - P| of the sampled token        T: teacher, P: policy before the update, both told; S: student
        low A,  both likely        low_teacher   KL(S, T)        low A,  both unlikely      low_self   KL(S, P)
        high A, T >= P             high_teacher  JSD(S, T)       high A, T < P              high_self  KL(S, P)

    Each divergence is over the ``top_k`` likeliest tokens of its target, and the others as one outcome. The published
    JSD is over the whole vocabulary. What is high or low is relative to the iteration's batch (``regimes_of``).

    Logged: ``train/dual/REGIME`` (share of the judged tokens), ``train/dual/gap`` (mean A), ``train/dual/divergence``.

    Args:
        teacher: folder of the frozen teacher; it must share the student's tokenizer.
        server: a teacher behind HTTP, instead of ``teacher``.
        prompts: what teacher and policy are told, such as a hint. The paper reports that a final answer hurts.
        top_k: number of tokens at each position.
        low_teacher: weight of a token in this regime; likewise the next three.
        low_self: see above.
        high_teacher: see above.
        high_self: see above.
        outliers: share of the largest gaps that the mean gap leaves out.
        coef: weight of the loss: a number, or a ``Schedule``.
        tasks: what the teacher judges, see ``TaughtTransform``; null for all tasks.
        name: of several teachers, see ``TaughtTransform``.
    """

    learns = True
    reads_old_logprobs = False

    def __init__(
        self,
        teacher: str | None = None,
        server: RemoteTeacher | None = None,
        prompts: TeacherPrompts | None = None,
        top_k: PositiveInt = 128,
        low_teacher: NonNegativeFloat = 0.6,
        low_self: NonNegativeFloat = 0.3,
        high_teacher: NonNegativeFloat = 1.0,
        high_self: NonNegativeFloat = 0.6,
        outliers: BelowOne = 0.05,
        coef: Coefficient = 1.0,
        tasks: dict[str, list[str]] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(teacher, server, None, prompts, tasks, name)
        if prompts is None:
            raise ValueError("prompts is null; DualDistillation tells teacher and policy more than the student reads")
        weights = (low_teacher, low_self, high_teacher, high_self)
        if is_zero(coef) or not any(weights):
            raise ValueError("coef or all four weights are 0, so that the teacher has no effect")
        self.low_teacher, self.low_self, self.high_teacher, self.high_self = weights
        self.top_k, self.outliers, self.coef = top_k, outliers, coef

    @property
    def support_size(self) -> int:
        return self.top_k

    def said(self, algorithm: Algorithm, own: TokenBatch, read: TokenBatch) -> DualJudged:
        logprobs, ids, support = self.likeliest(algorithm, read)
        mine, own_ids, own_support = top_of(algorithm, algorithm.policy, read, self.top(algorithm))
        return DualJudged(
            logprobs.column(0, own.mask), torch.ones(len(own.lengths), device=own.mask.device),
            ids.beside(own_ids), support.beside(own_support), None, mine.column(0, own.mask),
        )  # fmt: skip

    def transform(self, batch: RolloutBatch, advantages: Tensor) -> tuple[Tensor, RowTensors | None]:
        judged: DualJudged = batch.judged(self)
        assert judged.ids is not None and judged.support is not None and judged.self_logprobs is not None
        mask = batch.tokens.mask * judged.rows_judged[:, None]
        at = mask.nonzero(as_tuple=True)
        teacher, own = judged.logprobs[at], judged.self_logprobs[at]
        found = regimes_of(teacher, own, self.outliers)
        mean = batch.algorithm.metrics.mean
        for place, regime in enumerate(REGIMES):
            mean(self.metric(f"dual/{regime}"), (found == place).sum(), len(found))
        mean(self.metric("dual/gap"), (teacher - own).abs().sum(), len(found))
        factors = mask.new_tensor([self.low_teacher, self.low_self, self.high_teacher, self.high_self])
        weights, regimes = torch.zeros_like(mask), torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
        weights[at] = current(batch.algorithm, self.coef) * factors[found]
        regimes[at] = found + 1
        return advantages, DualInputs(weights, regimes, judged.ids, judged.support)

    def reading(self, algorithm: Algorithm, inputs: RowTensors | None) -> Reading | None:
        return Reading(ids=inputs.ids.joined.clamp(min=0).long()) if isinstance(inputs, DualInputs) else None

    def loss(self, micro: MicroBatch, inputs: RowTensors | None) -> Tensor | None:
        if not isinstance(inputs, DualInputs) or micro.read is None:
            return None
        mask, k = micro.weights.mask, micro.read.shape[1] // 2
        at = positions(mask)
        rest = "left_out" if k >= rows_of(micro.algorithm.policy) else "tail"
        unknown = inputs.ids.joined < 0
        both = (x.masked_fill(unknown, LOGIT_FLOOR).view(-1, 2, k) for x in (micro.read, inputs.support.joined))
        student, target = (with_rest(x, rest) for x in both)
        distances = reverse_kl(student, target, normalised=True)  # [N, 2], to the teacher and to the told policy
        regime = inputs.regimes[at]
        towards_self = (regime == 2) | (regime == 4)
        values = torch.where(towards_self, distances[:, 1], distances[:, 0])
        values = torch.where(regime == 3, jsd(student[:, 0], target[:, 0], 0.5, normalised=True), values)
        weights = inputs.dual_weights * micro.weights.aggregation
        judged = (regime > 0).float()
        micro.algorithm.metrics.mean(self.metric("dual/divergence"), (values.detach() * judged).sum(), judged.sum())
        return masked_sum(scatter(values, at, mask), weights)[0]
