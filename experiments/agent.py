"""torchrun for one stage on one node: ``python -m experiments.agent TORCHRUN-OPTIONS -m experiments stage FOLDER``.

It dies with the process that started it, its ranks die with it (torchrun puts each into a session of its own, where
no signal to a process group reaches it), and it says in one line what torchrun says in a page.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from experiments.process import die_with_parent
from experiments.stage import INTERRUPTED, PARENT_VARIABLE, REFUSED


def main(arguments: Sequence[str]) -> int:
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent:
        die_with_parent(int(parent))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # said below
    try:
        torchrun(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else signal.Signals(-failure.exitcode).name
        others = f"; torchrun has ended the other {len(error.failures) - 1}" if len(error.failures) > 1 else ""
        print(f"rank {rank} ended first: {how}{others}", file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode in (REFUSED, INTERRUPTED) else 1
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
