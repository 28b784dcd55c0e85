"""``flatten`` and the files of ``examples/`` that it makes."""

import pytest
import yaml

from experiments.commands.flatten import NOT_SHOWN, flattened
from experiments.registry.compose import resolve
from experiments.registry.listing import load
from experiments.registry.project import ROOT, Project

PROJECT = Project()
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
ALGORITHMS = "SFT KD PPO DGPO GRPO SOD SDAR ARPO AEPO OPSD GKD".split()


def test_every_algorithm_has_an_example():
    shown = [load(path.stem, PROJECT)["experiment"]["algorithm"] for path in EXAMPLES]
    assert sorted(shown) == sorted(ALGORITHMS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_what_the_registry_makes(path):
    assert path.read_text() == flattened(path.stem, PROJECT), "out of date: run `make examples`"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_every_value_of_its_experiment(path):
    config = load(path.stem, PROJECT)
    family = config["experiment"]["family"]
    outputs = config["paths"]["outputs"]
    expected = resolve(config, lambda stage: f"${{stage:{stage}}}", PROJECT.experiment_dirs)
    about = {key: value for key, value in expected.pop("experiment").items() if key not in NOT_SHOWN}
    text = path.read_text().replace("${paths.outputs}", outputs).replace("${experiment.family}", family)
    found = yaml.safe_load(text.replace("${experiment.folder}", load(path.stem, PROJECT)["experiment"]["folder"]))
    assert found == {key: value for key, value in {"experiment": about, **expected}.items() if value}
