"""The site builds without a warning (links, anchors, API pages), and its messages are those of the code."""

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

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


@pytest.mark.parametrize("name", ["loop", "stages", "tokens"])
def test_texts_of_a_picture_fit_their_boxes(name):
    """In DejaVu Sans, which is wide: browsers take what a machine has in place of Helvetica and Arial."""
    picture = ElementTree.parse(ROOT / "docs" / "assets" / f"{name}.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    sizes = {"small": 12.5, "name": 12.5}
    rectangles = [[float(r.get(k, 0)) for k in ("x", "y", "width", "height")] for r in picture.iter(f"{svg}rect")]
    checked = 0
    for text in picture.iter(f"{svg}text"):
        x, y, words = float(text.get("x")), float(text.get("y")), text.text
        size = sizes.get(text.get("class"), float(picture.get("font-size")))
        font = FontProperties(family="DejaVu Sans", weight="bold" if text.get("class") == "head" else "normal")
        width = TextPath((0, 0), words, size=size, prop=font).get_extents().width
        left = x if text.get("class") == "name" else x - width / 2
        around = [r for r in rectangles if r[0] <= x <= r[0] + r[2] and r[1] <= y <= r[1] + r[3]]
        inner = min(around, key=lambda r: r[2])
        assert inner[0] + 2 <= left and left + width <= inner[0] + inner[2] - 2, f"{words!r} is wider than its box"
        checked += 1
    assert checked > 10


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
