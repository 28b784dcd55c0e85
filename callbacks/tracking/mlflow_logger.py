"""Writes a run's metrics to a file, then uploads them to MLflow from a background thread."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml
from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from callbacks.tracking.metrics_file import METRICS_FILE, MetricsFile
from callbacks.tracking.mlflow_run import MLflowRun, is_refusal
from callbacks.tracking.run_info import RunStopped
from callbacks.tracking.run_parameters import parameters
from callbacks.tracking.trackers import Tracker, tracker_names
from common.errors import one_line
from common.make_command import same_run

log = logging.getLogger(__name__)
MODULE = "model."  # prefix of the module's parameters
STOPPING = (KeyboardInterrupt, SystemExit, RunStopped)  # Lightning's SIGTERMException is a SystemExit
STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}
PATIENCE_S = 120  # longest wait for a store that neither takes nor refuses
RETRY_S = 30  # shortest time from a failed attempt to the next one


def is_rank_zero() -> bool:
    """Return whether this process is rank 0. Lightning keeps the rank in an attribute of ``rank_zero_only``."""
    return getattr(rank_zero_only, "rank", 0) == 0


class Uploader:
    """Sends data to an MLflow run in a background thread, as a queue of jobs that run in order.

    A job that fails stays first in line until a later job or ``flush`` starts another attempt. The first failure logs
    one warning; the training goes on.

    Args:
        kept: last sentence of the warning: whether anything is lost.
    """

    def __init__(self, run: MLflowRun, kept: str) -> None:
        self._run, self._kept = run, kept
        self._jobs: deque[Callable[[MLflowRun], Any]] = deque()
        self._asked: SimpleQueue[threading.Event | None] = SimpleQueue()
        self._retry_at, self._warned = 0.0, False
        self._lock, self._working = threading.Lock(), False

    def put(self, job: Callable[[MLflowRun], Any]) -> None:
        """Add a job to the queue."""
        self._jobs.append(job)
        self._ask(None)

    def flush(self) -> None:
        """Wait until all upload jobs are done, an attempt has failed, or ``PATIENCE_S`` seconds have passed."""
        done = threading.Event()
        self._ask(done)
        if not done.wait(PATIENCE_S):
            self._warn(TimeoutError(f"no answer within {PATIENCE_S} s"))

    def _ask(self, done: threading.Event | None) -> None:
        with self._lock:
            self._asked.put(done)
            if not self._working:  # a thread ends when nothing is left to do
                self._working = True
                threading.Thread(target=self._work, name="mlflow", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._asked.empty():
                    self._working = False
                    return
                flushed = self._asked.get()
            if flushed is not None or time.monotonic() >= self._retry_at:
                try:
                    self._run_jobs()
                except Exception as error:  # a broken store must not stop the training
                    self._warn(error)
                    self._retry_at = time.monotonic() + RETRY_S
            if flushed is not None:
                flushed.set()

    def _run_jobs(self) -> None:
        self._run.open()
        while self._jobs:
            try:
                self._jobs[0](self._run)
            except Exception as error:
                if not is_refusal(error):
                    raise
                self._warn(error)
            self._jobs.popleft()

    def _warn(self, error: BaseException) -> None:
        if not self._warned:
            self._warned = True
            reason = f"{type(error).__name__}: {one_line(error)[:200]}"
            log.warning("MLflow (%s) does not take this run: %s. %s", self._run.uri, reason, self._kept)


class NoUpload:
    """Takes the jobs of an `Uploader` and does none: MLflow is not among the run's trackers."""

    def put(self, job: Callable[[MLflowRun], Any]) -> None:
        """Leave the job out."""

    def flush(self) -> None:
        """Return at once."""


class MLflowLogger(Logger):
    """Logs a Lightning run to the file ``<save_dir>/metrics.jsonl`` first, then to MLflow from a background thread.

    - The file comes first. A kill, or an MLflow store that is broken, locked or read-only, loses no metric and does not
      stop the run. ``make metrics`` sends later what the store lacks.
    - ``IterationCheckpoint`` stores the length of the file with each checkpoint. On resume it cuts off what follows, so
      that the file has each iteration once.
    - The run id is in ``<save_dir>/mlflow_run_id``. A later process with the same ``save_dir`` continues that run.

    Lightning's MLFlowLogger opens the store in its constructor, waits for the store at every call, and raises when the
    store fails.

    Args:
        experiment_name: MLflow experiment, the same for all stages to be compared in the UI.
        run_name: name of the run in the list, e.g. "dgpo_tiny-seed0".
        tracking_uri: any MLflow tracking URI; default: see ``default_tracking_uri``.
        save_dir: the stage's output folder. Without it the run cannot be continued.
        artifact_location: URI or folder for artifacts; default: beside an SQLite store, else the server's choice.
        tags: tags of the run.
        tracker: where metrics go after the file: ``mlflow``, ``wandb``, ``trackio``, a list of these, or ``none``.
            (The stage adds the loggers of wandb and trackio, see ``callbacks.tracking.trackers``.)
    """

    def __init__(
        self,
        experiment_name: str = "compact_agents",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        save_dir: str | None = None,
        artifact_location: str | None = None,
        tags: dict[str, Any] | None = None,
        tracker: Tracker | list[Tracker] = "mlflow",
    ) -> None:
        super().__init__()
        self.trackers = tracker_names(tracker)
        self._folder = Path(save_dir) if save_dir is not None else None
        self._name, self._run_name = experiment_name, run_name or (self._folder.name if self._folder else "run")
        self._run = MLflowRun(experiment_name, self._run_name, tracking_uri, self._folder, artifact_location, tags)
        self._configured: set[str] = set()  # arguments that the configuration gives, as "model.lr"
        self._uploaded = 0  # bytes of the file
        if is_rank_zero() and self._uploads:
            import mlflow  # noqa: F401  # 2 s, which the thread would take from the training

    @property
    def _uploads(self) -> bool:
        return "mlflow" in self.trackers

    @cached_property
    def _file(self) -> MetricsFile:
        """The run's metrics file, opened on the first use, by rank 0 alone."""
        return MetricsFile(self._folder / METRICS_FILE if self._folder is not None else None)

    @cached_property
    def _uploader(self) -> Uploader | NoUpload:
        if not self._uploads:
            return NoUpload()
        path = self._folder and self._folder / METRICS_FILE
        kept = f"Metrics are kept in {path}; {same_run('metrics')} sends them" if path else "Its metrics are lost"
        uploader = Uploader(self._run, kept)
        uploader.put(lambda run: run.open().update_run(run.run_id, status="RUNNING"))  # a continued run was FAILED, ...
        return uploader

    def _upload_metrics(self, run: MLflowRun) -> None:
        rows, end = self._file.read(self._uploaded)
        run.log_metrics(rows)
        self._uploaded = end

    # --- Lightning's interface --------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return self._run_name

    @property
    def save_dir(self) -> str | None:
        """The stage's output folder as text, or None."""
        return str(self._folder) if self._folder is not None else None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._file.append(metrics, step or 0)
        self._uploader.put(self._upload_metrics)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | argparse.Namespace) -> None:
        """Log the training module's parameters to MLflow. A continued run keeps those it was started with."""
        found = _flatten_dict(_convert_params(params))
        if self._configured:  # the configuration is logged; add what it leaves at its default
            named = {f"{MODULE}{key}": value for key, value in found.items()}
            found = {name: value for name, value in named.items() if name not in self._configured}
        self._uploader.put(lambda run: run.log_parameters(found))

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """End the MLflow run with a status. Lightning passes "failed" for any exception; after Ctrl-C, SIGTERM or a
        stop request the run is KILLED."""
        if "_uploader" not in self.__dict__:  # nothing was logged
            return
        status = "KILLED" if isinstance(sys.exception(), STOPPING) else STATUS.get(status, status)
        self._uploader.put(lambda run: run.open().set_terminated(run.run_id, status))
        self.flush()

    # --- the project's own ------------------------------------------------------------------------------------

    @rank_zero_only
    def log_config(self, yaml_text: str) -> None:
        """Log the resolved configuration (YAML text) to MLflow (``MLflowRun.log_config``)."""
        self._uploader.put(lambda run: run.log_config(yaml_text))
        self._configured = {".".join(name.split(".")[:2]) for name in parameters(yaml.safe_load(yaml_text))}

    @rank_zero_only
    def log_datasets(self, datasets: Iterable[Any]) -> None:
        """Log the run's data sets (``mlflow.entities.DatasetInput``) to MLflow, once per run."""
        found = cache(lambda: list(datasets))  # an attempt may fail after it has used up an iterator
        self._uploader.put(lambda run: run.log_datasets(found()))

    @rank_zero_only
    def log_file(self, path: Path, artifact_folder: str) -> None:
        """Copy a file into the MLflow run's artifacts."""
        self._uploader.put(lambda run: run.log_file(path, artifact_folder))

    def sync(self) -> int:
        """Flush the metrics file to disk and return its length in bytes. Other ranks than 0 have no file and return
        0."""
        return self._file.sync() if is_rank_zero() else 0

    @rank_zero_only
    def rewind(self, position: int) -> None:
        """Truncate the metrics file to ``position`` bytes, as ``sync`` returned them: later metrics are dropped."""
        self._file.rewind(position)

    @rank_zero_only
    def flush(self) -> None:
        """Wait until MLflow has all metrics logged so far, an attempt to send them has failed, or ``PATIENCE_S``
        seconds have passed."""
        self._uploader.flush()

    @property
    def experiment(self) -> Any:  # jsonargparse would import mlflow (1 s) if its class were named here
        """The ``MlflowClient`` of the run. None on other ranks than 0, without MLflow, and while its store cannot be
        used."""
        if is_rank_zero() and self._uploads and self._run.client is None:
            self.flush()
        return self._run.client

    @property
    def run_id(self) -> str:
        """The run's id in MLflow; "" until the run exists."""
        return self._run.run_id if self.experiment is not None else ""
