"""Distillation from distributions: loss and gradient against a slow form in float64, and what must not matter."""

import dataclasses
import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import ArgumentError

from common.schedules import Schedule
from lightning_modules.advantage_transforms.distillation import (
    AdvantageGate,
    Distillation,
    DivergenceRatio,
    IncorrectOnly,
)
from lightning_modules.advantage_transforms.divergence_loss import DivergenceLoss
from lightning_modules.advantage_transforms.teachers import Judged, SelfTeacher
from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.dgpo import DGPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.opsd import OPSD
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.algorithms.sdar import SDAR
from lightning_modules.algorithms.sod import SOD
from lightning_modules.batch import LogprobBatch, PolicyOutputs, collate, token_batch
from lightning_modules.maths.divergences import make_divergence, with_rest
from lightning_modules.maths.losses import LossInputs, TokenWeights, grpo_loss
from lightning_modules.metrics import StepMetrics
from lightning_modules.models.policy import load_causal_lm
from tests.lightning_modules.helpers import fit, make_group
from tests.lightning_modules.test_configuration import parse
from tests.lightning_modules.test_vocabulary import resized

NAMES = ["forward_kl", "reverse_kl", "jsd", "skew_forward", "skew_reverse", "tvd"]
V = 400  # of the fixtures' models


def rows(seed=0):
    rng = random.Random(seed)
    return make_group(rng, "a", [1, 0, 0]) + make_group(rng, "b", [0, 1, 1])


def module_of(model_dir, *transforms, **options):
    settings = {"use_grpo": False, "lr": 1e-3, "num_mini_batches": 1, "max_tokens_per_micro_batch": 60} | options
    return GRPO(str(model_dir), advantage_transforms=list(transforms), **settings)


def logprobs_of(folder, batch):
    """The whole distributions [B, T, V] in float64: entry t is over token t."""
    model = load_causal_lm(str(folder)).double()
    logits = model(input_ids=batch.input_ids).logits
    return torch.nn.functional.pad(logits[:, :-1].log_softmax(-1), (0, 0, 1, 0)), model


def slow(name, p, q, keep=None, rest="tail"):
    """The divergence of every position [B, T] from distributions [B, T, V], over the tokens ``keep`` [B, T, V]."""
    p, q = p.exp(), q.exp()
    if keep is not None:
        if rest == "renormalised":
            p, q = (x * keep / (x * keep).sum(-1, keepdim=True) for x in (p, q))
        if rest == "tail":
            p, q = (torch.cat([x * keep, (x * ~keep).sum(-1, keepdim=True)], -1) for x in (p, q))
            keep = torch.nn.functional.pad(keep, (0, 1), value=True)
    shown = torch.ones_like(p, dtype=torch.bool) if keep is None else keep
    p, q = (torch.where(shown, x, torch.ones_like(x)) for x in (p, q))  # ones add nothing below

    def kl(a, b):
        return (torch.where(shown, a * (a / b).log(), torch.zeros_like(a))).sum(-1)

    return {
        "forward_kl": lambda: kl(q, p),
        "reverse_kl": lambda: kl(p, q),
        "jsd": lambda: 0.3 * kl(q, 0.3 * q + 0.7 * p) + 0.7 * kl(p, 0.3 * q + 0.7 * p),
        "skew_forward": lambda: kl(q, 0.1 * q + 0.9 * p),
        "skew_reverse": lambda: kl(p, 0.9 * q + 0.1 * p),
        "tvd": lambda: 0.5 * torch.where(shown, (p - q).abs(), torch.zeros_like(p)).sum(-1),
    }[name]()


def kept_tokens(p, q, k, support):
    keep = torch.zeros_like(p, dtype=torch.bool)
    for logprobs, wanted in ((q, support in ("teacher", "both")), (p, support in ("student", "both"))):
        if wanted:
            keep = keep.scatter(-1, logprobs.topk(k).indices, True)
    return keep


CASES = [(name, 7, "teacher", "tail") for name in NAMES]
CASES += [(name, None, "teacher", "tail") for name in NAMES]
CASES += [("forward_kl", 7, support, rest) for support in ("student", "both") for rest in ("tail", "renormalised")]
CASES += [("reverse_kl", 7, "student", "tail"), ("forward_kl", 7, "teacher", "left_out"), ("jsd", 7, "both", "tail")]


@pytest.mark.parametrize(("name", "k", "support", "rest"), CASES)
def test_the_gradient_of_the_slow_form(model_dir, teacher_dir, gradients, name, k, support, rest):
    options = {"divergence": name, "top_k": k, "support": support, "rest": rest, "coef": 0.5}
    options |= {"jsd_beta": 0.3} if name == "jsd" else {}
    trainer = fit(module_of(model_dir, DivergenceLoss(str(teacher_dir), **options)), [rows()])
    batch = collate(rows())
    p, student = logprobs_of(model_dir, batch)
    with torch.no_grad():
        q, _ = logprobs_of(teacher_dir, batch)
        keep = None if k is None else kept_tokens(p, q, k, support)
    mask = batch.mask.double()
    values = slow(name, p, q, keep, rest)
    loss = 0.5 * (values * mask).sum() / mask.sum()
    loss.backward()
    expected = torch.cat([w.grad.flatten() for w in student.parameters()])
    assert expected.abs().max() > 1e-3 and (gradients[0].double() - expected).abs().max() < 1e-6
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["train/loss_policy"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/divergence"] == pytest.approx(2 * loss.item(), rel=1e-5)
    if k is not None:
        mass = (torch.where(keep, p.exp(), torch.zeros_like(p)).sum(-1) * mask).sum() / mask.sum()
        assert metrics["train/student_mass"] == pytest.approx(mass.item(), rel=1e-5)


@pytest.mark.parametrize("support", ["teacher", "student", "both"])
@pytest.mark.parametrize("rest", ["tail", "renormalised", "left_out"])
def test_all_tokens_are_the_whole_vocabulary(model_dir, teacher_dir, gradients, support, rest):
    for options in ({"top_k": V, "support": support, "rest": rest}, {"top_k": 10 * V}, {"top_k": None}):
        fit(module_of(model_dir, DivergenceLoss(str(teacher_dir), **options)), [rows()])
    assert all((gradients[-1] - g).abs().max() < 1e-6 for g in gradients)


def test_a_support_of_both_has_others_where_one_half_has_all_columns(model_dir, teacher_dir):
    """Two halves of the vocabulary that overlap: some tokens are in neither."""
    found = []
    for rest in ("tail", "left_out"):
        loss = DivergenceLoss(str(teacher_dir), top_k=V // 2, support="both", rest=rest)
        found.append(float(fit(module_of(model_dir, loss), [rows()]).callback_metrics["train/divergence"]))
    assert abs(found[0] - found[1]) > 1e-3


def test_a_teacher_s_rows_beyond_the_student_s_are_no_tokens(model_dir, teacher_dir, tmp_path):
    """As in Qwen2.5, whose larger models have more padding: all forms see the student's tokens."""
    larger = resized(teacher_dir, tmp_path, V + 40)
    found = []
    for options in ({"top_k": None}, *({"top_k": V, "support": s} for s in ("teacher", "student", "both"))):
        loss = DivergenceLoss(larger, divergence="forward_kl", **options)
        found.append(float(fit(module_of(model_dir, loss), [rows()]).callback_metrics["train/divergence"]))
    assert found == pytest.approx([found[0]] * 4, rel=1e-5)


def test_what_a_teacher_said_is_not_kept_after_the_iteration(model_dir, teacher_dir):
    for options in ({"top_k": 7}, {"top_k": None}):
        module = module_of(model_dir, DivergenceLoss(str(teacher_dir), **options))
        fit(module, [rows()])
        [kept] = module._last[3].transforms
        assert kept.ids is kept.support is kept.hidden is None and kept.divergence_weights.any()


CHANGES = {
    "micro-batches": {"max_tokens_per_micro_batch": 16384},
    "packing": {"packing": True},
    "chunks": {"logits_chunk": 3},
}


@pytest.mark.parametrize("options", [{"top_k": 7, "support": "both"}, {"top_k": None}], ids=["top-k", "whole"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_memory_changes_no_gradient(model_dir, teacher_dir, gradients, options, change):
    for others in ({}, CHANGES[change]):
        fit(module_of(model_dir, DivergenceLoss(str(teacher_dir), **options), **others), [rows()])
    assert gradients[0].abs().max() > 1e-3 and (gradients[0] - gradients[1]).abs().max() < 1e-6


def test_the_order_of_the_trajectories_does_not_matter(model_dir, teacher_dir, gradients):
    made = rows()
    for order in (made, [made[i] for i in (4, 1, 0, 5, 3, 2)]):
        fit(module_of(model_dir, DivergenceLoss(str(teacher_dir), top_k=7, support="student")), [order])
    assert (gradients[0] - gradients[1]).abs().max() < 1e-6


def test_the_sampled_token_is_an_unbiased_estimate_of_the_whole():
    """The gradient of GRPO's loss with T - S as the advantage, in the mean over y ~ p: that of the reverse KL."""
    torch.manual_seed(0)
    z, q = torch.randn(6, requires_grad=True), torch.randn(6)
    (exact,) = torch.autograd.grad(make_divergence("reverse_kl")(z[None], q[None]).sum(), z)
    mean, one = torch.zeros(6), torch.ones(1, 1)
    for y in range(6):
        student, teacher = z.log_softmax(0)[y].view(1, 1), q.log_softmax(0)[y].view(1, 1)
        batch = SimpleNamespace(algorithm=SimpleNamespace(metrics=StepMetrics()), trajectories=[None])
        batch.tokens, batch.outcome = token_batch([([0], [y], [1])]), torch.zeros(1, 2)
        padded = [torch.nn.functional.pad(x.detach(), (1, 0)) for x in (student, teacher)]
        batch.scores = LogprobBatch(padded[0])
        batch.judged = lambda _, said=padded[1]: Judged(said, torch.ones(1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "lightning_modules.advantage_transforms.distillation.turn_starts",
                lambda *_, mask=batch.tokens.mask: mask,
            )
            advantages, _ = Distillation("t").transform(batch, batch.outcome)
        inputs = LossInputs(advantages[:, 1:], None)
        loss = grpo_loss(student, torch.zeros(1, 1), inputs, TokenWeights(one, one, one))
        mean += student.exp().item() * torch.autograd.grad(loss, z)[0]
    assert torch.allclose(mean, exact, atol=1e-6) and exact.abs().max() > 0.1


# ---------------------------------------------------------------------- what is left of a distribution
def test_the_rest_by_hand():
    logprobs = torch.tensor([[0.5, 0.25], [0.1, 0.1], [0.75, 0.25]]).log()
    assert with_rest(logprobs, "left_out") is logprobs
    assert with_rest(logprobs, "renormalised").exp().flatten().tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0.5, 0.5, 0.75, 0.25]
    )
    assert with_rest(logprobs, "tail").exp()[:, 2].tolist() == pytest.approx([0.25, 0.8, 1e-7], rel=0.2)
    with pytest.raises(ValueError, match="rest is 'none'; expected tail"):
        with_rest(logprobs, "none")


@pytest.mark.parametrize("name", NAMES)
def test_fewer_outcomes_differ_less(name):
    """Joining tokens to one outcome never raises an f-divergence, and joining none changes nothing."""
    torch.manual_seed(0)
    p, q = (2 * torch.randn(50, 12).double()).log_softmax(-1), (2 * torch.randn(50, 12).double()).log_softmax(-1)
    divergence = partial(make_divergence(name, beta=0.3), normalised=True)
    whole, order = divergence(p, q), q.argsort(-1, descending=True)
    last = torch.zeros(50).double()
    for k in range(1, 12):
        ids = order[:, :k]
        found = divergence(with_rest(p.gather(-1, ids), "tail"), with_rest(q.gather(-1, ids), "tail"))
        assert (found <= whole + 1e-6).all() and (found >= last - 1e-6).all()
        last = found
    assert torch.allclose(last, whole, atol=1e-6), "eleven tokens and the rest are all"


@pytest.mark.parametrize("name", NAMES)
def test_a_support_with_all_probability_keeps_a_finite_gradient(name):
    z = torch.tensor([[20.0, 0.0, -20.0]], requires_grad=True)
    student, teacher = (with_rest(x.log_softmax(-1)[:, :2], "tail") for x in (z, z.detach().flip(-1)))
    make_divergence(name)(student, teacher, normalised=True).sum().backward()
    assert z.grad.isfinite().all()


# ---------------------------------------------------------------------- who teaches what
def test_weights_of_turns_multiply_the_divergence(model_dir, teacher_dir, gradients):
    """Only wrong trajectories (DGPO), and SOD's ratio: each token's divergence times its turn's weight."""
    weights = [IncorrectOnly(), DivergenceRatio(None)]
    fit(module_of(model_dir, DivergenceLoss(str(teacher_dir), top_k=None, weights=weights)), [rows()])
    batch = collate(rows())
    p, student = logprobs_of(model_dir, batch)
    with torch.no_grad():
        q, _ = logprobs_of(teacher_dir, batch)
    sampled = batch.input_ids[..., None]
    gap = (q.gather(-1, sampled) - p.detach().gather(-1, sampled))[..., 0].abs()
    w = torch.zeros_like(gap)
    for i, t in enumerate(rows()):
        if t.reward.total == 0:
            spans = [slice(len(t.prompt_ids) + turn.start, len(t.prompt_ids) + turn.end) for turn in t.turns]
            first = gap[i, spans[0]].mean()
            for k, span in enumerate(spans):
                w[i, span] = 1.0 if k == 0 else (first + 1e-6) / (gap[i, span].mean() + 1e-6)
    ((slow("reverse_kl", p, q) * w).sum() / batch.mask.sum()).backward()
    expected = torch.cat([x.grad.flatten() for x in student.parameters()])
    assert expected.abs().max() > 1e-3 and (gradients[0].double() - expected).abs().max() < 2e-6


def of_sources(made):
    return [
        t.replace(task=dataclasses.replace(t.task, data_source=t.group, metadata={"level": len(t.group)})) for t in made
    ]


@pytest.mark.parametrize("top_k", [7, None])
def test_each_teacher_judges_its_own_tasks(model_dir, teacher_dir, gradients, top_k):
    """Two teachers that share the tasks: the sum of the two alone; a folder named twice is loaded once."""
    made = of_sources(rows())
    first = partial(DivergenceLoss, str(teacher_dir), top_k=top_k, tasks={"data_source": ["a"]}, name="first")
    second = partial(DivergenceLoss, str(model_dir), top_k=top_k, divergence="forward_kl", coef=0.5, name="second")
    second = partial(second, tasks={"data_source": ["b", "c"], "level": ["1"]})
    other = load_causal_lm(str(model_dir))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    for transforms in ([first(), second()], [first()], [second()]):
        module = module_of(model_dir, *transforms)
        build = module.build_models

        def changed(module=module, build=build):
            build()
            for name in ("teacher", "teacher_second"):
                if getattr(module, f"{name}_path", None) == str(model_dir) or name == "teacher_second":
                    model = getattr(module, name, None)
                    if model is not None:
                        model.load_state_dict(other.state_dict())

        module.build_models = changed
        trainer = fit(module, [made])
    both, one, two = gradients
    assert one.abs().max() > 1e-3 and two.abs().max() > 1e-3 and (both - one - two).abs().max() < 1e-6
    judged = sum(sum(t.loss_mask) for t in made if t.group == "b") / sum(sum(t.loss_mask) for t in made)
    assert float(trainer.callback_metrics["train/second/judged_tokens"]) == pytest.approx(judged)
    twice = module_of(model_dir, first(), partial(first, name="again")())
    twice._trainer = trainer
    twice.build_models()
    assert list(twice.frozen_models()) == ["teacher"]


def test_pages_show_the_teacher_that_judged_a_row(model_dir, teacher_dir):
    made = of_sources(rows())
    loss = DivergenceLoss(str(teacher_dir), tasks={"data_source": ["a"]})
    module = module_of(model_dir, loss, use_grpo=True, num_mini_batches=2)
    fit(module, [made])
    for t, page in module.last_token_values:
        assert any(page["kl"]) == any(page["teacher_logprobs"]) == (t.group == "a")
    both = [loss, DivergenceLoss(str(model_dir), name="other")]
    module = module_of(model_dir, *both, use_grpo=True, num_mini_batches=2)
    fit(module, [made])
    for t, page in module.last_token_values:
        assert any(abs(x) > 1e-4 for x in page["kl"]) == (t.group == "a"), "the initial policy agrees"


def test_a_gate_reads_the_outcome_whatever_other_teachers_say(model_dir, teacher_dir):
    gate = Distillation(str(teacher_dir), weights=[AdvantageGate()], name="gated")
    loud = Distillation(str(teacher_dir), coef=100.0, name="loud")
    found = []
    for transforms in ([gate], [loud, gate]):
        module = GRPO(str(model_dir), advantage_transforms=transforms)
        module._trainer = SimpleNamespace(strategy=None)
        module.build_models()
        batch = collate(rows())
        inputs = module.compute_advantages(rows(), batch, module.score(rows(), batch))
        found.append(inputs.transforms[-1].opd_weights)
    assert torch.equal(*found) and found[0].any()


def test_a_teacher_without_trajectories_teaches_nothing(model_dir, teacher_dir, gradients):
    loss = DivergenceLoss(str(teacher_dir), tasks={"data_source": ["elsewhere"]})
    fit(module_of(model_dir, loss, use_grpo=True), [rows()])
    fit(module_of(model_dir, use_grpo=True), [rows()])
    assert torch.equal(*gradients)


# ---------------------------------------------------------------------- coefficients and the policy itself
def test_a_schedule_by_hand():
    falls = Schedule(1.0, 0.0, 4, after=2)
    assert [falls(i) for i in range(8)] == pytest.approx([1, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    wave = Schedule(1.0, 0.0, 4, shape="cosine")
    assert [wave(i) for i in (0, 1, 2, 3, 4, 9)] == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]
    )


@pytest.mark.parametrize(
    ("algorithm", "option", "rest"),
    [
        ("grpo.GRPO", "kl_coef", {"reference": "r"}),
        ("grpo.GRPO", "entropy_coef", {}),
        ("ppo.PPO", "kl_coef", {"reference": "r"}),
        ("dgpo.DGPO", "kl_coef", {"teacher": "t"}),
        ("sod.SOD", "opd_coef", {"teacher": "t"}),
        ("opsd.OPSD", "opd_coef", {}),
    ],
)
def test_coefficients_take_a_number_or_a_schedule(algorithm, option, rest):
    falls = {"start": 1.0, "end": 0.5, "iterations": 3}
    module = parse(algorithm, policy="p", **rest, **{option: falls})
    found = module.advantage_transforms[0].coef if option == "opd_coef" else getattr(module, option)
    assert found == Schedule(1.0, 0.5, 3)
    for wrong in (-1.0, {**falls, "start": -1.0}, {**falls, "iterations": 0}, {**falls, "shape": "steps"}):
        with pytest.raises(ArgumentError):
            parse(algorithm, policy="p", **rest, **{option: wrong})


def test_a_falling_kl_and_a_rising_entropy_bonus(model_dir, teacher_dir):
    """The loss of iteration 1 of 2, from the loss with constant coefficients."""
    batch = collate(rows())
    old = -torch.rand(batch.mask.shape) * batch.mask
    scores = LogprobBatch(old, reference_logprobs=2 * old)
    outputs = PolicyOutputs(old * 0.9, -old, None)
    found = []
    for kl, entropy in ((Schedule(0.4, 0.0, 2), Schedule(0.0, 0.1, 2)), (0.2, 0.05)):
        module = GRPO("p", "r", kl_coef=kl, entropy_coef=entropy)
        module._trainer = SimpleNamespace(global_step=1)
        inputs = module.compute_advantages(rows(), batch, scores)
        found.append(module.loss(outputs, batch, inputs, module.token_weights(batch, scores))["policy"])
    assert torch.equal(*found)


def test_a_coefficient_follows_the_iteration_also_after_a_resume(model_dir, teacher_dir, gradients, tmp_path):
    module = partial(module_of, model_dir, DivergenceLoss(str(teacher_dir), coef=Schedule(1.0, 0.0, 3)), lr=1e-9)
    fit(module(), [rows()] * 4)
    whole = [g.clone() for g in gradients]
    assert [float(g.norm() / whole[0].norm()) for g in whole] == pytest.approx([1, 2 / 3, 1 / 3, 0], abs=1e-4)
    gradients.clear()
    fit(module(), [rows()] * 2).save_checkpoint(tmp_path / "c.ckpt")
    fit(module(), [rows()] * 4, ckpt_path=tmp_path / "c.ckpt")
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(whole, gradients, strict=True))


@pytest.mark.parametrize("name", ["kl_coef", "entropy_coef", "opd_coef", "ppo"])
def test_a_schedule_of_an_algorithm_is_exact_on_resume(name, model_dir, teacher_dir, tmp_path):
    falls, common = Schedule(1.0, 0.0, 3), {"lr": 1e-3, "num_mini_batches": 1}
    make = {
        "kl_coef": lambda: GRPO(str(model_dir), str(teacher_dir), kl_coef=falls, **common),
        "entropy_coef": lambda: GRPO(str(model_dir), entropy_coef=falls, **common),
        "opd_coef": lambda: SOD(str(model_dir), str(teacher_dir), opd_coef=falls, **common),
        "ppo": lambda: PPO(str(model_dir), str(teacher_dir), kl_coef=falls, entropy_coef=falls, **common),
    }[name]
    whole = make()
    fit(whole, [rows()] * 3)
    fit(make(), [rows()]).save_checkpoint(tmp_path / "c.ckpt")
    resumed = make()
    fit(resumed, [rows()] * 3, ckpt_path=tmp_path / "c.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True))


def test_the_moving_average_teaches_and_moves_once(model_dir, gradients):
    """At first it agrees with the student; then it is behind, by its decay."""
    first = DivergenceLoss(self_teacher=SelfTeacher("ema", 0.75), name="one")
    second = DivergenceLoss(self_teacher=SelfTeacher("ema", 0.75), top_k=None, name="two")
    module = module_of(model_dir, first, second, use_grpo=True, lr=1e-2)
    start = {name: p.clone() for name, p in load_causal_lm(str(model_dir)).named_parameters()}
    fit(module, [rows()])
    assert float(module.trainer.callback_metrics["train/two/divergence"]) == pytest.approx(0, abs=1e-6)
    for name, p in module.policy.named_parameters():
        expected = 0.75 * start[name] + 0.25 * p.detach()
        assert torch.allclose(module.average.get_parameter(name), expected, atol=1e-6)
    trainer = fit(module_of(model_dir, first, second, use_grpo=True, lr=1e-2), [rows()] * 2)
    assert float(trainer.callback_metrics["train/two/divergence"]) > 1e-5


SHARED = SelfTeacher("ema")
REFUSED = {
    "one and two share one self_teacher": lambda: GRPO(
        "p", advantage_transforms=[DivergenceLoss(self_teacher=SHARED, name=name) for name in ("one", "two")]
    ),
    "jsd_beta is 0.1: no effect with divergence reverse_kl": lambda: DivergenceLoss("t", jsd_beta=0.1),
    "skew_alpha is 0.7: no effect with divergence jsd": lambda: DivergenceLoss("t", divergence="jsd", skew_alpha=0.7),
    "jsd_beta is 0.1: no effect with divergence taid": lambda: ColdStartKD("p", "t", divergence="taid", jsd_beta=0.1),
    "no effect with divergence forward_kl": lambda: ColdStartKD("p", "t", taid_t_start=0.7),
    "they do not apply to the loss of DivergenceLoss": lambda: GRPO(
        "p", use_grpo=False, importance_cap=2.0, advantage_transforms=[DivergenceLoss("t")]
    ),
    "adv_clamp: no effect with opd_coef 1.0 and opd_mode none": lambda: OPSD("p", opd_mode="none", adv_clamp=5.0),
    "top_k is null and the self-teacher has the current weights": lambda: GRPO(
        "p", num_mini_batches=2,
        advantage_transforms=[DivergenceLoss(self_teacher=SelfTeacher(), prompts=object(), top_k=None)],
    ),
    "self_teacher has the current weights and the student's prompt": lambda: DivergenceLoss(self_teacher=SelfTeacher()),
    "support is both and rest tail: no effect with top_k null": lambda: DivergenceLoss("t", top_k=None, support="both"),
    "ema_decay is 0.9: no effect with the teacher's weights current": lambda: SelfTeacher(ema_decay=0.9),
    "ce_coef and kl_coef are 0, so there is no loss": lambda: ColdStartKD("p", "t", ce_coef=0.0, kl_coef=0.0),
    "success_threshold is 0.5: no effect with selective false": lambda: DGPO(
        "p", "t", selective=False, success_threshold=0.5
    ),
    "kl_coef is 0.05, but there is no reference": lambda: PPO("p", kl_coef=0.05),
    "beta is 2.0: no effect with gate none": lambda: SDAR(
        "p", skills=object(), signal="reverse_kl", gate="none", beta=2.0
    ),
    "coef is 0, so that the teacher has no effect": lambda: DivergenceLoss("t", coef=0.0),
    "teacher, server and self_teacher are null": lambda: DivergenceLoss(),
    "there are two teachers, 't' and SelfTeacher": lambda: DivergenceLoss("t", self_teacher=SelfTeacher("ema")),
    "name is 'path', which other options of teachers have": lambda: DivergenceLoss("t", name="path"),
    "name is 'a b'; expected letters, digits and underscores": lambda: DivergenceLoss("t", name="a b"),
    r"ema_decay is \[0.5, 0.9\]; expected one": lambda: GRPO(
        "p",
        advantage_transforms=[
            DivergenceLoss(self_teacher=SelfTeacher("ema", decay), name=f"t{i}") for i, decay in enumerate((0.5, 0.9))
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_options_without_effect_are_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
