"""ALFWorld's downloaded games as tasks. ``alfworld-download`` fills the folder ALFWORLD_DATA."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from experiments.worlds.household.games import TASK_TYPES
from rollout.trajectory import Task

SPLITS = ("train", "valid_seen", "valid_unseen")
_TASK = re.compile(r"Your task is to: (.*?)\.?\"")


@dataclass(frozen=True, slots=True)
class DiskGames:
    """The games found in an ALFWorld download as tasks, and for each reason the number of games left out."""

    tasks: tuple[Task, ...]
    skipped: Counter[str]


def games_on_disk(folder: str | Path, split: str) -> DiskGames:
    """Return the downloaded games that ALFWorld itself would play as tasks, sorted by path.

    Leaves out, as alfworld's ``AlfredTWEnv`` does: other task types (slices and movable receptacles), games without a
    file, and games that are not marked as solvable.

    Args:
        folder: ALFWORLD_DATA, which contains ``json_2.1.1/SPLIT/TASK-.../trial_.../game.tw-pddl``.
        split: one of SPLITS.

    Raises:
        ValueError: unknown split, missing folder, no game in it, or an invalid game file, which is named.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
    root = Path(folder).expanduser() / "json_2.1.1" / split
    if not root.is_dir():
        raise ValueError(f"no folder {root}; expected ALFWorld's data (alfworld-download), named by its upper folder")
    tasks, skipped = [], Counter()
    for trial in sorted(path.parent for path in root.glob("*/*/traj_data.json")):
        task_type, path = trial.parent.name.partition("-")[0], trial / "game.tw-pddl"
        if task_type not in TASK_TYPES or "Sliced" in trial.parent.name:
            skipped["another task type"] += 1
        elif not path.is_file():
            skipped["no game.tw-pddl"] += 1
        elif (sentence := _sentence_if_solvable(path)) is None:
            skipped["not marked as solvable"] += 1
        else:
            identity = f"{split}/{trial.parent.name}/{trial.name}"
            metadata = {"household": {"file": str(path)}, "split": split}
            tasks.append(Task(identity, sentence, (), task_type, metadata=metadata))
    if not tasks:
        raise ValueError(f"no game to play under {root} (left out: {dict(skipped) or 'nothing'})")
    return DiskGames(tuple(tasks), skipped)


def _sentence_if_solvable(path: Path) -> str | None:
    """Return the task's wording from a game file's grammar, or None if the game is not marked as solvable."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        solvable, found = data.get("solvable"), _TASK.search(data["grammar"])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"game file {path}: no game ({type(error).__name__}: {error})") from None
    if not solvable:
        return None
    if found is None:
        raise ValueError(f"game file {path}: its grammar has no 'Your task is to: ...'")
    return found[1]
