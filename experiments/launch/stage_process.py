"""Runs one stage on this node: one process, or ranks that torchrun starts.

The process leads a process group, so that Ctrl-C reaches it only through us. The first Ctrl-C asks it to stop cleanly
(SIGINT to the process alone, not to its engines and servers); the second ends the whole group. If *this* process is
killed, the kernel ends the child (``stages.stage.die_with_parent``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from callbacks.training.stop_request import STOPPED as STOPPED_FILE
from common.make_command import COMMAND_VARIABLE, CONTINUE_VARIABLE
from experiments.launch.fork_server import ForkedProcess, ForkServer
from experiments.launch.screen import Screen, out
from experiments.launch.shared_retrievers import shared_retrievers
from experiments.launch.torchrun import threads_per_rank, torchrun_command
from experiments.registry.hardware import ranks_of, require_launcher
from experiments.stages.context import STOPPED, Chain, RunContext, StageFailed
from experiments.stages.graph import Stage
from experiments.stages.stage import INTERRUPTED, REFUSED, set_environment
from experiments.stages.store import StageFolder

WATCH_S = 1.0  # between two calls of ``watch``
GRACE_S = 10.0  # for the child to end by itself, with a better message than that of ``watch``


def run_stage(
    stage: Stage,
    context: RunContext,
    watch: Callable[[], str | None] = lambda: None,
    fork_server: ForkServer | None = None,
) -> None:
    """Run a prepared stage to its end: its process, or its ranks on this node.

    Args:
        watch: returns why the stage must end early, or None (see ``run_child``).
        fork_server: starts a stage of one process.

    Raises:
        StageFailed: the stage failed.
        ExperimentError: the stage has ranks on other nodes, and no launcher starts them.
    """
    ranks, node, store = ranks_of(stage.config), context.node, StageFolder(stage.folder)
    require_launcher(stage.name, stage.config, node.count if node else None)
    with context.stop.working_in(stage.folder), shared_retrievers(stage.config, ranks.processes) as shared:
        commands = {COMMAND_VARIABLE: context.command(), CONTINUE_VARIABLE: context.resume_command()}
        environment = set_environment(dict(os.environ)) | commands
        environment |= shared.environment
        command = ["-m", "experiments", "stage", str(stage.folder)]
        if ranks.several:
            command = torchrun_command(command, ranks, node)
            environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
            fork_server = None
        else:
            command = [sys.executable, *command]
        log = store.log_path if context.is_main_node else store.path / f"log-node{node.rank if node else 0}"
        child = run_child(
            command, cwd=context.project.root, env=environment, log=log, watch=lambda: watch() or shared.trouble(),
            fork_server=fork_server, chain=context.chain,
        )  # fmt: skip
    _require_success(stage, store, context, child)


def _require_success(stage: Stage, store: StageFolder, context: RunContext, child: ChildResult) -> None:
    if child.interrupted or child.returncode == INTERRUPTED:
        raise StageFailed(f"{stage.name} was stopped. To continue: {context.resume_command()}", INTERRUPTED)
    if child.returncode == REFUSED:
        raise StageFailed("", REFUSED)
    if child.returncode != 0:
        log = context.project.relative(store.log_path)
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        hint = " (killed from outside, perhaps for lack of memory)" if child.returncode == -9 else ""
        how = child.trouble or f"{how}{hint}"
        saved = store.checkpoint is not None
        again = context.resume_command(resume=saved or stage.kind == "task")  # a task may continue from finished parts
        verb = "continue" if saved else "try again"
        raise StageFailed(f"{stage.name} failed: {how}. Its log: {log}. To {verb}: {again}", 1)
    if context.is_main_node and (store.path / STOPPED_FILE).exists():
        raise StageFailed(
            f"{stage.name} was stopped after a checkpoint. To continue: {context.resume_command()}", STOPPED
        )


@dataclass(frozen=True, slots=True)
class ChildResult:
    returncode: int
    interrupted: bool  # by Ctrl-C or SIGTERM
    trouble: str | None = None  # message of ``watch``


def run_child(
    command: Sequence[str],
    *,
    cwd: Path,
    env: dict[str, str],
    log: Path,
    watch: Callable[[], str | None] = lambda: None,
    fork_server: ForkServer | None = None,
    chain: Chain | None = None,
) -> ChildResult:
    """Run a command in a child process to its end, with its output on the screen and in a log. Return how it ended.

    Args:
        watch: called every second. When it returns a message (another node is gone), the child is killed ``GRACE_S``
            later, unless it has ended by itself.
        fork_server: starts the child; default: a new interpreter.
        chain: position of the stage, for the screen.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background; the child inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    screen = Screen(log, chain)
    child: subprocess.Popen[bytes] | ForkedProcess
    if fork_server is not None:
        child = fork_server.start(command, cwd=cwd, env=env)
    else:
        child = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    presses, trouble, looked, deadline = 0, None, 0.0, math.inf
    unsaid: deque[str] = deque()  # by the signal handler, which may interrupt a print
    logging.getLogger().addHandler(notes := _Notes())

    def say() -> None:
        while unsaid:
            screen.erase()
            out(f"\n{unsaid.popleft()}\n".encode())

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        with contextlib.suppress(OSError):  # of a stage that has just ended
            if presses == 1:
                child.send_signal(signal.SIGINT)
                unsaid.append("stopping cleanly; Ctrl-C again ends the stage at once")
            else:
                os.killpg(child.pid, signal.SIGKILL)
                unsaid.append("ended at once")

    def check_watch() -> None:
        nonlocal trouble, looked, deadline
        notes.pass_to(screen)
        say()
        if trouble is None and time.monotonic() > looked + WATCH_S:
            trouble, looked = watch(), time.monotonic()
            if trouble is not None:
                unsaid.append(f"{trouble}; the processes here end in {GRACE_S:.0f} s")
                say()
                deadline = looked + GRACE_S
        if time.monotonic() > deadline:
            os.killpg(child.pid, signal.SIGKILL)

    try:
        with handling(interrupt):
            _copy_output(child, screen, check_watch)
            while child.poll() is None:  # it has closed its output but still runs
                check_watch()
                time.sleep(0.05)
    finally:
        logging.getLogger().removeHandler(notes)
        notes.pass_to(screen)
        say()
        screen.close()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        returncode = child.wait()
    if trouble is None and returncode != 0 and not presses:
        trouble = watch()  # the child may have failed before our next look, for the same reason
    return ChildResult(returncode, presses > 0, trouble)


class _Notes(logging.Handler):
    """Logging handler that shows warnings of this process on the screen and in the log, for instance about a shared
    search server."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[str] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.getMessage()}\n")

    def pass_to(self, screen: Screen) -> None:
        while self._lines:
            screen.write(self._lines.popleft().encode())


@contextmanager
def handling(interrupt: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context manager that makes Ctrl-C, SIGTERM and SIGHUP call ``interrupt`` during the block.

    Under nohup SIGHUP stays ignored."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    before = {s: signal.signal(s, interrupt) for s in signals}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _copy_output(
    child: subprocess.Popen[bytes] | ForkedProcess, screen: Screen, check_watch: Callable[[], None]
) -> None:
    """Copy a child process's output to the screen until the child has ended. A grandchild may keep the pipe open for
    longer."""
    assert child.stdout is not None
    while True:
        check_watch()
        ready, _, _ = select.select([child.stdout], [], [], 0.2)
        data = os.read(child.stdout.fileno(), 65536) if ready else b""
        if not data and (ready or child.poll() is not None):
            return
        screen.write(data)
        screen.tick()
