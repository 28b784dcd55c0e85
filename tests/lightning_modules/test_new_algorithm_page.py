"""The page that promises a fifth algorithm in an afternoon is executed, so that it stays true."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

from tests.lightning_modules.helpers import fit, make_trajectories

PAGE = Path(__file__).parents[2] / "docs" / "new_algorithm.md"


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)


@pytest.fixture
def algorithm(monkeypatch):
    module = types.ModuleType("my_grpo")
    monkeypatch.setitem(sys.modules, "my_grpo", module)  # dataclasses look their module up
    exec(compile(block("python"), str(PAGE), "exec"), module.__dict__)
    return module.MyGRPO


def test_the_code_on_the_page_learns_from_a_group(algorithm, model_dir):
    trajectories = [t.replace(group="one", index=i) for i, t in enumerate(make_trajectories(4, em=[1, 0, 0, 1]))]
    module = algorithm(policy=str(model_dir), lr=1e-3, importance_cap=2.0)
    seen = []
    annotate = module.annotate
    module.annotate = lambda *args: seen.append(annotate(*args)) or seen[-1]
    fit(module, [trajectories])
    advantages = [row[row != 0][0].item() for row in seen[0].advantages]
    assert advantages == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    before = torch.cat([p.flatten() for p in algorithm_policy(model_dir).parameters()])
    after = torch.cat([p.detach().flatten() for p in module.policy.parameters()])
    assert (before - after).abs().max() > 1e-4


def algorithm_policy(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_yaml_on_the_page_names_what_the_code_defines():
    config = yaml.safe_load(block("yaml"))
    assert config["model"]["class_path"].rsplit(".", 1)[1] in block("python")
    for base in config["inherits"]:
        assert (PAGE.parents[1] / "experiments" / f"{base}.yaml").is_file()
