"""Divergences against plain float64 sums, their endpoints, and the estimators against the exact KL."""

import math
from functools import partial

import pytest
import torch

from lightning_modules.algorithms.cold_start_kd import kd_columns
from lightning_modules.maths.divergences import (
    TAIDSchedule,
    forward_kl,
    jsd,
    make_divergence,
    reverse_kl,
    shared_vocabulary,
    skew_forward,
    skew_reverse,
    taid,
)
from lightning_modules.maths.losses import sampled_kl


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64) * 2
    return student.requires_grad_(), teacher


def plain_kl(a, b):
    return sum(x * (math.log(x) - math.log(y)) for x, y in zip(a, b, strict=True) if x > 0)


def mix(a, b, weight):
    return [weight * x + (1 - weight) * y for x, y in zip(a, b, strict=True)]


PLAIN = {
    "forward_kl": lambda p, q: plain_kl(q, p),
    "reverse_kl": lambda p, q: plain_kl(p, q),
    "jsd": lambda p, q: 0.3 * plain_kl(q, mix(q, p, 0.3)) + 0.7 * plain_kl(p, mix(q, p, 0.3)),
    "skew_forward": lambda p, q: plain_kl(q, mix(q, p, 0.1)),
    "skew_reverse": lambda p, q: plain_kl(p, mix(p, q, 0.1)),
    "tvd": lambda p, q: 0.5 * sum(abs(x - y) for x, y in zip(p, q, strict=True)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_against_plain_sums(name, logits):
    student, teacher = logits
    values = make_divergence(name, beta=0.3, alpha=0.1)(student, teacher)
    p, q = student.softmax(-1).tolist(), teacher.softmax(-1).tolist()
    expected = [PLAIN[name](a, b) for a, b in zip(p, q, strict=True)]
    assert values.tolist() == pytest.approx(expected, rel=1e-4)
    assert values.dtype == torch.float32


def test_endpoints(logits):
    student, teacher = logits
    assert torch.equal(jsd(student, teacher, 0.0), forward_kl(student, teacher))
    assert torch.equal(jsd(student, teacher, 1.0), reverse_kl(student, teacher))
    assert torch.equal(skew_forward(student, teacher, 0.0), forward_kl(student, teacher))
    assert torch.equal(skew_reverse(student, teacher, 0.0), reverse_kl(student, teacher))
    near = jsd(student, teacher, 1e-4) / 1e-4  # the scaled JSD tends to the forward KL
    assert torch.allclose(near, forward_kl(student, teacher), rtol=1e-2, atol=1e-3)


def test_impossible_tokens_are_no_nan(logits):
    student, teacher = (x.detach().clone() for x in logits)
    student[:, 0] = teacher[:, 0] = -torch.inf
    student.requires_grad_()
    for name in PLAIN:
        values = make_divergence(name)(student, teacher)
        (grad,) = torch.autograd.grad(values.sum(), student)
        assert torch.isfinite(values).all(), name
        assert torch.isfinite(grad).all(), name


@pytest.mark.parametrize("name", ["jsd", "taid"])
def test_the_kl_for_the_log_shares_the_loss_s_softmax(name, logits):
    student, teacher = (x.detach().float() for x in logits)
    divergence = partial(taid, t=0.3) if name == "taid" else make_divergence(name, beta=0.3)
    head = torch.nn.Linear(7, 7, bias=False)
    torch.nn.init.eye_(head.weight)
    with torch.profiler.profile() as profile:
        columns = kd_columns(student, torch.arange(5), teacher, head, divergence, temperature=2.0)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_log_softmax"] == 3, "student and teacher, and the student's at temperature 1 for the CE"
    assert torch.allclose(columns[:, 1], divergence(student / 2, teacher / 2), atol=1e-6)
    assert torch.allclose(columns[:, 2], forward_kl(student / 2, teacher / 2), atol=1e-6)


def test_shared_vocabulary_is_cut_before_the_softmax(logits):
    student, teacher = logits
    wide = torch.cat([teacher, torch.full((5, 3), 50.0, dtype=torch.float64)], -1)  # padding rows with large logits
    assert torch.equal(forward_kl(*shared_vocabulary(student, wide)), forward_kl(student, teacher))
    assert torch.equal(forward_kl(*shared_vocabulary(wide, teacher)), forward_kl(teacher, teacher))


def test_taid(logits):
    student, teacher = logits
    entropies = [-(z.log_softmax(-1) * z.softmax(-1)).sum(-1) for z in (student.float(), teacher.float())]
    assert torch.allclose(taid(student, teacher, 1.0), forward_kl(student, teacher) + entropies[1], atol=1e-5)
    assert torch.allclose(taid(student, teacher, 0.0), entropies[0], atol=1e-5)
    hard = teacher.clone()
    hard[:, 0] = -math.inf
    assert torch.isfinite(taid(hard, teacher, 1.0)).all() and torch.isfinite(taid(student, hard, 0.0)).all()
    (grad,) = torch.autograd.grad(taid(student, teacher, 0.4).sum(), student)
    target = (0.6 * student + 0.4 * teacher).softmax(-1)
    assert torch.allclose(grad, student.softmax(-1) - target, atol=1e-6)  # the target itself has no gradient


def test_taid_schedule_by_hand():
    schedule = TAIDSchedule(total_steps=1000, t_start=0.4)
    assert schedule.update(2.0, step=0) == 0.4  # the first loss is only remembered
    momentum = 0.01 * (2.0 - 1.0) / 2.0
    expected = 0.4 + 5e-4 / (1 + math.exp(-momentum)) * 0.6
    assert schedule.update(1.0, step=0) == pytest.approx(expected)
    assert schedule.update(1.0, step=900) == pytest.approx(0.94)  # the linear floor takes over
    assert schedule.update(1.0, step=2000) == 1.0
    with pytest.raises(ValueError, match="t_start 0.9"):
        TAIDSchedule(total_steps=1, t_start=0.9, t_end=0.5)


def test_estimators_by_hand():
    student, teacher = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert sampled_kl(student, teacher, "k1").tolist() == pytest.approx([0.5, -1.0])
    assert sampled_kl(student, teacher, "k2").tolist() == pytest.approx([0.125, 0.5])
    assert sampled_kl(student, teacher, "k3").tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2.0])
    assert sampled_kl(student, teacher + 90, "k3").tolist() == [10.0, 10.0]
    with pytest.raises(ValueError, match="low_var_rkl"):
        sampled_kl(student, teacher, "low_var_rkl")


def test_unknown_names_and_ranges():
    with pytest.raises(ValueError, match="unknown divergence 'kl'; expected one of forward_kl"):
        make_divergence("kl")
    with pytest.raises(ValueError, match="beta is 2"):
        make_divergence("jsd", beta=2)
    with pytest.raises(ValueError, match="alpha is 1"):
        make_divergence("skew_forward", alpha=1)
