"""The modules as jsonargparse sees them: typed, documented, strict; nothing is loaded."""

import pytest
from jsonargparse import ArgumentParser
from lightning import LightningModule


def parse(class_path, **init_args):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    config = parser.parse_object(
        {"model": {"class_path": f"lightning_modules.algorithms.{class_path}", "init_args": init_args}}
    )
    return parser.instantiate_classes(config).model


def test_dgpo_takes_its_own_its_parents_and_the_shared_arguments():
    arguments = {"policy": "p", "teacher": "t", "kl_coef": 0.01, "clip_high": 0.28, "num_mini_batches": 3, "lr": 1e-5}
    module = parse("dgpo.DGPO", **arguments)
    assert (module.kl_coef, module.clip_high, module.num_mini_batches, module.lr) == (0.01, 0.28, 3, 1e-5)
    assert (module.reference_path, module.critic_path, module.policy_path) == ("t", "p", "p")
    assert module.policy is None  # nothing was loaded
    assert {k: module.hparams[k] for k in arguments} == arguments


@pytest.mark.parametrize(
    ("class_path", "arguments"),
    [
        ("sft.SFT", {"policy": "p", "lr": 3e-3, "schedule": "cosine", "warmup_steps": 10}),
        (
            "cold_start_kd.ColdStartKD",
            {"policy": "p", "teacher": "t", "divergence": "jsd", "max_tokens_per_micro_batch": 512},
        ),
        ("ppo.PPO", {"policy": "p", "reference": "r", "critic_lr": 1e-4}),
        ("grpo.GRPO", {"policy": "p", "reference": "r", "kl_coef": 0.1, "advantage": "global", "num_mini_batches": 8}),
        ("arpo.ARPO", {"policy": "p", "attribution": "hard", "aggregation": "sequence_mean", "importance_cap": 2.0}),
        ("aepo.AEPO", {"policy": "p", "entropy_weight": 0.1, "attribution": "hard", "clip_high": 0.28, "lr": 1e-5}),
        ("sod.SOD", {"policy": "p", "teacher": "t", "delta": None, "use_grpo": False, "clip_high": 0.28, "lr": 1e-5}),
        ("opsd.OPSD", {"policy": "p", "privilege": "hint", "template": "{question} {hint}", "opd_coef": 0.5}),
    ],
)
def test_every_module_is_configurable(class_path, arguments):
    module = parse(class_path, **arguments)
    assert {k: module.hparams[k] for k in arguments} == arguments
