"""The correction for what sampled, and its figures, against what is written down by hand."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from lightning_modules.advantage_transforms.teachers import Judged
from lightning_modules.algorithms.dgpo import DGPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.algorithms.sdar import SDAR
from lightning_modules.algorithms.sod import SOD
from lightning_modules.batch import LogprobBatch, PolicyOutputs, collate
from lightning_modules.maths.correction import Correction, ratios
from lightning_modules.metrics import StepMetrics
from lightning_modules.training.on_policy import OnPolicyModule
from lightning_modules.training.rollout_metrics import log_mismatch
from tests.lightning_modules.helpers import fit, make_group, make_trajectory

# By hand: log-ratios of two rows, three and two sampled tokens. r = e^0.1 .. ; geometric means e^0.5 and e^-1.5.
GAPS = ((0.1, 2.4, -1.0), (-1.0, -2.0))
MEANS = (0.5, -1.5)


def two_rows():
    """Rows with an observation in the middle of the first, the old log-probs that give GAPS, and the tokens' places."""
    rng = random.Random(0)
    rows = [make_trajectory(rng, 0, 1.0, [2, 3, 1]), make_trajectory(rng, 1, 0.0, [2])]
    rows = [t.replace(group="0", index=i) for i, t in enumerate(rows)]
    batch = collate(rows)
    old, places = torch.zeros_like(batch.mask), []
    for i, gaps in enumerate(GAPS):
        found = batch.mask[i].nonzero()[:, 0].tolist()
        places += [(i, p) for p in found]
        for p, gap in zip(found, gaps, strict=True):
            old[i, p] = batch.sampler_logprobs[i, p] + gap
    return rows, batch, old, places


FLAT = [gap for row in GAPS for gap in row]
OF_ROW = [mean for row, mean in zip(GAPS, MEANS, strict=True) for _ in row]
CASES = {
    "cap": ({"importance_cap": 2.0}, [min(math.exp(g), 2.0) for g in FLAT]),
    "cap_by_sequence": (
        {"importance_cap": 1.2, "importance_level": "sequence"}, [min(math.exp(g), 1.2) for g in OF_ROW],
    ),
    "mask": ({"mask_ratio": (0.3, 3.0)}, [1.0, 0.0, 1.0, 1.0, 0.0]),
    "mask_sequences": ({"mask_ratio": (0.3, 3.0), "mask_level": "sequence"}, [1.0, 1.0, 1.0, 0.0, 0.0]),
    "both": (
        {"importance_cap": 2.0, "mask_ratio": (0.3, 3.0), "mask_level": "sequence"},
        [math.exp(0.1), 2.0, math.exp(-1.0), 0.0, 0.0],
    ),
}  # fmt: skip


def arguments(options):
    names = {"importance_cap": "cap", "importance_level": "level"}
    return {names.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("case", CASES)
def test_weights_by_hand(case):
    options, expected = CASES[case]
    _, batch, old, places = two_rows()
    weights = Correction(**arguments(options)).weights(old.requires_grad_(), batch)
    assert [weights[p].item() for p in places] == pytest.approx(expected, rel=1e-5)
    assert weights.sum().item() == pytest.approx(sum(expected), rel=1e-5), "nothing beside the sampled tokens"


def test_nothing_is_weighed_without_an_option():
    _, batch, old, _ = two_rows()
    assert torch.equal(Correction().weights(old, batch), batch.mask)
    assert ratios(old, batch, "sequence")[batch.mask == 0].eq(0).all()


ALGORITHMS = {
    "GRPO": lambda **o: GRPO("p", "r", kl_coef=0.1, entropy_coef=0.01, **o),
    "PPO": lambda **o: PPO("p", "r", kl_in="loss", kl_estimator="k3", kl_coef=0.1, entropy_coef=0.01, **o),
    "DGPO": lambda **o: DGPO("p", "t", kl_coef=0.1, **o),
    "SOD": lambda **o: SOD("p", "t", opd_mode="divergence_ratio", **o),
}


def step(module, rows, batch, scores, outputs):
    """Sums by stream as the shared module forms them, and the gradients of log-probs, entropy and values."""
    inputs, weights = module.compute_advantages(rows, batch, scores), module.token_weights(batch, scores)
    sums = module.loss(outputs, batch, inputs, weights)
    counts = {name: divisor.sum().item() for name, divisor in module.streams(batch, inputs, weights).items()}
    total = sum(sums[name] / counts[name] for name in sums)
    leaves = [x for x in (outputs.logprobs, outputs.entropy, outputs.values) if x is not None]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return total.item(), counts, [None if g is None else g for g in gradients]


def tensors(batch, old, critic):
    """A frozen model's log-probs, values, and outputs whose log-probs are near the old ones, within every clip."""
    generator = torch.Generator().manual_seed(3)

    def draw():
        return torch.rand(batch.mask.shape, generator=generator)

    outputs = PolicyOutputs(
        (old + 0.1 * (draw() - 0.5) * batch.mask).requires_grad_(), (draw() * batch.mask).requires_grad_(),
        draw().requires_grad_() if critic else None,
    )  # fmt: skip
    return -2 * draw() * batch.mask, draw() if critic else None, outputs


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("case", CASES)
def test_only_the_policys_loss_is_weighed_token_by_token_and_divided_by_all(name, case):
    """The policy's gradient of a token is its weight times what it was: what is left of it, the KL's, is found with
    advantages of 0. Entropy, values and divisors are untouched."""
    options, expected = CASES[case]
    rows, batch, old, places = two_rows()
    critic = name in ("PPO", "DGPO")
    frozen, values, outputs = tensors(batch, old, critic)
    judged = (Judged(frozen, torch.ones(len(rows))),) * 2  # of the transforms that have a teacher
    scores = LogprobBatch(old, frozen, frozen, values, outputs.entropy.detach(), judged)
    plain, module = ALGORITHMS[name](), ALGORITHMS[name](**options)
    _, counts, (policy, *others) = step(plain, rows, batch, scores, outputs)
    _, weighed_counts, (weighed, *weighed_others) = step(module, rows, batch, scores, outputs)
    compute = plain.compute_advantages
    plain.compute_advantages = lambda *a: (lambda n: dataclasses.replace(n, advantages=n.advantages * 0))(compute(*a))
    _, _, (rest, *_) = step(plain, rows, batch, scores, outputs)
    assert counts == weighed_counts and counts["policy"] == 5
    found = [((weighed - rest)[p].item(), (policy - rest)[p].item()) for p in places]
    assert [a for a, _ in found] == pytest.approx([w * b for w, (_, b) in zip(expected, found, strict=True)], abs=1e-7)
    assert all(abs(b) > 1e-3 for _, b in found), "every token learns, or this shows nothing"
    for a, b in zip(others, weighed_others, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def with_versions(t, *runs):
    """Every turn of ``t`` sampled by these runs of (version, tokens)."""
    changed = [dataclasses.replace(turn, policy_version=r[-1][0], version_runs=r if len(r) > 1 else ())
               for turn, r in zip(t.turns, runs, strict=True)]  # fmt: skip
    return t.replace(turns=tuple(changed))


def test_figures_by_hand():
    rows, batch, old, _ = two_rows()
    rows = [with_versions(rows[0], ((3, 1), (4, 1)), ((5, 1),)), with_versions(rows[1], ((5, 2),))]
    metrics = StepMetrics()
    correction = Correction(2.0, mask_ratio=(0.3, 3.0), mask_level="sequence")
    log_mismatch(metrics, rows, batch, old, correction, version=5)
    r = [math.exp(g) for g in FLAT]
    expected = {
        "logprob_gap": sum(map(abs, FLAT)) / 5, "logprob_gap_max": 2.4, "sampler_kl_k1": -sum(FLAT) / 5,
        "sampler_kl_k3": sum(a - 1 - g for a, g in zip(r, FLAT, strict=True)) / 5,
        "importance_ess": sum(r) ** 2 / (5 * sum(a * a for a in r)),
        "importance_truncated": 1 / 5, "importance_masked": 2 / 5, "version_lag": (2 + 1 + 0 + 0 + 0) / 5,
        "version_lag_max": 2,
    }  # fmt: skip
    assert metrics.reduce() == {f"train/{k}": pytest.approx(v, rel=1e-5) for k, v in expected.items()}


def test_an_empty_batch_logs_no_nan():
    metrics = StepMetrics()
    log_mismatch(metrics, [], collate([]), torch.zeros(0, 1), Correction(2.0), 3)
    assert metrics.reduce() == {}


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_in_training_figures_and_weights_do_not_depend_on_micro_batches(model_dir, algorithm):
    rng = random.Random(4)
    rows = [with_versions(t, *(((0, turn.end - turn.start),) for turn in t.turns))
            for name in "ab" for t in make_group(rng, name, [1.0, 0.0, 1.0])]  # fmt: skip
    seen = []
    for max_tokens_per_micro_batch in (4096, 1):
        torch.manual_seed(0)
        options = {"importance_cap": 1.5, "mask_ratio": (1e-6, 5.0), "num_mini_batches": 2, "lr": 1e-3}
        module = algorithm(str(model_dir), max_tokens_per_micro_batch=max_tokens_per_micro_batch, **options)
        trainer = fit(module, [rows, rows])
        seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        seen[-1]["weights"] = float(sum(p.double().abs().sum() for p in module.policy.parameters()))
        assert any("importance" in figures for _, figures in module.last_token_values)
    assert seen[0] == {k: pytest.approx(v, rel=2e-3, abs=1e-5) for k, v in seen[1].items()}
    assert seen[0]["train/version_lag"] == seen[0]["train/version_lag_max"] == 1, "the second iteration's"
    assert 0 < seen[0]["train/importance_ess"] < 1 and "train/sampler_kl_k3" in seen[0]


class Plain(OnPolicyModule):
    """Says nothing about the correction."""

    def compute_advantages(self, trajectories, batch, scores):
        return scores

    def loss(self, outputs, batch, inputs, weights):
        return {"policy": (outputs.logprobs * weights.mask).sum()}


def test_an_algorithm_that_does_not_apply_the_correction_is_refused_before_any_model_loads():
    for options in ({"importance_cap": 2.0}, {"mask_ratio": (0.5, 2.0)}):
        with pytest.raises(ValueError, match="Plain does not say that its loss applies them; multiply .* weights.prod"):
            Plain("p", **options)
    Plain("p")
    with pytest.raises(ValueError, match="weigh the loss of GRPO, which use_grpo: false leaves out"):
        SDAR("p", skills_coef=0.0, use_grpo=False, importance_cap=2.0)
