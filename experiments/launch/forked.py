"""Ends the fork server with the process that started it. The server imports this module first.

By default the server lives as long as one of its forks.
"""

import os

from experiments.stages.stage import PARENT_VARIABLE, die_with_parent

die_with_parent(int(os.environ[PARENT_VARIABLE]))
