"""What a run in MLflow says of its configuration, in a real SQLite store."""

from types import SimpleNamespace

import polars as pl
import pytest
import yaml
from mlflow import MlflowClient

from callbacks.tracking.mlflow_logger import MLflowLogger
from experiments.registry.keys import PathHasher
from experiments.stages.inputs import dataset_inputs
from experiments.stages.stage import log_configuration
from experiments.stages.store import StageFolder

ABOUT = {"name": "grpo_tiny", "algorithm": "GRPO", "models": "sft_tiny", "data": "invented world", "summary": "a run"}


@pytest.fixture
def store(tmp_path):
    """A stage folder whose configuration names three question files, one of them missing."""
    world = tmp_path / "world_tiny" / "key0"
    world.mkdir(parents=True)
    pl.DataFrame({"question": ["a", "b", "c"]}).write_parquet(world / "train.parquet")
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1 + 1"}\n\n{"question": "2 + 2"}\n')
    store = StageFolder(tmp_path / "grpo_tiny" / "key1")
    store.path.mkdir(parents=True)
    files = {"train_files": [str(world / "train.parquet")], "val_files": [str(world / "none.parquet")]}
    files["test_files"] = [f"gsm8k:{tmp_path}/gsm8k.jsonl"]
    engine = {"class_path": "rollout.engines.vllm.VLLMEngine", "init_args": {"max_length": 768}}
    data = {
        "class_path": "data_modules.rollout_data_module.RolloutDataModule",
        "init_args": {"engine": engine, **files},
    }
    callbacks = [
        {"class_path": "a.Export", "init_args": {"choose": "best"}},
        {"class_path": "b.X"},
        {"class_path": "c.X"},
    ]
    config = {
        "experiment": ABOUT | {"folder": str(store.path)},
        "seed_everything": 3,
        "trainer": {"logger": {"class_path": "x.Logger"}, "max_epochs": 1, "callbacks": callbacks},
        "model": {"class_path": "lightning_modules.algorithms.grpo.GRPO", "init_args": {"lr": 1e-6}},
        "data": data,
    }
    store.config_path.write_text(yaml.safe_dump(config))
    return store


def test_a_run_has_parameters_tags_and_data_sets(store, tmp_path, monkeypatch):
    monkeypatch.setenv("COMPACT_AGENTS_COMMAND", "make train EXP=grpo_tiny")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for _ in range(2):  # the second continues the run, and must change no parameter
        logger = MLflowLogger("tiny", "grpo_tiny-seed3", uri, save_dir=str(store.path))
        log_configuration(SimpleNamespace(loggers=[logger], is_global_zero=True), store)
        logger.log_hyperparams({"lr": 1.0, "clip": 0.2})  # the module's own: the first is in the configuration
        logger.flush()
    run = MlflowClient(uri).get_run(logger.run_id)

    params, train = run.data.params, tmp_path / "world_tiny/key0/train.parquet"
    assert params["model"] == "GRPO" and params["model.lr"] == "1e-06" and params["model.clip"] == "0.2"
    assert params["data.engine"] == "VLLMEngine" and params["data.engine.max_length"] == "768"
    assert params["data.train_files"] == f"['{train}']"
    assert params["trainer.callbacks.Export.choose"] == "best" and params["trainer.callbacks.2"] == "X"
    assert params["seed_everything"] == "3" and not any("logger" in name or "experiment" in name for name in params)

    tags = run.data.tags
    expected = {"experiment": "grpo_tiny", "algorithm": "GRPO", "model": "sft_tiny", "world": "invented world"}
    expected |= {"seed": "3", "stage_key": "key1", "mlflow.note.content": "a run"}
    expected |= {"mlflow.source.name": "make train EXP=grpo_tiny"}
    assert expected.items() <= tags.items() and tags["commit"]

    found = {d.dataset.name: (d.tags[0].value, d.dataset.digest, d.dataset.profile) for d in run.inputs.dataset_inputs}
    digest = {path: PathHasher(tmp_path / "none")(path)[:12] for path in (train, tmp_path / "gsm8k.jsonl")}
    assert found == {
        "world_tiny/train.parquet": ("training", digest[train], '{"num_rows": 3}'),
        "gsm8k": ("testing", digest[tmp_path / "gsm8k.jsonl"], '{"num_rows": 2}'),
    }
    config = yaml.safe_load(store.config_path.read_text())
    config["experiment"]["kind"] = "test"
    assert [d.dataset.name for d in dataset_inputs(config, tmp_path)] == ["gsm8k"], "a test reads nothing else"
