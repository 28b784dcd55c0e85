"""The search agent of ``examples/``, as its first lines say to run it; with fewer iterations."""

import os
import re
import subprocess
import sys

import pytest

from experiments.registry.project import ROOT


@pytest.mark.slow
def test_the_search_agent_trains_from_one_file(tmp_path):
    ran = subprocess.run(
        [sys.executable, "examples/search_agent.py", "--data.iterations=10"],
        cwd=ROOT,
        env=os.environ | {"COMPACT_AGENTS_OUTPUTS": str(tmp_path), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {name: (float(em), float(searches)) for name, em, searches in re.findall(
        r"│ (SFT|GRPO) +│ +200 │ ([\d.]+) \[.*?\] │ +([\d.]+) │", ran.stdout
    )}  # fmt: skip
    assert rows["GRPO"][0] > rows["SFT"][0] > 0.1 and rows["GRPO"][1] < rows["SFT"][1]
