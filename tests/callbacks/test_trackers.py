"""Weights & Biases (offline) and trackio (a local database) record a real training run beside or instead of MLflow."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from callbacks.tracking import trackers
from callbacks.tracking.trackers import other_trackers, tracker_names

TRAIN = """
import json, sys
from pathlib import Path
import lightning as L
from callbacks.tracking.mlflow_logger import MLflowLogger
from callbacks.tracking.trackers import other_trackers
from tests.callbacks.helpers import make_learner

model, folder, names = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
module, data = make_learner(model)
logger = MLflowLogger("tests", "run-seed0", f"sqlite:///{folder}/mlflow.db", save_dir=folder, tracker=names)
off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
trainer = L.Trainer(logger=logger, **options, **dict.fromkeys(off, False))
with other_trackers(trainer, {"model": {"lr": 0.5}}):
    trainer.fit(module, datamodule=data)
"""
READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("tests")
print(json.dumps([runs, SQLiteStorage.get_logs("tests", runs[0])]))
"""


def train(model_dir, folder: Path, names, environment) -> None:
    command = [sys.executable, "-c", TRAIN, str(model_dir), str(folder), json.dumps(names)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)


@pytest.mark.slow
def test_a_run_is_in_the_chosen_trackers_and_goes_on_in_them(model_dir, tmp_path):
    """Not in MLflow, which is not chosen. The file has all metrics in any case."""
    environment = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": "."}
    folder = tmp_path / "stage"
    folder.mkdir()
    for _ in range(2):  # a run that is resumed
        train(model_dir, folder, ["wandb", "trackio"], environment)
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in written for name in row["metrics"]}
    assert "train/reward" in names or "train/loss" in names
    read = subprocess.run(
        [sys.executable, "-c", READ_TRACKIO], env=environment, check=True, capture_output=True, text=True
    )
    runs, logs = json.loads(read.stdout.splitlines()[-1])
    run_id = (folder / "tracker_run_id").read_text()
    assert runs == [f"run-seed0-{run_id}"], "the second process went on with the first's run"
    assert names <= {name for log in logs for name in log}
    offline = list((folder / "wandb").glob(f"offline-run-*-{run_id}"))
    assert len(offline) == 2 and all(list(run.glob("*.wandb")) for run in offline)
    assert not (folder / "mlflow.db").exists() and not (folder / "mlflow_run_id").exists()


def test_a_run_that_fails_before_it_logs_begins_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = SimpleNamespace(trackers=("wandb", "trackio"), name="tests", version="run", save_dir=str(tmp_path))
    trainer = SimpleNamespace(logger=logger, loggers=[logger], is_global_zero=True)
    codes = []
    monkeypatch.setattr("wandb.finish", codes.append)
    with pytest.raises(ValueError, match="no such model"), other_trackers(trainer, {}):
        raise ValueError("no such model")
    trainer.loggers = [logger]
    with other_trackers(trainer, {}):
        pass
    assert codes == [1, 0], "a failed run has failed"
    assert len(trainer.loggers) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["tracker_run_id"]


@pytest.mark.parametrize("value", ["tensorboard", ["mlflow", "mlflow"], [], ["mlflow", "none"]])
def test_unknown_trackers_are_refused(value):
    with pytest.raises(ValueError, match="tracker is "):
        tracker_names(value)


def test_a_tracker_that_cannot_log_is_refused_in_a_line(monkeypatch):
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")
    with pytest.raises(ValueError, match="tracker wandb found no key: run `wandb login`, or set .*WANDB_MODE=offline"):
        tracker_names(["mlflow", "wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert tracker_names(["mlflow", "wandb"]) == ("mlflow", "wandb")
    found = importlib.util.find_spec
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "trackio" else found(name))
    with pytest.raises(ValueError, match="needs the package trackio, which is not installed: pip install trackio"):
        tracker_names("trackio")
