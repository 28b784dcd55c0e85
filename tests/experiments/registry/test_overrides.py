"""Command-line overrides: which are put into the configuration, which are left to the parser."""

import pytest

from experiments.registry.errors import ExperimentError
from experiments.registry.overrides import apply, parse

BASE = {
    "trainer": {"max_steps": 5, "callbacks": {"log": {"class_path": "c.Log", "init_args": {"n": 1}}}, "strategy": None},
    "model": {
        "class_path": "m.DGPO",
        "init_args": {"kl_coef": 0.001, "optim": {"class_path": "m.Adam", "init_args": {}}},
    },
    "data": {"class_path": "d.Data", "init_args": {"files": ["a.parquet"], "name": "1"}},
}


def applied(*words):
    config, rest = apply(BASE, parse(words).own)
    return config, rest


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--model.kl_coef", "0.01"], ("model", "init_args", "kl_coef"), 0.01),
        (["--model.optim.lr", "1"], ("model", "init_args", "optim", "init_args", "lr"), 1),
        (["--trainer.fast_dev_run", "true"], ("trainer", "fast_dev_run"), True),
        (["--trainer.callbacks.log.n", "3"], ("trainer", "callbacks", "log", "init_args", "n"), 3),
        (["--data.files", "[b.parquet, c.parquet]"], ("data", "init_args", "files"), ["b.parquet", "c.parquet"]),
        (["--data.name", "007"], ("data", "init_args", "name"), "007"),
        (["--data.name", "null"], ("data", "init_args", "name"), None),
    ],
)
def test_simple_overrides_enter_the_configuration(words, path, value):
    config, rest = applied(*words)
    for part in path:
        config = config[part]
    assert config == value and type(config) is type(value)
    assert rest == ()


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.callbacks+=lightning.pytorch.callbacks.Timer", "--trainer.callbacks.interval=epoch"],
        ["--model=lightning_modules.algorithms.ppo.PPO", "--model.clip_low=0.1"],
        ["--model.class_path=lightning_modules.algorithms.ppo.PPO", "--model.clip_low=0.1"],
    ],
)
def test_what_only_the_parser_can_do_is_left_to_it_in_order(words):
    config, rest = applied(*words)
    assert rest == tuple(words)
    assert config == BASE


def test_a_strategy_s_name_takes_the_place_of_a_class():
    config = {"trainer": {"strategy": {"class_path": "s.ZeRO3", "init_args": {"offload_optimizer": True}}}}
    changed, rest = apply(config, parse(["--trainer.strategy", "ddp"]).own)
    assert changed["trainer"]["strategy"] == "ddp" and rest == ()
    assert apply(config, parse(["--trainer.strategy=s.ZeRO2"]).own) == (config, ("--trainer.strategy=s.ZeRO2",))


def test_references_to_shared_parts_are_followed():
    config = {
        "values": {"rollouts": {"class_path": "r.System", "init_args": {"max_turns": 4}}, "n": 3},
        "data": {"class_path": "d.Data", "init_args": {"rollouts": "${values.rollouts}", "n": "${values.n}"}},
    }
    changed, rest = apply(config, parse(["--data.rollouts.max_turns=2", "--data.n=5"]).own)
    assert rest == ()
    assert changed["values"]["rollouts"]["init_args"]["max_turns"] == 2
    assert changed["data"]["init_args"] == {"rollouts": "${values.rollouts}", "n": 5}


def test_the_configuration_given_is_not_changed():
    before = str(BASE)
    applied("--model.kl_coef", "9", "--model.optim.lr", "1")
    assert str(BASE) == before


def test_config_files_are_merged(tmp_path):
    (tmp_path / "more.yaml").write_text("trainer: {devices: 2}")
    config, rest = applied("--config", str(tmp_path / "more.yaml"), "--trainer.max_steps=6")
    assert (config["trainer"]["devices"], config["trainer"]["max_steps"]) == (2, 6)


def test_overrides_for_other_stages():
    overrides = parse(["--stages.kd_tiny.trainer.max_steps", "5", "--trainer.max_steps", "6"])
    assert overrides.own == (("trainer.max_steps", "6"),)
    assert overrides.stages == {"kd_tiny": (("trainer.max_steps", "5"),)}
    dotted = parse(["--stages.kd_qwen2.5_0.5b.model.lr=1", "--stages.sft_qwen2.5_0.5b.data", "a.B"]).stages
    assert dotted == {"kd_qwen2.5_0.5b": (("model.lr", "1"),), "sft_qwen2.5_0.5b": (("data", "a.B"),)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--modle.kl_coef", "1"], "unknown section 'modle'; did you mean 'model'"),
        (["model.kl_coef", "1"], "expected --section.name VALUE"),
        (["--model.kl_coef", "--trainer.max_steps", "1"], "'--model.kl_coef' needs a value"),
        (["--stages.kd_tiny", "1"], "expected --stages.NAME.section.name VALUE"),
    ],
)
def test_wrong_overrides(words, message):
    with pytest.raises(ExperimentError, match=message):
        applied(*words)
