"""One run in an MLflow store: found or made, and brought up to what its folder holds. Each call may be repeated."""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from callbacks.tracking.metrics_file import Row
from callbacks.tracking.run_info import RUN_ID_FILE, SQLITE, default_tracking_uri, run_info
from callbacks.tracking.run_parameters import parameters, tags
from rollout.files import locked, write_atomically

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT_KIND = "mlflow.experimentKind"  # tag by which MLflow's pages choose what they show first
TRAINING = "custom_model_development"  # "Machine learning": runs and their curves
MOST_METRICS, MOST_PARAMETERS, LONGEST = 1000, 100, 250  # that MLflow takes in one call; characters of a parameter
BUSY_S = 5  # to wait for a database that another process has locked


class MLflowRun:
    """The run whose id is in ``<folder>/mlflow_run_id``, or a new one where there is none or its store has lost it.

    An SQLite store has the artifacts beside it, by an absolute path: MLflow's own default depends on the directory the
    experiment was first made from. An experiment is marked as model training; by itself MLflow would take one with
    traces for an application's. Nothing is done with the store before ``open``.

    Args: as ``MLflowLogger``; ``folder`` None: the run cannot be found again.
    """

    def __init__(
        self,
        experiment_name: str,
        run_name: str,
        tracking_uri: str | None = None,
        folder: Path | None = None,
        artifact_location: str | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        uri = tracking_uri or default_tracking_uri()
        self.database = Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None
        if self.database is not None:
            uri = f"{SQLITE}{self.database}"
            artifact_location = artifact_location or str(self.database.parent / "mlartifacts" / experiment_name)
        if artifact_location is not None and "://" not in artifact_location:
            artifact_location = Path(artifact_location).absolute().as_uri()
        self.uri = uri
        self.made = False  # by this object
        self.client: MlflowClient | None = None  # once it is open
        self.experiment_id = self.run_id = ""
        self._experiment_name, self._run_name, self._tags = experiment_name, run_name, dict(tags or {})
        self._folder, self._artifact_location = folder, artifact_location
        self._stored: dict[str, set[int]] = {}  # steps that the store had of a metric when it was opened
        self._last: dict[str, int] = {}  # step sent of each

    def open(self, started_ms: int | None = None) -> MlflowClient:
        """``started_ms``: when the run began, for one that is made. Raises whatever the store does."""
        if self.client is not None:
            return self.client
        import mlflow

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # what it raises is told in a line
        with self._alone():
            if self.database is not None:
                require_usable(self.database)
            client = mlflow.MlflowClient(self.uri)
            mlflow.set_tracking_uri(self.uri)  # for traces
            if not self.run_id and not self._find(client):
                self._make(client, started_ms)
        self.client = client
        return client

    def _alone(self) -> AbstractContextManager[None]:
        """The first use makes the tables, the next the experiment; two runs that start at once would make them twice,
        and one would stop with an error of SQLite's."""
        return nullcontext() if self.database is None else locked(Path(f"{self.database}.lock"))

    def _find(self, client: MlflowClient) -> bool:
        path = self._folder / RUN_ID_FILE if self._folder is not None else None
        if path is None or not path.exists():
            return False
        from mlflow.exceptions import MlflowException

        try:
            info = client.get_run(path.read_text().strip()).info
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            return False
        if info.lifecycle_stage == "deleted":
            return False
        self.run_id, self.experiment_id = info.run_id, info.experiment_id
        return True

    def _make(self, client: MlflowClient, started_ms: int | None) -> None:
        from mlflow.tracking.context.registry import resolve_tags

        found = client.get_experiment_by_name(self._experiment_name)
        if found is not None and found.lifecycle_stage != "deleted":
            self.experiment_id = found.experiment_id
        else:
            self.experiment_id = client.create_experiment(self._experiment_name, self._artifact_location)
        if EXPERIMENT_KIND not in client.get_experiment(self.experiment_id).tags:  # else it is the user's choice
            client.set_experiment_tag(self.experiment_id, EXPERIMENT_KIND, TRAINING)
        # Without a name MLflow would draw one, from Python's generator that the training draws from.
        run = client.create_run(self.experiment_id, started_ms, resolve_tags(self._tags), run_name=self._run_name)
        self.run_id, self.made = run.info.run_id, True
        if self._folder is not None:
            write_atomically(self._folder / RUN_ID_FILE, f"{self.run_id}\n")

    def log_parameters(self, found: Mapping[str, Any]) -> None:
        """Those that the run does not have: MLflow forbids changing them."""
        from mlflow.entities import Param

        client = self.open()
        there = client.get_run(self.run_id).data.params
        missing = [Param(name, str(value)[:LONGEST]) for name, value in found.items() if name not in there]
        for i in range(0, len(missing), MOST_PARAMETERS):
            client.log_batch(self.run_id, params=missing[i : i + MOST_PARAMETERS])

    def log_config(self, yaml_text: str, origin: Mapping[str, str] | None = None) -> None:
        """A resolved configuration: whole as artifact config.yaml, flat as parameters, and what one searches for as
        tags (see ``run_parameters``). ``origin``: commit and command; default: this process's."""
        client, config = self.open(), yaml.safe_load(yaml_text)
        client.log_text(self.run_id, yaml_text, "config.yaml")
        for key, value in tags(config, origin or run_info()).items():
            client.set_tag(self.run_id, key, value)
        self.log_parameters(parameters(config))

    def log_datasets(self, datasets: Iterable[Any]) -> None:
        """Data sets (``mlflow.entities.DatasetInput``) that the run reads, where it has none yet."""
        client = self.open()
        there = client.get_run(self.run_id).inputs
        if not (there and there.dataset_inputs) and (given := list(datasets)):
            client.log_inputs(self.run_id, given)

    def send(self, rows: Sequence[Row]) -> int:
        """Metrics that the store does not have at their step, in the order given; returns how many. What it has is left
        as it is: the same again, or what an attempt had logged that was killed before its next checkpoint."""
        from mlflow.entities import Metric

        client, missing, last = self.open(), [], dict(self._last)
        for row in rows:
            for logged, value in row.metrics.items():
                name = re.sub("[^a-zA-Z0-9_/. -]+", "", logged)  # what MLflow takes
                if last.get(name) != row.step and row.step not in self._steps(client, name):
                    missing.append(Metric(name, value, row.ms, row.step))
                last[name] = row.step
        for i in range(0, len(missing), MOST_METRICS):
            client.log_batch(self.run_id, metrics=missing[i : i + MOST_METRICS])
        self._last = last
        return len(missing)

    def _steps(self, client: MlflowClient, name: str) -> set[int]:
        if name not in self._stored:
            history = [] if self.made else client.get_metric_history(self.run_id, name)
            self._stored[name] = {metric.step for metric in history}
        return self._stored[name]


def require_usable(database: Path) -> None:
    """Raises sqlite3.Error for a database that cannot be written. MLflow itself would try for minutes."""
    with closing(sqlite3.connect(database, timeout=BUSY_S)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()
