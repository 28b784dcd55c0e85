"""A loss or gradient that is not finite ends a training before the optimiser step, in every algorithm."""

import math
import random
import re

import pytest
import torch

from lightning_modules.algorithms.aepo import AEPO
from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.dgpo import DGPO
from lightning_modules.algorithms.episode_grpo import EpisodeGRPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.algorithms.sft import SFT
from lightning_modules.algorithms.sod import SOD
from lightning_modules.training.optimisation import NonFiniteError
from tests.lightning_modules.helpers import fit, make_group, make_trajectories
from tests.processes import run_ranks

RANKS_WORKER = "tests/lightning_modules/ranks/non_finite_worker.py"


def batch():
    rng = random.Random(0)
    return [t for name in ("q1", "q2") for t in make_group(rng, name, [1, 0, 0, 1])]


def stopped(module, batches, **options):
    """The error that ends a training of ``batches``, with the weights as they were before."""
    kept = {}
    began = module.on_train_start
    module.on_train_start = lambda: (began(), kept.update({k: v.clone() for k, v in module.policy_weights()}))
    with pytest.raises(NonFiniteError) as caught:
        fit(module, batches, **options)
    for name, weight in module.policy_weights():
        torch.testing.assert_close(weight, kept[name], rtol=0, atol=0, equal_nan=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def damage(module, part, value):
    """Give one parameter of a model a number that is not finite once the module has loaded it."""
    build = module.build_models

    def build_and_damage():
        build()
        weights = dict(getattr(module, part).named_parameters())
        with torch.no_grad():
            next(weight for name, weight in weights.items() if "up_proj" in name)[0, 0] = value

    module.build_models = build_and_damage
    return module


ALGORITHMS = {
    "sft": (lambda m, t: SFT(m), "policy"),
    "kd_teacher": (lambda m, t: ColdStartKD(m, t, ce_coef=0.0), "teacher"),
    "ppo_critic": (lambda m, t: PPO(m), "critic"),
    "dgpo_teacher": (lambda m, t: DGPO(m, t), "reference"),
    "grpo_kl": (lambda m, t: GRPO(m, reference=t, kl_coef=0.1), "reference"),
    "aepo": (lambda m, t: AEPO(m), "policy"),
    "episode_grpo": (lambda m, t: EpisodeGRPO(m), "policy"),
    "sod_teacher": (lambda m, t: SOD(m, t), "teacher"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_weight_that_is_not_finite_stops_before_the_step(model_dir, teacher_dir, name):
    make, part = ALGORITHMS[name]
    module = damage(make(str(model_dir), str(teacher_dir)), part, math.nan if len(name) % 2 else math.inf)
    said = stopped(module, [batch()])
    assert re.match(r"iteration 1: train/\w+ is (nan|-?inf)", said), said
    assert "q1/0" in said or "q2/0" in said
    assert f"not finite are the parameters {part}." in said and "up_proj.weight" in said


class InfiniteLoss(SFT):
    """The gradient stays finite."""

    def token_losses(self, batch):
        columns = super().token_losses(batch)
        return {**columns, "loss": columns["loss"] + (math.inf if self.trainer.fit_loop.total_batch_idx else 0.0)}


class NaNGradient(GRPO):
    """The loss stays finite."""

    def loss(self, outputs, batch, inputs, weights):
        outputs.logprobs.register_hook(lambda gradient: gradient * math.nan)
        return super().loss(outputs, batch, inputs, weights)


def test_the_iteration_and_the_micro_batch_are_named(model_dir):
    rows = make_trajectories(3)
    module = InfiniteLoss(str(model_dir))
    with pytest.raises(NonFiniteError, match="iteration 2: train/loss is inf; .* Trajectories 0/0, 1/0, 2/0; all para"):
        fit(module, [rows, rows])
    assert module.trainer.global_step == 1


def test_only_the_micro_batches_with_such_a_loss_are_named(model_dir):
    class OneRow(SFT):
        def token_losses(self, batch):
            columns = super().token_losses(batch)
            return {**columns, "loss": columns["loss"] * (math.nan if int(batch.input_ids[0, 0]) == first else 1.0)}

    rows = make_trajectories(20)
    first = rows[7].prompt_ids[0]
    alike = [t.name for t in rows if t.prompt_ids[0] == first]
    said = stopped(OneRow(str(model_dir), max_tokens_per_micro_batch=1), [rows])
    assert re.search(r"Trajectories (.*); all", said)[1].split(", ") == alike


def test_a_finite_loss_whose_gradient_is_not(model_dir):
    said = stopped(NaNGradient(str(model_dir), max_grad_norm=0.0, num_mini_batches=1), [batch()])
    assert said.startswith("iteration 1: train/grad_norm is nan; expected finite numbers")
    assert all(f"q{group}/{i}" in said for group in (1, 2) for i in range(4)), "no micro-batch is known to be the cause"
    assert "all parameters are finite" in said


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_all_ranks_end_with_the_same_message(strategy, model_dir, tmp_path):
    """Rank 1 alone has a loss that is not finite, or a gradient; neither rank takes the step or waits for the other."""
    run_ranks(RANKS_WORKER, tmp_path, model_dir, strategy)
    for case in ("loss", "gradient"):
        said = [(tmp_path / f"{case}-{rank}.txt").read_text() for rank in (0, 1)]
        assert said[0] == said[1]
        name = "loss" if case == "loss" else "grad_norm"
        assert re.match(rf"iteration 1: train/{name} is (nan|inf)", said[0]), said[0]
        assert "4/0" in said[0], "of rank 1"
        assert ("0/0" in said[0]) == (case == "gradient"), "of rank 0, whose loss is finite"
        assert said[0].endswith("weights unchanged: True")
