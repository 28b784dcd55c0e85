"""Content keys: the same configuration over the same inputs has the same key, anything else has another.

A key is a SHA-256 over

* the resolved configuration without the parts that only watch (progress bar, logger, trajectory pages, ...) and without
  the number of ranks, which changes no result: a stage goes on, from its checkpoint, on as many as there are,
* with every reference to another stage replaced by that stage's key,
* and every path of an existing file or folder replaced by the hash of its contents (where it lies does not matter), in
  options that name models and data (``INPUTS``) or that take a text by their class's annotations; a folder not in those
  options of our own classes that are no folder's name (``FOLDERS``): a prefix ``/usr/lib`` is a text,
* and the arguments left for the parser.

Code is not part of the key; result.json records the commit, and a reused stage says with which it was made.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_type_hints

from common.digests import sha256
from common.errors import one_line
from common.files import write_atomically
from data_modules.datasets.benchmark_names import split_reference
from experiments.registry.compose import Config
from experiments.registry.errors import ExperimentError

KEY_VERSION = 1  # raise to make every stage anew after a change of meaning
KEY_LENGTH = 12
HASHES = ".file_hashes.json"  # in the outputs: the cache of the hasher

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
INPUTS = (*MODELS, *DATA, "index", "vectors", "lucene", "passages_of")
FOLDERS = (*INPUTS, "folder")  # options of our own classes that may name a folder; the others' texts name files at most
OURS = ("callbacks", "data_modules", "experiments", "lightning_modules", "retrieval", "rollout")  # packages
PATHS = (Path, os.PathLike)
TEXTS = (str, *PATHS, Any)
KERNEL = ("/proc", "/sys")  # whose files have no end, or wait for events
MOST = 50_000  # files and folders of an input; ALFWorld's games are about 30,000
FILE_SUFFIXES = (*TABLES, ".yaml", ".txt", ".ckpt", ".safetensors", ".index", ".faiss", ".pt")


def semantic(config: Config) -> Config:
    """The part of a resolved configuration that can change a result."""
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
    """Whether a text names an existing file or folder. Devices and pipes, a folder that has the project in it (``/``),
    and the kernel's own files are no inputs."""
    if not looks_like_path(text):
        return False
    try:
        path = (root / text).resolve()
        found = path.is_file() or path.is_dir()
    except (OSError, ValueError, RuntimeError):  # a text too long for a name, a zero byte, a loop of links
        return False
    return found and not root.is_relative_to(path) and not any(map(path.is_relative_to, KERNEL))


def takes_path(class_path: str, option: str, is_folder: bool) -> bool:
    """Whether a class takes a path for an option, as far as annotations and ``FOLDERS`` say. The types of a
    configuration are checked after its key is known; a folder for a learning rate must not be read before."""
    ours = class_path.partition(".")[0] in OURS
    wanted = PATHS if ours and is_folder and option not in FOLDERS else TEXTS
    module, _, name = class_path.rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):  # the check of the classes says what is wrong
        return False
    for function in constructors(target):
        try:
            parameters = inspect.signature(function).parameters
            if option in parameters:
                return _has(get_type_hints(function).get(option, Any), wanted)
        except (NameError, TypeError, ValueError):  # names of a TYPE_CHECKING block; a builtin without signature
            return wanted is TEXTS
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
    return wanted is TEXTS


def constructors(target: Any) -> list[Any]:
    """The ``__init__`` of a class and of its bases, nearest first; a function itself."""
    if not inspect.isclass(target):
        return [target]
    return [vars(c)["__init__"] for c in inspect.getmro(target) if "__init__" in vars(c)]


def _has(hint: Any, wanted: Sequence[Any]) -> bool:
    hint = getattr(hint, "__value__", hint)  # of an alias with a name
    return hint in wanted or any(_has(part, wanted) for part in get_args(hint))


def stage_key(config: Config, arguments: Sequence[str], root: Path, hash_path: Callable[[Path], str]) -> str:
    """The key of a configuration in which ``${stage:X}`` has been resolved to ``@stage/<key of X>``.

    Raises:
        ExperimentError: a folder that is too large for an input, or a file that cannot be read.
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

    body = {"version": KEY_VERSION, "config": walk(semantic(config), "", bool), "arguments": list(arguments)}
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


class PathHasher:
    """Content hash of files and folders. Large inputs (a 60 GB index) are read once: a file whose size, inode and
    modification time have not changed since is taken from ``cache`` (what git does for its index)."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        try:
            self._known: dict[str, str] = dict(json.loads(cache.read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError):  # missing or damaged: files are read again
            self._known = {}
        self._changed = False

    def __call__(self, path: Path) -> str:
        """Raises ValueError for a folder with more than ``MOST`` entries, OSError for a file that cannot be read."""
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
        """Write the cache (atomically); nothing to do when nothing new was read."""
        if not self._changed:
            return
        write_atomically(self.cache, json.dumps(self._known))
        self._changed = False
