"""``python -m experiments COMMAND``; see ``python -m experiments --help`` or ``make help``."""

import contextlib
import sys

from common.run_folder import use_run_folder
from experiments.commands.cli import main
from rollout.engines.weights.files import SHARED_MEMORY, remove_leftovers

if __name__ == "__main__":
    with contextlib.suppress(OSError):  # no usable temporary folder; a command that needs one says so
        use_run_folder()
    remove_leftovers(SHARED_MEMORY)  # a killed run's weights would keep their memory until the next push
    sys.exit(main(sys.argv[1:]))
