"""Paths of the project: root, folders of experiment files, outputs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("callbacks", "common", "data_modules", "experiments", "lightning_modules", "retrieval", "rollout")


@dataclass(frozen=True, slots=True)
class Project:
    """The project's folders: root, experiment files, outputs. ``experiment_dirs`` are searched in order; the first file
    with a name wins."""

    root: Path = ROOT
    experiment_dirs: tuple[Path, ...] = (ROOT / "experiments" / "configs",)
    outputs: Path = ROOT / "outputs"

    @classmethod
    def from_environment(cls) -> Project:
        """Return the project's folders, as two environment variables change them. ``COMPACT_AGENTS_OUTPUTS`` replaces
        the output folder; ``COMPACT_AGENTS_EXPERIMENTS`` adds folders of experiment files, separated by ':'."""
        outputs = Path(os.environ.get("COMPACT_AGENTS_OUTPUTS", ROOT / "outputs"))
        extra = [Path(p).resolve() for p in os.environ.get("COMPACT_AGENTS_EXPERIMENTS", "").split(":") if p]
        return cls(experiment_dirs=(*extra, ROOT / "experiments" / "configs"), outputs=outputs.absolute())

    def relative(self, path: Path) -> str:
        """Return ``path`` as text, relative to the project's root if it is inside."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)
