"""One run in an MLflow store: finds or creates the run, and sends what the store lacks. Each call may be repeated."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from callbacks.tracking.metrics_file import Row
from callbacks.tracking.mlflow_names import LONGEST, mlflow_name, storable
from callbacks.tracking.run_info import RUN_ID_FILE, SQLITE, default_tracking_uri, run_info
from callbacks.tracking.run_parameters import parameters, tags
from common.errors import one_line
from common.files import locked, write_atomically

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)
EXPERIMENT_KIND = "mlflow.experimentKind"  # tag that decides which view MLflow's pages open with
TRAINING = "custom_model_development"  # "Machine learning": runs and their curves
MOST = {"metrics": 1000, "params": 100, "tags": 100, "datasets": 1000}  # that MLflow takes in one call
REFUSED = "MLflow (%s) does not take %r of the run's %s; it takes the others: %s"
LONGEST_EXPERIMENT, LONGEST_FOLDER = 500, 60  # characters of an experiment's name, and of its artifacts' folder
BUSY_S = 5  # to wait for a database that another process has locked


class MLflowRun:
    """The run whose id is in ``<folder>/mlflow_run_id``, or a new run where the file or the run is missing.

    An SQLite store has the artifacts beside it, by an absolute path: MLflow's own default depends on the directory the
    experiment was first made from. An experiment is marked as model training; by itself MLflow would take one with
    traces for an application's. ``open`` is the first to use the store.

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
            folder_name = mlflow_name(experiment_name, LONGEST_FOLDER)
            artifact_location = artifact_location or str(self.database.parent / "mlartifacts" / folder_name)
        if artifact_location is not None and "://" not in artifact_location:
            artifact_location = Path(artifact_location).absolute().as_uri()
        self.uri = uri
        self.made = False  # by this object
        self.client: MlflowClient | None = None  # once it is open
        self.experiment_id = self.run_id = ""
        self._experiment_name = storable(experiment_name)
        if len(self._experiment_name) > LONGEST_EXPERIMENT:
            self._experiment_name = mlflow_name(self._experiment_name, LONGEST_EXPERIMENT)
        self._run_name, self._tags = storable(run_name), dict(tags or {})
        self._folder, self._artifact_location = folder, artifact_location
        self._stored: dict[str, set[int]] = {}  # steps that the store had of a metric when it was opened
        self._last: dict[str, int] = {}  # step sent of each
        self._refused: set[tuple[str, str]] = set()  # kind and name of each entity that the store refused

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
        run = client.create_run(self.experiment_id, started_ms, resolve_tags(), run_name=self._run_name)
        self.run_id, self.made = run.info.run_id, True
        if self._folder is not None:
            write_atomically(self._folder / RUN_ID_FILE, f"{self.run_id}\n")
        self._log_tags(client, self._tags)

    def log_parameters(self, found: Mapping[str, Any]) -> None:
        """Send the parameters that the run lacks: MLflow forbids changing one."""
        from mlflow.entities import Param

        client = self.open()
        there = client.get_run(self.run_id).data.params
        named = {mlflow_name(name): storable(value) for name, value in found.items()}
        self._send(client, "params", [Param(name, value) for name, value in named.items() if name not in there])

    def _log_tags(self, client: MlflowClient, found: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        self._send(client, "tags", [RunTag(mlflow_name(name), storable(value)) for name, value in found.items()])

    def _send(self, client: MlflowClient, kind: str, entities: Sequence[Any]) -> int:
        """Log metrics, params, tags or data sets; returns how many. A refused batch is sent in halves, so that one
        entity that the store refuses costs a warning and no other entity. Other errors of the store are raised."""
        from mlflow.exceptions import MlflowException

        send: Any = client.log_inputs if kind == "datasets" else client.log_batch
        sent = 0
        batches = [entities[i : i + MOST[kind]] for i in range(0, len(entities), MOST[kind])]
        while batches:
            batch = batches.pop(0)
            try:
                send(self.run_id, **{kind: batch})
                sent += len(batch)
            except MlflowException as error:
                if not is_refusal(error) or client.get_run(self.run_id).info.lifecycle_stage == "deleted":
                    raise
                if middle := len(batch) // 2:
                    batches[:0] = [batch[:middle], batch[middle:]]
                else:
                    name = batch[0].dataset.name if kind == "datasets" else batch[0].key
                    self._refused.add((kind, name))
                    log.warning(REFUSED, self.uri, name[:LONGEST], kind, one_line(error)[:200])
        return sent

    def log_config(self, yaml_text: str, origin: Mapping[str, str] | None = None) -> None:
        """Log a resolved configuration: whole as artifact config.yaml, flat as parameters, and its searchable fields as
        tags (see ``run_parameters``). ``origin``: commit and command; default: this process's."""
        client, config = self.open(), yaml.safe_load(yaml_text)
        client.log_text(self.run_id, yaml_text, "config.yaml")
        self._log_tags(client, tags(config, origin or run_info()))
        self.log_parameters(parameters(config))

    def log_datasets(self, datasets: Iterable[Any]) -> None:
        """Log the data sets (``mlflow.entities.DatasetInput``) that the run reads, once per run."""
        client = self.open()
        there = client.get_run(self.run_id).inputs
        if not (there and there.dataset_inputs):
            self._send(client, "datasets", list(datasets))

    def send(self, rows: Sequence[Row]) -> int:
        """Send the metrics that the store lacks at their step, in the order given; returns how many. A value that the
        store has stays: it is the same value, or one of an attempt that was killed before its next checkpoint."""
        from mlflow.entities import Metric

        client, missing, last = self.open(), [], dict(self._last)
        for row in rows:
            for logged, value in row.metrics.items():
                name = mlflow_name(logged)
                if last.get(name) == row.step or ("metrics", name) in self._refused:
                    continue
                if row.step not in self._steps(client, name):
                    missing.append(Metric(name, value, row.ms, row.step))
                last[name] = row.step
        sent = self._send(client, "metrics", missing)
        self._last = last
        return sent

    def _steps(self, client: MlflowClient, name: str) -> set[int]:
        if name not in self._stored:
            history = [] if self.made else client.get_metric_history(self.run_id, name)
            self._stored[name] = {metric.step for metric in history}
        return self._stored[name]


def is_refusal(error: BaseException) -> bool:
    """Whether MLflow refused a name or a value, which another attempt would not change."""
    return getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE"


def require_usable(database: Path) -> None:
    """Raises sqlite3.Error for a database that cannot be written. MLflow itself would try for minutes."""
    with closing(sqlite3.connect(database, timeout=BUSY_S)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()
