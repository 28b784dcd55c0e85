"""The child process of a `DeadlinePool`: ``python -m rollout.rewards.deadline_worker FD FUNCTION MEMORY_MB``.

From the parent: (arguments, timeout in seconds). To the parent: ("ready", None), ("value", result) or ("error", text).
"""

from __future__ import annotations

import importlib
import resource
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection

GRACE_SECONDS = 1.0  # the parent kills at the deadline; this process ends itself after it, should the parent be gone


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    module, _, name = sys.argv[2].rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
        _limit(resource.RLIMIT_AS, int(sys.argv[3]) * 2**20)
        _limit(resource.RLIMIT_CORE, 0)
    except Exception:
        connection.send(("error", traceback.format_exc()))
        return
    connection.send(("ready", None))
    try:
        while True:
            arguments, timeout_s = connection.recv()
            # Not a Python handler: SIGALRM's default action ends the process even in the middle of one long operation.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_SECONDS)
            try:
                answer = ("value", function(*arguments))
            except Exception:
                answer = ("error", traceback.format_exc())
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, or has no more use for this process


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard),) * 2)


if __name__ == "__main__":
    main()
