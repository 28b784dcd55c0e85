"""``python -m experiments COMMAND``; see ``python -m experiments --help`` or ``make help``."""

import sys

from experiments.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
