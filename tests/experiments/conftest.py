"""A project of its own per test: experiment files and outputs in a temporary folder, code from the real root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.registry.overrides import parse
from experiments.registry.project import ROOT, Project
from experiments.stages.graph import Graph


class Workshop:
    """Writes experiment files and runs the real command line over them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "experiments"
        self.journal = folder / "journal"  # the toy stages write a line here when they run
        (self.files / "bases").mkdir(parents=True)
        self.project = Project(experiment_dirs=(self.files,), outputs=folder / "outputs")

    def write(self, name: str, text: str) -> None:
        (self.files / f"{name}.yaml").write_text(text)

    def task(self, name: str, arguments: str = "", about: str = "") -> None:
        """An experiment of kind task over ``toys.Note``."""
        self.write(
            name,
            f"experiment: {{kind: task, summary: a note{', ' + about if about else ''}}}\n"
            f"task: {{class_path: tests.experiments.toys.Note, init_args: {{{arguments}}}}}\n",
        )

    def graph(self, target: str, *overrides: str, seed: int | None = None) -> Graph:
        return Graph(self.project, target, parse(overrides), seed)

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "COMPACT_AGENTS_EXPERIMENTS": str(self.files),
            "COMPACT_AGENTS_OUTPUTS": str(self.project.outputs),
            "TOY_JOURNAL": str(self.journal),
        }

    def start(self, *words: str, **kwargs) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "experiments", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, **{**pipes, "env": self.environment(), **kwargs})

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.fixture
def run_here(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]):
    """``workshop.run`` without a process of its own (stages have theirs)."""
    from experiments.commands.cli import main

    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        for name, value in workshop.environment().items():
            monkeypatch.setenv(name, value)
        capfdbinary.readouterr()
        code = main(words)
        out, err = capfdbinary.readouterr()
        return subprocess.CompletedProcess(words, code, out.decode(), err.decode())

    return run
