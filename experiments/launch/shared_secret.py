"""Shares the secret of a run's servers through the folder of the outputs, which all nodes use."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from experiments.registry.errors import ExperimentError

FILE = f".secret-{os.getuid()}"  # several users may share a folder of outputs
WRITTEN_S = 20.0  # network file systems show the file of another node late


def share_secret(outputs: Path) -> None:
    """Put the secret of an output folder into the environment, for search and vLLM servers and their clients that
    this process starts. A secret that the user has set stays. The first call writes the file, readable by the user
    alone. Raises ExperimentError for a file without a secret."""
    from common.secret import SECRET_VARIABLE, read_secret

    if os.environ.get(SECRET_VARIABLE):
        return
    path = outputs / FILE
    outputs.mkdir(parents=True, exist_ok=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:  # from an earlier run, or another node is writing it
        deadline = time.monotonic() + WRITTEN_S
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.1)
    try:
        os.environ[SECRET_VARIABLE] = read_secret(path)
    except ValueError as error:
        raise ExperimentError(str(error)) from None
