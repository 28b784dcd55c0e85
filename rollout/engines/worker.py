"""The child process of an engine: ``python -m rollout.engines.worker FD PARENT_PID``, started by `EngineProcess`.

Messages from the parent: ("generate", id, token ids, SamplingParams), ("cancel", id), ("load", paths, version),
("load_between", paths, version), ("transfer", method, arguments, version), ("close",). To the parent: ("ready", info),
("refused", message), ("results", [(id, Generation)]), ("loaded", error or None), ("fatal", traceback).
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from rollout.engines.weights import WeightFiles


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes this process
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    threading.Thread(target=_exit_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    try:
        class_path, options, threads = connection.recv()
        import torch

        torch.set_num_threads(threads)
        module, name = class_path.rsplit(".", 1)
        try:
            backend = getattr(importlib.import_module(module), name)(**options)
        except ValueError as error:
            connection.send(("refused", str(error)))
            return
        connection.send(("ready", backend.info))
        _serve(connection, backend)
        connection.close()
        os._exit(0)  # tearing down torch and vLLM takes seconds, and there is nothing to save
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except Exception:
        connection.send(("fatal", traceback.format_exc()))
        sys.exit(1)


def _serve(connection: Connection, backend: Any) -> None:
    """Alternate between messages and steps. A load waits until the requests that came before it have finished, and
    those that come after it wait for the load: every generation is sampled by one version of the weights. Only a
    "load_between" takes place at once, between two steps: what is under way goes on with the new weights. No step is
    taken while a transfer has begun and whole weights have not come: the model is none."""
    load: tuple[list[str], int] | None = None
    held: list[tuple] = []
    torn = False
    while True:
        while connection.poll(0 if load or (backend.has_work and not torn) else None):
            kind, *arguments = connection.recv()
            if kind == "close":
                return
            if kind == "cancel":
                held = [message for message in held if message[0] != arguments[0]]
                backend.cancel(*arguments)
            elif kind == "load":
                load = tuple(arguments)
            elif kind == "transfer":
                error = _transfer(backend, *arguments)
                if arguments[0] == "start_weight_update":
                    torn = True
                elif arguments[0] == "finish_weight_update":
                    torn = torn and error is not None
                connection.send(("loaded", error))
            elif kind == "load_between":
                error = _load(backend, *arguments)
                torn = torn and error is not None
                connection.send(("loaded", error))
            elif load:
                held.append(tuple(arguments))
            else:
                backend.add(*arguments)
        if load and (torn or not backend.has_work):  # torn: nothing is left to finish on
            error = _load(backend, *load)
            torn, load = torn and error is not None, None
            connection.send(("loaded", error))
            for arguments in held:
                backend.add(*arguments)
            held.clear()
        if backend.has_work and not torn:
            results = backend.step()
            if results:
                connection.send(("results", results))


def _load(backend: Any, paths: list[str], version: int) -> str | None:
    """Returns why the weights were refused (nothing has changed then), or None."""
    files = WeightFiles(paths)
    try:
        files.verify()
        backend.load(files)
    except ValueError as error:
        return str(error)
    backend.version = version
    return None


def _transfer(backend: Any, method: str, arguments: dict[str, Any], version: int | None) -> str | None:
    """Returns what the backend said against it, or None."""
    try:
        backend.transfer(method, arguments)
    except Exception:  # the engine lives on, unfit until whole weights have come; the parent sees to that
        return f"{method} failed in the engine:\n{traceback.format_exc()}"
    if version is not None:
        backend.version = version
    return None


def _exit_with_parent(parent: int) -> None:
    """Also in the middle of a long computation, and also when the parent is killed with SIGKILL."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
