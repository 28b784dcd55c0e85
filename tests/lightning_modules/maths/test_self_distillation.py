"""SDAR's loss and its baselines: by hand, their gradients, and their expected gradients by exact enumeration."""

import math

import pytest
import torch

from lightning_modules.maths import divergences
from lightning_modules.maths.gates import gate, gate_mean, token_gap
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


def test_a_teacher_that_agrees_gives_half_a_gate_no_value_and_a_gradient_all_the_same():
    """Spec 6 b."""
    student, _, mask = random_tokens()
    total, count = sdar_loss(student, student.detach(), gate("gap", token_gap(student, student), None), mask)
    (total / count).backward()
    assert total.item() == 0.0
    assert torch.allclose(student.grad, -0.5 * mask / mask.sum())
    for kind in ("reverse_kl", "forward_kl", "jsd"):
        assert not divergence_weights(kind, torch.zeros(3)).any(), "distillation is silent there, token by token"


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


def test_what_is_refused():
    gap = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="unknown divergence 'tvd'; expected one of reverse_kl, forward_kl, jsd"):
        divergence_weights("tvd", gap)
    with pytest.raises(ValueError, match="cap of the forward KL's ratio is 1.0"):
        divergence_weights("forward_kl", gap, cap=1.0)
    with pytest.raises(ValueError, match="beta of the JSD is 1.0"):
        divergence_weights("jsd", gap, beta=1.0)


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


def cosines(a, b):
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)


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


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_a_ratio_makes_old_tokens_count_as_new_ones(kind):
    """Tokens from p_old: with the ratio (nothing clipped) the gradient is exact, without it is another one."""
    logits, teacher_logits = toys(5)
    old = every_token(logits + 0.5 * toys(5, seed=9)[1], teacher_logits)[0].detach()
    student, teacher, p = every_token(logits, teacher_logits)
    weights = divergence_weights(kind, token_gap(student, teacher))
    expected = gradient_of(signal_loss(student, weights, p)[0], logits)
    found = gradient_of(signal_loss(student, weights, old.exp(), old, 1.0, 1e3)[0], logits)
    assert torch.allclose(found, expected, atol=1e-12)
    without = gradient_of(signal_loss(student, weights, old.exp())[0], logits)
    assert (without - expected).norm() > 0.05 * expected.norm()


def test_skill_sd_is_the_reverse_kl_off_policy_too_and_the_forward_kl_without_rhos_gradient():
    logits, teacher_logits = toys(5)
    old = every_token(logits + 0.5 * toys(5, seed=9)[1], teacher_logits)[0].detach()
    student, teacher, p = every_token(logits, teacher_logits)
    value = divergences.reverse_kl(logits, teacher_logits).sum()
    forward = divergences.forward_kl(logits, teacher_logits).sum()
    expected = gradient_of(value, logits)
    for sampler in (student.detach(), old):
        total, _ = skill_sd_loss(student, sampler, teacher, sampler.exp())
        assert total.item() == pytest.approx(value.item(), abs=1e-5)
        assert torch.allclose(gradient_of(total, logits), expected, atol=1e-6)
    d = student - teacher
    k3_alone = gradient_of((p * ((-d).exp() - 1 + d)).sum(), logits)
    assert torch.allclose(k3_alone, gradient_of(forward, logits), atol=1e-6)


def sdar_gradient(logits, teacher_logits, kind="gap", beta=5.0, centred=False):
    student, teacher, p = every_token(logits, teacher_logits)
    entropy = -(p * student).sum(-1, keepdim=True).expand_as(p)
    g = gate(kind, token_gap(student, teacher), entropy, beta)
    g = g - (g * p).sum(-1, keepdim=True) if centred else g
    return gradient_of(sdar_loss(student, teacher, g, p)[0], logits)


def test_the_gap_gate_at_beta_5_goes_the_way_of_the_reverse_kl_on_a_toy():
    """Spec 0.2 and 6 g."""
    logits, teacher_logits = toys(1)
    true = gradient_of(divergences.reverse_kl(logits, teacher_logits).sum(), logits)
    assert cosines(sdar_gradient(logits, teacher_logits), true).item() > 0.9
    again = sdar_gradient(logits, teacher_logits, centred=True)
    assert torch.allclose(again, sdar_gradient(logits, teacher_logits), atol=1e-12)


def test_beta_0_and_the_entropy_gate_hold_no_teacher_in_expectation():
    logits, teacher_logits = toys(20)
    for kind, beta in (("gap", 0.0), ("soft_or", 0.0), ("entropy", 0.0), ("entropy", 5.0)):
        assert sdar_gradient(logits, teacher_logits, kind, beta).abs().max() < 1e-15, (kind, beta)
    assert sdar_gradient(logits, teacher_logits).abs().max() > 0.01


def test_the_gap_gate_at_beta_1_is_the_kl_to_the_average():
    """f'' = h' / u with h = u / (1 + u) integrates to f = u log(u / (1 + u))."""
    logits, teacher_logits = toys(5)
    mean = torch.logaddexp(logits.log_softmax(-1), teacher_logits.log_softmax(-1)) - math.log(2)
    to_average = (teacher_logits.softmax(-1) * (teacher_logits.log_softmax(-1) - mean)).sum()
    assert torch.allclose(sdar_gradient(logits, teacher_logits, beta=1.0), gradient_of(to_average, logits), atol=1e-12)


def test_a_gated_reverse_kl_lets_go_of_what_the_teacher_rejects():
    """g w against Delta at beta 2: it falls up to Delta = -1.28 / 2 and rises from there; at -4 a hundredth is left."""
    gap = torch.linspace(-4.0, 4.0, 801, dtype=torch.float64)
    student, g = torch.zeros_like(gap)[None].requires_grad_(), gate("gap", gap, None, beta=2.0)
    signal = g[None] * token_gap(student, gap[None])
    weights = -gradient_of(signal_loss(student, signal, torch.ones_like(student))[0], student)[0]
    turning = gap[weights.argmin()].item()
    assert turning == pytest.approx(-0.64, abs=0.01)
    assert (weights.diff()[gap[1:] < turning] < 0).all() and (weights.diff()[gap[:-1] > turning] > 0).all()
    assert abs(weights[0].item()) < 0.01 * 4.0 and weights[-1].item() > 0.99 * 4.0


def test_descent_on_the_gap_gate_ends_at_a_fixed_teacher():
    """Spec 0.2: the same fixed point as the reverse KL."""
    logits, teacher_logits = toys(1)
    for _ in range(3000):
        logits = (logits - 0.5 * sdar_gradient(logits, teacher_logits)).detach().requires_grad_()
    assert torch.allclose(logits.softmax(-1), teacher_logits.softmax(-1), atol=1e-3)


def test_soft_or_in_nats_turns_round_where_the_entropy_is_above_one():
    logits, teacher_logits = toys(60, words=8, spread=3.0, noise=0.2)
    log = logits.detach().log_softmax(-1)
    entropy = -(log.exp() * log).sum(-1)
    true = gradient_of(divergences.reverse_kl(logits, teacher_logits).sum(), logits)
    cosine = cosines(sdar_gradient(logits, teacher_logits, "soft_or", 1.0), true)
    assert (entropy > 1.1).sum() > 5 and (cosine[entropy > 1.1] < -0.7).all()
    assert (entropy < 0.9).sum() > 5 and (cosine[entropy < 0.9] > 0.7).all()


def test_a_centred_gate_changes_no_expectation_but_the_spread():
    """Beta 0: each token alone pushes, and nothing is left once the mean is taken away."""
    student, teacher, mask = random_tokens(11)
    g = gate("gap", token_gap(student, teacher), None, beta=0.0)
    plain = gradient_of(sdar_loss(student, teacher, g, mask)[0], student)
    centred = gradient_of(sdar_loss(student, teacher, g - gate_mean(g, mask), mask)[0], student)
    assert torch.equal(plain, -0.5 * mask) and not centred.any()


@pytest.mark.parametrize(
    ("noise", "reverse_kl", "forward_kl", "cosine", "least", "bias", "capped"),
    [
        (0.3, 0.04, 0.04, 0.99, 0.94, 0.0, 1.0),
        (1.0, 0.47, 0.46, 0.89, 0.28, 0.04, 1.0),
        (2.0, 1.82, 1.65, 0.72, -0.41, 0.44, 0.90),
    ],
)
def test_figures_in_the_docstrings(noise, reverse_kl, forward_kl, cosine, least, bias, capped):
    """200 students of 1,000 words: how far SDAR's direction is from the reverse KL's, and what the cap of 10 costs."""
    logits, teacher_logits = toys(200, 1000, spread=2.0, noise=noise)
    student, teacher, p = every_token(logits, teacher_logits)
    gap = token_gap(student, teacher)
    assert -(p * gap).sum(-1).mean().item() == pytest.approx(reverse_kl, abs=0.005)
    assert (teacher.exp() * gap).sum(-1).mean().item() == pytest.approx(forward_kl, abs=0.005)
    reverse, forward, cut = (
        gradient_of(signal_loss(student, divergence_weights(kind, gap, cap=cap), p)[0], logits)
        for kind, cap in (("reverse_kl", None), ("forward_kl", None), ("forward_kl", FORWARD_KL_CAP))
    )
    found = cosines(sdar_gradient(logits, teacher_logits), reverse)
    assert (found.mean().item(), found.min().item()) == pytest.approx((cosine, least), abs=0.01)
    relative = (cut - forward).norm(dim=-1) / forward.norm(dim=-1)
    assert (relative.mean().item(), cosines(cut, forward).mean().item()) == pytest.approx((bias, capped), abs=0.01)
