"""Finds the paths of installed packages and their requirements without importing them, for the sandbox."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path


def package_paths(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the files and folders of installed packages and all their requirements, and the folders to search for
    them.

    Args:
        names: import names, such as ``("sympy",)``.

    Raises:
        ValueError: a package is not installed, or not by a package manager.
    """
    owners = metadata.packages_distributions()
    waiting, seen, paths, search = [], set(), set(), set()
    for name in names:
        if name not in owners:
            raise ValueError(f"packages: {name!r} is not installed; install it, or leave it out")
        waiting += owners[name]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # a requirement of other platforms
        root = Path(str(distribution.locate_file(""))).resolve()
        search.add(str(root))
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__") and not file.parts[0].endswith(".dist-info"):
                paths.add(str(root / file.parts[0]))
        needed = [text for text in distribution.requires or () if "extra ==" not in text]
        waiting += [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in needed]
    return sorted(paths), sorted(search)
