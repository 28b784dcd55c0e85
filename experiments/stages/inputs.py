"""Describes the data files of a stage for MLflow's "Datasets used": name, digest, number of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.tracking.mlflow_names import storable
from data_modules.datasets.benchmark_names import split_reference
from experiments.registry.keys import HASHES, KEY_LENGTH, PathHasher

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

CONTEXTS = {
    "train_files": "training",
    "trajectories": "training",
    "val_files": "validation",
    "test_files": "testing",
}


def dataset_inputs(config: Mapping[str, Any], outputs: Path) -> Iterator[DatasetInput]:
    """Yield a stage's data files as MLflow dataset inputs (name, digest, number of rows). Skips a missing or unreadable
    file, which the data module reports. The digest is the beginning of the file's SHA-256, as in the stage's key.

    Args:
        config: resolved configuration of a fit or a test.
        outputs: folder of the stages. The file of a stage is named after the stage.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    from data_modules.datasets.files import DatasetError, expand

    hasher = PathHasher(outputs / HASHES)
    arguments = (config.get("data") or {}).get("init_args") or {}
    tests = config["experiment"].get("kind") == "test"  # the configuration may still name training files
    for argument, context in CONTEXTS.items():
        if tests and context != "testing":
            continue
        for reference in arguments.get(argument) or []:
            benchmark, path = split_reference(reference)
            try:
                counted = [(file, _rows(file)) for file in expand([path])]
            except DatasetError:
                continue
            for file, rows in counted:
                yield DatasetInput(
                    Dataset(
                        name=storable(benchmark or dataset_name(file.absolute(), outputs.absolute())),
                        digest=hasher(file)[:KEY_LENGTH],
                        source_type="local",
                        source=json.dumps({"uri": str(file)}),
                        profile=json.dumps({"num_rows": rows}),
                    ),
                    [InputTag("mlflow.data.context", context)],
                )


def _rows(path: Path) -> int:
    from data_modules.datasets.files import DatasetError, read_rows

    if path.suffix != ".parquet":
        return len(read_rows(path))
    import polars as pl

    try:
        return pl.scan_parquet(path).select(pl.len()).collect().item()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DatasetError(f"{path} cannot be read as parquet") from error


def dataset_name(path: Path, outputs: Path) -> str:
    """Return a short name for a data file, such as ``world_tiny/test.parquet``: its stage or its folder, and its file
    name."""
    if path.is_relative_to(outputs):
        stage, _, *rest = path.relative_to(outputs).parts
        return "/".join([stage, *rest])
    return "/".join(path.parts[-2:])
