"""Starts the ranks of one stage on one node with torchrun.

``python -m experiments.launch.torchrun OPTIONS -m experiments stage FOLDER`` dies with the process that started it, and
its ranks die with it. torchrun puts each rank into a session that no signal to a process group reaches. A failure is
one line instead of torchrun's page.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence

from common.errors import signal_name
from experiments.registry.hardware import Ranks
from experiments.stages.context import Node
from experiments.stages.stage import INTERRUPTED, PARENT_VARIABLE, REFUSED, die_with_parent


def torchrun_command(stage: Sequence[str], ranks: Ranks, node: Node | None) -> list[str]:
    """Return the torchrun command that starts this node's ranks of a stage. Each rank runs ``stage`` (``-m experiments
    stage FOLDER``)."""
    if node is None or ranks.nodes == 1:
        where = ["--standalone", "--local-addr=localhost"]
    else:
        where = [
            f"--nnodes={ranks.nodes}", f"--node-rank={node.rank}", f"--master-addr={node.address}",
            f"--master-port={node.port}", f"--rdzv-conf=timeout={node.timeout_s}",
        ]  # fmt: skip
    options = [*where, f"--nproc-per-node={ranks.processes}", "--max-restarts=0"]
    return [sys.executable, "-m", "experiments.launch.torchrun", *options, *stage]


def threads_per_rank(ranks: Ranks) -> int:
    """Return the number of CPU threads for each rank: the node's cores divided by its ranks, as in Lightning's
    launcher."""
    return max(1, (os.cpu_count() or 1) // (ranks.processes or 1))


def main(arguments: Sequence[str]) -> int:
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent:
        die_with_parent(int(parent))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # reported below
    try:
        with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:  # torchrun would not delete its folder
            torchrun([f"--log-dir={logs}", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else signal_name(-failure.exitcode)
        how += " (killed from outside, perhaps for lack of memory)" if failure.exitcode == -signal.SIGKILL else ""
        others = f"; torchrun has ended the other {len(error.failures) - 1}" if len(error.failures) > 1 else ""
        print(f"rank {rank} ended first: {how}{others}", file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode in (REFUSED, INTERRUPTED) else 1
    except DistError as error:
        print(f"error: the nodes have not found each other: {error}", file=sys.stderr, flush=True)
        return 1
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
