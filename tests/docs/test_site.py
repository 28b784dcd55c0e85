"""The site builds without a warning (links, anchors, API pages), and its messages are those of the code."""

import os
import re
import subprocess
import sys

import pytest

from experiments.registry.project import ROOT


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}
    assert "Why a trajectory ended." in pages["api/rollouts.html"]  # a docstring
    fetched = r"""<(?:script|link|img)[^>]+(?:src|href)=["']?https?://(?!127)"""
    assert not [name for name, text in pages.items() if re.search(fetched, text)], "a page asks the network for a part"


def test_messages_of_the_troubleshooting_page_are_in_the_code():
    packages = ("callbacks", "common", "data_modules", "experiments", "lightning_modules", "retrieval", "rollout")
    files = [
        file
        for package in (*packages, "scripts")
        for file in (ROOT / package).rglob("*")
        if file.suffix in (".py", ".sh")
    ]
    code = "\n".join(file.read_text() for file in [*files, ROOT / "Makefile"])
    code = re.sub(r"""["']\s*\n\s*f?["']""", "", code)  # a message over several lines
    first = re.findall(r"^\| (`[^|]*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    parts = [part.strip(" '") for cell in first for span in re.findall("`([^`]+)`", cell) for part in span.split("...")]
    assert len(parts) > 60
    assert not [part for part in parts if part not in code]
