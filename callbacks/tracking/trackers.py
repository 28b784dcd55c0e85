"""Trackers beside MLflow: Weights & Biases and trackio, chosen by ``values.tracker``.

Each reads its own environment variables, such as ``WANDB_MODE``, ``WANDB_ENTITY``, ``TRACKIO_SPACE_ID``.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from common.files import write_atomically

Tracker = Literal["mlflow", "wandb", "trackio", "none"]
TRACKERS: tuple[Tracker, ...] = get_args(Tracker)
RUN_ID_FILE = "tracker_run_id"  # in the folder of a run: wandb and trackio continue the run with this id


def tracker_names(value: Tracker | Sequence[Tracker]) -> tuple[Tracker, ...]:
    """Return the trackers of the option ``tracker`` (a name or a list of names). ``none`` stands alone.

    Raises:
        ValueError: an unknown name, a name twice, ``none`` beside others, or a tracker that cannot be used here.
    """
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names or not set(names) <= set(TRACKERS) or len(set(names)) < len(names):
        raise ValueError(f"tracker is {value!r}; expected one of {', '.join(TRACKERS)}, or a list of different ones")
    if "none" in names and len(names) > 1:
        raise ValueError(f"tracker is {value!r}; none cannot stand beside others")
    for name in names:
        if name in ("wandb", "trackio") and find_spec(name) is None:
            raise ValueError(f"tracker {name} needs the package {name}, which is not installed: pip install {name}")
    if "wandb" in names and not _wandb_can_log_in():
        raise ValueError("tracker wandb found no key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
    return names


def _wandb_can_log_in() -> bool:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    return bool(wandb.api.api_key)  # of the file that `wandb login` writes


@contextmanager
def other_trackers(trainer: Any, config: Mapping[str, Any]) -> Iterator[None]:
    """Add loggers of the run's trackers other than MLflow to the Trainer, on rank 0. End their runs after the block: a
    stage's process ends without exit hooks.

    Args:
        trainer: its logger names the trackers, the project and the run, and has the stage's folder.
        config: the resolved configuration, which they show.
    """
    logger: Any = trainer.logger
    names = getattr(logger, "trackers", ()) if trainer.is_global_zero else ()
    added: list[Logger] = []
    ends: list[Callable[[], None]] = []
    if "wandb" in names:
        import wandb
        from lightning.pytorch.loggers import WandbLogger

        identity = {"project": logger.name, "name": logger.version, "id": _run_id(logger.save_dir)}
        added.append(WandbLogger(**identity, save_dir=logger.save_dir, resume="allow", config=dict(config)))
        ends.append(lambda: wandb.finish(int(sys.exception() is not None)))  # nothing where no run has begun
    if "trackio" in names:
        trackio = TrackioLogger(logger.name, f"{logger.version}-{_run_id(logger.save_dir)}", config)
        added.append(trackio)
        ends.append(trackio.finish)
    trainer.loggers = [*trainer.loggers, *added]
    try:
        yield
    finally:
        for end in ends:
            end()


def _run_id(folder: str) -> str:
    """Return the id of the folder's run at other trackers than MLflow."""
    file = Path(folder) / RUN_ID_FILE
    if not file.exists():
        write_atomically(file, secrets.token_hex(4))
    return file.read_text()


class TrackioLogger(Logger):
    """Logs a Lightning run to trackio: a local database, or a Space of the Hugging Face hub with ``TRACKIO_SPACE_ID``.

    Args:
        project: trackio's project.
        run: name of the run; an existing run of this name is continued.
        config: what trackio shows as the run's configuration.
    """

    def __init__(self, project: str, run: str, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._project, self._run_name, self._config = project, run, dict(config)

    @property
    def name(self) -> str:
        return self._project

    @property
    def version(self) -> str:
        return self._run_name

    @cached_property
    def experiment(self) -> Any:
        """The ``trackio.Run``. Made at its first use, by rank 0 alone."""
        import trackio

        return trackio.init(self._project, self._run_name, config=self._config, resume="allow", embed=False)

    def finish(self) -> None:
        """End the run, if one has begun."""
        if "experiment" in vars(self):
            self.experiment.finish()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | argparse.Namespace, *_: Any, **__: Any) -> None:
        """Do nothing: the configuration has all parameters."""
