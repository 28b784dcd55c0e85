"""SDAR's loss and its baselines: by hand, their gradients, and their expected gradients by exact enumeration."""

import math

import pytest
import torch

from lightning_modules.maths import divergences
from lightning_modules.maths.gates import gate, token_gap
from lightning_modules.maths.losses import ppo_clip_loss
from lightning_modules.maths.self_distillation import (
    FORWARD_KL_CAP,
    divergence_weights,
    sdar_loss,
    signal_loss,
    skill_sd_loss,
)

NAN = float("nan")


def tensors(*rows):
    return [torch.tensor([row], dtype=torch.float64) for row in rows]


def random_tokens(seed=0, shape=(4, 9)):
    """S (with gradient), T and a mask with zeros."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (-3 * torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher, (torch.rand(shape, generator=generator) < 0.7).double()


# ---------------------------------------------------------------------- SDAR: values and gradients
def test_sdar_by_hand():
    student, teacher, mask = tensors([-1.0, -2.0, -3.0], [-0.5, -2.5, -9.0], [1.0, 1.0, 0.0])
    student.requires_grad_()
    g = gate("gap", token_gap(student, teacher), None, beta=2.0)
    total, count = sdar_loss(student, teacher, g, mask)
    liked, disliked = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(1.0))  # Delta +0.5 and -0.5, beta 2
    assert total.item() == pytest.approx(liked * 0.5 - disliked * 0.5) and count.item() == 2
    total.backward()
    assert student.grad[0].tolist() == pytest.approx([-liked, -disliked, 0.0])


@pytest.mark.parametrize("kind", ["gap", "entropy", "soft_or"])
def test_gradient_is_minus_the_gate_and_only_the_student_has_one(kind):
    """Spec 6 a, e, h: everything that could carry gradient does, and the mask has zeros and weights."""
    student, teacher, mask = random_tokens()
    mask = mask * 2.5
    logits = torch.randn((*student.shape, 5), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    teacher.requires_grad_(), logits.requires_grad_()
    log = logits.log_softmax(-1)
    g = gate(kind, teacher - student, -(log.exp() * log).sum(-1), beta=5.0)
    assert not g.requires_grad
    live = g.clone().requires_grad_()  # a caller who forgot to detach
    total, count = sdar_loss(student, teacher, live, mask)
    (total / count).backward()
    assert torch.allclose(student.grad, -g * mask / mask.sum(), atol=1e-12)
    assert teacher.grad is None and logits.grad is None and live.grad is None
    assert (student.grad <= 0).all(), "descent pushes sampled tokens up, never down"


def losses_of(student, teacher, mask):
    """Every loss of the file, the ones with old log-probs off policy."""
    gap, old = token_gap(student, teacher), (student + 0.3 * teacher.sin()).detach()
    g = gate("gap", gap, None)
    return {
        "sdar": sdar_loss(student, teacher, g, mask),
        "centred": sdar_loss(student, teacher, g - g.new_tensor(0.4), mask),
        "clipped sdar": signal_loss(student, g, mask, old),
        "opsd": signal_loss(student, g * token_gap(student, teacher, 1.0), mask),
        "jsd": signal_loss(student, g * divergence_weights("jsd", gap), mask),
        "skill_sd": skill_sd_loss(student, old, teacher, mask),
    }


def test_micro_batches_add_up_to_the_batch():
    """Spec 6 i: sums and counts of any split are those of the whole, gradient included."""
    student, teacher, mask = random_tokens(3, (6, 11))
    whole = losses_of(student, teacher, mask)
    for name, (total, count) in whole.items():
        (expected,) = torch.autograd.grad(total / count, student, retain_graph=True)
        split = [losses_of(student[r], teacher[r], mask[r])[name] for r in (slice(0, 1), slice(1, 4), slice(4, 6))]
        assert sum(c.item() for _, c in split) == count.item()
        (found,) = torch.autograd.grad(sum(t for t, _ in split) / count, student, retain_graph=True)
        assert torch.allclose(found, expected, atol=1e-12), name


def test_what_is_masked_out_may_be_nan_and_an_empty_mask_stays_tied_to_the_graph():
    student, teacher, mask = random_tokens(5)
    clean = losses_of(student, teacher, mask)
    for where in (mask, torch.zeros_like(mask)):
        unknown = torch.where(mask == 0, NAN, 0.0)
        holes = (student.detach() + unknown).requires_grad_()
        for name, (total, count) in losses_of(holes, teacher + unknown, where * mask).items():
            (gradient,) = torch.autograd.grad(total, holes, retain_graph=True)
            assert torch.isfinite(gradient).all() and not gradient[where * mask == 0].any(), name
            expected = clean[name][0].item() if where is mask else 0.0
            assert total.item() == pytest.approx(expected, rel=1e-12) and count.item() == (where * mask).sum(), name


def test_tokens_that_one_model_rules_out_stay_finite():
    student, teacher = torch.tensor([[-1e4, -0.1]]).requires_grad_(), torch.tensor([[-0.1, -1e4]])
    for name, (total, _) in losses_of(student, teacher, torch.ones(1, 2)).items():
        (gradient,) = torch.autograd.grad(total, student, retain_graph=True)
        assert torch.isfinite(total) and torch.isfinite(gradient).all(), name
    for kind in ("reverse_kl", "forward_kl", "jsd"):
        assert torch.isfinite(divergence_weights(kind, teacher - student)).all(), kind


# ---------------------------------------------------------------------- the other losses by hand
def test_reverse_kl_signal_by_hand():
    student, teacher, mask = tensors([-1.0, -2.0, -0.5], [-0.5, -5.0, -0.5], [1.0, 1.0, 1.0])
    student.requires_grad_()
    total, count = signal_loss(student, token_gap(student, teacher), mask)
    assert total.item() == pytest.approx(-(0.5 * -1.0) - (-3.0 * -2.0)) and count.item() == 3
    total.backward()
    assert student.grad[0].tolist() == pytest.approx([-0.5, 3.0, 0.0])  # pushed down where the teacher disagrees
    (g,) = tensors([0.5, 0.1, 0.9])
    (gradient,) = torch.autograd.grad(signal_loss(student, g * token_gap(student, teacher, 2.0), mask)[0], student)
    assert gradient[0].tolist() == pytest.approx([-0.25, 0.2, 0.0])


def test_divergence_weights_by_hand():
    (gap,) = tensors([math.log(3.0), math.log(0.5), math.log(50.0), 0.0])
    assert torch.equal(divergence_weights("reverse_kl", gap), gap)
    assert divergence_weights("forward_kl", gap)[0].tolist() == pytest.approx([2.0, -0.5, FORWARD_KL_CAP - 1, 0.0])
    assert divergence_weights("forward_kl", gap, cap=None)[0].tolist() == pytest.approx([2.0, -0.5, 49.0, 0.0])
    expected = [0.75 * math.log(0.25 * u + 0.75) for u in (3.0, 0.5, 50.0, 1.0)]
    assert divergence_weights("jsd", gap, beta=0.25)[0].tolist() == pytest.approx(expected)
    small, large = (divergence_weights("jsd", gap, beta=b) for b in (1e-9, 1 - 1e-9))
    assert torch.allclose(small / 1e-9, divergence_weights("forward_kl", gap, cap=None), rtol=1e-4)
    assert torch.allclose(large / 1e-9, gap, rtol=1e-4, atol=1e-6)


def test_skill_sd_by_hand():
    student, old, teacher, mask = tensors([-1.0, -2.0], [-1.0, -2.5], [-1.5, -1.0], [1.0, 1.0])
    student.requires_grad_()
    total, count = skill_sd_loss(student, old, teacher, mask)
    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    rho = [1.0, math.exp(0.5)]
    assert total.item() == pytest.approx(rho[0] * k3[0] + rho[1] * k3[1]) and count.item() == 2
    total.backward()  # rho k3 from rho's gradient, rho (1 - exp(-d)) from k3's
    expected = [rho[0] * (k3[0] + 1 - math.exp(-0.5)), rho[1] * (k3[1] + 1 - math.exp(1.0))]
    assert student.grad[0].tolist() == pytest.approx(expected)


def test_skill_sd_caps_both_exponents():
    student, old, teacher, mask = tensors([-30.0, -1.0], [-30.0, -16.0], [-1.0, -1.0], [1.0, 1.0])
    student.requires_grad_()
    total, _ = skill_sd_loss(student, old, teacher, mask)
    capped = math.exp(20.0) - 1 - 29.0
    assert total.item() == pytest.approx(capped)
    (gradient,) = torch.autograd.grad(total, student)
    assert gradient[0].tolist() == pytest.approx([capped + 1.0, 0.0])  # k3 of the second token is 0 at d = 0
    teacher = teacher - 1.0
    (gradient,) = torch.autograd.grad(skill_sd_loss(student, old, teacher, mask)[0], student)
    assert gradient[0, 1].item() == pytest.approx(math.exp(10.0) * (1 - math.exp(-1.0)))  # rho is a constant there


def test_a_clipped_signal_is_ppo_with_the_signal_as_the_advantage():
    student, teacher, mask = random_tokens(7)
    old = (student - 0.5 * teacher.cos()).detach()
    signal = token_gap(student, teacher)
    found = signal_loss(student, signal, mask, old, 0.1, 0.3, 3.0)[0]
    assert found.item() == ppo_clip_loss(student, old, signal, mask, 0.1, 0.3, 3.0)[0].item()
    (one,) = tensors([1.0])
    far = torch.zeros_like(one).requires_grad_()
    bounded = [signal_loss(far, -2.0 * one, one, far.detach() - math.log(9.0), dual_clip=c)[0] for c in (None, 3.0)]
    assert [x.item() for x in bounded] == pytest.approx([18.0, 6.0])
    (on_policy,) = torch.autograd.grad(signal_loss(student, signal, mask, student.detach())[0], student)
    (plain,) = torch.autograd.grad(signal_loss(student, signal, mask)[0], student)
    assert torch.allclose(on_policy, plain, atol=1e-12)
    student, old, g, mask = tensors([math.log(0.5), math.log(0.1)], [math.log(0.25), math.log(0.2)], [0.7, 0.7], [1, 1])
    student.requires_grad_()
    (gradient,) = torch.autograd.grad(signal_loss(student, g, mask, old)[0], student)
    assert gradient[0].tolist() == pytest.approx([0.0, -0.7 * 0.5])  # has doubled: enough; has halved: weighs half


# ---------------------------------------------------------------------- expected gradients, by exact enumeration
def toys(n=1, words=6, spread=1.0, noise=1.0, seed=0):
    """Logits of students (with gradient) and of teachers near them, [n, words]."""
    generator = torch.Generator().manual_seed(seed)
    student, near = (torch.randn(n, words, generator=generator, dtype=torch.float64) for _ in range(2))
    student = spread * student
    return student.requires_grad_(), (student + noise * near).detach()


def every_token(student_logits, teacher_logits):
    """S, T [n, V] of every token, and what weighs a token in an expectation under the student."""
    student, teacher = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return student, teacher, student.detach().exp()


def gradient_of(total, logits):
    return torch.autograd.grad(total, logits, retain_graph=True)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "options", "exact"),
    [
        ("reverse_kl", {}, divergences.reverse_kl),
        ("forward_kl", {"cap": None}, divergences.forward_kl),
        *[("jsd", {"beta": b}, lambda s, t, b=b: divergences.jsd(s, t, b)) for b in (0.1, 0.5, 0.9)],
    ],
)
def test_expected_gradients_are_those_of_the_divergences(kind, options, exact, seed):
    logits, teacher_logits = toys(5, seed=seed)
    student, teacher, p = every_token(logits, teacher_logits)
    weights = divergence_weights(kind, token_gap(student, teacher), **options)
    found = gradient_of(signal_loss(student, weights, p)[0], logits)
    expected = gradient_of(exact(logits, teacher_logits).sum(), logits)  # float32 inside
    assert torch.allclose(found, expected, atol=1e-6) and expected.abs().max() > 0.01
    shifted = gradient_of(signal_loss(student, weights + 7.0, p)[0], logits)
    assert torch.allclose(found, shifted, atol=1e-12), "a constant changes nothing in expectation"
