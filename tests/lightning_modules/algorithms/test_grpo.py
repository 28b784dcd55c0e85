"""GRPO: its loss against a slow form, its switches, and what its gradient must not depend on."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_modules.advantage_transforms import attribution
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.batch import LogprobBatch, PolicyOutputs, RowTensors, collate
from lightning_modules.maths.losses import LossInputs
from lightning_modules.models.policy import load_causal_lm, named_weights, token_logprobs
from lightning_modules.training import on_policy
from rollout.trajectory import CallOutcome, Reward, StopReason, ToolCall, ToolRequest, ToolResult
from tests.lightning_modules.helpers import fit, largest_difference, make_group, make_trajectory


def groups(seed=0):
    rng = random.Random(seed)
    return make_group(rng, "q1", [1, 0, 0, 1]) + make_group(rng, "q1#2", [0.3, 0.3]) + make_group(rng, "q2", [1, 0, 0])


def train(module, batches, **options):
    trainer = fit(module, batches, **options)
    weights = {k: v.clone() for k, v in named_weights(module) if not k.startswith("reference.")}
    return weights, {k: float(v) for k, v in trainer.callback_metrics.items()}


def random_scores(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old, reference = (-2 * torch.rand(batch.mask.shape, generator=generator) * batch.mask for _ in range(2))
    return LogprobBatch(old, None, reference, None, torch.rand(batch.mask.shape, generator=generator) * batch.mask)


def random_outputs(batch, seed=1):
    generator = torch.Generator().manual_seed(seed)
    logprobs, entropy = (torch.rand(batch.mask.shape, generator=generator) * batch.mask for _ in range(2))
    return PolicyOutputs((-2 * logprobs).requires_grad_(), entropy.requires_grad_(), None)


def mean_loss(module, rows, batch, scores, outputs):
    """Of one mini-batch, as the shared module divides it."""
    inputs, weights = module.compute_advantages(rows, batch, scores), module.token_weights(batch, scores)
    total = module.loss(outputs, batch, inputs, weights)["policy"]
    return total / module.streams(batch, inputs, weights)["policy"].sum()


def slow_loss(module, rows, batch, scores, outputs, advantages):
    """Token by token, from the formulas of the class docstring; a mean over the batch, with gradient."""
    per_sequence, tokens = [], []
    for i, t in enumerate(rows):
        terms = []
        for j, sampled in enumerate(t.loss_mask):
            if not sampled:
                continue
            p = len(t.prompt_ids) + j
            rho, a = (outputs.logprobs[i, p] - scores.old_logprobs[i, p]).exp(), advantages[i]
            bounded = rho.clamp(1 - module.clip_low, 1 + module.clip_high)
            objective = torch.minimum(a * rho, a * bounded)
            if a < 0 and module.dual_clip is not None:
                objective = torch.maximum(objective, torch.tensor(a * module.dual_clip))
            if module.importance_cap is not None:
                gap = math.exp(float(scores.old_logprobs[i, p]) - t.logprobs[j])
                objective = objective * min(gap, module.importance_cap)
            d = scores.reference_logprobs[i, p] - outputs.logprobs[i, p]
            kl = (d.exp() - d - 1).clamp(-10, 10)
            terms.append(-objective + module.kl_coef * kl - module.entropy_coef * outputs.entropy[i, p])
        tokens += terms
        per_sequence.append(sum(terms) / len(terms))
    return sum(tokens) / len(tokens) if module.aggregation == "token_mean" else sum(per_sequence) / len(per_sequence)


ADVANTAGES = [0.866, -0.866, -0.866, 0.866, 0, 0, 1.1547, -0.57735, -0.57735]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(
    "options",
    [{}, {"dual_clip": 1.5}, {"dual_clip": None, "clip_high": 0.28}, {"kl_coef": 0.1, "reference": "r"},
     {"importance_cap": 1.5}, {"importance_cap": 2.0, "kl_coef": 0.1, "reference": "r", "entropy_coef": 0.01}],
)  # fmt: skip
def test_the_loss_and_its_gradient_against_a_slow_form(aggregation, options):
    module = GRPO("p", aggregation=aggregation, **options)
    rows = groups()
    batch = collate(rows)
    scores, outputs = random_scores(batch), random_outputs(batch)
    fast = mean_loss(module, rows, batch, scores, outputs)
    slow = slow_loss(module, rows, batch, scores, outputs, ADVANTAGES)
    assert fast.item() == pytest.approx(slow.item(), abs=2e-5)
    inputs = (outputs.logprobs, outputs.entropy)
    for a, b in zip(*(torch.autograd.grad(x, inputs, allow_unused=True) for x in (fast, slow)), strict=True):
        assert (a is None) == (b is None) or not (a if b is None else b).any()
        if a is not None and b is not None:
            assert torch.allclose(a, b, atol=1e-5)


def pad(rows: RowTensors):
    import dataclasses

    fields = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
    wide = {k: torch.nn.functional.pad(v, (0, 5)) for k, v in fields.items() if v is not None and v.dim() == 2}
    return dataclasses.replace(rows, **wide)


def test_advantages_by_group_and_globally():
    rows = groups()
    batch = collate(rows)
    scores = random_scores(batch)
    advantages = GRPO("p").outcome_advantages(rows, batch, scores)
    for row, expected in enumerate(ADVANTAGES):
        on = batch.mask[row] == 1
        assert advantages[row][on].tolist() == pytest.approx([expected] * int(on.sum()), abs=1e-4)
        assert not advantages[row][~on].any()
    everywhere = GRPO("p", advantage="global").outcome_advantages(rows, batch, scores)
    outcome = torch.tensor([t.reward.total for t in rows])[:, None].expand_as(batch.mask)[batch.mask == 1]
    expected = (outcome - outcome.mean()) / outcome.std()
    assert torch.allclose(everywhere[batch.mask == 1], expected, atol=1e-4)


# ---------------------------------------------------------------------- with a real model
def sampled_nearly_by(model_dir, rows):
    """As if an engine with slightly other probabilities than the trainer's had sampled the rows."""
    rng = random.Random(0)
    with torch.no_grad():
        logprobs = token_logprobs(load_causal_lm(str(model_dir)), collate(rows)).logprobs
    changed = []
    for t, own in zip(rows, logprobs.tolist(), strict=True):
        own = own[len(t.prompt_ids) :]
        noisy = tuple(min(own[j] + rng.uniform(-0.4, 0.4), 0.0) * m for j, m in enumerate(t.loss_mask))
        changed.append(t.replace(logprobs=noisy))
    return changed


def test_one_optimiser_step_scores_nothing_that_nobody_reads(model_dir, teacher_dir, monkeypatch):
    """Weights, metrics and pages are those of a run that scores all the same, bit for bit."""

    class Scoring(GRPO):
        @property
        def reads_old_logprobs(self):
            return True

    passes, found = [], []

    def counted(*arguments, **options):
        passes.append(torch.is_grad_enabled())
        return token_logprobs(*arguments, **options)

    monkeypatch.setattr(on_policy, "token_logprobs", counted)
    rows = sampled_nearly_by(model_dir, groups())
    for kind in (Scoring, GRPO):
        module = kind(
            str(model_dir), str(teacher_dir), kl_coef=0.1, num_mini_batches=1, max_tokens_per_micro_batch=80, lr=1e-3
        )
        passes.clear()
        weights, metrics = train(module, [rows, rows])
        found.append((weights, metrics, module.last_token_values, sum(passes), len(passes)))
    (weights, metrics, pages, *scored), (others, other_metrics, other_pages, *seen) = found
    assert seen[0] == seen[1] == scored[0] == scored[1] / 2 > 2, "only the passes with a gradient are left"
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert metrics == other_metrics and metrics["train/logprob_gap"] > 0.1 and "train/kl" in metrics
    assert [t.index for t, _ in pages] == [t.index for t, _ in other_pages]
    assert [values for _, values in pages] == [values for _, values in other_pages]


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 2},
        {"num_mini_batches": 2},
        {"importance_cap": 2.0},
        {"advantage_transforms": [attribution.EntropyScaling()]},
    ],
)
def test_what_reads_the_policys_scores(options):
    assert not GRPO("p", num_mini_batches=1, advantage_transforms=[attribution.HardAttribution()]).reads_old_logprobs
    assert GRPO("p", **{"num_mini_batches": 1} | options).reads_old_logprobs


SETTINGS = [
    {},
    {"aggregation": "sequence_mean", "kl_coef": 0.1, "importance_cap": 1.2, "entropy_coef": 0.01},
    {"advantage": "global", "clip_high": 0.28},
]


@pytest.mark.parametrize("options", SETTINGS)
def test_micro_batches_chunks_and_order_change_nothing(model_dir, teacher_dir, options):
    common = {"lr": 1e-3, "num_mini_batches": 1, "epochs": 3, "reference": str(teacher_dir), **options}
    rows = sampled_nearly_by(model_dir, groups())
    whole, figures = train(GRPO(str(model_dir), **common), [rows])
    random.Random(1).shuffle(rows)
    split, other = train(GRPO(str(model_dir), max_tokens_per_micro_batch=1, logits_chunk=3, **common), [rows])
    assert largest_difference(whole, split) < 5e-5
    assert figures["train/clip_fraction"] > 0
    for name, value in figures.items():
        assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_rows_with_advantage_zero_run_forward_only_and_nothing_changes(model_dir, num_mini_batches, monkeypatch):
    """In the third iteration no group differs, and the weights still move, by momentum."""
    equal = make_group(random.Random(5), "q1", [1, 1, 1])
    batches = [groups(), groups(seed=1), equal]
    forward, backward = [], []
    loss = GRPO.loss

    def watched(module, outputs, batch, inputs, weights):
        found = loss(module, outputs, batch, inputs, weights)
        (backward if found["policy"].requires_grad else forward).append(int(batch.mask.sum()))
        return found

    monkeypatch.setattr(GRPO, "loss", watched)
    arguments = {"lr": 1e-3, "num_mini_batches": num_mini_batches, "max_tokens_per_micro_batch": 40}
    weights, figures = train(GRPO(str(model_dir), **arguments), batches)
    constant = sum(sum(t.loss_mask) for rows in batches[:2] for t in rows if t.group == "q1#2")
    assert sum(forward) == constant > 0
    tokens = sum(sum(t.loss_mask) for rows in batches for t in rows)
    assert sum(forward) + sum(backward) == tokens
    monkeypatch.setattr(GRPO, "rows_without_gradient", lambda self, inputs: ())
    expected, same = train(GRPO(str(model_dir), **arguments), batches)
    assert sum(forward) == constant
    assert largest_difference(weights, expected) < 1e-6
    assert figures == pytest.approx(same, rel=1e-3, abs=1e-5)
    before, _ = train(GRPO(str(model_dir), **arguments), batches[:2])
    assert largest_difference(before, expected) > 1e-5


class OwnTransform(attribution.HardAttribution):
    def loss(self, micro, inputs):
        return None


class OwnLoss(GRPO):
    def loss(self, outputs, batch, inputs, weights):
        return super().loss(outputs, batch, inputs, weights)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GRPO, {"entropy_coef": 0.01}),
        (GRPO, {"kl_coef": 0.1, "reference": "teacher"}),
        (GRPO, {"advantage_transforms": [OwnTransform()]}),
        (OwnLoss, {}),
    ],
)
def test_a_loss_with_other_terms_has_a_gradient_everywhere(kind, options):
    module = kind("unused", **options)
    assert module.rows_without_gradient(LossInputs(torch.zeros(2, 3), None, None, ())) == ()
    assert GRPO("unused").rows_without_gradient(LossInputs(torch.eye(2), None, None, ())) == []
    assert GRPO("unused").rows_without_gradient(LossInputs(torch.zeros(2, 3), None, None, ())) == [0, 1]


def test_the_first_loss_is_the_mean_over_sequences_of_their_means(model_dir, teacher_dir):
    """Every ratio is 1: what is left is -mean of w A + kl, written down from the models' own log-probs."""
    rows = sampled_nearly_by(model_dir, groups())
    batch = collate(rows)
    module = GRPO(str(model_dir), str(teacher_dir), kl_coef=0.5, aggregation="sequence_mean", importance_cap=1.05,
                  num_mini_batches=1, max_tokens_per_micro_batch=40)  # fmt: skip
    _, figures = train(module, [rows])
    with torch.no_grad():
        old, reference = (token_logprobs(load_causal_lm(str(d)), batch).logprobs for d in (model_dir, teacher_dir))
    weights = (old - batch.sampler_logprobs).exp()
    kl = (reference - old).exp() - (reference - old) - 1
    terms = -weights.clamp(max=1.05) * torch.tensor(ADVANTAGES)[:, None] + 0.5 * kl.clamp(-10, 10)
    on = batch.mask == 1
    per_row = [terms[i][on[i]].mean().item() for i in range(len(rows))]
    assert figures["train/loss_policy"] == pytest.approx(sum(per_row) / len(rows), rel=1e-4)
    assert figures["train/kl"] == pytest.approx(kl.clamp(-10, 10)[on].mean().item(), rel=1e-4)
    truncated = (weights[on] > 1.05).float().mean().item()
    assert 0 < truncated < 1
    assert figures["train/importance_truncated"] == pytest.approx(truncated)
    assert figures["train/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert figures["train/clip_fraction"] == 0.0
    tokens = [abs(a) for a, t in zip(ADVANTAGES, rows, strict=True) for _ in range(sum(t.loss_mask))]
    assert figures["train/advantage_abs"] == pytest.approx(sum(tokens) / len(tokens), rel=1e-3)
    assert figures["train/zero_variance_groups"] == pytest.approx(1 / 3)
    assert "train/discarded_groups" not in figures


def test_without_a_kl_no_reference_is_loaded(model_dir, teacher_dir):
    """Not even looked for; nor is there a critic."""
    module = GRPO(str(model_dir), reference="/nowhere/at/all")
    _, figures = train(module, [groups()])
    assert module.reference is None and module.critic is None and "train/kl" not in figures
    with_kl = GRPO(str(model_dir), reference=str(teacher_dir), kl_coef=0.1)
    train(with_kl, [groups()])
    assert with_kl.reference is not None
    with pytest.raises(OSError, match="/nowhere/at/all"):
        train(GRPO(str(model_dir), reference="/nowhere/at/all", kl_coef=0.1), [groups()])


@pytest.mark.parametrize("num_mini_batches", [2])
def test_a_failed_member_changes_neither_mean_nor_spread_nor_any_figure(model_dir, num_mini_batches):
    """Even one that was rewarded before its service failed, and however many calls it had made."""
    rows = make_group(random.Random(0), "q1", [1, 0, 0, 1, 1]) + make_group(random.Random(1), "q2", [0.2, 0.8, 0.2])
    call = ToolCall(0, ToolRequest("python", {"code": "1"}), ToolResult("", CallOutcome.INFRASTRUCTURE), 1.0)
    lost = {"stop_reason": StopReason.INFRASTRUCTURE, "calls": (call,) * 9, "reward": Reward(100.0, {"em": 100.0})}
    broken = [*rows[:4], rows[4].replace(**lost), *rows[5:]]
    module = GRPO(str(model_dir), lr=1e-3, num_mini_batches=num_mini_batches)
    weights, figures = train(module, [broken])
    advantages = {(t.group, t.index): inputs["advantages"][0] for t, inputs in module.last_token_values}
    assert advantages == {
        ("q1", 0): pytest.approx(0.866, abs=1e-3), ("q1", 1): pytest.approx(-0.866, abs=1e-3),
        ("q1", 2): pytest.approx(-0.866, abs=1e-3), ("q1", 3): pytest.approx(0.866, abs=1e-3),
        ("q2", 0): pytest.approx(-0.577, abs=1e-3), ("q2", 1): pytest.approx(1.155, abs=1e-3),
        ("q2", 2): pytest.approx(-0.577, abs=1e-3),
    }  # fmt: skip
    assert figures["train/reward"] == pytest.approx((2 + 1.2) / 7) == figures["train/em"]
    assert figures["train/trajectories"] == 7 and figures["train/tool_calls"] == 0
    quiet = [*rows[:4], rows[4].replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None), *rows[5:]]
    other_weights, other_figures = train(GRPO(str(model_dir), lr=1e-3, num_mini_batches=num_mini_batches), [quiet])
    assert figures == other_figures and largest_difference(weights, other_weights) == 0.0


def test_groups_thrown_away_by_the_data_module_are_logged(model_dir):
    import lightning as L
    from torch.utils.data import DataLoader

    class Data(L.LightningDataModule):
        group_size, discarded_groups = 4, (3, 12)

        def train_dataloader(self):
            return DataLoader([groups()], batch_size=None)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(max_steps=1, accelerator="cpu", **quiet)
    trainer.fit(GRPO(str(model_dir)), datamodule=Data())
    assert float(trainer.callback_metrics["train/discarded_groups"]) == 0.25


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_coef": 0.1}, "kl_coef is 0.1, but there is no reference"),
        ({"kl_coef": 0.1, "reference": "r", "reference_kl_estimator": "k1"}, "gradient of zero mean; take k2 or k3"),
        ({"reference_kl_estimator": "k3"}, "no effect with kl_coef 0"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GRPO("p", **options)


def test_one_sample_per_prompt_is_refused_before_the_policy_is_loaded():
    def setup(size, **options):
        module = GRPO("/nowhere", **options)
        datamodule = SimpleNamespace(group_size=size)
        module._trainer = SimpleNamespace(
            datamodule=datamodule,
            precision_plugin=SimpleNamespace(),
            strategy=SingleDeviceStrategy(),
        )
        module.setup("fit")

    with pytest.raises(ValueError, match="group_size is 1, so that every group advantage is 0"):
        setup(1)
    setup(2)
    setup(1, advantage="global")
    setup(1, singleton_advantage="reward")


def test_streams_that_nothing_divides_are_refused(model_dir):
    class WithAux(GRPO):
        def loss(self, *args):
            sums = super().loss(*args)
            return {"aux": sums["policy"]} | self.kept(sums)

    for kept in (dict, lambda sums: {}):  # one too many; one too many and one missing
        module = WithAux(str(model_dir))
        module.kept = kept
        with pytest.raises(ValueError, match=r"loss sums \['aux'.*, but streams divides \['policy'\]"):
            train(module, [groups()])


# ---------------------------------------------------------------------- ratios of turns and sequences
@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_ratios_of_spans_against_a_slow_form(level):
    """Loss and gradient: every token has its span's geometric mean, whose clip removes whole spans."""
    rows = groups()
    batch = collate(rows)
    module = GRPO("p", ratio_level=level, clip_low=0.01, clip_high=0.02, dual_clip=None, aggregation="sequence_mean")
    generator = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(batch.mask.shape, generator=generator) * batch.mask
    now = (old + 0.2 * torch.randn(batch.mask.shape, generator=generator) * batch.mask).requires_grad_()
    scores = LogprobBatch(old)
    inputs = module.compute_advantages(rows, batch, scores)
    outputs = PolicyOutputs(now, torch.zeros_like(now), None)
    found = module.loss(outputs, batch, inputs, module.token_weights(batch, scores))["policy"]
    (gradient,) = torch.autograd.grad(found, now)
    expected, slow = 0.0, torch.zeros_like(now)
    clipped = 0
    for i, t in enumerate(rows):
        start = len(t.prompt_ids)
        places = [[start + j for j in range(turn.start, turn.end)] for turn in t.turns]
        spans = places if level == "turn" else [[j for span in places for j in span]]
        for span in spans:
            a = inputs.advantages[i, span[0]].item()
            s = math.exp(sum((now - old)[i, j].item() for j in span) / len(span))
            within = min(max(s, 0.99), 1.02)
            lost = -a * within > -a * s
            clipped += lost
            for j in span:
                w = 1 / sum(t.loss_mask)
                expected += w * max(-a * s, -a * within)
                slow[i, j] = 0.0 if lost else -a * s * w
    assert found.item() == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(gradient, slow, atol=1e-6) and clipped >= 2
    assert torch.equal(inputs.old_logprobs, old)


def test_a_span_of_one_token_has_the_token_s_ratio():
    rows = [make_trajectory(random.Random(i), i, spans=[1, 2, 1]).replace(group="g", index=i) for i in range(3)]
    rows = [t.replace(reward=Reward(float(i), {"em": float(i)})) for i, t in enumerate(rows)]
    batch = collate(rows)
    old = -torch.rand(batch.mask.shape) * batch.mask
    outputs = PolicyOutputs(old + 0.3 * torch.randn(old.shape) * batch.mask, torch.zeros_like(old), None)
    found = []
    for level in ("token", "turn"):
        module = GRPO("p", ratio_level=level)
        inputs = module.compute_advantages(rows, batch, LogprobBatch(old))
        weights = module.token_weights(batch, LogprobBatch(old))
        found.append(module.loss(outputs, batch, inputs, weights)["policy"])
    assert torch.allclose(*found, rtol=1e-5)
