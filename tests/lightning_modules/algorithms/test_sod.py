"""SOD: what a token is worth against a slow form, the gradient it stands for, and where it is GRPO."""

import dataclasses
import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.sod import SOD
from lightning_modules.batch import collate, tensors_BT
from lightning_modules.models.policy import load_causal_lm, named_weights, token_logprobs
from lightning_modules.training import optimisation
from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    ToolCall,
    ToolRequest,
    ToolResult,
)
from tests.lightning_modules.helpers import fit, judged_scores, make_group

MODES = ["uniform", "divergence_ratio", "gated", "decay_after_error", "mask_after_error"]
REWARDS = ([1, 0, 0, 1], [0.3, 0.3], [1, 0, 0])
OUTCOMES = [0.866, -0.866, -0.866, 0.866, 0, 0, 1.1547, -0.57735, -0.57735]  # advantages of these


def act(t, errors=()):
    """Its turns as valid calls that succeeded, but for the turns in ``errors``."""
    turns = [dataclasses.replace(turn, action=Action(ActionKind.CALL)) for turn in t.turns]
    outcome = [CallOutcome.ERROR if i in errors else CallOutcome.OK for i in range(len(turns))]
    calls = [ToolCall(i, ToolRequest("python", {}), ToolResult("", o), 0.0) for i, o in enumerate(outcome)]
    return t.replace(turns=tuple(turns), calls=tuple(calls))


def groups(seed=0):
    """Nine trajectories of three turns; 1 and 6 go wrong in their second, 4 in its first, 7 in its last."""
    rng = random.Random(seed)
    rows = [t for i, rewards in enumerate(REWARDS) for t in make_group(rng, f"q{i}", rewards)]
    wrong = {1: (1, 2), 6: (1,), 4: (0,), 7: (2,)}
    return [act(t, wrong.get(i, ())) for i, t in enumerate(rows)]


def random_scores(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return judged_scores(*(-2 * torch.rand(batch.mask.shape, generator=generator) * batch.mask for _ in range(2)))


def computed(rows, scores=None, **options):
    batch = collate(rows)
    module = SOD("p", "t", **options)
    inputs = module.compute_advantages(rows, batch, scores or random_scores(batch))
    return SimpleNamespace(**tensors_BT(inputs)), batch, module


# ---------------------------------------------------------------------- what a token is worth
ERRORS = {1: 2, 6: 2, 4: 1, 7: 3}  # first erroneous turn, counted from 1


def slow_weights(mode, d, row):
    error = ERRORS.get(row, math.inf)
    turns = range(1, len(d) + 1)
    return {
        "uniform": [1.0 for _ in d],
        "divergence_ratio": [1.0 if k == 1 else min((d[0] + 1e-6) / (d[k - 1] + 1e-6), 1.2) for k in turns],
        "gated": [0.02 + (0.5 - 0.02) / (1 + math.exp(2.0 * OUTCOMES[row])) for _ in d],
        "decay_after_error": [0.7 ** (k - error) if k >= error else 1.0 for k in turns],
        "mask_after_error": [1.0 if k <= error else 0.0 for k in turns],
    }[mode]


OPTIONS = {"gated": {"beta_min": 0.02, "beta_max": 0.5, "beta_gamma": 2.0}, "decay_after_error": {"decay": 0.7}}


BOTH = [(mode, grpo) for mode in MODES for grpo in (True, False) if grpo or mode != "gated"]  # which is refused


@pytest.mark.parametrize(("mode", "use_grpo"), BOTH)
def test_advantages_against_a_slow_form(mode, use_grpo):
    rows = groups()
    inputs, batch, _ = computed(rows, opd_mode=mode, opd_coef=0.5, use_grpo=use_grpo, **OPTIONS.get(mode, {}))
    scores = random_scores(batch)
    for i, t in enumerate(rows):
        start = len(t.prompt_ids)
        g = (scores.teacher_logprobs - scores.old_logprobs)[i, start : start + len(t.response_ids)].tolist()
        d = [sum(abs(x) for x in g[turn.start : turn.end]) / (turn.end - turn.start) for turn in t.turns]
        weights = [0.0] * len(g)
        for turn, w in zip(t.turns, slow_weights(mode, d, i), strict=True):
            weights[turn.start : turn.end] = [w] * (turn.end - turn.start)
        outcome = OUTCOMES[i] if use_grpo else 0.0
        expected = [(outcome + 0.5 * w * x) * m for w, x, m in zip(weights, g, t.loss_mask, strict=True)]
        span = slice(start, start + len(g))
        assert inputs.advantages[i, span].tolist() == pytest.approx(expected, abs=1e-4)
        assert inputs.opd_weights[i, span].tolist() == pytest.approx(weights, abs=1e-4)
        assert not inputs.advantages[i, :start].any() and not inputs.advantages[i, span.stop :].any()
    assert torch.equal(inputs.old_logprobs, scores.old_logprobs)


def test_weights_of_a_batch_do_not_depend_on_order_or_padding():
    rows = groups()
    batch = collate(rows)
    scores = random_scores(batch)
    options = {"reference_turn": "batch_median", "weight_floor": 0.5, "adv_clamp": 0.3}
    inputs, _, _ = computed(rows, scores, **options)
    order = [5, 2, 8, 0, 1, 7, 6, 4, 3]
    shuffled, moved, _ = computed([rows[i] for i in order], scores.rows(order, batch.mask.shape[1]), **options)
    assert torch.allclose(shuffled.advantages, inputs.advantages[order], atol=1e-6)
    half, _, _ = computed(rows[:4], scores.rows(range(4), int(batch.lengths[:4].max())))
    whole, _, _ = computed(rows, scores)
    assert torch.equal(half.advantages, whole.advantages[:4, : half.advantages.shape[1]]), "weights are a row's own"


@pytest.mark.parametrize(
    "options",
    [{"delta": 0.5}, {"delta": None}, {"weight_floor": 0.9}, {"reference_turn": "batch_median"}, {"adv_clamp": 0.2},
     {"opd_coef": 0.3}, {"epsilon": 1.0},
     {"opd_mode": "decay_after_error", "decay": 0.5}, {"use_grpo": False}],
)  # fmt: skip
def test_each_option_has_an_effect(options):
    rows = groups()
    assert (computed(rows)[0].advantages - computed(rows, **options)[0].advantages).abs().max() > 1e-3


def test_clamping_bounds_the_signal_and_not_the_weights():
    rows = groups()
    plain, batch, _ = computed(rows, use_grpo=False)
    clamped, _, module = computed(rows, use_grpo=False, adv_clamp=0.4)
    assert torch.equal(plain.opd_weights, clamped.opd_weights)
    bound = 0.4 * clamped.opd_weights
    assert (clamped.opd_advantages.abs() <= bound + 1e-6).all() and (plain.opd_advantages.abs() > bound + 1e-3).any()
    share = module.metrics.reduce()["train/opd_clamped"]
    scores = random_scores(batch)
    gap = (scores.teacher_logprobs - scores.old_logprobs)[batch.mask == 1].abs()
    assert 0 < share < 1 and share == pytest.approx((gap > 0.4).float().mean().item())


def test_what_models_say_of_tool_results_is_in_no_sum():
    rows = groups()
    batch = collate(rows)
    scores = random_scores(batch)
    noise = 99.0 * (1 - batch.mask)
    loud = judged_scores(scores.old_logprobs + noise, scores.teacher_logprobs - noise)
    quiet, noisy = (computed(rows, s)[0] for s in (scores, loud))
    for name in ("advantages", "opd_weights", "opd_advantages"):
        assert torch.equal(getattr(quiet, name), getattr(noisy, name))


def test_a_batch_of_nothing():
    inputs, _, module = computed([])
    assert inputs.advantages.shape == (0, 1)
    assert "train/opd_log_ratio" not in module.metrics.reduce()


def test_extremes_are_those_of_sampled_tokens():
    """Not of padding and tool results, whose log-ratio of 0 would lie between or outside."""
    rows = groups()
    batch = collate(rows)
    zero = torch.zeros_like(batch.mask)
    for sign in (1, -1):
        _, _, module = computed(rows, judged_scores(zero, sign * (0.5 + torch.rand(zero.shape)) * batch.mask))
        figures = module.metrics.reduce()
        low, high = sorted(sign * figures[f"train/opd_log_ratio_{end}"] for end in ("min", "max"))
        assert 0.5 <= low < high <= 1.5


# ---------------------------------------------------------------------- the gradient it stands for
V, LENGTH = 3, 3


def prefixes():
    return [s for n in range(LENGTH) for s in itertools.product(range(V), repeat=n)]


# ---------------------------------------------------------------------- with real models
def train(module, batches, **options):
    trainer = fit(module, batches, **options)
    weights = {k: v.clone() for k, v in named_weights(module) if not k.startswith("teacher.")}
    return weights, {k: float(v) for k, v in trainer.callback_metrics.items()}


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


COMMON = {"lr": 1e-3, "epochs": 2, "clip_high": 0.28}


@pytest.mark.parametrize("mode", ["divergence_ratio"])
def test_a_teacher_that_is_the_student_changes_nothing(model_dir, mode):
    plain, figures = train(GRPO(str(model_dir), **COMMON), [groups()])
    taught, other = train(SOD(str(model_dir), str(model_dir), opd_mode=mode, **COMMON), [groups()])
    assert largest_difference(plain, taught) == 0.0
    assert {k: other[k] for k in figures} == figures  # loss and gradient norms among them
    assert other["train/divergence/turn1"] == other["train/opd_advantage_abs"] == 0.0
    assert other["train/weight/last"] == 1.0


@pytest.mark.parametrize("off", [{"opd_coef": 0.0}, {"opd_mode": "none"}])
def test_without_distillation_it_is_grpo_and_no_teacher_is_looked_for(model_dir, off):
    plain, figures = train(GRPO(str(model_dir), **COMMON), [groups()] * 2)
    module = SOD(str(model_dir), "/nowhere/at/all", **off, **COMMON)
    same, other = train(module, [groups()] * 2)
    assert largest_difference(plain, same) == 0.0 and figures == other and module.teacher is None


def test_figures_and_pages_from_the_models_own_words(model_dir, teacher_dir):
    rows = groups()
    batch = collate(rows)
    module = SOD(str(model_dir), str(teacher_dir), **COMMON)
    _, figures = train(module, [rows])
    with torch.no_grad():
        s, t = (token_logprobs(load_causal_lm(str(d)), batch).logprobs for d in (model_dir, teacher_dir))
    d, w = [], []
    for i, row in enumerate(rows):
        spans = [slice(len(row.prompt_ids) + turn.start, len(row.prompt_ids) + turn.end) for turn in row.turns]
        d.append([(s - t)[i, span].abs().mean().item() for span in spans])
        w.append(slow_weights("divergence_ratio", d[-1], i))
    for k, name in enumerate(("turn1", "turn2", "turn3")):
        assert figures[f"train/divergence/{name}"] == pytest.approx(sum(x[k] for x in d) / 9, rel=1e-3)
        assert figures[f"train/weight/{name}"] == pytest.approx(sum(x[k] for x in w) / 9, rel=1e-3)
    assert figures["train/weight/last"] == pytest.approx(figures["train/weight/turn3"])
    assert "train/weight/turn4" not in figures
    capped = [x >= 1.2 for row in w for x in row[1:]]
    assert 0 < sum(capped) < len(capped)
    assert figures["train/opd_weight_capped"] == pytest.approx(sum(capped) / len(capped))
    gap = (t - s)[batch.mask == 1]
    assert figures["train/opd_log_ratio"] == pytest.approx(gap.mean().item(), rel=1e-3)
    assert figures["train/opd_log_ratio_min"] == pytest.approx(gap.min().item(), rel=1e-3)
    assert figures["train/opd_log_ratio_max"] == pytest.approx(gap.max().item(), rel=1e-3)
    assert figures["train/opd_log_ratio_std"] == pytest.approx(gap.std(unbiased=False).item(), rel=1e-3)
    for row, (trajectory, page) in enumerate(module.last_token_values):
        assert next(iter(page)) == "advantages"
        assert {"opd_weights", "opd_advantages", "kl"} <= page.keys()
        turn = trajectory.turns[2]
        shown = page["opd_weights"][turn.start : turn.end]
        assert shown == pytest.approx([w[row][2]] * len(shown), rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"reference_turn": "batch_median", "adv_clamp": 0.5, "aggregation": "sequence_mean"},
        {"opd_mode": "gated", "beta_max": 1.0},
    ],
)
def test_micro_batches_chunks_and_order_change_nothing(model_dir, teacher_dir, options):
    common = {"lr": 1e-3, "num_mini_batches": 1, "epochs": 3, **options}
    rows = groups()
    whole, figures = train(SOD(str(model_dir), str(teacher_dir), **common), [rows])
    random.Random(1).shuffle(rows)
    split, other = train(
        SOD(str(model_dir), str(teacher_dir), max_tokens_per_micro_batch=1, logits_chunk=3, **common), [rows]
    )
    assert largest_difference(whole, split) < 5e-5
    for name, value in figures.items():
        assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_tool_results_are_read_by_both_models(model_dir, teacher_dir):
    """Other words of the tool, same sampled tokens: other opinions of what follows, the same of what came before."""
    rows = groups()[:4]
    told = []
    for t in rows:
        ids = list(t.response_ids)
        turn = t.turns[0]
        ids[turn.end : turn.observation_end] = [(x + 1) % 400 for x in ids[turn.end : turn.observation_end]]
        told.append(t.replace(response_ids=tuple(ids)))
    pages = []
    for batch in (rows, told):
        module = SOD(str(model_dir), str(teacher_dir), **COMMON)
        train(module, [batch])
        pages.append(module.last_token_values)
    for (t, a), (_, b) in zip(*pages, strict=True):
        first, later = t.turns[0], t.turns[1]
        for name in ("old_logprobs", "teacher_logprobs"):
            assert a[name][: first.end] == pytest.approx(b[name][: first.end], abs=1e-5)
            assert a[name][later.start : later.end] != pytest.approx(b[name][later.start : later.end], abs=1e-3)
            assert not any(a[name][first.end : first.observation_end])


def test_the_first_gradient_of_distillation_alone(model_dir, teacher_dir, monkeypatch):
    """- mean over tokens of (T - S) grad log pi, by hand from the two models."""
    steps, clip = [], optimisation.clip_gradients

    def record(module, *args):
        steps.append(torch.cat([p.grad.flatten().clone() for p in module.policy.parameters()]))
        return clip(module, *args)

    monkeypatch.setattr(optimisation, "clip_gradients", record)
    rows = groups()
    options = {"opd_mode": "uniform", "use_grpo": False, "num_mini_batches": 1}
    fit(SOD(str(model_dir), str(teacher_dir), **options), [rows])
    batch = collate(rows)
    student = load_causal_lm(str(model_dir))
    s = token_logprobs(student, batch).logprobs
    with torch.no_grad():
        t = token_logprobs(load_causal_lm(str(teacher_dir)), batch).logprobs
    (-(t - s).detach() * s * batch.mask).sum().div(batch.mask.sum()).backward()
    truth = torch.cat([p.grad.flatten() for p in student.parameters()])
    assert truth.abs().max() > 1e-3 and (steps[0] - truth).abs().max() < 1e-5


@pytest.mark.parametrize("teacher", [None, "t"])
def test_the_ratio_divides_by_the_sampler_where_asked(teacher):
    rows = groups()
    batch = collate(rows)
    options = {"opd_mode": "none"} if teacher is None else {}
    module = SOD("p", teacher, ratio_denominator="sampler", **options)
    inputs = module.compute_advantages(rows, batch, random_scores(batch))
    plain = SOD("p", teacher, **options).compute_advantages(rows, batch, random_scores(batch))
    assert torch.equal(inputs.old_logprobs, batch.sampler_logprobs)
    assert not torch.equal(plain.old_logprobs, inputs.old_logprobs)
    assert torch.equal(inputs.advantages, plain.advantages), "T - S stays the trainer's"


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": None}, "opd_mode is divergence_ratio, but there is no teacher; name one, or take opd_mode: none"),
        ({"opd_mode": "all"}, "opd_mode is 'all'; expected one of none, uniform"),
        ({"opd_mode": "gated", "beta_min": 0.2}, r"beta_min is 0.2; expected 0 to beta_max \(0.1\)"),
        ({"opd_mode": "none", "use_grpo": False}, "nothing to learn"),
        (
            {"opd_mode": "uniform", "delta": None},
            "delta has no effect with opd_mode uniform; it belongs to divergence_ratio",
        ),
        ({"opd_coef": 0.0, "delta": 0.5, "adv_clamp": 5.0}, "adv_clamp, delta: no effect with opd_coef 0"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SOD(**{"policy": "p", "teacher": "t"} | options)


def test_one_sample_per_prompt_is_enough_for_distillation_alone():
    def setup(**options):
        module = SOD("/nowhere", "/nowhere", **options)
        module._trainer = SimpleNamespace(
            datamodule=SimpleNamespace(group_size=1),
            precision_plugin=SimpleNamespace(),
            strategy=SingleDeviceStrategy(),
        )
        module.setup("fit")

    with pytest.raises(ValueError, match="group_size is 1, so that every group advantage is 0"):
        setup()
    setup(use_grpo=False)
