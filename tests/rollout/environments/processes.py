"""Finds processes that a test has started."""

import psutil


def children_named(part):
    """Processes below this one whose command line contains a text."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(part in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
