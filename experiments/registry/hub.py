"""Files of the Hugging Face hub in a configuration, replaced by their copies in the hub's local cache.

A model is ``owner/name@revision``; without ``@revision`` whoever loads it asks the hub. Data is
``hf://datasets/owner/name[@revision][/file or folder]``, as in polars, pandas and DuckDB.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import one_line
from data_modules.datasets.benchmark_names import split_reference
from experiments.registry.errors import ExperimentError
from experiments.registry.files import Config
from experiments.registry.keys import MODELS, TABLES

DATASETS = "hf://datasets/"
DATA = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>refs/(convert|pr)/[^/]+|[^/]+))?(/(?P<inside>.+))?")
MODEL = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>\S+)")
LOCAL_MODELS = (".engine.init_args.model", ".encoder.model")  # other options "model" name a service's
WEIGHTS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")  # not the same weights in other formats


def with_local_files(config: Config, root: Path) -> Config:
    """Return a resolved configuration with paths of the hub's cache instead of names on the hub. Downloads files that
    the cache lacks.

    Args:
        config: resolved configuration.
        root: folder that relative paths start from.

    Raises:
        ExperimentError: a form that is not known, or no such repository, revision or file, or no connection.
    """

    def walk(value: Any, key: str, where: str) -> Any:
        if isinstance(value, dict):
            return {k: walk(v, str(k), f"{where}.{k}") for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, key, f"{where}[{i}]") for i, v in enumerate(value)]
        if not isinstance(value, str):
            return value
        benchmark, path = split_reference(value)
        if path.startswith("hf://"):
            return (f"{benchmark}:" if benchmark else "") + _data(path, where)
        named = key in MODELS and (key != "model" or where.endswith(LOCAL_MODELS))
        if named and (found := MODEL.fullmatch(value)) and not (root / value).exists():
            return _download(found["name"], found["revision"], "model", WEIGHTS, where)
        return value

    return {
        key: walk(value, key, key) if key in ("model", "data", "task", "trainer") else value
        for key, value in config.items()
    }


def _data(uri: str, where: str) -> str:
    """Return the path of a data set's file or folder in the hub's cache."""
    found = DATA.fullmatch(uri.removeprefix(DATASETS)) if uri.startswith(DATASETS) else None
    if found is None:
        raise ExperimentError(f"{where} is {uri}; expected {DATASETS}owner/name[@revision][/file or folder]")
    inside = (found["inside"] or "").strip("/")
    wanted = (inside, f"{inside}/*") if inside else tuple(f"*{suffix}*" for suffix in TABLES)
    folder = _download(found["name"], found["revision"], "dataset", wanted, where)
    path = Path(folder, inside)
    if not path.exists():
        raise ExperimentError(f"{where}: {uri}: no such file or folder there{_files(found['name'], found['revision'])}")
    return str(path)


def _files(name: str, revision: str | None) -> str:
    """Return the end of a message: the files of tables in a data set, if the hub can be reached."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(name, repo_type="dataset", revision=revision)
    except OSError:
        return ""
    tables = [file for file in files if any(suffix in file for suffix in TABLES)]
    return f"; it has {', '.join(tables[:8])}{' ...' if len(tables) > 8 else ''}"


def _download(name: str, revision: str | None, kind: str, wanted: tuple[str, ...], where: str) -> str:
    """Return the folder of a repository's revision in the hub's cache, with the files whose names match."""
    from huggingface_hub.errors import HFValidationError

    try:
        return _snapshot(name, revision, kind, wanted)
    except (HFValidationError, OSError) as error:
        at = f"{name}@{revision}" if revision else name
        raise ExperimentError(
            f"{where}: {kind} {at} of the hub: {one_line(error).rstrip('.')}. Check the name and the network "
            "(mirror: HF_ENDPOINT; gated: HF_TOKEN), or give a local path"
        ) from None


@cache
def _snapshot(name: str, revision: str | None, kind: str, wanted: tuple[str, ...]) -> str:
    """Ask the hub once per process, so that all stages of a command get the same commit of a branch."""
    from huggingface_hub import snapshot_download

    return snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=list(wanted))
