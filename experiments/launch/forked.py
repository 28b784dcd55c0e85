"""Imported by the fork server before all else: the server ends when the process that has started it does.

By itself it would go on for as long as one of its forks.
"""

import os

from experiments.stages.stage import PARENT_VARIABLE, die_with_parent

die_with_parent(int(os.environ[PARENT_VARIABLE]))
