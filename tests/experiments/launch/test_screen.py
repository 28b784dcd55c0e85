"""What a terminal and a log file show of a stage's progress."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from common.progress_reports import MARK, Progress
from experiments.launch.screen import Screen, status
from experiments.stages.context import Chain

CHAIN = Chain(number=4, total=13, own_s=100.0, rest_s=660.0, rest_known=False)
MANY = ("reward 0.312", "em 0.300", "val em 0.280", *(f"my/very/long/metric/{'x' * 40} 0.5" for _ in range(9)))


def at(done, *figures, phase="train"):
    return Progress(phase, done, 60.0, math.nan if done == 0 else 60 * (1 - done) / done, figures)


def as_bytes(progress):
    return MARK + json.dumps(asdict(progress)).encode() + b"\n"


def test_the_status_says_how_far_the_stage_and_the_chain_are():
    assert status(at(0.5, *MANY), CHAIN, 60.0, 100) == (
        "stage 4 of 13: train 50%, 1 min 00 s left, >12 min 00 s for all, reward 0.312, em 0.300"
    )
    assert status(at(0.5), Chain(), 60.0) == "train 50%, 1 min 00 s left", "neither chain nor figures"
    assert status(at(0.5), CHAIN, 60.0, 45) == "stage 4 of 13: train 50%, 1 min 00 s left", "no half of a part"
    known = Chain(4, 13, own_s=100.0, rest_s=660.0)
    assert " 12 min 00 s for all" in status(at(0.5), known, 60.0), "60 s by its pace, more than 40 by last time"
    begun = "stage 4 of 13: running for 30.0 s (last time 1 min 40 s), >12 min 10 s for all"
    assert status(None, CHAIN, 30.0) == begun
    never = Chain(4, 13, own_s=None, rest_s=660.0, rest_known=False)
    assert status(at(0.0), never, 1.0).endswith(", >11 min 00 s for all"), "nothing is known of the stage itself"
    assert status(at(1.0, "em 0.3"), Chain(4, 13), 60.0) == "stage 4 of 13: train 100% in 1 min 00 s, em 0.3"


@pytest.mark.parametrize("width", [20, 59])
def test_nothing_is_wider_than_the_terminal(width):
    for progress in (None, at(0.0), at(0.333, *MANY), at(math.nan, *MANY), at(1.0, *MANY, phase="a very long phase")):
        assert len(status(progress, CHAIN, 1e6, width)) <= width


def test_a_log_file_has_a_line_now_and_then(tmp_path, capfdbinary, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("experiments.launch.screen.time", SimpleNamespace(monotonic=lambda: clock[0]))
    shown = Screen(tmp_path / "log", CHAIN)
    shown.write(b"words of the stage\n" + as_bytes(at(0.0)))
    for clock[0], done in ((9, 0.2), (10, 0.25), (19, 0.4), (20, 0.3), (41, 0.32), (42, 1.0)):
        report = as_bytes(at(done, f"loss {done}"))
        shown.write(b"half a " + report[:10])  # as a pipe may cut it
        shown.write(report[10:])
        shown.write(b"line\n")
    shown.write(as_bytes(at(1.0, phase="validate")))
    shown.close()
    text = (tmp_path / "log").read_text()
    assert text == capfdbinary.readouterr().out.decode(), "no terminal: the same on both"
    assert re.findall(r"loss (\S+)", text) == ["0.25", "0.32", "1.0"], "10 s and 10 %, or 30 s, or the end"
    assert MARK.decode() not in text and text.startswith("words of the stage\n")


def test_a_mark_in_the_programs_own_output_is_text(tmp_path, capfdbinary):
    shown = Screen(tmp_path / "log", CHAIN)
    own = b"".join((b"a", MARK, b"b\n", MARK, b'{"phase": 1}\n', MARK, b"[]\n"))
    shown.write(own + as_bytes(at(1.0)))
    shown.close()
    out = capfdbinary.readouterr().out
    assert out.startswith(own) and b"100%" in out and (tmp_path / "log").read_bytes() == out


def test_a_terminal_that_was_closed_ends_no_stage(tmp_path, monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.stderr", terminal)
        shown = Screen(tmp_path / "log", CHAIN)
        shown.write(as_bytes(at(0.5)))
        os.close(ours)
        shown.tick()
        shown.write(b"stopping cleanly\n")
        shown.tick()
        shown.write(as_bytes(at(1.0)))
        shown.close()
    assert (tmp_path / "log").read_text().startswith("stopping cleanly\n  stage 4 of 13: train 100%")


def test_a_terminal_has_a_status_that_gives_way_to_words(tmp_path, monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((80, 24)))
    with os.fdopen(theirs, "w", buffering=1) as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        shown = Screen(tmp_path / "log", CHAIN)
        shown.write(as_bytes(at(0.5, *MANY)))
        shown.tick()
        shown.tick()  # too early for another
        shown.write(b"a warning\n")
        shown.write(as_bytes(at(1.0, "em 0.3")))
        shown.close()
        seen = ""
        while "em 0.3\r" not in seen:
            seen += os.read(ours, 4096).decode()
    os.close(ours)
    assert [part.strip() for part in seen.split("\r\x1b[K")] == [
        "",
        "stage 4 of 13: train 50%, 1 min 00 s left, >12 min 40 s for all, reward 0.312",
        "a warning\r\n  stage 4 of 13: train 100% in 1 min 00 s, >12 min 40 s for all, em 0.3",
    ]
    assert (
        tmp_path / "log"
    ).read_text() == "a warning\n  stage 4 of 13: train 100% in 1 min 00 s, >12 min 40 s for all, em 0.3\n"
