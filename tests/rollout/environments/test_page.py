"""The page about environments of other packages: its YAML is valid, and its examples are registered."""

import re
from pathlib import Path

import pytest
import yaml

from experiments.commands.cli import main
from experiments.registry.definitions import definitions
from experiments.registry.project import ROOT, Project
from experiments.stages.parser import instantiate
from rollout.environments.gymnasium_text import GymnasiumText
from rollout.environments.openenv_client import OpenEnv

PAGE = (ROOT / "docs" / "other_environments.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = re.findall(r"\| `([a-z_]+)` \|$", PAGE, re.MULTILINE)


def test_an_agent_with_mcp_tools_as_on_the_page_is_valid(tmp_path, monkeypatch, model_dir, capsys):
    files = dict(re.match(r"# (\S+)\n(.*)", block, re.DOTALL).groups() for block in BLOCKS if block.startswith("# "))
    assert set(files) == {"my_tools.yaml", "my_agent_with_tools.yaml"}
    for name, text in files.items():
        Path(tmp_path, name).write_text(text)
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(f'{{"question": "Say {n}.", "golden_answers": "{n}"}}\n' for n in range(40)))
    monkeypatch.setenv("COMPACT_AGENTS_EXPERIMENTS", str(tmp_path))
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path / "outputs"))
    options = [f"--paths.questions={questions}", f"--paths.model={model_dir}"]
    assert main(["dry-run", "my_agent_with_tools", *options]) == 0, capsys.readouterr()
    assert "my_tools" in capsys.readouterr().out


@pytest.mark.parametrize("made", [GymnasiumText, OpenEnv])
def test_the_blocks_of_environments_can_be_built(made):
    [block] = [yaml.safe_load(b)["environment"] for b in BLOCKS if f".{made.__name__}\n" in b]
    assert isinstance(instantiate(block, "environment"), made)


def test_the_examples_are_registered():
    assert len(EXAMPLES) == 5 and set(EXAMPLES) <= set(definitions(Project.from_environment().experiment_dirs))
