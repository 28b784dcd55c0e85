"""Content keys of stages: equal keys mean the same configuration over the same inputs.

A key is a SHA-256 over

* the resolved configuration, without the parts that only observe (progress bar, logger, trajectory pages, ...) and
  without the number of ranks, which changes no result: a stage can resume on another number,
* with every reference to another stage replaced by that stage's key,
* with every path of an existing file or folder replaced by the hash of its contents, wherever it is. This holds for
  options that name models and data (``INPUTS``) and for those that accept text by their class's annotations. Our own
  classes take folders only in the options ``FOLDERS``: elsewhere a prefix ``/usr/lib`` is text,
* and the arguments left for the parser (``+=``, another class), with the hashes of the files that they name.

Code is not part of the key; result.json records the commit.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import yaml

from common.digests import sha256
from common.errors import one_line
from common.files import write_atomically
from data_modules.datasets.benchmark_names import split_reference
from experiments.registry.compose import Config
from experiments.registry.constructors import arguments_of
from experiments.registry.errors import ExperimentError
from experiments.registry.files import parse_yaml
from experiments.registry.project import PACKAGES

KEY_VERSION = 1  # raise it after a change of meaning; every stage then runs again
KEY_LENGTH = 12
HASHES = ".file_hashes.json"  # cache of the hasher, in the outputs

WATCHING_TRAINER_KEYS = (
    "logger",
    "enable_progress_bar",
    "enable_model_summary",
    "log_every_n_steps",
    "profiler",
    "default_root_dir",
    "barebones",
)
RANKS = ("devices", "num_nodes")
WATCHING_CALLBACKS = (
    "callbacks.training.progress.",
    "callbacks.training.throughput.",
    "callbacks.tracking.trajectory_log.",
    "callbacks.training.training_totals.",
    "callbacks.tracking.mlflow_logger.",
    "callbacks.training.rank_watch.",
    "callbacks.training.resume.",
    "lightning.pytorch.callbacks.LearningRateMonitor",
    "lightning.pytorch.callbacks.RichProgressBar",
    "lightning.pytorch.callbacks.TQDMProgressBar",
    "lightning.pytorch.callbacks.RichModelSummary",
)
TABLES = (".parquet", ".csv", ".jsonl", ".json")
MODELS = ("policy", "teacher", "reference", "critic", "model", "tokenizer")  # options that name a model
QUESTION_FILES = ("train_files", "val_files", "test_files", "files")  # or traces
DATA = (*QUESTION_FILES, "trajectories", "corpus")  # that name files or folders
INPUTS = (*MODELS, *DATA, "index", "vectors")
FOLDERS = (*INPUTS, "folder", "folders", "source")  # options of our classes that may name a folder; other texts: files
PATHS = (Path, os.PathLike)
TEXTS = (str, *PATHS, Any)
KERNEL = ("/proc", "/sys")  # their files may be endless or wait for events
MOST = 50_000  # files and folders of an input; ALFWorld has about 30,000
FILE_SUFFIXES = (*TABLES, ".yaml", ".txt", ".ckpt", ".safetensors", ".index", ".faiss", ".pt")


def semantic(config: Config) -> Config:
    """Return the part of a resolved configuration that can change a result, without loggers, progress bars and the
    number of ranks."""
    out = {k: v for k, v in config.items() if k in ("seed_everything", "model", "data", "task")}
    out["kind"] = config["experiment"]["kind"]
    trainer = {k: v for k, v in (config.get("trainer") or {}).items() if k not in (*WATCHING_TRAINER_KEYS, *RANKS)}
    if isinstance(trainer.get("callbacks"), list):
        trainer["callbacks"] = [c for c in trainer["callbacks"] if not _watches(c)]
    out["trainer"] = trainer
    return out


def _watches(callback: Any) -> bool:
    path = callback.get("class_path", "") if isinstance(callback, dict) else str(callback)
    return path.startswith(WATCHING_CALLBACKS)


def looks_like_path(text: str) -> bool:
    return "/" in text or text.endswith(FILE_SUFFIXES)


def is_input(text: str, root: Path) -> bool:
    """Return whether a text in a configuration names an existing file or folder. Devices, pipes, kernel files, and
    folders that contain the project (``/``) do not count."""
    if not looks_like_path(text):
        return False
    try:
        path = (root / text).resolve()
        found = path.is_file() or path.is_dir()
    except (OSError, ValueError, RuntimeError):  # a text too long for a name, a zero byte, a loop of links
        return False
    return found and not root.is_relative_to(path) and not any(map(path.is_relative_to, KERNEL))


def takes_path(class_path: str, option: str, is_folder: bool) -> bool:
    """Return whether a class accepts a path for an option, by its annotation and ``FOLDERS``. Types are checked later,
    so this keeps a folder that is given as a learning rate from being read."""
    ours = class_path.partition(".")[0] in PACKAGES
    wanted = PATHS if ours and is_folder and option not in FOLDERS else TEXTS
    module, _, name = class_path.rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):  # the check of the classes reports it
        return False
    arguments = arguments_of(target)
    if (parameter := arguments.known.get(option)) is not None:
        return _has(parameter.annotation, wanted)
    return not arguments.complete and wanted is TEXTS


def _has(hint: Any, wanted: Sequence[Any]) -> bool:
    hint = getattr(hint, "__value__", hint)  # a named alias
    return hint in wanted or any(_has(part, wanted) for part in get_args(hint))


def stage_key(config: Config, arguments: Sequence[str], root: Path, hash_path: Callable[[Path], str]) -> str:
    """Return the key of a stage: a hash of its configuration and of the files it reads. ``${stage:X}`` must be resolved
    to ``@stage/<key of X>``.

    Raises:
        ExperimentError: an input folder that is too large, or an unreadable file.
    """

    def walk(value: Any, name: str, takes: Callable[[bool], bool]) -> Any:
        if isinstance(value, dict) and isinstance(path := value.get("class_path"), str):
            given = value.get("init_args")
            if isinstance(given, dict):
                given = {str(k): walk(v, str(k), partial(takes_path, path, str(k))) for k, v in given.items()}
            return {str(k): given if k == "init_args" else walk(v, str(k), takes) for k, v in value.items()}
        if isinstance(value, dict):
            return {str(k): walk(v, str(k), takes) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(v, name, takes) for v in value]
        if isinstance(value, str):
            benchmark, path = split_reference(value)
            if is_input(path, root) and (name in INPUTS or takes((root / path).is_dir())):
                try:
                    return (f"{benchmark}:" if benchmark else "") + "sha256:" + hash_path(root / path)
                except (OSError, ValueError) as error:
                    raise ExperimentError(f"'{name}' is {value}: {one_line(error)}") from None
        return value

    def walk_argument(argument: str) -> str:
        """Return ``--path=value`` with the hashes of the files that the value names, whatever the option."""
        path, _, text = argument.partition("=")
        try:
            value = parse_yaml(f"value: {text}")["value"]
        except yaml.YAMLError:
            value = text
        hashed = walk(value, path.rstrip("+").rpartition(".")[2], lambda is_folder: not is_folder)
        return argument if hashed == value else f"{path}={json.dumps(hashed, sort_keys=True)}"

    given = [walk_argument(one) for one in arguments]
    body = {"version": KEY_VERSION, "config": walk(semantic(config), "", bool), "arguments": given}
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


class PathHasher:
    """Hashes the contents of files and folders, and caches the hashes. ``cache``: file with the hash of each file by
    size, inode and modification time, so that large inputs (a 60 GB index) are read once."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        try:
            self._known: dict[str, str] = dict(json.loads(cache.read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError):  # missing or damaged: files are read again
            self._known = {}
        self._changed = False

    def __call__(self, path: Path) -> str:
        """Return the SHA-256 of a file's or folder's contents. Raises ValueError for a folder with more than ``MOST``
        entries, OSError for an unreadable file."""
        if path.is_file():
            return self._file(path)
        entries = list(islice(path.rglob("*"), MOST + 1))
        if len(entries) > MOST:
            raise ValueError(f"a folder of more than {MOST:,} files; name the folder of one model or data set")
        files = sorted(p for p in entries if p.is_file())
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.relative_to(path)}\0{self._file(file)}\n".encode())
        return digest.hexdigest()

    def _file(self, path: Path) -> str:
        stat = path.stat()
        identity = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        if identity not in self._known:
            self._known[identity] = sha256(path)
            self._changed = True
        return self._known[identity]

    def save(self) -> None:
        """Write the cache of hashes atomically, if a new file was hashed."""
        if not self._changed:
            return
        write_atomically(self.cache, json.dumps(self._known))
        self._changed = False
