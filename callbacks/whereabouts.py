"""Where the main thread of this process is, in words, read from outside it: nothing is noted while it works."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = str(Path(__file__).parents[1]) + os.sep
LIBRARIES = ("site-packages" + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, "<")  # <: made at run time
COLLECTIVES = (os.path.join("torch", "distributed", ""), os.path.join("deepspeed", "comm", ""))
# Work that may take long; of rollouts ahead of the training this thread only waits for the one that does it.
ROLLING_OUT = ("rollout/", "retrieval/", "data_modules/rollouts_ahead.py")
# What an innermost frame of ours means: beginning of its file, function (any, if empty), words. First match counts.
WORDS = (
    ("retrieval/", "", "search"),
    ("rollout/engines/", "load_weights", "weight sync"),
    ("rollout/", "load_weights", "weight sync"),
    ("rollout/", "", "rollout"),
    ("data_modules/rollouts_ahead.py", "", "rollout"),
    ("data_modules/balance.py", "", "exchange of groups between ranks"),
    ("data_modules/failures.py", "", "end of the rollout"),
    ("data_modules/question_loading.py", "", "loading of the questions"),
    ("data_modules/datasets/", "", "loading of the questions"),
    ("data_modules/", "", "loading of the batch"),
    ("callbacks/weight_sync.py", "", "weight sync"),
    ("callbacks/resume.py", "", "checkpoint"),
    ("callbacks/export.py", "", "export"),
    ("callbacks/", "", "callbacks"),
    ("lightning_modules/scoring_module.py", "", "scoring"),
    ("lightning_modules/optimisation.py", "clip_gradients", "optimizer step"),
    ("lightning_modules/optimisation.py", "backward", "backward pass of a micro-batch"),
    ("lightning_modules/strategies.py", "optimizer_step", "optimizer step"),
    ("lightning_modules/", "_step", "optimizer step"),
    ("lightning_modules/", "_mini_batch", "micro-batch"),
    ("lightning_modules/", "training_step", "training step"),
)


@dataclass(frozen=True, slots=True)
class Place:
    text: str  # "rollout (rollout/system.py:173 rollout)"
    waiting: bool  # in a collective, for the other ranks
    rolling_out: bool  # at work that may take long on one rank
    mark: Any  # equal as long as the thread has not moved


def whereabouts() -> Place:
    """Of the main thread. Costs microseconds; the thread itself is not touched."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(_outwards(frame))
    mark = tuple((id(f.f_code), f.f_lasti) for f in frames)
    ours = [(i, f) for i, f in enumerate(frames) if not any(part in f.f_code.co_filename for part in LIBRARIES)]
    inner = ours[0][0] if ours else len(frames)
    waiting = any(part in f.f_code.co_filename for f in frames[:inner] for part in COLLECTIVES)
    names = [(f.f_code.co_filename.removeprefix(ROOT), f.f_lineno, f.f_code.co_name) for _, f in ours]
    words = next((w for name in names if (w := _words(name[0], name[2]))), "between steps")
    at = f" ({names[0][0]}:{names[0][1]} {names[0][2]})" if names else ""
    rolling_out = not waiting and any(name.startswith(ROLLING_OUT) for name, _, _ in names)
    return Place(f"{words}{', waiting for the others' if waiting else ''}{at}", waiting, rolling_out, mark)


def _words(file: str, function: str) -> str | None:
    for beginning, name, words in WORDS:
        if file.startswith(beginning) and name in ("", function):
            return words
    return None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
