"""A real SQLite store: logging, resuming, comparing, reporting."""

from __future__ import annotations

import os
import subprocess
import sys

import lightning as L
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException
from mlflow import MlflowClient

from callbacks.evaluation.arcap import ARCap
from callbacks.evaluation.evaluation import Evaluation
from callbacks.tracking.metrics_file import METRICS_FILE, MetricsFile, read_metrics
from callbacks.tracking.mlflow_logger import MLflowLogger
from callbacks.tracking.trajectory_log import TrajectoryLog
from experiments.reports.compare import (
    NoRunsError,
    compare,
    find_runs,
    history_frame,
)
from experiments.reports.report import write_results
from tests.callbacks.helpers import EvaluationData, make_call, make_learner, make_trajectory
from tests.experiments.reports.pages import rows_of

METHODS = {"kd": [0.0] * 30 + [1.0] * 10, "dgpo": [0.0] * 10 + [1.0] * 30}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, model_dir):
    """Outputs folder with two methods, two seeds each, trained (four steps) and tested for real."""
    outputs = tmp_path_factory.mktemp("outputs")
    for method, scores in METHODS.items():
        for seed in (0, 1):
            stage = outputs / method / f"key{seed}"
            module, data = make_learner(model_dir)
            logger = MLflowLogger(
                "tests", f"{method}-seed{seed}", f"sqlite:///{outputs}/mlflow.db", save_dir=str(stage)
            )
            logger.log_config("model: tiny\n")
            options = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "log_every_n_steps": 1}
            options |= {"use_distributed_sampler": False}
            options |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
            callbacks = [Evaluation(), ARCap(), TrajectoryLog(2)]
            trainer = L.Trainer(default_root_dir=stage, callbacks=callbacks, logger=logger, max_epochs=1, **options)
            trainer.fit(module, datamodule=data)
            questions = [
                make_trajectory(f"q{i}", answer="grey harbor" if s else "x", calls=(make_call(0, "q", ("text",)),))
                for i, s in enumerate(scores)
            ]
            trainer.test(module, datamodule=EvaluationData({"agent": [questions]}), verbose=False)
    return outputs


def client_of(outputs):
    return MlflowClient(f"sqlite:///{outputs}/mlflow.db")


def history_of(client, run_id, metric):
    return [(point.step, point.value) for point in client.get_metric_history(run_id, metric)]


def test_run_has_params_metrics_by_step_and_artifacts(outputs):
    client = client_of(outputs)
    run_id = (outputs / "dgpo" / "key0" / "mlflow_run_id").read_text().strip()
    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == ("dgpo-seed0", "FINISHED")
    assert "model.policy" in run.data.params and run.data.metrics["test/em"] == 0.75
    losses = history_of(client, run_id, "train/loss")
    assert [step for step, _ in losses] == [0, 1, 2, 3] and losses == sorted(losses, key=lambda point: -point[1])
    assert losses == [*history_frame({outputs / "dgpo" / "key0": "x"}, ["train/loss"]).select("step", "value").rows()]
    artifacts = {a.path for a in client.list_artifacts(run_id)}
    assert artifacts == {"config.yaml", "trajectories"}
    assert [a.path for a in client.list_artifacts(run_id, "trajectories")] == ["trajectories/test-000004.html"]
    location = client.get_run(run_id).info.artifact_uri
    assert location.startswith((outputs / "mlartifacts" / "tests").as_uri())


def test_metrics_arrive_where_artifacts_are_refused(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    uri, there = f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path / "file" / "artifacts")
    logger = MLflowLogger("tests", "run", uri, save_dir=str(tmp_path / "stage"), artifact_location=there)
    logger.log_config("model: tiny\n")
    logger.log_file(tmp_path / "file", "pages")
    logger.log_metrics({"train/loss": 1.0}, 1)
    logger.flush()
    client = MlflowClient(uri)
    assert client.get_metric_history(logger.run_id, "train/loss")[0].value == 1.0
    assert client.get_run(logger.run_id).data.params["model"] == "tiny"
    assert caplog.text.count("does not take the run's artifacts") == 1


def test_resume_continues_the_run_and_repeated_steps_count_once(outputs, tmp_path):
    options = {"tracking_uri": f"sqlite:///{outputs}/mlflow.db", "save_dir": str(tmp_path)}
    first = MLflowLogger("resumes", "run", **options)
    first.log_hyperparams({"lr": 0.1})
    first.log_metrics({"train/em": 0.1}, step=0)
    first.log_metrics({"train/em": 0.2}, step=1)
    first.flush()  # killed here: never finalised
    second = MLflowLogger("resumes", "run", **options)
    second.log_hyperparams({"lr": 0.5})  # MLflow would raise: parameters cannot be changed
    second.log_metrics({"train/em": 0.25}, step=1)
    second.log_metrics({"train/em": 0.3}, step=2)
    second.finalize("success")
    client = client_of(outputs)
    assert client.get_run(first.run_id).data.params["lr"] == "0.1" and second.run_id == first.run_id
    stored = history_of(client, first.run_id, "train/em")
    assert stored == [(0, 0.1), (1, 0.2), (2, 0.3)], "a step has one value, the first"
    rows = read_metrics(tmp_path / METRICS_FILE)
    assert [row.metrics["train/em"] for row in rows] == [0.1, 0.2, 0.25, 0.3], "the file has what was logged"


def test_continued_run_is_running_until_it_ends(outputs, tmp_path):
    options = {"tracking_uri": f"sqlite:///{outputs}/mlflow.db", "save_dir": str(tmp_path)}
    MLflowLogger("status", **options).finalize("failed")  # nothing was logged: no run
    first = MLflowLogger("status", **options)
    first.log_metrics({"x": 1.0}, 0)
    first.finalize("failed")
    client = client_of(outputs)
    assert client.get_run(first.run_id).info.status == "FAILED"
    second = MLflowLogger("status", **options)
    assert second.experiment and client.get_run(first.run_id).info.status == "RUNNING"
    second.finalize("success")
    assert client.get_run(first.run_id).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("stop", "status"),
    [
        (KeyboardInterrupt, "KILLED"),
        (SIGTERMException, "KILLED"),
    ],
)
def test_a_stopped_run_is_killed_and_a_broken_one_failed(outputs, trainer_for, model_dir, stop, status):
    class Stop(L.Callback):
        def on_train_batch_end(self, *args):
            raise stop("in the middle")

    logger = MLflowLogger("stops", tracking_uri=f"sqlite:///{outputs}/mlflow.db")
    module, data = make_learner(model_dir)
    with pytest.raises((SystemExit, stop)):  # Lightning exits after a KeyboardInterrupt
        trainer_for([Stop()], max_epochs=1, logger=logger).fit(module, datamodule=data)
    assert client_of(outputs).get_run(logger.run_id).info.status == status


def experiment_of(logger):
    return logger.experiment.get_run(logger.run_id).info.experiment_id


def test_an_experiment_opens_with_its_runs_unless_the_user_chose_otherwise(outputs):
    options = {"tracking_uri": f"sqlite:///{outputs}/mlflow.db"}
    logger = MLflowLogger("tiny", "a", **options)
    client, experiment = logger.experiment, experiment_of(logger)
    assert client.get_experiment(experiment).tags["mlflow.experimentKind"] == "custom_model_development"
    client.set_experiment_tag(experiment, "mlflow.experimentKind", "genai_development")
    assert experiment_of(MLflowLogger("tiny", "b", **options)) == experiment
    assert client.get_experiment(experiment).tags["mlflow.experimentKind"] == "genai_development"


@pytest.mark.slow
def test_runs_that_start_at_once_share_a_new_store(tmp_path):
    program = (
        "import sys; import mlflow; from callbacks.tracking import mlflow_logger\n"
        "mlflow_logger.PATIENCE_S = 1000\n"  # a slow machine is no broken store
        "print('ready', flush=True); sys.stdin.readline()\n"  # both have imported: now both make the store
        "logger = mlflow_logger.MLflowLogger('tests', sys.argv[1], 'sqlite:///' + sys.argv[2])\n"
        "logger.log_metrics({'x': 1.0}); logger.finalize()\n"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [  # the last one is another rank of a run: it makes no run, but opens the store
        subprocess.Popen([*command, name, str(tmp_path / "new/mlflow.db")], env=os.environ | {"RANK": rank}, **pipes)
        for name, rank in (("a", "0"), ("b", "0"), ("b", "1"))
    ]
    for run in runs:
        assert run.stdout.readline() == "ready\n"
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()
    for run in runs:
        assert run.wait(timeout=1000) == 0, run.stderr.read()
    client = MlflowClient(f"sqlite:///{tmp_path}/new/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    assert sorted(run.info.run_name for run in client.search_runs(experiments)) == ["a", "b"]


def test_compare_prints_a_table_of_the_runs_that_fit(outputs, tmp_path):
    text = compare(outputs, ["kd", "dgpo"], metrics=("test/em", "never/logged"))
    assert text.count("kd") >= 2 and text.count("dgpo") >= 2 and "0.75" in text
    assert "test/em" in text and "never/logged" not in text
    assert all(f"{name} key{seed}" in text for name in ("kd", "dgpo") for seed in (0, 1)), "runs of one name"
    (outputs / "kd" / "key1" / "config.yaml").write_text("trainer: {logger: {init_args: {run_name: kd-seed1}}}\n")
    assert [name for name, _ in find_runs(outputs, ["kd"])] in (["kd", "kd-seed1"], ["kd-seed1", "kd"])
    assert [name for name, _ in find_runs(outputs, ["k*1"])] == ["kd-seed1"]
    (outputs / "kd" / "key1" / "config.yaml").unlink()
    with pytest.raises(NoRunsError, match=r"no run fits \['kd_ppo'\] in .*; the runs are: dgpo, kd"):
        find_runs(outputs, ["kd", "kd_ppo"])
    with pytest.raises(NoRunsError, match="train an experiment first"):
        find_runs(tmp_path)


def test_results_page_has_curves_when_the_runs_do(outputs, tmp_path):
    for row in rows_of(outputs, METHODS):
        file = MetricsFile(row["folder"] / METRICS_FILE)
        for step in range(5):
            value = 0.1 * step + 0.05 * row["seed"]
            file.append({"train/em": value} | ({"val/em": value} if step in (2, 4) else {}), step)
    paths = write_results("dgpo", rows_of(outputs, METHODS), tmp_path, "x")
    assert paths[-1].name == "dgpo_curves.png" and paths[-1].read_bytes()[:4] == b"\x89PNG"
    assert "(dgpo_curves.png)" in paths[0].read_text()
