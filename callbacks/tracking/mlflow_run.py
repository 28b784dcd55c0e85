"""One run in an MLflow store. Finds or creates the run, and sends what the store lacks; each call may be repeated."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
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
EXPERIMENT_KIND = "mlflow.experimentKind"  # this tag selects the view that MLflow opens for an experiment
TRAINING = "custom_model_development"  # "Machine learning": runs and their curves
MOST = {"metrics": 1000, "params": 100, "tags": 100, "datasets": 1000}  # entities that MLflow takes in one call
REFUSED = "MLflow (%s) does not take %r of the run's %s; it takes the others: %s"
LONGEST_FOLDER = 60  # characters of the name of the artifacts' folder
BUSY_S = 5  # to wait for a database that another process has locked


class MLflowRun:
    """Finds or creates a run in an MLflow store, and sends data to it. The run's id is in ``<folder>/mlflow_run_id``;
    if the file or the run is missing, a new run is created.

    Artifacts of an SQLite store are kept beside the database. MLflow's default depends on the working directory.

    Args: as ``MLflowLogger``. Without ``folder`` a later process cannot continue the run.
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
        self.uri = tracking_uri or default_tracking_uri()
        self._database: Path | None = None
        if self.uri.startswith(SQLITE):
            self._database = Path(self.uri.removeprefix(SQLITE)).absolute()
            self.uri = f"{SQLITE}{self._database}"
            folder_name = mlflow_name(experiment_name, LONGEST_FOLDER)
            artifact_location = artifact_location or str(self._database.parent / "mlartifacts" / folder_name)
        if artifact_location is not None and "://" not in artifact_location:
            artifact_location = Path(artifact_location).absolute().as_uri()
        self._experiment_name, self._run_name = storable(experiment_name), storable(run_name)
        self._folder, self._artifact_location, self._tags = folder, artifact_location, dict(tags or {})
        self.client: MlflowClient | None = None  # set by `open`
        self.run_id = ""
        self.made = False  # whether this object has created the run
        self._last: dict[str, int] = {}  # name of a metric -> its last step in the store
        self._refused: set[str] = set()  # metrics that the store does not take
        self._without_artifacts = False

    def open(self, started_ms: int | None = None) -> MlflowClient:
        """Connect to the MLflow store on the first call, and return its client. Raises whatever the store raises.

        Args:
            started_ms: start of a run that is created; default: now.
        """
        if self.client is None:
            import mlflow

            logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it repeats what it raises
            with self._alone():
                if self._database is not None:
                    require_usable(self._database)
                client = mlflow.MlflowClient(self.uri)
                if not self.run_id and not self._find(client):
                    self._make(client, started_ms)
            self.client = client
        return self.client

    def _alone(self) -> AbstractContextManager[None]:
        """Return a context manager that locks an SQLite store. Two runs that start together would both create its
        tables, and one would fail."""
        return nullcontext() if self._database is None else locked(Path(f"{self._database}.lock"))

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
        self.run_id = "" if info.lifecycle_stage == "deleted" else info.run_id
        return bool(self.run_id)

    def _make(self, client: MlflowClient, started_ms: int | None) -> None:
        from mlflow.tracking.context.registry import resolve_tags

        found = client.get_experiment_by_name(self._experiment_name)
        if found is not None and found.lifecycle_stage != "deleted":
            experiment = found.experiment_id
        else:
            experiment = client.create_experiment(self._experiment_name, self._artifact_location)
            client.set_experiment_tag(experiment, EXPERIMENT_KIND, TRAINING)
        # Without a name MLflow would draw one from Python's generator, which belongs to the training.
        run = client.create_run(experiment, started_ms, resolve_tags(), run_name=self._run_name)
        self.run_id, self.made = run.info.run_id, True
        if self._folder is not None:
            write_atomically(self._folder / RUN_ID_FILE, f"{self.run_id}\n")
        self._log_tags(client, self._tags)

    def log_config(self, yaml_text: str, origin: Mapping[str, str] | None = None) -> None:
        """Log a resolved configuration to MLflow as artifact config.yaml, as flat parameters, and as tags
        (``run_parameters``).

        Args:
            origin: commit and command; default: those of this process.
        """
        client, config = self.open(), yaml.safe_load(yaml_text)
        self._log_tags(client, tags(config, origin or run_info()))
        self.log_parameters(parameters(config))
        self._log_artifact(lambda: client.log_text(self.run_id, yaml_text, "config.yaml"))

    def log_file(self, path: Path, artifact_folder: str) -> None:
        """Copy a file into the run's artifacts."""
        client = self.open()
        self._log_artifact(lambda: client.log_artifact(self.run_id, str(path), artifact_folder))

    def _log_artifact(self, send: Callable[[], Any]) -> None:
        """Send an artifact. Artifacts have a store of their own: if it fails while MLflow itself answers, warn once and
        leave artifacts out, since the stage's folder has the files."""
        if self._without_artifacts:
            return
        try:
            send()
        except Exception as error:
            self.open().get_run(self.run_id)  # raises if nothing answers: the artifact is sent later
            reason = f"{type(error).__name__}: {one_line(error)[:200]}"
            log.warning("MLflow (%s) does not take the run's artifacts, which stay here: %s", self.uri, reason)
            self._without_artifacts = True

    def log_parameters(self, found: Mapping[str, Any]) -> None:
        """Send the parameters that the MLflow run does not have yet. MLflow forbids changing a parameter."""
        from mlflow.entities import Param

        client = self.open()
        there = client.get_run(self.run_id).data.params
        named = {mlflow_name(name): storable(value) for name, value in found.items()}
        self._send(client, "params", [Param(name, value) for name, value in named.items() if name not in there])

    def _log_tags(self, client: MlflowClient, found: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        self._send(client, "tags", [RunTag(mlflow_name(name), storable(value)) for name, value in found.items()])

    def log_datasets(self, datasets: Iterable[Any]) -> None:
        """Log the run's data sets (``mlflow.entities.DatasetInput``) to MLflow, unless the run already has some."""
        client = self.open()
        there = client.get_run(self.run_id).inputs
        if not (there and there.dataset_inputs):
            self._send(client, "datasets", list(datasets))

    def log_metrics(self, rows: Sequence[Row]) -> int:
        """Send the metrics of later steps than the MLflow store has, and return the number of values sent.

        A value that the store has at a step stays. It is the same value, or one of an attempt that was killed before
        its next checkpoint.
        """
        from mlflow.entities import Metric

        client, missing, last = self.open(), [], dict(self._last)
        for row in rows:
            for logged, value in row.metrics.items():
                name = mlflow_name(logged)
                if name not in last:
                    history = [] if self.made else client.get_metric_history(self.run_id, name)
                    last[name] = max((metric.step for metric in history), default=-1)
                if row.step > last[name] and name not in self._refused:
                    missing.append(Metric(name, value, row.ms, row.step))
                    last[name] = row.step
        self._send(client, "metrics", missing)
        self._last = last
        return len(missing)

    def _send(self, client: MlflowClient, kind: str, entities: Sequence[Any]) -> None:
        """Send metrics, params, tags or data sets to MLflow, in batches. A refused batch is sent again in halves, so
        that an entity that the store refuses costs one warning and no other entity."""
        from mlflow.exceptions import MlflowException

        call: Any = client.log_inputs if kind == "datasets" else client.log_batch
        for batch in (entities[i : i + MOST[kind]] for i in range(0, len(entities), MOST[kind])):
            try:
                call(self.run_id, **{kind: batch})
            except MlflowException as error:
                if not is_refusal(error) or client.get_run(self.run_id).info.lifecycle_stage == "deleted":
                    raise
                if middle := len(batch) // 2:
                    self._send(client, kind, batch[:middle])
                    self._send(client, kind, batch[middle:])
                    continue
                name = batch[0].dataset.name if kind == "datasets" else batch[0].key
                self._refused |= {name} if kind == "metrics" else set()
                log.warning(REFUSED, self.uri, name[:LONGEST], kind, one_line(error)[:200])


def is_refusal(error: BaseException) -> bool:
    """Return whether the error means that MLflow refuses this name or value, so that a retry is useless."""
    return getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE"


def require_usable(database: Path) -> None:
    """Raise sqlite3.Error if the SQLite ``database`` cannot be written. MLflow would retry for minutes."""
    with closing(sqlite3.connect(database, timeout=BUSY_S)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()
