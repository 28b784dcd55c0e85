"""Fixtures of the callback tests."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from mlflow import MlflowClient

from callbacks.tracking import mlflow_logger

mlflow_logger.PATIENCE_S = 1000  # a slow machine is no broken store
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture
def trainer_for(tmp_path: Path):
    """Trainer on the stage folder ``tmp_path/stage`` with nothing but the given callbacks."""

    def make(callbacks: list[L.Callback], **options: Any) -> L.Trainer:
        defaults = {
            "default_root_dir": str(tmp_path / "stage"),
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": any("Checkpoint" in type(c).__name__ for c in callbacks),
            "enable_progress_bar": any("Progress" in type(c).__name__ for c in callbacks),
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
        }
        return L.Trainer(callbacks=callbacks, **(defaults | options))

    return make


@pytest.fixture(scope="session")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store: its tables take a while to make."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    MlflowClient(uri).search_experiments()
    return uri
