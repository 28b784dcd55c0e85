"""Milliseconds per model-written program: warm interpreters against fresh ones, and against no protection at all.

    python -m benchmarks.sandbox [--programs 64] [--pause-ms 50] [--at-once 1 16]

The same small program (import, compute, print the last expression) in four forms: the sandbox with interpreters that
wait; the sandbox without, each forked when it is asked for; a whole sandbox started, tried and closed for one program;
and ``python -I -S -c`` with nothing around it, which every tool that starts a process per call pays at least.  So many
agents as ``--at-once`` says ask one program after the other, with a pause before each, as a model that writes its turn
would.  The forms take turns in blocks of 8 programs, so that they meet the same load.  Printed are the medians from
asking to the answer, and each as a ratio to the plain process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from benchmarks import page
from rollout.tools.python.local import LocalSandbox

PROGRAM = "import math\nprint(math.comb({}, 3))\n"
TIMEOUT_S = 120.0
BLOCK = 8


async def unprotected(number: int) -> str:
    interpreter = os.path.realpath(sys.executable)
    words = [interpreter, "-I", "-S", "-c", PROGRAM.format(number)]
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()


async def whole_sandbox(number: int) -> str:
    sandbox = LocalSandbox(timeout_s=TIMEOUT_S, warm=0)
    try:
        return (await sandbox.run(PROGRAM.format(number))).output
    finally:
        await sandbox.close()


Run = Callable[[int], Awaitable[str]]


async def latencies_ms(run: Run, programs: int, at_once: int, pause_s: float) -> list[float]:
    """From asking to the answer, per program."""
    numbers, found = iter(range(10, 10 + programs)), []

    async def agent() -> None:
        for number in numbers:
            await asyncio.sleep(pause_s)
            began = time.perf_counter()
            said = await run(number)
            found.append(1000 * (time.perf_counter() - began))
            if not said.strip().isdigit():
                raise SystemExit(f"the program did not run: {said}")

    await asyncio.gather(*(agent() for _ in range(at_once)))
    return found


async def measure(programs: int, at_once: int, pause_s: float) -> dict[str, float]:
    """Median milliseconds per form."""
    warm, cold = LocalSandbox(TIMEOUT_S, warm=2 + at_once // 4), LocalSandbox(TIMEOUT_S, warm=0)

    async def pooled(number: int) -> str:
        return (await warm.run(PROGRAM.format(number))).output

    async def forked(number: int) -> str:
        return (await cold.run(PROGRAM.format(number))).output

    forms: dict[str, Run] = {"warm pool": pooled, "forked when asked": forked, "unprotected process": unprotected}
    times: dict[str, list[float]] = {name: [] for name in (*forms, "sandbox per program")}
    await asyncio.gather(warm.start(), cold.start())
    for done in range(0, programs, BLOCK):
        for name, run in forms.items():
            count = max(min(BLOCK, programs - done), at_once)
            times[name] += await latencies_ms(run, count, at_once, pause_s)
        times["sandbox per program"] += await latencies_ms(whole_sandbox, 1, 1, pause_s)
    await asyncio.gather(warm.close(), cold.close())
    return {name: statistics.median(values) for name, values in times.items()}


def figure(at_once: int, row: dict[str, float]) -> str:
    plain = row["unprotected process"]
    ours = {name: ms for name, ms in row.items() if name != "unprotected process"}
    told = ", ".join(f"{name} {ms:.1f} ms (ratio {ms / plain:.2f})" for name, ms in ours.items())
    return f"{at_once} at once: {told}, unprotected process {plain:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=64)
    parser.add_argument("--pause-ms", type=float, default=50.0)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16])
    page.add_option(parser)
    arguments = parser.parse_args()
    figures = []
    for at_once in arguments.at_once:
        row = asyncio.run(measure(arguments.programs, at_once, arguments.pause_ms / 1000))
        figures.append(figure(at_once, row))
    print(page.rows(figures) if arguments.markdown else "\n".join(figures))


if __name__ == "__main__":
    main()
