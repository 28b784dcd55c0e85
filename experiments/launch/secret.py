"""The secret of the servers that a run uses, in the folder of the outputs, which all nodes and servers share."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from experiments.registry.errors import ExperimentError

FILE = f".secret-{os.getuid()}"  # several users may share a folder of outputs
WRITTEN_S = 20.0  # until what another node writes is seen here: network file systems show it late


def share_secret(outputs: Path) -> None:
    """Put the secret of these outputs into the environment, where servers and clients that this process starts find it
    (``common.secret``); one that the user has put there stays. It is made when it is first wanted, for the user's
    eyes alone. Raises ExperimentError where the file holds none."""
    from common.secret import SECRET_VARIABLE, read_secret

    if os.environ.get(SECRET_VARIABLE):
        return
    path = outputs / FILE
    outputs.mkdir(parents=True, exist_ok=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:  # of an earlier run, or another node is making it just now
        deadline = time.monotonic() + WRITTEN_S
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.1)
    try:
        os.environ[SECRET_VARIABLE] = read_secret(path)
    except ValueError as error:
        raise ExperimentError(str(error)) from None
