"""Distillation from more of the teacher's distribution than the sampled token: its likeliest tokens, or all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from common.ranges import AtLeastOne, BelowOne, PositiveInt, UnitInterval
from common.schedules import Coefficient, Schedule, is_zero
from lightning_modules.advantage_transforms.base import (
    Algorithm,
    MicroBatch,
    RolloutBatch,
    current,
    per_turn_prompts,
    validate_choice,
)
from lightning_modules.advantage_transforms.distillation import TurnWeighting, check_gates, check_rows, weigh_turns
from lightning_modules.advantage_transforms.teacher_prompts import TeacherPrompts
from lightning_modules.advantage_transforms.teachers import Judged, SelfTeacher, TaughtTransform, rows_of, top_of
from lightning_modules.batch import RowTensors, TokenBatch, TokenRows
from lightning_modules.maths.divergences import (
    LOGIT_FLOOR,
    Divergence,
    DivergenceName,
    Rest,
    log_distributions,
    make_divergence,
    refuse_unused,
    with_rest,
)
from lightning_modules.maths.losses import importance_ratio, masked_sum
from lightning_modules.models.policy import gathered, hidden_before, output_head, partitioned, positions, scatter
from lightning_modules.models.projection import GivenTokens, Reading, TokenStatistics
from lightning_modules.models.remote_teacher import RemoteTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Support = Literal["teacher", "student", "both"]


@dataclass(frozen=True, slots=True)
class DivergenceInputs(RowTensors):
    """What ``DivergenceLoss`` keeps for its loss; no gradient."""

    divergence_weights: Tensor  # [B, T] float32, coef times the weight of the token's turn; 0 where nothing is learnt
    ids: TokenRows | None  # [n, K] int32; -1: a token that is there already
    support: TokenRows | None  # [n, K] float32, the teacher's log-probs of these
    hidden: TokenRows | None  # [n, H], for whole distributions


class DivergenceLoss(TaughtTransform):
    """Adds a divergence between student and teacher at every sampled token, with gradient through the student::

        L = coef w D(pi_T(. | h), pi_S(. | h))         mean over the tokens, like the policy's loss

    It sees the distribution where ``Distillation`` sees the sampled token: of the ``top_k`` likeliest tokens, or of the
    whole vocabulary (``top_k: null``). What the teacher says is computed before the update; of the student only the
    tokens are fixed, not their probabilities. With ``use_grpo: false`` the outcome has no part in the loss.

    The whole vocabulary takes the teacher's hidden states of the rollout batch, and the student's output layer once
    more; top-k takes 8 bytes times K for each token.

    Logged: ``train/divergence`` (mean over tokens whose weight is not 0, nats), ``train/teacher_mass`` and
    ``train/student_mass`` (probability of the K tokens, likewise), ``train/judged_tokens`` (share of the sampled
    tokens), ``train/divergence_coef`` (of a schedule). With a name they are ``train/NAME/...``.

    Args:
        teacher: folder of the frozen teacher; it must share the student's tokenizer.
        server: a teacher behind HTTP, instead of ``teacher``; it returns its own top-k.
        self_teacher: the policy itself, instead of ``teacher``.
        prompts: the prompt that the teacher reads before each response; null for the student's prompt.
        divergence: forward_kl (teacher || student), reverse_kl, jsd, skew_forward, skew_reverse or tvd, see
            ``divergences.py``.
        jsd_beta: the teacher's share of the JSD's mixture: 0 is forward KL, 1 is reverse KL.
        skew_alpha: skew of the DistiLLM divergences.
        top_k: number of tokens at each position; null for the whole vocabulary.
        support: whose likeliest tokens: teacher, student (before the update), or both.
        rest: the probability of other tokens: tail (one outcome), renormalised or left_out, see
            ``divergences.with_rest``.
        weights: factors of w by turn; none for 1.
        coef: weight of the loss: a number, or a ``Schedule``.
        ratio_cap: bound of pi / pi_old of the sampled token, which then multiplies a token's divergence without
            gradient (SDPO: 2). Null for no factor.
        tasks: what the teacher judges, see ``TaughtTransform``; null for all tasks.
        name: of several teachers, see ``TaughtTransform``.
    """

    learns = True

    def __init__(
        self,
        teacher: str | None = None,
        server: RemoteTeacher | None = None,
        self_teacher: SelfTeacher | None = None,
        prompts: TeacherPrompts | None = None,
        divergence: DivergenceName = "reverse_kl",
        jsd_beta: UnitInterval = 0.5,
        skew_alpha: BelowOne = 0.1,
        top_k: PositiveInt | None = 100,
        support: Support = "teacher",
        rest: Rest = "tail",
        weights: list[TurnWeighting] | None = None,
        coef: Coefficient = 1.0,
        ratio_cap: AtLeastOne | None = None,
        tasks: dict[str, list[str]] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(teacher, server, self_teacher, prompts, tasks, name)
        if is_zero(coef):
            raise ValueError("coef is 0, so that the teacher has no effect; expected above 0, or no DivergenceLoss")
        refuse_unused(divergence, jsd_beta, skew_alpha)
        self.divergence, self.jsd_beta, self.skew_alpha = divergence, jsd_beta, skew_alpha
        self._divergence: Divergence = make_divergence(divergence, beta=jsd_beta, alpha=skew_alpha)
        self.top_k = top_k
        self.support: Support = validate_choice("support", support, Support)
        self.rest: Rest = validate_choice("rest", rest, Rest)
        self.weights, self.coef, self.ratio_cap = weights or [], coef, ratio_cap
        if top_k is None and (support != "teacher" or rest != "tail"):
            raise ValueError(f"support is {support} and rest {rest}: no effect with top_k null; leave them out")
        if server is not None and (top_k is None or support != "teacher"):
            raise ValueError(
                f"top_k is {top_k} and support {support}, but a server returns its own likeliest tokens; expected a "
                "number and support: teacher"
            )

    @property
    def reads_old_logprobs(self) -> bool:  # type: ignore[override]
        return bool(self.weights)

    @property
    def support_size(self) -> int:
        return self.top_k or 0

    def check(self, algorithm: Algorithm) -> None:
        super().check(algorithm)
        check_gates(self.weights, algorithm)
        moving = self.self_teacher is not None and self.self_teacher.weights == "current"
        if self.top_k is None and moving and algorithm.num_mini_batches * algorithm.epochs > 1:
            raise ValueError(
                "top_k is null and the self-teacher has the current weights, which change between the optimiser steps "
                "of an iteration; expected num_mini_batches: 1 and epochs: 1, a number for top_k, or weights: ema"
            )

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        """Refuse a data module whose turns cannot be compared, and what the base class refuses."""
        check_rows(self.weights, per_turn_prompts(data))
        super().check_data(algorithm, data)

    # ------------------------------------------------------------------ what the teacher says
    def said(self, algorithm: Algorithm, own: TokenBatch, read: TokenBatch) -> Judged:
        judged = torch.ones(len(own.lengths), device=own.mask.device)
        if self.top_k is not None and self.support == "teacher":
            logprobs, ids, support = self.likeliest(algorithm, read)
            return Judged(logprobs.column(0, own.mask), judged, ids, support)
        model, chunk, temperature = self.model(algorithm), algorithm.logits_chunk, algorithm.temperature
        if self.top_k is None:
            hidden = algorithm.values_of(read, lambda micro, _: hidden_before(model, micro, positions(micro.mask)))
            targets = own.input_ids[positions(own.mask)]
            with torch.no_grad():
                logprobs = output_head(model)(hidden.joined, TokenStatistics(temperature), (targets,), chunk)
            return Judged(scatter(logprobs[:, 0], positions(own.mask), own.mask), judged, hidden=hidden)
        top = self.top(algorithm)
        _, ids, _ = top_of(algorithm, algorithm.policy, own, top)
        if self.support == "both":
            ids = union(self.likeliest(algorithm, read)[1], ids)
        found = self._at(algorithm, model, read, ids, top.vocabulary)
        return Judged(found.column(0, own.mask), judged, ids, found.columns(1, None))

    def _at(
        self, algorithm: Algorithm, model: PreTrainedModel, batch: TokenBatch, ids: TokenRows, size: int
    ) -> TokenRows:
        given = GivenTokens(size, algorithm.temperature)

        def function(micro: TokenBatch, group: Sequence[int]) -> Tensor:
            at = positions(micro.mask)
            others = ids.rows(group, 0).joined.clamp(min=0).long()
            targets = torch.cat([micro.input_ids[at][:, None], others], dim=1)
            return output_head(model)(hidden_before(model, micro, at), given, (targets,), algorithm.logits_chunk)

        return algorithm.values_of(batch, function)

    # ------------------------------------------------------------------ the loss
    def transform(self, batch: RolloutBatch, advantages: Tensor) -> tuple[Tensor, RowTensors | None]:
        judged: Judged = batch.judged(self)
        tokens = dataclasses.replace(batch.tokens, mask=batch.tokens.mask * judged.rows_judged[:, None])
        coef = current(batch.algorithm, self.coef)
        if isinstance(self.coef, Schedule):
            batch.algorithm.metrics.maximum(self.metric("divergence_coef"), coef)
        weights = coef * tokens.mask
        if self.weights:
            models = (batch.scores.require("old_logprobs"), judged.logprobs)
            weights = weights * weigh_turns(self.weights, batch.trajectories, tokens, *models, batch.outcome).weights_BT
        batch.algorithm.metrics.mean(self.metric("judged_tokens"), tokens.mask.sum(), batch.tokens.mask.sum())
        return advantages, DivergenceInputs(weights, judged.ids, judged.support, judged.hidden)

    def reading(self, algorithm: Algorithm, inputs: RowTensors | None) -> Reading | None:
        if not isinstance(inputs, DivergenceInputs):
            return None
        if inputs.ids is not None:
            return Reading(ids=inputs.ids.joined.clamp(min=0).long())
        assert inputs.hidden is not None
        head = output_head(self.model(algorithm))
        function = partial(
            whole_divergence, teacher_head=head, divergence=self._divergence, temperature=algorithm.temperature
        )
        # The policy's own head is whole while it is called.
        apart = head is not output_head(algorithm.policy) and partitioned(head.parameters())
        context = partial(gathered, list(head.parameters())) if apart else None
        return Reading(function=function, rows=(inputs.hidden.joined,), context=context)

    def loss(self, micro: MicroBatch, inputs: RowTensors | None) -> Tensor | None:
        if not isinstance(inputs, DivergenceInputs) or micro.read is None:
            return None
        mask, mean = micro.weights.mask, micro.algorithm.metrics.mean
        at = positions(mask)
        judged = (inputs.divergence_weights[at] != 0).float()
        if inputs.ids is None or inputs.support is None:
            values = micro.read[:, 0]
        else:
            student, teacher = micro.read, inputs.support.joined
            again = inputs.ids.joined < 0
            student, teacher = (x.masked_fill(again, LOGIT_FLOOR) for x in (student, teacher))
            for name, logprobs in (("student_mass", student), ("teacher_mass", teacher)):
                mean(self.metric(name), (logprobs.detach().exp().sum(-1) * judged).sum(), judged.sum())
            whole = (self.top_k or 0) >= rows_of(micro.algorithm.policy)  # then there are no others
            rest: Rest = "left_out" if whole else self.rest
            values = self._divergence(with_rest(student, rest), with_rest(teacher, rest), normalised=True)
        mean(self.metric("divergence"), (values.detach() * judged).sum(), judged.sum())
        values = scatter(values, at, mask)
        if self.ratio_cap is not None:
            ratio = importance_ratio(micro.outputs.logprobs.detach(), micro.old_logprobs)
            values = values * ratio.clamp(max=self.ratio_cap)
        return masked_sum(values, inputs.divergence_weights * micro.weights.aggregation)[0]


def whole_divergence(
    logits: Tensor, teacher_hidden: Tensor, teacher_head: torch.nn.Linear, divergence: Divergence, temperature: float
) -> Tensor:
    """Return the divergence of each token over the whole vocabulary [n, 1]."""
    return divergence(*log_distributions(logits, teacher_hidden, teacher_head, temperature), normalised=True)[:, None]


def union(first: TokenRows, second: TokenRows) -> TokenRows:
    """Return the tokens [n, K + L] of both; -1 instead of a token of ``second`` that ``first`` has."""

    def joined(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b.masked_fill((b[:, :, None] == a[:, None, :]).any(-1), -1)], dim=1)

    rows = tuple(joined(a, b) for a, b in zip(first.by_row, second.by_row, strict=True))
    return TokenRows(rows, joined(first.none, second.none))
