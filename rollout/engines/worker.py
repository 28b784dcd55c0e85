"""The child process of an engine: ``python -m rollout.engines.worker FD PARENT_PID``, started by `EngineProcess`.

Messages from the parent: ("generate", number, token ids, SamplingParams), ("cancel", number), ("load", number, paths,
version, verify checksums, between steps), ("transfer", number, method, arguments, version, between steps), ("sleep",
number), ("wake_up", number, part), ("close",). To the parent: ("ready", info), ("refused", message), ("results",
[(number, outcome)]), ("alive", None), ("fatal", traceback). An outcome is a Generation, None, or an error that concerns
only this message.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

from common.errors import one_line

if TYPE_CHECKING:
    from rollout.engines.base import Generation, SamplingParams
    from rollout.engines.weights.files import WeightFiles


BEAT_S = 1.0  # longest pause between heartbeats, while there is work


class Backend(Protocol):
    """The inference engine inside the child process. `add` takes requests, `step` runs one engine step, and weights
    change between engine steps."""

    version: int  # of the weights; set by this module after each update

    @property
    def info(self) -> dict[str, Any]: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, request_id: int, token_ids: list[int], sampling: SamplingParams) -> None:
        """Take a request for tokens. An exception is the answer to this request, which must leave no trace."""
        ...

    def cancel(self, request_id: int) -> None: ...

    def step(self) -> list[tuple[int, Generation | Exception]]:
        """Run one engine step, and return the finished requests.

        An exception in place of a generation fails that request; a raised exception ends the process."""
        ...

    def check(self, files: WeightFiles) -> None:
        """Check that weight files fit the model, without changing it. Raises ValueError."""
        ...

    def load(self, files: WeightFiles) -> None:
        """Load the weights of checked files. An exception ends the process, because the model may be half loaded."""
        ...

    def transfer(self, method: str, arguments: dict[str, Any]) -> None: ...

    def sleep(self) -> None:
        """Free the engine's device memory. No request is in flight. An exception here or in `wake_up` ends the
        process."""
        ...

    def wake_up(self, part: str) -> None:
        """Take back the device memory of "weights" or "kv_cache", in this order."""
        ...


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the trainer, which closes this process
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    threading.Thread(target=_exit_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    try:
        class_path, options, threads = connection.recv()
        try:
            with _beating(connection):
                backend = _build(class_path, options, threads)
        except ValueError as error:
            connection.send(("refused", str(error)))
            return
        connection.send(("ready", backend.info))
        _serve(connection, backend)
        connection.close()
        os._exit(0)  # the teardown of torch and vLLM takes seconds, and saves nothing
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except Exception:
        connection.send(("fatal", traceback.format_exc()))
        sys.exit(1)


@contextlib.contextmanager
def _beating(connection: Connection) -> Iterator[None]:
    """Context manager that sends heartbeats to the parent from a thread, because the block may take minutes."""
    done = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            while not done.wait(BEAT_S):
                connection.send(("alive", None))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _build(class_path: str, options: dict[str, Any], threads: int) -> Backend:
    """Import the engine's backend class, and return an object of it.

    Two measures save 4 of the 12 processor seconds that vLLM needs to start: no garbage collection while millions of
    permanent objects are created, and no import of scikit-learn, which transformers imports with SciPy if it is
    installed and which no engine uses."""
    gc.disable()
    sys.modules.setdefault("sklearn", None)  # pyright: ignore[reportArgumentType]  # documented: None blocks an import
    import torch

    torch.set_num_threads(threads)
    module, name = class_path.rsplit(".", 1)
    backend_class = getattr(importlib.import_module(module), name)
    gc.freeze()
    backend = backend_class(**options)
    gc.freeze()
    gc.enable()
    return backend


class _Pipe:
    """The child's connection to the parent process, with heartbeats."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._told = connection, time.monotonic()

    def tell(self, kind: str, content: Any = None) -> None:
        self._connection.send((kind, content))
        self._told = time.monotonic()

    def answer(self, number: int, outcome: Any) -> None:
        self.tell("results", [(number, outcome)])

    def beat(self) -> None:
        if time.monotonic() - self._told >= BEAT_S:
            self.tell("alive")

    def messages(self, wait_s: float | None) -> Iterator[tuple[Any, ...]]:
        """Yield all messages received from the parent. Waits ``wait_s`` for the first one (None: without limit)."""
        while self._connection.poll(wait_s):
            yield self._connection.recv()
            wait_s = 0.0


def _serve(connection: Connection, backend: Backend) -> None:
    """Alternate between the parent's messages and engine steps until the parent sends "close".

    A "load" or "transfer" waits for the requests before it, and later requests wait for it, so that one version of the
    weights samples a generation. With "between steps" it happens at once, and requests in flight continue with the new
    weights. Between the start and the end of a transfer the model is incomplete, and no step is taken.
    """
    pipe = _Pipe(connection)
    update: tuple[Any, ...] | None = None  # the update that waits
    held: list[tuple[Any, ...]] = []
    incomplete = False
    while True:
        working = update is not None or backend.has_work
        for kind, *arguments in pipe.messages((BEAT_S if incomplete else 0.0) if working else None):
            if kind == "close":
                return
            if kind == "cancel":
                held = [message for message in held if message[0] != arguments[0]]
                backend.cancel(*arguments)
            elif kind in ("load", "transfer"):
                *what, between_steps = arguments
                if between_steps:
                    incomplete = _update(pipe, backend, incomplete, kind, *what)
                else:
                    update = (kind, *what)
            elif kind in ("sleep", "wake_up"):
                number, *parts = arguments
                getattr(backend, kind)(*parts)
                pipe.answer(number, None)
            elif update:
                held.append(tuple(arguments))
            else:
                _add(pipe, backend, *arguments)
        if update and (incomplete or not backend.has_work):  # an incomplete model cannot finish the requests in flight
            incomplete, update = _update(pipe, backend, incomplete, *update), None
            for arguments in held:
                _add(pipe, backend, *arguments)
            held.clear()
        if backend.has_work and not incomplete:
            results = backend.step()
            if results:
                pipe.tell("results", results)
        pipe.beat()


def _add(pipe: _Pipe, backend: Backend, number: int, token_ids: list[int], sampling: SamplingParams) -> None:
    """Pass a request to the backend. If the backend refuses it, only this request fails."""
    try:
        backend.add(number, token_ids, sampling)
    except Exception as error:
        with contextlib.suppress(Exception):
            backend.cancel(number)
        pipe.answer(number, ValueError(f"the engine refuses this request: {one_line(error)}"))


def _update(pipe: _Pipe, backend: Backend, incomplete: bool, kind: str, number: int, *arguments: Any) -> bool:
    """Run one weight update (load or transfer), answer the parent, and return whether the model is incomplete now."""
    error = _load(backend, *arguments) if kind == "load" else _transfer(backend, *arguments)
    pipe.answer(number, error and ValueError(error))
    if kind == "load" or arguments[0] == "finish_weight_update":
        return incomplete and error is not None
    return incomplete or arguments[0] == "start_weight_update"


def _load(backend: Backend, paths: list[str], version: int, verify: bool) -> str | None:
    """Load weight files into the backend, and return why they were refused, or None. A refusal leaves the model
    unchanged."""
    from rollout.engines.weights.files import WeightFiles

    files = WeightFiles(paths)
    try:
        backend.check(files)
        files.verify(verify)
    except (ValueError, OSError) as error:
        return str(error)
    backend.load(files)
    backend.version = version
    return None


def _transfer(backend: Backend, method: str, arguments: dict[str, Any], version: int | None) -> str | None:
    """Make one call of a weight transfer in the backend, and return its error as a text, or None."""
    try:
        backend.transfer(method, arguments)
    except Exception:  # the engine stays incomplete until all weights are pushed; the parent ensures that
        return f"{method} failed in the engine:\n{traceback.format_exc()}"
    if version is not None:
        backend.version = version
    return None


def _exit_with_parent(parent: int) -> None:
    """End this process when the parent ends, even by SIGKILL, and even during a long computation."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
