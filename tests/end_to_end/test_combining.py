"""Files of docs/combining.md train: shortened, by the command that users type. The others are validated."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.registry.project import ROOT, Project
from experiments.stages.graph import Graph
from experiments.stages.validate import check

PAGE = (ROOT / "docs" / "combining.md").read_text()
FILES = {name: text for text, name in re.findall(r"```yaml\n(# (\w+)\.yaml\n.*?)```", PAGE, re.DOTALL)}
TEACHER = "smoke_teacher"
TRAINED = ["sod_branches", "dgpo_turns", "skewed_gkd"]
SHORT = [
    "--stages.smoke_world.task.articles=16",
    "--stages.smoke_world.task.demonstrations=48",
    "--stages.smoke_world.task.test=4",
    "--stages.smoke_sft.trainer.max_epochs=1",
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder, outputs = tmp_path_factory.mktemp("combined"), tmp_path_factory.mktemp("outputs")
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(text)
    [skills] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (folder / "searching.json").write_text(skills)
    own = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return own | {"COMPACT_AGENTS_EXPERIMENTS": str(folder), "COMPACT_AGENTS_OUTPUTS": str(outputs)}


@pytest.mark.slow
def test_the_others_are_valid(environment, monkeypatch):
    folder, outputs = (Path(environment[f"COMPACT_AGENTS_{name}"]) for name in ("EXPERIMENTS", "OUTPUTS"))
    monkeypatch.setenv("COMPACT_AGENTS_EXPERIMENTS", str(folder))  # which a file names
    project = Project(experiment_dirs=(folder, *Project().experiment_dirs), outputs=outputs)
    for name in FILES.keys() - {TEACHER, *TRAINED}:
        check(Graph(project, name).target(), ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_combination_trains(name, environment):
    rounds = ["--data.iterations=2", "--trainer.val_check_interval=2"]
    words = ["--data.batch_size=8"] if "batch_size" in FILES[name] else rounds
    if f"stage:{TEACHER}" in FILES[name]:
        words.append(f"--stages.{TEACHER}.trainer.max_epochs=2")
    command = [sys.executable, "-m", "experiments", "train", name, *SHORT, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_preconditions_are_measured_on_what_it_starts_from(environment):
    words = ["--questions", "4", "--stages.smoke_teacher.trainer.max_epochs=2"]
    command = [sys.executable, "-m", "experiments", "preconditions", "sod_branches", *words, *SHORT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 1 and "gates failed" in done.stderr, done.stdout[-2000:] + done.stderr[-2000:]
    lines = {line.split()[1]: line.split()[-2] for line in done.stdout.splitlines() if line.count("│") == 6}
    assert lines["first_turn"] == "pass", done.stdout


def test_there_are_files_and_a_teacher():
    assert len(FILES) == 7 and TEACHER in FILES
