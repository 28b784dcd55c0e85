"""Names in MLflow: kept where its own validators take them, else readable, accepted and never shared."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.exceptions import MlflowException
from mlflow.utils import validation

from callbacks.evaluation.evaluation import Evaluation
from callbacks.tracking.metrics_file import METRICS_FILE, read_metrics
from callbacks.tracking.mlflow_logger import MLflowLogger
from callbacks.tracking.mlflow_names import LONGEST, mlflow_name, storable
from callbacks.tracking.mlflow_run import MOST
from callbacks.tracking.run_info import SQLITE
from experiments.reports.compare import compare
from tests.callbacks.helpers import EvaluationData, Hands, make_trajectory

NAMES = (
    "test/em/问题", "test/em/a+b", "test/em/ab", "test/em/a-b", "C#", "C++", "C", "a b", "a:b", "", ".", "..", "...",
    "a/.", "../x", "/x", "//x", "x/", "x//y", "x/../y", "..x", "x" * 250, "x" * 251, "x" * 300, "问" * 251, "हिन्दी",
    "a\n", "a\0b", "\ud83d", "\udcff", "é", "e\u0301",
)  # fmt: skip


def taken(name: str) -> bool:
    """Whether MLflow's own validators take the name."""
    try:
        validation._validate_metric(name, 0.5, 0, 0)
        validation._validate_param(name, "value")
        validation._validate_tag(name, "value")
    except MlflowException:
        return False
    return not name.endswith("\n")  # which its pattern overlooks


def test_a_name_stays_where_mlflow_takes_it_and_is_else_accepted_and_unique():
    assert {name for name in NAMES if mlflow_name(name) == name} == {name for name in NAMES if taken(name)}
    assert all(taken(mlflow_name(name)) for name in NAMES) and len({*map(mlflow_name, NAMES)}) == len(NAMES)
    assert mlflow_name("test/em/问题") == "test/em/问题" and mlflow_name("test/em/a+b") == "test/em/a_b-e5de86d2"
    assert mlflow_name("x" * 300).startswith("x" * 200) and len(mlflow_name("x" * 300)) == LONGEST


def test_every_character_is_judged_as_mlflow_judges_it():
    characters = [chr(code) for code in (*range(0x3000), *range(0xD700, 0xE100)) if chr(code) not in "./\n"]
    wrong = [c for c in characters if (mlflow_name(c) == c) != bool(validation.validate_param_and_metric_name(c))]
    assert not wrong, wrong[:20]


@pytest.mark.parametrize("name", ["家族/问题", "../../etc", "问" * 400])
def test_a_folder_stays_in_its_parent_and_its_name_fits_a_file_system(tmp_path, name):
    folder = (tmp_path / mlflow_name(name, 60)).resolve()
    folder.mkdir(parents=True)
    assert folder.is_relative_to(tmp_path) and folder != tmp_path


def test_bytes_that_are_no_text_are_escapes():
    assert storable("a\udcffb") == r"a\udcffb" and storable("问题") == "问题" and storable(0.5) == "0.5"


def test_names_of_data_sources_reach_the_store_the_file_and_the_table(uri, tmp_path, trainer_for):
    sources = {"问题": 1.0, "a+b": 1.0, "ab": 0.0, "..": 0.5, "x" * 300: 0.0}
    trajectories = [
        make_trajectory(f"q{number}", source=source, answer="grey harbor" if right else "x")
        for source, score in sources.items()
        for number, right in enumerate((score > 0, score == 1))
    ]
    logger = MLflowLogger("sources", "named", uri, save_dir=str(tmp_path / "named" / "key"))
    trainer = trainer_for([Evaluation(100)], logger=logger)
    trainer.test(Hands(), datamodule=EvaluationData({"agent": [trajectories]}), verbose=False)
    logger.log_metrics({"later": 1.0, "none": math.nan, "much": -math.inf, "half \udcff": 1.0}, 1)
    logger.log_hyperparams({source: source for source in sources} | {"long": "x" * 5000, "half": "\udcff"})
    logger.flush()
    run = MlflowClient(uri).get_run(logger.run_id).data
    assert {source: run.metrics[mlflow_name(f"test/em/{source}")] for source in sources} == sources
    assert {source: run.params[mlflow_name(source)] for source in sources} == {source: source for source in sources}
    assert run.params["long"] == "x" * 5000 and run.params["half"] == r"\udcff"
    assert run.metrics["later"] == run.metrics[mlflow_name("half \udcff")] == 1.0 and math.isnan(run.metrics["none"])
    [row] = [row.metrics for row in read_metrics(tmp_path / "named" / "key" / METRICS_FILE) if "test/em" in row.metrics]
    assert {source: row[f"test/em/{source}"] for source in sources} == sources, "the file keeps the names"
    shown = compare(tmp_path, ["named"], metrics=("test/em/a+b", "test/em/ab", "none", "much"))
    cells = [line.replace("\u2502", " ").split() for line in shown.splitlines()]
    assert {("test/em/a+b", "1"), ("test/em/ab", "0"), ("none", "nan"), ("much", "-inf")} <= {*map(tuple, cells)}


def test_what_mlflow_refuses_costs_one_name_and_one_line(uri, tmp_path, monkeypatch, caplog):
    """MLflow refuses names that another release of its server may not take, and long values where it may not cut."""
    monkeypatch.setattr("callbacks.tracking.mlflow_run.mlflow_name", lambda name, longest=0: name)
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")
    options = {"tracking_uri": uri, "save_dir": str(tmp_path)}
    logger = MLflowLogger("refusals", "run", tags={"team": "a", "a+b": "c"}, **options)
    monkeypatch.setitem(MOST, "metrics", 8)
    names = [f"m{number}" for number in range(20)]
    for step in range(3):
        logger.log_metrics(dict.fromkeys((*names[:11], "a+b", *names[11:], "问题"), 1.0), step)
        logger.flush()
    logger.log_hyperparams({"a": 1, "long": "x" * 7000, "b": 2})
    logger.log_datasets([data_set("good"), data_set("x" * 501), data_set("fine")])
    logger.finalize("success")
    run = MlflowClient(uri).get_run(logger.run_id)
    assert run.data.metrics == dict.fromkeys((*names, "问题"), 1.0) and run.info.status == "FINISHED"
    assert len(MlflowClient(uri).get_metric_history(logger.run_id, "m19")) == 3
    assert run.data.params == {"a": "1", "b": "2"} and run.data.tags["team"] == "a" and "a+b" not in run.data.tags
    assert sorted(d.dataset.name for d in run.inputs.dataset_inputs) == ["fine", "good"]
    said = [record.getMessage() for record in caplog.records if "does not take" in record.getMessage()]
    refused = [line.split(" does not take ")[1].split(";")[0] for line in said]
    kinds = {"'a+b'": ["tags", "metrics"], "'long'": ["params"], repr("x" * 250): ["datasets"]}
    assert refused == [f"{name} of the run's {kind}" for name, found in kinds.items() for kind in found]
    assert not any("\n" in line for line in said)


def data_set(name):
    return DatasetInput(Dataset(name, "digest", "local", "{}"), [InputTag("mlflow.data.context", "training")])


@pytest.mark.parametrize("family", ["../家 a#b?c%d", "x" * 300])
def test_any_experiment_name_has_runs_and_artifacts(uri, tmp_path, family):
    (tmp_path / "page.html").write_text("page")
    logger = MLflowLogger(family, f"{family}-seed0", uri)
    logger.log_metrics({"x": 1.0}, 0)
    logger.log_file(tmp_path / "page.html", "trajectories")
    logger.finalize("success")
    client = MlflowClient(uri)
    run = client.get_run(logger.run_id)
    assert run.info.status == "FINISHED" and run.data.metrics == {"x": 1.0}
    assert [a.path for a in client.list_artifacts(logger.run_id, "trajectories")] == ["trajectories/page.html"]
    assert run.info.artifact_uri.startswith(f"file://{Path(uri.removeprefix(SQLITE)).parent}/mlartifacts/")
    stored = client.get_experiment(run.info.experiment_id).name
    assert stored == family
