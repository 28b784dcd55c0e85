"""``python -m experiments COMMAND``; see ``python -m experiments --help`` or ``make help``."""

import sys

from experiments.commands.cli import main
from retrieval.run_folder import use_run_folder

if __name__ == "__main__":
    use_run_folder()
    sys.exit(main(sys.argv[1:]))
