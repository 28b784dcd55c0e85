"""Programs that are command lines, in any language. Each rollout starts its command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from common.async_calls import PerLoop
from common.env_vars import command_path
from common.errors import one_line
from common.ranges import FiniteFloat, PositiveFloat, PositiveInt
from rollout.programs.base import Model, ProgramError, ProgramResult
from rollout.services.task_variables import task_variables
from rollout.trajectory import RewardError, Task

MARK = "COMPACT_AGENTS_ROLLOUT"  # variable of all processes of a rollout; finds them at the end
INHERITED = ("PATH", "LANG", "LC_ALL", "TZ")  # of the trainer's environment; nothing else is passed on
POLL_S, PIPES_S = 0.02, 1.0
ERROR_BYTES = 2000  # of the standard error, for messages
ISOLATED = ("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--")


class CommandProgram:
    """Runs a command as the agent. Its working folder is temporary and removed afterwards.

    Its environment has ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``, the same three for Anthropic's
    client, ``TASK_ID``, ``TASK_QUESTION`` (empty above 100 kB), and ``TASK_FILE``, a JSON file with all fields of the
    task. ``python`` is the trainer's.

    When the command ends, or its time, all processes that it has started are killed. Without ``isolated`` a process
    that changes its environment can hide from that.

    Args:
        command: the program and its arguments. Arguments that name files are made absolute.
        result: ``stdout``: the last line that it prints: a number (the reward), a JSON object with some of reward,
            answer and metrics, or a text (the answer); another exit code than 0 is a failure. ``exit_code``: 0 is
            reward 1, another code reward 0, a signal a failure. A reward that the program sends to ``POST
            $OPENAI_BASE_URL/reward`` comes first.
        timeout_s: seconds of one rollout, the model's time included.
        failure_reward: reward of a rollout whose program fails, also at a limit of turns, tokens or time. null: it is
            not scored, and left out unless there is a reward function.
        at_once: commands that run at once; others wait, and their time does not run.
        memory_mb: address space of each of its processes; null: no limit. Node and Java reserve tens of GB that they
            never use.
        output_bytes: a program that prints more is killed, and fails.
        isolated: run it in its own PID namespace, which ends with it: nothing is left behind (Linux, util-linux).
        environment: further variables.

    Raises:
        ValueError: the program is not found.
    """

    def __init__(
        self,
        command: Sequence[str],
        result: Literal["stdout", "exit_code"] = "stdout",
        timeout_s: PositiveFloat = 600.0,
        failure_reward: FiniteFloat | None = None,
        at_once: PositiveInt = 8,
        memory_mb: PositiveInt | None = None,
        output_bytes: PositiveInt = 1 << 20,
        isolated: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(command, str) or not command:
            raise ValueError(f"command is {command!r}; expected a list: the program and its arguments")
        self._path = command_path()
        self.command = [str(Path(part).absolute()) if Path(part).is_file() else str(part) for part in command]
        for program in (self.command[0], *(ISOLATED[:1] if isolated else ())):
            if shutil.which(program, path=self._path) is None:
                raise ValueError(f"there is no program {program!r}; expected a file or a name on the PATH")
        self.result, self.timeout_s, self.memory_mb, self.output_bytes = result, timeout_s, memory_mb, output_bytes
        self.failure_reward, self.isolated, self.environment = failure_reward, isolated, dict(environment or {})
        self._slots = PerLoop("a program", lambda: asyncio.Semaphore(at_once))

    async def start(self) -> None:
        """Raise ValueError where this machine allows no PID namespaces."""
        if self.isolated:
            tried = await asyncio.create_subprocess_exec(
                *ISOLATED, "true", stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
            )
            _, said = await tried.communicate()
            if tried.returncode:
                raise ValueError(
                    f"isolated is true, but this machine makes no PID namespace ({one_line(said.decode())}); allow "
                    "user namespaces, run in a container of your own, or take isolated: false for programs you trust"
                )

    async def run(self, task: Task, model: Model) -> ProgramResult:
        async with self._slots.get():
            # The task's file, with its gold answers, is not where a coding agent looks around.
            folder, told = (Path(tempfile.mkdtemp(prefix=f"{name}-")) for name in ("rollout", "task"))
            try:
                return await self._run(folder, task_variables(told, task), model)
            finally:
                await asyncio.shield(asyncio.to_thread(_remove, folder, told))

    async def close(self) -> None:
        self._slots.drop()

    async def _run(self, folder: Path, task: Mapping[str, str], model: Model) -> ProgramResult:
        mark = uuid.uuid4().hex
        limit = ["sh", "-c", f'ulimit -v {self.memory_mb * 1024}; exec "$@"', "sh"] if self.memory_mb else []
        process = await asyncio.create_subprocess_exec(
            *(ISOLATED if self.isolated else ()),
            *limit,
            *self.command,
            cwd=folder,
            env=self._variables(folder, task, model) | {MARK: mark},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None and process.stderr is not None
        reading = [
            asyncio.ensure_future(self._read(process, process.stdout)),
            asyncio.ensure_future(self._read(process, process.stderr)),
        ]
        try:
            async with asyncio.timeout(self.timeout_s):
                while process.returncode is None:  # `wait` also waits for children that hold the pipes open
                    await asyncio.sleep(POLL_S)
        finally:
            await _end(process, mark)
            await asyncio.wait(reading, timeout=PIPES_S)  # a process that hides may hold the pipes open
            for pipe in reading:
                pipe.cancel()
            process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]  # asyncio closes it at EOF alone
        said, errors = await asyncio.gather(*reading)
        return self._read_result(process.returncode or 0, said, errors)

    def _variables(self, folder: Path, task: Mapping[str, str], model: Model) -> dict[str, str]:
        kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
        own = {"HOME": str(folder), "TMPDIR": str(folder), "PATH": self._path, "PYTHONUNBUFFERED": "1"}
        reached = {
            "OPENAI_BASE_URL": model.base_url,
            "OPENAI_API_KEY": model.api_key,
            "OPENAI_MODEL": model.name,
            "ANTHROPIC_BASE_URL": model.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": model.api_key,
            "ANTHROPIC_MODEL": model.name,
        }
        return {**kept, **own, **self.environment, **task, **reached}

    async def _read(self, process: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> bytes:
        """Return what the command prints. Kills it once that is too much."""
        kept = b""
        try:
            while piece := await stream.read(1 << 16):
                kept += piece
                if len(kept) > self.output_bytes:
                    _kill(process)
                    break
        except asyncio.CancelledError:  # what was printed before counts
            pass
        return kept

    def _read_result(self, code: int, said: bytes, errors: bytes) -> ProgramResult:
        if len(said) > self.output_bytes or len(errors) > self.output_bytes:
            raise ProgramError(f"it printed more than {self.output_bytes} bytes and was killed (output_bytes)")
        if code < 0 or (code > 0 and self.result == "stdout"):
            end = one_line(errors[-ERROR_BYTES:].decode(errors="replace"))[-300:]
            ended = (
                f"a signal ended it ({signal.strsignal(-code) or -code})" if code < 0 else f"it ended with code {code}"
            )
            raise ProgramError(f"{ended}{f': ... {end}' if end else ''}")
        if self.result == "exit_code":
            return ProgramResult(float(code == 0))
        lines = said.decode(errors="replace").strip().splitlines()
        return result_of(lines[-1].strip()) if lines else ProgramResult()


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def result_of(line: str) -> ProgramResult:
    """Return the result that a program prints as its last line. Raises ProgramError for an object of another form."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        return ProgramResult(answer=line)
    if isinstance(value, dict | int | float | None):
        try:
            return ProgramResult.of(value)
        except RewardError as error:
            raise ProgramError(str(error)) from error
    return ProgramResult(answer=value if isinstance(value, str) else line)


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """Kill a command's process group, and its processes that have left the group, and wait for the command's end."""
    _kill(process)
    wanted = f"{MARK}={mark}".encode()
    for _ in range(100):  # a program that forks while it is killed
        found = await asyncio.to_thread(_marked_processes, wanted)
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)
    while process.returncode is None:
        await asyncio.sleep(POLL_S)


def _marked_processes(wanted: bytes) -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _marked(int(path.name), wanted)]


def _marked(pid: int, wanted: bytes) -> bool:
    try:
        return pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
