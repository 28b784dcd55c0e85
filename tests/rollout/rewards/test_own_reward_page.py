"""docs/own_reward.md is executed: the class, both ways to use it, and its last program on saved trajectories.

That a training uses it: tests/end_to_end/test_own_data.py."""

import dataclasses
import os
import random
import re
import shlex
import subprocess
import sys

import pytest

from experiments.registry.errors import ExperimentError
from experiments.registry.overrides import parse
from experiments.registry.project import ROOT, Project
from experiments.stages.graph import Graph
from experiments.stages.validate import check
from rollout.storage import save_trajectories
from rollout.trajectory import CallOutcome, Reward, Task, ToolCall, ToolRequest, ToolResult
from tests.lightning_modules.helpers import make_trajectory

PAGE = (ROOT / "docs" / "own_reward.md").read_text()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The files of the page in a folder of their own."""
    folder = tmp_path / "brief"
    folder.mkdir()
    for name, text in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("brief", None)


def answered(answer, outcomes):
    calls = [ToolCall(0, ToolRequest("search", {}), ToolResult("", outcome), latency_s=0.0) for outcome in outcomes]
    plain = make_trajectory(random.Random(0), 0)
    task = Task("q", "Where?", ("Grey Harbor",), "test")
    return dataclasses.replace(plain, task=task, answer=answer, calls=tuple(calls), reward=Reward(0.5))


def test_the_reward_by_hand(own):
    from brief import BriefReward

    reward = BriefReward(per_call=0.3, attempt=0.2)
    two = (CallOutcome.OK, CallOutcome.REFUSED, CallOutcome.EMPTY)  # what was not executed is not paid for
    for answer, outcomes, total in (
        ("in Grey Harbor", two, 1 - 2 * 0.3),
        ("Grey Harbor", [CallOutcome.OK] * 4, 0.2),
        ("Oldfield", two, 0.2),
        (None, two, 0.0),
    ):
        assert reward.score(answered(answer, outcomes)).total == pytest.approx(total)
    assert reward.score(answered(None, two)).parts["calls"] == 2


def test_both_ways_to_use_it_are_valid(own, tmp_path):
    project = Project(experiment_dirs=(own, ROOT / "experiments/configs"), outputs=tmp_path / "out")
    found = []
    for line in re.findall(r"^make .*", PAGE, re.MULTILINE):
        _, target, experiment, *variables = shlex.split(line)
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        words = shlex.split(next((v.removeprefix("ARGS=") for v in variables if v.startswith("ARGS=")), ""))
        stage = Graph(project, experiment.removeprefix("EXP="), parse(words), None).target()
        if target == "dry-run":
            check(stage, ROOT)
        found.append((stage.config["data"]["init_args"]["rollouts"]["init_args"]["reward"], stage.arguments))
    priced = ({"class_path": "brief.BriefReward", "init_args": {"per_call": 0.1}}, ())
    bare = "brief.BriefReward"
    assert found == [(bare, ("--data.rollouts.reward.per_call=0.1",)), (bare, ()), priced, priced]
    wrong = parse(["--data.rollouts.reward", "brief.BriefReward", "--data.rollouts.reward.per_cal", "0.1"])
    with pytest.raises(ExperimentError, match="per_cal"):
        check(Graph(project, "my_grpo", wrong, None).target(), ROOT)


def test_saved_trajectories_are_scored_again(own, tmp_path):
    saved = tmp_path / "outputs" / "key" / "trajectories" / "chunk-00000.parquet"
    save_trajectories(saved, [answered("Grey Harbor", [CallOutcome.OK]), answered(None, [])])
    python, script, folder = shlex.split(re.findall(r"^\.venv/bin/python .*", PAGE, re.MULTILINE)[0])
    assert (python, script, folder) == (".venv/bin/python", "$HOME/brief/try_brief.py", "outputs/my_demonstrations")
    command = [sys.executable, own / "try_brief.py", tmp_path / "outputs"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{own}"}, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["0.50 -> 0.90 Where? | Grey Harbor", "0.50 -> 0.00 Where? | None"], done.stderr
