"""docs/new_algorithm.md is executed: its two losses and their gradients against slow forms; training."""

import math
import random
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from experiments.registry.errors import ExperimentError
from experiments.registry.listing import load
from experiments.registry.project import Project
from experiments.stages.validate import check_classes
from lightning_modules.batch import LogprobBatch, PolicyOutputs, collate
from tests.lightning_modules.helpers import fit, make_group
from tests.lightning_modules.test_advantage_transforms import parse

PAGE = Path(__file__).parents[3] / "docs" / "new_algorithm.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def page(monkeypatch):
    """The page's modules by name."""
    modules = {}
    for code in blocks("python"):
        name = code.split(".py")[0].removeprefix("# ")
        modules[name] = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, modules[name])
        exec(compile(code, str(PAGE), "exec"), modules[name].__dict__)
    return modules


@pytest.fixture
def gspo(page):
    return page["my_gspo"].GSPO


@pytest.fixture
def cispo(page):
    return page["my_cispo"].CISPO


def groups():
    rng = random.Random(0)
    return make_group(rng, "a", [1, 0, 0, 1]) + make_group(rng, "b", [1, 0, 0])


ADVANTAGES = [0.866, -0.866, -0.866, 0.866, 1.1547, -0.57735, -0.57735]
OPTIONS = [
    {}, {"mask_ratio": (0.6, 1.5)}, {"mask_ratio": (0.85, 1.15), "mask_level": "sequence"}, {"importance_cap": 1.1},
    {"importance_cap": 1.1, "importance_level": "sequence", "mask_ratio": (0.6, 1.5)},
]  # fmt: skip


def slow_loss(module, rows, batch, old, logprobs):
    """Sequence by sequence, token by token."""
    total = 0.0
    for i, (t, advantage) in enumerate(zip(rows, ADVANTAGES, strict=True)):
        start = len(t.prompt_ids)
        sampled = [j for j, on in enumerate(t.loss_mask) if on]
        r = {j: math.exp(float(old[i, start + j]) - t.logprobs[j]) for j in sampled}
        mean = math.exp(sum(math.log(x) for x in r.values()) / len(r))
        judged = {j: mean if module.correction.mask_level == "sequence" else r[j] for j in sampled}
        low, high = module.correction.mask_ratio or (0.0, math.inf)
        kept = [j for j in sampled if low <= judged[j] <= high]
        if not kept:
            continue
        capped = {j: mean if module.correction.level == "sequence" else r[j] for j in kept}
        cap = module.importance_cap
        weight = sum(1.0 if cap is None else min(capped[j], cap) for j in kept) / len(sampled)
        ratio = (sum(logprobs[i, start + j] - old[i, start + j] for j in kept) / len(kept)).exp()
        bounded = ratio.clamp(1 - module.clip_low, 1 + module.clip_high)
        total = total - weight * torch.minimum(advantage * ratio, advantage * bounded)
    return total / len(rows)


@pytest.mark.parametrize("options", OPTIONS)
def test_gspo_and_its_gradient_against_a_slow_form(gspo, options):
    module, rows = gspo("p", clip_low=0.1, clip_high=0.15, **options), groups()
    batch = collate(rows)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn((2, *batch.mask.shape), generator=generator) * batch.mask
    old = batch.sampler_logprobs + 0.4 * noise[0]
    logprobs = (old + 0.3 * noise[1]).requires_grad_()
    scores = LogprobBatch(old)
    inputs, weights = module.compute_advantages(rows, batch, scores), module.token_weights(batch, scores)
    count = module.streams(batch, inputs, weights)["policy"].sum()
    fast = (
        sum(  # in micro-batches of three rows, and an empty one
            module.loss(
                PolicyOutputs(logprobs[i : i + 3] if i < 7 else logprobs[:1, :1], logprobs, None),
                *(x.rows(range(i, min(i + 3, 7)), batch.mask.shape[1]) for x in (batch, inputs, weights)),
            )["policy"]
            for i in (0, 3, 6, 9)
        )
        / count
    )
    slow = slow_loss(module, rows, batch, old, logprobs)
    assert count.item() == pytest.approx(7) and fast.item() == pytest.approx(slow.item(), abs=1e-5)
    gradients = [torch.autograd.grad(x, logprobs, retain_graph=True)[0] for x in (fast, slow)]
    assert gradients[1].abs().max() > 1e-3 and torch.allclose(*gradients, atol=1e-5)
    assert 0 < module.metrics.reduce()["train/clip_fraction"] < 1
    if "mask_ratio" in options:
        assert 0 < weights.kept.sum() < batch.mask.sum(), "something is left out, or this shows nothing"


def test_the_test_on_the_page_passes_and_can_fail(page, monkeypatch):
    test = page["test_my_cispo"].test_the_loss_against_a_slow_form
    torch.manual_seed(0)
    test()
    monkeypatch.setattr(page["test_my_cispo"], "CISPO", lambda *args, **kwargs: page["my_gspo"].GSPO("unused"))
    with pytest.raises(AssertionError):
        test()


def test_cispo_leaves_out_rows_without_advantage_and_nothing_else(cispo, model_dir, monkeypatch):
    rng = random.Random(0)
    rows = make_group(rng, "a", [1, 0, 0, 1]) + make_group(rng, "b", [1, 1, 1])
    found = []
    for skips in (True, False):
        if not skips:
            monkeypatch.delattr(cispo, "rows_without_gradient")
        module = cispo(str(model_dir), lr=1e-3, num_mini_batches=1, epochs=2)
        trainer = fit(module, [rows])
        weights = torch.cat([p.detach().flatten() for p in module.policy.parameters()])
        found.append((weights, float(trainer.callback_metrics["train/loss_policy"])))
    assert torch.allclose(found[0][0], found[1][0], atol=5e-5) and found[0][1] == pytest.approx(found[1][1], abs=1e-5)


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_it_trains_and_micro_batches_change_nothing(name, request, model_dir):
    algorithm, found = request.getfixturevalue(name), []
    for budget in (4096, 1):
        module = algorithm(
            str(model_dir),
            lr=1e-3,
            num_mini_batches=1,
            epochs=3,
            mask_ratio=(1e-9, 50.0),
            max_tokens_per_micro_batch=budget,
        )
        trainer = fit(module, [groups()])
        weights = torch.cat([p.detach().flatten() for p in module.policy.parameters()])
        found.append((weights, float(trainer.callback_metrics["train/loss_policy"])))
    assert torch.allclose(found[0][0], found[1][0], atol=5e-5) and found[0][1] == pytest.approx(found[1][1], abs=1e-5)


def test_the_yaml_on_the_page_is_taken(gspo, tmp_path):
    [experiment] = blocks("yaml")
    (tmp_path / "gspo_smoke.yaml").write_text(experiment)
    config = load("gspo_smoke", Project(experiment_dirs=(tmp_path, *Project().experiment_dirs)))
    module = parse(config["model"])
    assert type(module).__name__ == "GSPO" and module.correction.mask_ratio == (0.5, 2.0)


def test_a_class_without_loss_or_advantages_is_refused():
    with pytest.raises(
        ExperimentError, match="OnPolicyModule lacks the method 'compute_advantages' and the method 'loss'"
    ):
        check_classes({"model": {"class_path": "lightning_modules.training.on_policy.OnPolicyModule"}}, "x")


def test_a_run_that_cannot_learn_says_so_once(gspo, model_dir, caplog):
    """An own algorithm, too: the fifth iteration in a row without differing rewards warns, later ones do not."""
    rng = random.Random(1)
    equal = make_group(rng, "a", [0.0] * 3) + make_group(rng, "b", [1.0] * 2)
    trainer = fit(gspo(str(model_dir)), [*[equal] * 4, groups(), *[equal] * 6])
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert figures["train/zero_variance_groups"] == 1.0 and figures["train/advantage_abs"] == 0.0
    [warning] = [r.getMessage() for r in caplog.records if "rewards of every group were identical" in r.getMessage()]
    assert warning.startswith("iteration 10: in each of the last 5 iterations") and "mean is 0.4 now" in warning
    assert "\n" not in warning and "Check whether the reward can take other values" in warning


def test_the_size_of_advantages_is_logged_by_token(gspo, model_dir):
    rows = groups()
    trainer = fit(gspo(str(model_dir)), [rows])
    tokens = [abs(a) for a, t in zip(ADVANTAGES, rows, strict=True) for _ in range(sum(t.loss_mask))]
    assert float(trainer.callback_metrics["train/advantage_abs"]) == pytest.approx(sum(tokens) / len(tokens), rel=1e-3)
    assert float(trainer.callback_metrics["train/zero_variance_groups"]) == 0.0
