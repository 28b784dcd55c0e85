"""Runs one stage in this process: ``python -m experiments stage FOLDER``.

Reads config.yaml and stage.json of the folder, and writes everything but result.json. The runner writes result.json
when this process has ended well.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import logging
import operator
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from callbacks.training import stop_request
from callbacks.training.stop_request import StopRequested
from common.errors import one_line
from common.files import DiskFullError, is_no_room, write_atomically
from experiments.registry.errors import ExperimentError
from experiments.registry.machine import ISA_VARIABLE, onednn_isa
from experiments.registry.project import PACKAGES, ROOT
from experiments.stages.graph import Stage
from experiments.stages.store import StageFolder

SUMMARY = "summary.json"  # what a task returned
INTERRUPTED = 130
REFUSED = 2  # the configuration is wrong; nothing has run
PARENT_VARIABLE = "COMPACT_AGENTS_PARENT"
PR_SET_PDEATHSIG = 1
# With these Lightning takes a process for one rank that srun started. Our jobs have one srun task per node.
SRUN_VARIABLES = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")


def run(folder: Path) -> int:
    """Run a stage in this process, which the runner started, and return the exit code.

    The user's errors become one message, defects a traceback.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent:
        die_with_parent(int(parent))
        os.environ[PARENT_VARIABLE] = str(os.getpid())  # for ranks that the strategy launches
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Lightning alone would end with code 0, as if finished
    try:
        execute(folder)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning's exit
            return INTERRUPTED
        if end.code not in (None, 0):
            raise
        return _report(RuntimeError("code of this stage called sys.exit() before the stage's end"), folder)
    except StopRequested as stop:
        if rank() == 0:
            print(stop, flush=True)
            (folder / stop_request.STOPPED).touch()
        return 0  # torchrun would treat any other code as a failure
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    except Exception as error:
        return _report(error, folder)
    return 0


def execute(folder: Path) -> None:
    """Check a prepared stage, then run it. A training run continues from its last checkpoint."""
    from experiments.stages.data_files import check_data_files
    from experiments.stages.validate import check

    quieten()
    store = StageFolder(folder)
    config = yaml.safe_load(store.config_path.read_text())
    stage = prepared(store, config)
    if notes := check(stage, ROOT):
        raise ExperimentError(notes[0])
    check_data_files([stage], ROOT)
    if stage.kind == "task":
        run_task(config, stage.arguments, folder)
    else:
        run_lightning(config, stage.arguments, store)


def prepared(store: StageFolder, config: dict[str, Any]) -> Stage:
    """Return the stage that a prepared folder describes, with the names and folders of the stages that it reads."""
    metadata, about = store.metadata(), config["experiment"]

    def other(name: str, key: str) -> Stage:
        return Stage(name, "", key, store.path.parents[1] / name / key, {}, (), (), ())

    upstream = tuple(other(name, key) for name, key in metadata["upstream"].items())
    arguments = tuple(metadata["arguments"])
    return Stage(about["name"], about["kind"], metadata["key"], store.path, config, arguments, upstream, ())


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, or at once if the parent is dead (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def run_task(config: dict[str, Any], arguments: Sequence[str], folder: Path) -> None:
    from experiments.stages.parser import cli

    parsed = cli(config, arguments, _where(config), instantiate=True)
    seed_task(parsed.config.seed_everything)
    summary = parsed.task.run(folder)
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=2, default=str))


def seed_task(seed: int) -> None:
    """Seed the random generators of Python and of the libraries that the task has imported, as Lightning's
    ``seed_everything`` does."""
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    random.seed(seed)
    for module, function in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if module in sys.modules:
            operator.attrgetter(function)(sys.modules[module])(seed)


def run_lightning(config: dict[str, Any], arguments: Sequence[str], store: StageFolder) -> None:
    """Train with Trainer.fit (kind fit only), then test with Trainer.test."""
    from callbacks.tracking.trackers import other_trackers
    from experiments.stages.parser import cli

    config = {**config, "trainer": {**(config.get("trainer") or {}), "default_root_dir": str(store.path)}}
    parsed = cli(config, arguments, _where(config), instantiate=True)
    trainer, model, data = parsed.trainer, parsed.model, parsed.datamodule
    with other_trackers(trainer, config):
        log_configuration(trainer, store)
        fit_and_test(trainer, model, data, config, store)


def fit_and_test(trainer: Any, model: Any, data: Any, config: dict[str, Any], store: StageFolder) -> None:
    """Run ``trainer`` as the stage's kind says: fit and test, or test alone."""
    if config["experiment"]["kind"] == "fit":
        gc.freeze()  # keep libraries and models out of the garbage collector's walks
        trainer.fit(model, datamodule=data, ckpt_path=store.checkpoint)
        if has_test(data):
            trainer.test(model, datamodule=data, verbose=False)
        else:
            data.teardown("test")  # which ends the engine
    else:
        checkpoint = store.metadata()["checkpoint"]  # may come from elsewhere
        trainer.test(model, datamodule=data, ckpt_path=checkpoint, verbose=False, weights_only=True)


def has_test(data: Any) -> bool:
    """Return whether a data module has test files. A stage that only prepares a model has none."""
    files = getattr(data, "files", None)  # of data_modules.evaluation_data.EvaluationData
    return files is None or bool(files["test"])


def log_configuration(trainer: Any, store: StageFolder) -> None:
    """Log the resolved configuration and the data files to every logger that accepts them."""
    from experiments.stages.inputs import dataset_inputs

    text = store.config_path.read_text()
    for logger in trainer.loggers:
        if not trainer.is_global_zero:
            return
        if hasattr(logger, "log_config"):
            logger.log_config(text)
        if hasattr(logger, "log_datasets"):
            logger.log_datasets(dataset_inputs(yaml.safe_load(text), store.path.parents[1]))


def quieten() -> None:
    """Silence messages of libraries about settings that this project chooses."""
    connector = "lightning.pytorch.trainer.connectors.checkpoint_connector"
    mlflow = ("mlflow.store.db.utils", "mlflow.tracing.export.async_export_queue")
    lightning = ("pytorch.utilities.rank_zero", "pytorch.accelerators.cuda", "fabric.utilities.seed")
    for name in (*(f"lightning.{part}" for part in lightning), connector, *mlflow, "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    for message in (
        ".*does not have many workers.*",
        ".*LeafSpec.*is deprecated.*",
        ".*You have overridden `transfer_batch_to_device`.*",  # collating moves the batches to the device
        ".*module\\(s\\) in eval mode.*",  # the frozen teacher
        ".*`torch.distributed.*is deprecated.*",  # called by DeepSpeed, on each rank
        ".*each worker will save a shard of the checkpoint.*",
        ".*`srun` command is available.*",  # torchrun starts the ranks
    ):
        warnings.filterwarnings("ignore", message)


def _where(config: dict[str, Any]) -> str:
    return f"experiment '{config['experiment']['name']}'"


def rank() -> int:
    """Return the rank of this process from the launcher's environment variables, or 0."""
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def _report(error: Exception, folder: Path) -> int:
    which = f"rank {rank()}, " if rank() else ""
    print(f"\n{which}error: {explain(error)}", file=sys.stderr)
    if not is_for_user(error):
        traceback.print_exc()
    elif not _is_full_disk(error):
        path = folder / (f"traceback-rank{rank()}.txt" if rank() else "traceback.txt")
        with contextlib.suppress(OSError):  # the disk may be full
            write_atomically(path, traceback.format_exc())
            print(f"(traceback: {path})", file=sys.stderr)
    sys.stderr.flush()
    return 1


def is_for_user(error: BaseException) -> bool:
    """Return whether an error's message suffices without a traceback. This holds for wrong input, faults of the
    machine, and error classes of this project (a service that is down, a collapsed run)."""
    own = type(error).__module__.partition(".")[0] in PACKAGES
    machine = isinstance(error, (ValueError, OSError, MemoryError)) or _is_full_disk(error)
    return own or machine or _is_lost_connection(error)


def _is_full_disk(error: BaseException | None) -> bool:
    while error is not None:
        if is_no_room(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether the error says that a collective of gloo or NCCL lost another rank."""
    said = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


def explain(error: BaseException) -> str:
    """Return an error as one message. Faults of the machine, such as a full disk, come with what to do."""
    text = str(error) or type(error).__name__
    if isinstance(error, DiskFullError):
        return error.strerror or text
    if _is_lost_connection(error):
        return f"another rank has ended and printed why. This rank has lost its connection: {one_line(text)[:200]}"
    if _is_full_disk(error):
        return f"no space left on the disk ({text}). Free some space; finished work is kept."
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"a port is in use ({text}). End the other process, or choose another port (0 takes a free one)."
    if isinstance(error, MemoryError):
        return "out of memory."
    return f"{type(error).__name__}: {text}"


def set_environment(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment variables for a stage's process. Variables that the user has set keep their values."""
    defaults = {
        ISA_VARIABLE: onednn_isa(),
        # Trainer and engine share the cores. Threads that spin longer starve each other: at 20,000 a step took 2.6
        # times as long on a busy machine. Threads that never spin cost a tenth on an idle one.
        "GOMP_SPINCOUNT": "1000",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # one bar per model that is loaded or saved
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    environment = {name: value for name, value in environment.items() if name not in SRUN_VARIABLES}
    return {**defaults, **environment, PARENT_VARIABLE: str(os.getpid())}
