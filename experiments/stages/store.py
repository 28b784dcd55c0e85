"""The folder of a stage on disk: its files, its lock, its done marker. Imports without torch.

outputs/NAME/KEY/
    config.yaml       resolved configuration      stage.json   arguments, upstream keys, sessions
    checkpoints/      for resuming                model/       exported Hugging Face folder
    evaluation.json   evaluation/*.parquet        trajectories/   log
    digests.sha256    of its tables for other stages (model/ and checkpoints have their own)
    result.json       written last: the stage is done
outputs/NAME/KEY.lock   held while a process works in the folder
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from callbacks.training import stop_request
from callbacks.training.checkpoint_files import FOLDER, anything_saved, find_checkpoint
from common.digests import files_of, list_path, write_digests
from common.files import REPLACED, obey_umask, remove, set_aside, write_atomically
from experiments.registry.files import read_json
from experiments.stages.graph import Stage

HANDED_ON = (".parquet", ".jsonl", ".csv")
MODEL = "model"
INDEX = "index"
OWN_FOLDERS = (FOLDER, MODEL, INDEX)  # have their own digests; an index records the sizes of its files


class Lock:
    """A lock file that one process holds, on this machine or another with the same file system.

    The kernel releases the lock of a dead process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def owner(self) -> dict[str, Any] | None:
        """Return the fields that the lock's holder has written (pid, host, ...), or None if the lock is free."""
        if not self.path.is_file():
            return None
        with self.path.open("r+") as stream:
            if _try_lock(stream.fileno(), fcntl.LOCK_SH):  # shared, so that two readers do not see each other
                return None
            text = stream.read()
        return json.loads(text) if text else {"pid": None}

    @contextmanager
    def held(self, on_wait: Callable[[dict[str, Any]], None] = lambda owner: None, poll: float = 0.5) -> Iterator[None]:
        """Context manager that holds the lock. While another process holds the lock, it calls ``on_wait`` once and
        waits."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+") as stream:
            waited = False
            while not _try_lock(stream.fileno()):
                if not waited:
                    on_wait(self.owner() or {"pid": None})
                    waited = True
                time.sleep(poll)
            stream.truncate(0)  # a killed process may have left its fields
            self.update(pid=os.getpid(), host=os.uname().nodename, since=time.time())
            try:
                yield
            finally:
                stream.truncate(0)

    def update(self, **fields: Any) -> None:
        """Change fields in the lock file that ``owner`` returns. They are synced to the disk, for other nodes."""
        with self.path.open("r+") as stream:
            text = json.dumps({**json.loads(stream.read() or "{}"), **fields})
            stream.seek(0)
            stream.write(text)
            stream.truncate()
            stream.flush()
            os.fsync(stream.fileno())


class StageFolder:
    """The output folder of one stage (a training run, test or task): its files, state and sessions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def log_path(self) -> Path:
        return self.path / "log"

    @property
    def lock(self) -> Lock:
        return Lock(self.path.with_name(self.path.name + ".lock"))

    @property
    def checkpoint(self) -> Path | None:
        """The path of the stage's newest checkpoint, or None."""
        return find_checkpoint(self.path)

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def is_tested(self) -> bool:
        """Whether the stage has a test: tasks have none, nor does a run with limit_test_batches 0."""
        return self.evaluation.is_file() and "test" in read_json(self.evaluation)

    def result(self) -> dict[str, Any] | None:
        """Return the content of the stage's result.json, or None while the stage is not done."""
        try:
            return read_json(self.path / "result.json")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def state(self) -> str:
        """Return the stage's state: ``done``, ``running``, ``interrupted`` (has checkpoints), ``unfinished`` (has none)
        or ``missing``."""
        if self.result() is not None:
            return "done"
        if not self.path.is_dir():
            return "missing"
        if self.lock.owner() is not None:
            return "running"
        return "interrupted" if anything_saved(self.path) else "unfinished"

    def identity(self) -> str | None:
        """Return a hash of what the stage hands on (its model, or else its index and tables), or None while the stage
        is not done. A second run has the same identity if its model or index is the same; tables of trajectories record
        times, and so differ."""
        if self.result() is None:
            return None
        model, index = list_path(self.path / MODEL), self.path / INDEX / "metadata.json"
        if model.is_file():
            found = model.read_text()
        elif index.is_file():
            described = read_json(index)
            found = json.dumps([described.get(key) for key in ("kind", "corpus_sha256", "passages")])
        else:
            found = list_path(self.path).read_text() if list_path(self.path).is_file() else ""
        return hashlib.sha256(found.encode()).hexdigest()

    def replaced_upstream(self, upstream: Iterable[Stage]) -> list[str]:
        """Return the names of the ``upstream`` stages that have another outcome than when this stage began, because
        they were run again."""
        then = self.metadata().get("identities", {})
        now = {stage.name: StageFolder(stage.folder).identity() for stage in upstream}
        return [name for name, one in now.items() if None not in (one, then.get(name)) and one != then[name]]

    # -- sessions -----------------------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        path = self.path / "stage.json"
        return read_json(path) if path.is_file() else {}

    def has_weights(self) -> bool:
        """Return whether the stage's folder has an exported model or a checkpoint, even a damaged or renamed one."""
        return bool(anything_saved(self.path)) or (self.path / MODEL).exists()

    def prepare(self, stage: Stage, metadata: dict[str, Any], *, keep: bool) -> Path | None:
        """Prepare the stage's folder for a run: write config.yaml and stage.json, and record the start of a session.

        Args:
            keep: if false, begin with an empty folder. A folder with weights is renamed and stays until ``finish``;
                any other folder is deleted.

        Returns:
            the new name of a renamed folder.
        """
        renamed = None if keep or not self.has_weights() else set_aside(self.path, REPLACED)
        if not keep:
            remove(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        sessions = self.metadata().get("sessions", [])
        if sessions and sessions[-1]["ended"] is None:  # killed, at the earliest after its last checkpoint
            end = self.checkpoint.stat().st_mtime if self.checkpoint else sessions[-1]["started"]
            sessions[-1]["ended"] = max(end, sessions[-1]["started"])
        sessions.append({"started": time.time(), "ended": None})
        stop_request.forget(self.path)
        write_atomically(self.config_path, yaml.safe_dump(stage.config, sort_keys=False, allow_unicode=True))
        write_atomically(self.path / "stage.json", json.dumps({**metadata, "sessions": sessions}, indent=2))
        return renamed

    def end_session(self) -> float:
        """Record the end of the current session, and return the seconds of all sessions."""
        metadata = self.metadata()
        metadata["sessions"][-1]["ended"] = time.time()
        write_atomically(self.path / "stage.json", json.dumps(metadata, indent=2))
        return sum(s["ended"] - s["started"] for s in metadata["sessions"])

    def undo_prepare(self, renamed: Path | None) -> None:
        """Delete the stage's folder, and restore the folder that ``prepare`` has ``renamed``."""
        remove(self.path)
        if renamed is not None:
            os.rename(renamed, self.path)

    def _replaced(self) -> list[Path]:
        """Return the folders that ``prepare`` renamed, oldest first."""
        found = self.path.parent.glob(f"{self.path.name}{REPLACED}*")
        numbered = {path.name.partition(REPLACED)[2] or "1": path for path in found}
        return [numbered[number] for number in sorted(filter(str.isdigit, numbered), key=int)]

    def finish(self, result: dict[str, Any]) -> None:
        """Mark the stage as done: write the digests of its tables, then result.json. Delete the folders that this stage
        replaces."""
        obey_umask(self.path)
        own = [self.path / name for name in OWN_FOLDERS]
        tables = [file for file in files_of(self.path) if file.suffix in HANDED_ON]
        write_digests(self.path, [file for file in tables if not any(map(file.is_relative_to, own))])
        write_atomically(self.path / "result.json", json.dumps(result, indent=2))
        for earlier in self._replaced():
            remove(earlier)


def _try_lock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
