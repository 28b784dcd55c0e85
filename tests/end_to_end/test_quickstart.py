"""docs/quickstart.ipynb, executed cell by cell by a real kernel: SmolLM2, Lucene, engine and MLflow."""

import json
import re
import sqlite3
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from experiments.registry.project import ROOT

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_quickstart_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = {cell.id: cell for cell in notebook.cells}
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells), "kept empty"
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path / "out"))
    kernel = {"name": "here", "display_name": "here", "language": "python"}
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]} | kernel
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    folder = tmp_path / "kernels" / "here"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    place = {"metadata": {"path": ROOT / "docs"}}
    NotebookClient(notebook, timeout=3600, kernel_name="here", resources=place).execute()
    shown = {
        name: "".join(out.get("text") or out.data["text/plain"] for out in cell.outputs)
        for name, cell in cells.items()
        if cell.cell_type == "code"
    }
    assert re.search(r"│ untrained .*\n?.*│ SFT .*\n?.*│ GRPO ", shown["train"])
    assert "shape: (3, 6)" in shown["table"]
    stages = dict(re.findall(r"^ +(\w+) +(?:fit|task) .* (done|to make)", shown["change"], re.M))
    assert [name for name, state in stages.items() if state == "to make"] == ["smollm2_grpo"]
    assert "MODEL:" in shown["one-trajectory"] and "reward: " in shown["one-trajectory"]
    assert "answer:" in shown["ask"] and "own" in shown["reward"]
    for result in (tmp_path / "out" / "smollm2_grpo").glob("*/result.json"):
        for made in ("evaluation.json", "model/model.safetensors", "trajectories"):
            assert (result.parent / made).exists(), made
    with sqlite3.connect(tmp_path / "out" / "mlflow.db") as store:
        steps = store.execute("select max(step) from metrics where key = 'train/reward'").fetchone()
    assert steps[0] == 0, "one iteration, counted from 0"
