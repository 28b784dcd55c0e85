"""Writes a run's metrics to a file, then uploads them to MLflow from a background thread. A resumed run goes on."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from callbacks.tracking.metrics_file import METRICS_FILE, MetricsFile
from callbacks.tracking.mlflow_run import MLflowRun, is_refusal
from callbacks.tracking.run_info import RunStopped
from callbacks.tracking.run_parameters import parameters
from common.errors import one_line
from common.make_command import same_run

log = logging.getLogger(__name__)
MODULE = "model."  # begins the names of the module's parameters
STOPPING = (KeyboardInterrupt, SystemExit, RunStopped)  # Lightning's SIGTERMException is a SystemExit
STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}
PATIENCE_S = 120  # at most, to wait for a store that neither takes nor refuses
RETRY_S, RETRY_MOST_S = 10, 300  # between attempts, doubled each time


def is_rank_zero() -> bool:
    """Lightning keeps the process's rank in an attribute of this decorator."""
    return getattr(rank_zero_only, "rank", 0) == 0


class Sender:
    """Uploads a run's metrics file and the jobs put to it to MLflow, in a background thread. A failed upload is
    repeated later; the first failure logs one warning.

    Args:
        run: used by this sender alone until it is open.
        metrics: is read from its beginning; the store's own points are not sent again.
        kept: ends the warning: what is lost, or is not.
    """

    def __init__(self, run: MLflowRun, metrics: MetricsFile, kept: str) -> None:
        self.run, self._metrics, self._kept = run, metrics, kept
        self._jobs: deque[Callable[[MLflowRun], Any]] = deque()
        self._sent = 0  # bytes of the file
        self._reads = False  # not before the first metric: until then a resumed run may rewind the file
        self._turn = threading.Condition()
        self._asked = self._answered = 0
        self._urgent = self.failing = self._told = self._works = False

    def put(self, job: Callable[[MLflowRun], Any]) -> None:
        """Jobs are done in order, each after the metrics that there are then."""
        self._jobs.append(job)
        self._ask()

    def send(self) -> None:
        """There is more in the file."""
        self._reads = True
        self._ask()

    def flush(self) -> bool:
        """Wait until all that was put so far is done, or an attempt has failed, or time is up. Whether it is done."""
        number = self._ask(urgent=True)
        with self._turn:
            done = self._turn.wait_for(lambda: self._answered >= number, PATIENCE_S)
        if not done:
            self.warn(TimeoutError(f"no answer within {PATIENCE_S} s"))
        return done and not self.failing

    def warn(self, error: BaseException) -> None:
        """One line, once."""
        if not self._told:
            self._told = True
            reason = one_line(error)[:200]
            log.warning("MLflow (%s) does not take this run: %s: %s. %s", self.run.uri, type(error).__name__, reason,
                        self._kept)  # fmt: skip

    def _ask(self, urgent: bool = False) -> int:
        with self._turn:
            self._asked += 1
            self._urgent |= urgent
            if not self._works:
                self._works = True
                threading.Thread(target=self._work, name="mlflow", daemon=True).start()
            self._turn.notify_all()
            return self._asked

    def _work(self) -> None:
        """Until there is nothing to do."""
        wait = RETRY_S
        while True:
            with self._turn:
                if self._answered == self._asked and not self.failing:
                    self._works = False
                    return
                new = self._turn.wait_for(
                    lambda: self._urgent or (self._asked > self._answered and not self.failing),
                    timeout=wait if self.failing else None,
                )
                number, self._urgent = self._asked, False
            try:
                self._attempt()
                self.failing, wait = False, RETRY_S
            except Exception as error:  # a store that is broken costs the run nothing
                self.warn(error)
                wait = wait if new else min(2 * wait, RETRY_MOST_S)
                self.failing = True
            with self._turn:
                self._answered = number
                self._turn.notify_all()

    def _attempt(self) -> None:
        self.run.open()
        if self._reads:
            rows, end = self._metrics.read(self._sent)
            self.run.send(rows)
            self._sent = end
        while self._jobs:
            try:
                self._jobs[0](self.run)
            except Exception as error:
                if not is_refusal(error):
                    raise
                self.warn(error)
            self._jobs.popleft()


class MLflowLogger(Logger):
    """Logs a run of Lightning's into ``<save_dir>/metrics.jsonl``, and into MLflow.

    - The file comes first: a kill, or an MLflow store that is broken, locked or read-only, loses no metric and does not
      stop the run; ``make metrics`` brings it into a store later.
    - ``IterationCheckpoint`` keeps with each checkpoint how far the file had come, and on resume cuts off what is
      later: it holds each iteration once.
    - All that MLflow does, but for traces, is done in a thread (``Sender``): SQLite takes 20 ms and more a write.
    - The run id is kept in ``<save_dir>/mlflow_run_id``. A later process with the same ``save_dir`` continues that run,
      and sends it what it lacks. Starting afresh means an empty folder.

    mlflow itself (2 s) is imported on construction, not with this module.

    Args:
        experiment_name: MLflow experiment, the same for all stages to be compared in the UI.
        run_name: name of the run in the list, e.g. "dgpo_tiny-seed0".
        tracking_uri: any MLflow tracking URI; default: see ``default_tracking_uri``.
        save_dir: the stage's output folder; None: the run cannot be continued.
        artifact_location: URI or folder for artifacts; default: beside an SQLite store, else the server's choice.
        tags: tags of the run.
    """

    def __init__(
        self,
        experiment_name: str = "compact_agents",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        save_dir: str | None = None,
        artifact_location: str | None = None,
        tags: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._folder = Path(save_dir) if save_dir is not None else None
        self._name, self._run_name = experiment_name, run_name or (self._folder.name if self._folder else "run")
        self._run = MLflowRun(experiment_name, self._run_name, tracking_uri, self._folder, artifact_location, tags)
        self._configured: set[str] = set()  # arguments that the configuration gives, as "model.lr"
        self._opened: tuple[MetricsFile, Sender] | None = None
        if is_rank_zero():
            import mlflow  # noqa: F401  here, so that the thread need not

    def _start(self) -> tuple[MetricsFile, Sender]:
        """At the first use, of rank 0 alone: there are loggers that log nothing."""
        if self._opened is None:
            path = self._folder / METRICS_FILE if self._folder is not None else None
            kept = f"Metrics are kept in {path}; {same_run('metrics')} sends them" if path else "Its metrics are lost"
            metrics = MetricsFile(path)
            self._opened = metrics, Sender(self._run, metrics, kept)
            self._opened[1].put(
                lambda run: run.open().update_run(run.run_id, status="RUNNING")
            )  # no longer FAILED, ...
        return self._opened

    # --- what Lightning asks for ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return self._run_name

    @property
    def save_dir(self) -> str | None:
        """The stage's folder."""
        return str(self._folder) if self._folder is not None else None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        file, sender = self._start()
        file.append(metrics, step or 0)
        sender.send()

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | argparse.Namespace) -> None:
        """Log parameters; a continued run keeps those it was started with."""
        found = _flatten_dict(_convert_params(params))
        if self._configured:  # these are of the module: what the configuration leaves at its default
            named = {f"{MODULE}{key}": value for key, value in found.items()}
            found = {name: value for name, value in named.items() if name not in self._configured}
        self._start()[1].put(lambda run: run.log_parameters(found))

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """End the run. Lightning calls this with "failed" while it handles an exception: one that means that somebody
        stopped the run (Ctrl-C, SIGTERM, a request) makes it KILLED."""
        if self._opened is None:
            return
        status = "KILLED" if isinstance(sys.exception(), STOPPING) else STATUS.get(status, status)
        self._opened[1].put(_flush_traces)
        self._opened[1].put(lambda run: run.open().set_terminated(run.run_id, status))
        self.flush()

    # --- what the project logs beside -------------------------------------------------------------------------

    @rank_zero_only
    def log_config(self, yaml_text: str) -> None:
        """Log the resolved configuration (``MLflowRun.log_config``)."""
        self._start()[1].put(lambda run: run.log_config(yaml_text))
        self._configured = {".".join(name.split(".")[:2]) for name in parameters(yaml.safe_load(yaml_text))}

    @rank_zero_only
    def log_datasets(self, datasets: Iterable[Any]) -> None:
        """Log the data sets (``mlflow.entities.DatasetInput``) that the run reads, once per run."""
        self._start()[1].put(lambda run: run.log_datasets(datasets))

    @rank_zero_only
    def log_file(self, path: Path, artifact_folder: str) -> None:
        """Copy a file into the run's artifacts."""
        self._start()[1].put(lambda run: run.open().log_artifact(run.run_id, str(path), artifact_folder))

    @rank_zero_only
    def trace(self, write: Callable[[MLflowRun], None]) -> None:
        """Write traces, with the run open, in this thread, which owns Python's generator that they draw from. While the
        store takes nothing, the traces are dropped."""
        sender = self._start()[1]
        if sender.failing or (self._run.client is None and not sender.flush()):
            return
        try:
            write(self._run)
        except Exception as error:  # as in the thread
            sender.warn(error)

    # --- for checkpoints --------------------------------------------------------------------------------------

    def sync(self) -> int:
        """Put on the disk what was logged; returns how far the file has come, in bytes (0 on other ranks than 0)."""
        return self._start()[0].sync() if is_rank_zero() else 0

    @rank_zero_only
    def rewind(self, position: int) -> None:
        """Forget what was logged after ``sync`` returned this."""
        self._start()[0].rewind(position)

    # --- the store --------------------------------------------------------------------------------------------

    @rank_zero_only
    def flush(self) -> None:
        """Wait until everything logged so far is in the store, or it does not take it."""
        if self._opened is not None:
            self._opened[1].flush()

    @property
    def experiment(self) -> Any:  # jsonargparse would import mlflow (1 s) if its class were named here
        """The MlflowClient, with the run made; None on other ranks than 0, and while the store takes nothing."""
        if is_rank_zero() and self._run.client is None:
            self._start()[1].flush()
        return self._run.client

    @property
    def run_id(self) -> str:
        """The run's id in MLflow; "" until the run exists."""
        _ = self.experiment
        return self._run.run_id

    @property
    def experiment_id(self) -> str:
        _ = self.experiment
        return self._run.experiment_id


def _flush_traces(run: MLflowRun) -> None:
    import mlflow

    mlflow.flush_trace_async_logging()
