"""``make metrics``: what a run has kept in its folder comes into MLflow, even if the whole database was lost."""

from __future__ import annotations

import json

import pytest
from mlflow import MlflowClient

from callbacks.tracking.metrics_file import METRICS_FILE, MetricsFile
from callbacks.tracking.run_info import RUN_ID_FILE
from experiments.stages.store import StageFolder

FIT = """
experiment: {kind: fit, algorithm: GRPO, summary: a run}
model: {class_path: m.A, init_args: {lr: 0.5}}
data: {class_path: d.A}
trainer:
  logger: {class_path: x.Logger, init_args: {experiment_name: tiny, run_name: x-seed0}}
"""
ODD = {"test/em/a+b": 0.25, "test/em/ab": 0.75, "test/em/问题": 0.5}


@pytest.fixture
def done(workshop):
    """The folder of a run that is done, which MLflow has never heard of."""
    workshop.write("x", FIT)
    stage = workshop.graph("x").target()
    store = StageFolder(stage.folder)
    store.prepare(stage, {"command": "make train EXP=x"}, keep=False)
    file = MetricsFile(store.path / METRICS_FILE)
    for step in range(3):
        file.append({"train/loss": 1.0 - step / 4}, step)
    store.finish({"finished": 2e9, "commit": "abc", "command": "make train EXP=x", "seconds": 1, "kind": "fit"})
    return store


def test_a_lost_run_is_made_anew_and_what_is_there_is_not_sent_again(workshop, run_here, done):
    MetricsFile(done.path / METRICS_FILE).append(ODD, 3)
    for said in ("6 values sent, to a new run", "0 values sent\n"):
        imported = run_here("metrics", "x")
        assert imported.returncode == 0 and said in imported.stdout, imported
    (spoilt := done.path.with_name("0") / METRICS_FILE).parent.mkdir()  # before the run in the order of their names
    spoilt.write_text("")
    imported = run_here("metrics", "x")
    assert imported.returncode == 2 and "left out 1 of 2 runs" in imported.stderr, imported
    assert "x/0: left out:" in imported.stdout and "0 values sent" in imported.stdout
    client = MlflowClient(f"sqlite:///{workshop.project.outputs}/mlflow.db")
    run = client.get_run((done.path / RUN_ID_FILE).read_text().strip())
    assert run.data.params["model.lr"] == "0.5" and run.data.tags["commit"] == "abc"
    assert (run.info.status, run.info.run_name, run.info.end_time) == ("FINISHED", "x-seed0", 2_000_000_000_000)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(0, 1.0), (1, 0.75), (2, 0.5)]
    workshop.write("x", FIT.replace("a run", f"a run, columns: [{', '.join(name[5:] for name in ODD)}]"))
    compared = run_here("compare", "x")
    cells = [line.replace("\u2502", " ").split() for line in compared.stdout.splitlines()]
    assert all([name, f"{value:g}"] in cells for name, value in ODD.items()), compared


def test_refusals_in_one_line(workshop, run_here, done):
    (workshop.project.outputs / "mlflow.db").write_bytes(b"x" * 5000)
    broken = run_here("metrics", "x")
    assert broken.returncode == 2 and "accepts no data: file is not a database" in broken.stderr
    (done.path / METRICS_FILE).unlink()
    nothing = run_here("metrics", "x")
    assert nothing.returncode == 2 and json.dumps(nothing.stderr).count("\\n") == 1
    assert f"no run of 'x' has a {METRICS_FILE}" in nothing.stderr
