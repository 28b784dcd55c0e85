"""Guided-OPD: the policy's turns are distilled, the guide's are imitated and never reinforced."""

import dataclasses
import math
import random
from types import SimpleNamespace

import pytest
import torch

from callbacks.tracking.metrics_file import METRICS_FILE, read_metrics
from callbacks.tracking.mlflow_logger import MLflowLogger
from lightning_modules.advantage_transforms.distillation import (
    DecayAfterError,
    Distillation,
    MaskAfterError,
    spread_by_row,
    weigh_turns,
)
from lightning_modules.advantage_transforms.divergence_loss import DivergenceLoss
from lightning_modules.advantage_transforms.guided_turns import GuidedTurns, of_policy
from lightning_modules.advantage_transforms.turns import turn_numbers
from lightning_modules.algorithms.episode_grpo import EpisodeGRPO, GiGPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.batch import PolicyOutputs, collate
from lightning_modules.maths.losses import LossInputs, TokenWeights
from lightning_modules.models.policy import load_causal_lm, token_logprobs
from rollout.trajectory import Action, ActionKind
from tests.lightning_modules.helpers import fit, make_group, make_trajectory


def rows(guided=True):
    """Two groups of three turns each; the guide has played every second turn of the first, and all of the last row."""
    rng = random.Random(0)
    made = make_group(rng, "a", [1, 0, 0]) + make_group(rng, "b", [0, 1, 1])
    if not guided:
        return made
    marks = [[k == 1 for k in range(3)] if t.group == "a" else [t.index == 2] * 3 for t in made]
    turns = [
        tuple(dataclasses.replace(turn, guided=mark) for turn, mark in zip(t.turns, own, strict=True))
        for t, own in zip(made, marks, strict=True)
    ]
    return [t.replace(turns=own) for t, own in zip(made, turns, strict=True)]


def marks(made, batch):
    found = torch.zeros_like(batch.mask)
    for i, t in enumerate(made):
        for turn in t.turns:
            if turn.guided:
                found[i, len(t.prompt_ids) + turn.start : len(t.prompt_ids) + turn.end] = 1
    return found


@pytest.mark.parametrize("use_grpo", [False, True])
def test_the_gradient_of_the_slow_form(model_dir, teacher_dir, gradients, use_grpo):
    """- mean over all sampled tokens of (A + T - S) log pi on the policy's, and of 0.5 log pi on the guide's."""
    made, options = rows(), {"num_mini_batches": 1, "max_tokens_per_micro_batch": 60, "lr": 1e-3}
    transforms = [Distillation(str(teacher_dir)), GuidedTurns(0.5)]
    trainer = fit(GRPO(str(model_dir), advantage_transforms=transforms, use_grpo=use_grpo, **options), [made])
    batch, student = collate(made), load_causal_lm(str(model_dir))
    s, guided = token_logprobs(student, batch).logprobs, marks(made, batch)
    with torch.no_grad():
        t = token_logprobs(load_causal_lm(str(teacher_dir)), batch).logprobs
    outcome = GRPO("p").outcome_advantages(made, batch, SimpleNamespace()) if use_grpo else 0.0
    signal = (outcome + t - s.detach()) * (1 - guided) + 0.5 * guided
    (-(signal * s * batch.mask).sum() / batch.mask.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in student.parameters()])
    assert expected.abs().max() > 1e-3 and (gradients[0] - expected).abs().max() < 1e-5
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert figures["train/guided_tokens"] == pytest.approx(float(guided.sum() / batch.mask.sum()))
    assert figures["train/loss_guided"] == pytest.approx(float(-(s * guided).sum() / guided.sum()), rel=1e-4)


def test_without_guided_turns_it_is_distillation(model_dir, teacher_dir, gradients):
    for extra in ([GuidedTurns()], []):
        transforms = [Distillation(str(teacher_dir)), *extra]
        fit(GRPO(str(model_dir), advantage_transforms=transforms, use_grpo=False, num_mini_batches=1), [rows(False)])
    assert torch.allclose(*gradients, atol=1e-7)


def test_a_metric_that_a_step_lacks_is_not_that_of_the_last_step(model_dir, teacher_dir, tmp_path):
    """The mean loss of the guide's tokens, in a step without any."""
    transforms = [Distillation(str(teacher_dir)), GuidedTurns()]
    module = GRPO(str(model_dir), advantage_transforms=transforms, use_grpo=False)
    logger = MLflowLogger("tests", "run", f"sqlite:///{tmp_path}/mlflow.db", save_dir=str(tmp_path), tracker="none")
    trainer = fit(module, [rows(), rows(False)], logger=logger, log_every_n_steps=1)
    first, second = read_metrics(tmp_path / METRICS_FILE)
    assert first.metrics["train/guided_tokens"] > 0 and "train/loss_guided" in first.metrics
    assert second.metrics["train/guided_tokens"] == 0 and "train/loss_guided" not in second.metrics
    assert second.metrics["train/opd_log_ratio_min"] < 0
    assert "train/loss_guided" not in trainer.callback_metrics


@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_mean_ratios_are_those_of_the_policy_s_tokens(level):
    """The ratio of a token that the policy sampled does not depend on what became of the guide's."""
    made = rows()
    batch = collate(made)
    guided, module = marks(made, batch), GRPO("p", ratio_level=level)
    loss = {}
    for gap in (0.0, 3.0):
        now = torch.full_like(batch.mask, -1.0).requires_grad_()
        old = now.detach() - gap * guided
        spans = module._spans(made, of_policy(made, batch))
        inputs = LossInputs(batch.mask * (1 - guided), old, None, (), spans)
        outputs = PolicyOutputs(now, torch.zeros_like(now), None)
        module.loss(outputs, batch, inputs, TokenWeights(*[batch.mask] * 3))["policy"].backward()
        loss[gap] = now.grad
    assert loss[0.0].abs().max() > 0 and torch.allclose(loss[0.0], loss[3.0])


def test_what_is_logged_concerns_the_policy_s_tokens(model_dir, teacher_dir):
    made = rows()
    batch = collate(made)
    guided = marks(made, batch)
    with torch.no_grad():
        s, t = (token_logprobs(load_causal_lm(str(m)), batch).logprobs for m in (model_dir, teacher_dir))
        entropy = token_logprobs(load_causal_lm(str(model_dir)), batch).entropy
    transforms = [Distillation(str(teacher_dir)), GuidedTurns()]
    module = GRPO(str(model_dir), advantage_transforms=transforms, use_grpo=False, num_mini_batches=1)
    figures = {name: float(value) for name, value in fit(module, [made]).callback_metrics.items()}
    own = batch.mask * (1 - guided)
    assert figures["train/response_tokens"] == pytest.approx(float(own.sum()) / len(made))
    assert figures["train/entropy"] == pytest.approx(float((entropy * own).sum() / own.sum()), rel=1e-5)
    gap = (s - batch.sampler_logprobs).abs()
    assert figures["train/logprob_gap"] == pytest.approx(float((gap * own).sum() / own.sum()), rel=1e-4)
    assert figures["train/opd_log_ratio"] == pytest.approx(float(((t - s) * own).sum() / own.sum()), rel=1e-4)
    assert figures["train/opd_advantage_abs"] == pytest.approx(float(((t - s).abs() * own).sum() / own.sum()), rel=1e-4)


def test_clipping_is_counted_on_the_policy_s_tokens():
    """All of them are beyond the clip, and the guide's have moved by e^3."""
    made = rows()
    batch = collate(made)
    own, module = batch.mask * (1 - marks(made, batch)), GRPO("p")
    now = torch.full_like(batch.mask, -1.0)
    old = now - torch.where(own != 0, 0.5, 3.0)
    inputs = LossInputs(own, old, None, (), None)
    module.loss(PolicyOutputs(now, now * 0, None), batch, inputs, TokenWeights(own, batch.mask, batch.mask))
    figures = module.metrics.reduce()
    assert figures["train/clip_fraction"] == pytest.approx(1)
    assert figures["train/ratio_max"] == pytest.approx(math.exp(0.5))


def mixed(played):
    """A group of three turns each, one of them invalid; the guide has played the turns ``played`` of two rows."""
    made = make_group(random.Random(1), "a", [1, 0, 1, 0])
    turns = [
        tuple(
            dataclasses.replace(
                turn,
                guided=t.index < 2 and k in played,
                action=Action(ActionKind.INVALID if k == t.index % 3 else ActionKind.ANSWER),
            )
            for k, turn in enumerate(t.turns)
        )
        for t in made
    ]
    return [t.replace(turns=own) for t, own in zip(made, turns, strict=True)]


@pytest.mark.parametrize("played", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_a_turn_has_the_same_advantage_whoever_played_the_others(played):
    """Turns of the guide are compared, too, and have no advantage themselves."""
    made, plain = mixed(played), mixed(())
    whole, own = collate(plain), of_policy(made, collate(made))
    for module in (EpisodeGRPO("p", invalid_coef=0.5), GiGPO("p", invalid_coef=0.5)):
        expected = module.outcome_advantages(plain, whole, SimpleNamespace())
        assert expected.unique().numel() > 3
        assert torch.allclose(module.outcome_advantages(made, own, SimpleNamespace()), expected * own.mask)
    assert torch.equal(turn_numbers(made, own), turn_numbers(plain, whole) * (own.mask != 0))
    values = [[10.0, 20.0, 30.0]] * len(made)
    assert torch.equal(spread_by_row(values, made, own), spread_by_row(values, plain, whole) * own.mask)
    for weighting in (MaskAfterError(), DecayAfterError(0.5)):
        expected = weigh_turns([weighting], plain, whole, whole.mask, whole.mask).weights_BT
        found = weigh_turns([weighting], made, own, own.mask, own.mask).weights_BT
        assert len(expected.unique()) > 2 or isinstance(weighting, MaskAfterError)
        assert torch.equal(found, expected * own.mask)


@pytest.mark.parametrize("judged", [[0], []])
def test_an_error_in_a_row_that_no_teacher_has_judged_changes_no_weight(judged):
    """Such rows have no teacher's distances, and may have more turns than all others."""
    short = make_trajectory(random.Random(0), 0, spans=[3])
    rows = [short, *mixed(())]
    batch = collate(rows)
    keep = torch.zeros(len(rows), 1)
    keep[judged] = 1.0
    some = dataclasses.replace(batch, mask=batch.mask * keep)
    alone = collate([short])
    for weighting in (MaskAfterError(), DecayAfterError(0.5)):
        found = weigh_turns([weighting], rows, some, -some.mask, -2 * some.mask).weights_BT
        assert not found[1:].any()
        if judged:
            expected = weigh_turns([weighting], [short], alone, -alone.mask, -2 * alone.mask).weights_BT
            assert torch.equal(found[0, : expected.shape[1]], expected[0]) and expected.any()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"kl_coef": 0.1, "reference": "r"}, "kl_coef"),
        ({"entropy_coef": 0.1}, "entropy_coef"),
        ({"ratio_denominator": "sampler"}, "ratio_denominator: sampler"),
        ({"importance_cap": 2.0, "importance_level": "sequence"}, "importance_level or mask_level: sequence"),
        ({"advantage_transforms": [DivergenceLoss("t", top_k=4), GuidedTurns()]}, "DivergenceLoss"),
    ],
)
def test_what_would_concern_the_guide_s_tokens_is_refused(options, found):
    with pytest.raises(ValueError, match=f"GuidedTurns and {found}: these would also concern the guide's tokens"):
        GRPO("p", **({"advantage_transforms": [GuidedTurns()]} | options))


@pytest.mark.parametrize("steps", [1, 2])
def test_the_guide_is_no_sampler_that_the_trainer_disagrees_with(model_dir, steps):
    """Importance weights and the logged mismatch concern the policy's tokens."""
    made = rows()
    batch = collate(made)
    with torch.no_grad():
        known = token_logprobs(load_causal_lm(str(model_dir)), batch).logprobs
    sampled = [
        t.replace(logprobs=tuple(
            -0.01 * m if mark else float(value) * m
            for m, mark, value in zip(
                t.loss_mask, guided[len(t.prompt_ids) :], known[i, len(t.prompt_ids) :], strict=False
            )
        ))
        for i, (t, guided) in enumerate(zip(made, marks(made, batch).tolist(), strict=True))
    ]  # fmt: skip
    options = {"importance_cap": 2.0} if steps == 2 else {}
    module = GRPO(str(model_dir), advantage_transforms=[GuidedTurns()], num_mini_batches=steps, lr=1e-9, **options)
    figures = fit(module, [sampled]).callback_metrics
    assert float(figures["train/logprob_gap_max"]) < 1e-3 and float(figures["train/importance_ess"]) == pytest.approx(1)


def test_a_guide_and_its_transform_need_each_other():
    data = SimpleNamespace(rollouts=SimpleNamespace(guide=object()))
    module = GRPO("p", advantage_transforms=[Distillation("t")])
    module.check_rows = lambda: None
    with pytest.raises(ValueError, match="would reinforce as if the policy had sampled them; put .*GuidedTurns last"):
        module.check_data(data)
    with pytest.raises(ValueError, match="GuidedTurns imitates turns of rollouts.guide, but there is none"):
        GuidedTurns().check_data(None, SimpleNamespace(rollouts=SimpleNamespace(guide=None)))
    with pytest.raises(ValueError, match="GuidedTurns must be the last"):
        GRPO("p", advantage_transforms=[GuidedTurns(), Distillation("t")])
