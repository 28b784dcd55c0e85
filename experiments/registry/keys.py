"""Content keys: the same configuration over the same inputs has the same key, anything else has another.

A key is a SHA-256 over

* the resolved configuration without the parts that only watch (progress bar, logger, trajectory pages, ...) and without
  the number of ranks, which changes no result: a stage goes on, from its checkpoint, on as many as there are,
* with every reference to another stage replaced by that stage's key,
* and every path of an existing file or folder replaced by the hash of its contents (where it lies does not matter),
* and the arguments left for the parser.

Code is not part of the key; result.json records the commit, and a reused stage says with which it was made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_modules.datasets.benchmark_names import split_reference
from experiments.registry.compose import Config
from rollout.digests import sha256
from rollout.files import write_atomically

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
    """Whether a value names an existing file or folder (never one that holds the project itself, such as ``/``)."""
    return looks_like_path(text) and (root / text).exists() and not root.is_relative_to((root / text).resolve())


def stage_key(config: Config, arguments: Sequence[str], root: Path, hash_path: Callable[[Path], str]) -> str:
    """Key of a configuration in which ``${stage:X}`` has been resolved to ``@stage/<key of X>``."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): walk(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(v) for v in value]
        if isinstance(value, str):
            benchmark, path = split_reference(value)
            if is_input(path, root):
                return (f"{benchmark}:" if benchmark else "") + "sha256:" + hash_path(root / path)
        return value

    body = {"version": KEY_VERSION, "config": walk(semantic(config)), "arguments": list(arguments)}
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
        if path.is_file():
            return self._file(path)
        files = sorted(p for p in path.rglob("*") if p.is_file())
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
