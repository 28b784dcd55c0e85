"""metrics.jsonl: whole after a kill at any moment, and whatever becomes of MLflow."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3

import lightning as L
import pytest
import torch
from mlflow import MlflowClient
from torch.utils.data import DataLoader

from callbacks.tracking.metrics_file import METRICS_FILE, MetricsFile, read_metrics
from callbacks.tracking.mlflow_logger import MLflowLogger
from callbacks.training.checkpoint_files import find_checkpoint
from callbacks.training.resume import IterationCheckpoint


class Crash(RuntimeError):
    pass


class Learner(L.LightningModule):
    """Six iterations with a metric each, a validation after every third."""

    def __init__(self, crash_at: int | None = None, where: str = "") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.crash_at, self.where = crash_at, where

    def crash(self, where: str) -> None:
        if (self.trainer.fit_loop.total_batch_idx, where) == (self.crash_at, self.where):
            raise Crash

    def train_dataloader(self):
        return DataLoader(torch.ones(6, 1))

    def val_dataloader(self):
        return DataLoader(torch.ones(1, 1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        loss = (self.weight * batch).sum()
        self.log("train/loss", loss)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.crash("before")

    def on_train_batch_end(self, *args):
        self.crash("after")  # between the checkpoint and what Lightning logs of the iteration

    def validation_step(self, batch, batch_idx):
        self.crash("validation")
        self.log("val/em", self.weight.sum())


def fit(trainer_for, folder, module, uri, resume=False, every=1):
    logger = MLflowLogger("tests", "run", uri, save_dir=str(folder))
    options = {"logger": logger, "max_epochs": 1, "val_check_interval": 3, "log_every_n_steps": 1}
    trainer = trainer_for([IterationCheckpoint(every)], default_root_dir=str(folder), **options)
    trainer.fit(module, ckpt_path=str(find_checkpoint(folder)) if resume else None)
    return logger


def logged(folder):
    return [(row.step, dict(row.metrics)) for row in read_metrics(folder / METRICS_FILE)]


def expected():
    """(step, metrics) of the lines of a run: each iteration, and a validation after every third."""
    for step in range(6):
        yield step, {"train/loss": pytest.approx(1 - 0.1 * step), "epoch": 0.0}
        if step in (2, 5):
            yield step, {"val/em": pytest.approx(0.9 - 0.1 * step)}  # the epoch stands there already


@pytest.mark.parametrize(
    ("crash_at", "where", "every"), [(3, "after", 1), (2, "before", 1), (2, "validation", 1), (4, "before", 3)]
)
def test_a_resumed_run_has_every_metric_once(trainer_for, tmp_path, uri, crash_at, where, every):
    folder = tmp_path / "killed"
    with pytest.raises(Crash):
        fit(trainer_for, folder, Learner(crash_at, where), uri, every=every)
    with (folder / METRICS_FILE).open("a") as file:
        file.write('{"step": 99, "ms": 1, "met')  # torn
    logger = fit(trainer_for, folder, Learner(), uri, resume=True, every=every)
    assert logged(folder) == list(expected())
    client = MlflowClient(uri)
    for name, steps in (("train/loss", [0, 1, 2, 3, 4, 5]), ("val/em", [2, 5])):
        history = client.get_metric_history(logger.run_id, name)
        in_file = {step: metrics[name] for step, metrics in logged(folder) if name in metrics}
        assert sorted((m.step, m.value) for m in history) == sorted(in_file.items()) and sorted(in_file) == steps


def not_a_database(path):
    path.write_bytes(b"x" * 5000)


def a_folder(path):
    path.unlink()
    path.mkdir()


def locked(path):
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    return connection


@pytest.mark.parametrize("spoil", [not_a_database, a_folder, locked])
def test_a_store_that_takes_nothing_costs_one_line(trainer_for, tmp_path, uri, caplog, monkeypatch, spoil):
    monkeypatch.setattr("callbacks.tracking.mlflow_run.BUSY_S", 0.1)
    store, folder = tmp_path / "mlflow.db", tmp_path / "run"
    shutil.copy(uri.removeprefix("sqlite:///"), store)
    held = spoil(store)
    logger = fit(trainer_for, folder, Learner(), f"sqlite:///{store}")
    assert logged(folder) == list(expected()) and logger.run_id == ""
    [said] = [record.getMessage() for record in caplog.records if "MLflow" in record.getMessage()]
    assert f"Metrics are kept in {folder / METRICS_FILE}; make metrics" in said and "\n" not in said
    if held is not None:  # it is sent them as soon as it takes them
        held.close()
        logger.flush()
        assert len(MlflowClient(f"sqlite:///{store}").get_metric_history(logger.run_id, "train/loss")) == 6


def test_values_come_back_and_are_not_repeated(tmp_path):
    path = tmp_path / METRICS_FILE
    file = MetricsFile(path)
    file.append({"a": torch.tensor(0.5), "b": math.inf, "word": "x"}, 0)
    file.append({"a": 0.5, "c": 1}, 0)
    position = file.sync()
    file.append({"a": math.nan}, 1)
    file.append({"a": math.nan}, 1)
    rows = read_metrics(path)
    assert [(row.step, dict(row.metrics)) for row in rows[:2]] == [(0, {"a": 0.5, "b": math.inf}), (0, {"c": 1.0})]
    assert len(rows) == 3 and math.isnan(rows[2].metrics["a"])
    later = MetricsFile(path)
    later.rewind(position)
    later.append({"a": 0.5}, 0)
    later.append({"a": 2.0}, 1)
    assert [row.step for row in read_metrics(path)] == [0, 0, 1] and read_metrics(path)[2].metrics["a"] == 2.0
    assert all(json.loads(line)["ms"] > 1e12 for line in path.read_text().splitlines())


def test_a_line_that_is_none_is_told_and_left_out(tmp_path, caplog):
    path = tmp_path / METRICS_FILE
    MetricsFile(path).append({"a": 1.0}, 0)
    path.write_bytes(path.read_bytes() + b"\xff\x00[1]\n" + path.read_bytes())
    assert len(read_metrics(path)) == 2
    assert f"{path}: line 2 holds no metrics" in caplog.text
