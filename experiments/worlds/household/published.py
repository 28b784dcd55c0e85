"""Stage that lists the games of an ALFWorld download as question files, split as in verl-agent and SDAR."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.ranges import NonNegativeInt, PositiveInt
from data_modules.datasets.files import DatasetError
from data_modules.datasets.questions import write_tasks
from experiments.worlds.household.games_on_disk import SPLITS, games_on_disk
from rollout.trajectory import Task

logger = logging.getLogger(__name__)

FILES = {"train": "train", "valid_seen": "test_seen", "valid_unseen": "test_unseen"}  # split -> file


class ListHousehold:
    """Writes the games of an ALFWorld download as question files. Deterministic.

    ``data_source`` is the task type, by which tables are split. The released evaluation draws 128 games of valid_seen
    each time (docs/algorithms/sdar.md). Here the validation panel is drawn once, so that validations of one or several
    runs can be compared, and the test plays every game once. Panel and test overlap: to report games that no decision
    has used, choose checkpoints by the panel and report ``test_unseen``.

    Args:
        folder: ALFWORLD_DATA, which contains ``json_2.1.1/{train,valid_seen,valid_unseen}``.
        panel: games of valid_seen for validation, drawn from each task type in proportion to its share.
        seed: seed of the panel.
    """

    def __init__(self, folder: str, panel: PositiveInt = 128, seed: NonNegativeInt = 0) -> None:
        self.folder, self.size, self.seed = folder, panel, seed

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write the question files ``{train,val,test_seen,test_unseen}.parquet`` to ``output_dir``, and return their
        sizes.

        Raises:
            DatasetError: valid_seen has fewer games than the panel.
            ValueError: see ``games_on_disk``.
        """
        # absolute, because a run may read the files from another folder
        folder = Path(self.folder).expanduser().absolute()
        found = {split: games_on_disk(folder, split) for split in SPLITS}
        for split, games in found.items():
            logger.info("%s: %d games (left out: %s)", split, len(games.tasks), dict(games.skipped) or "none")
            write(output_dir / f"{FILES[split]}.parquet", games.tasks)
        write(output_dir / "val.parquet", panel(found["valid_seen"].tasks, self.size, self.seed))
        left_out = {f"left out of {split}": sum(games.skipped.values()) for split, games in found.items()}
        return {FILES[split]: len(games.tasks) for split, games in found.items()} | {"val": self.size} | left_out


def write(path: Path, tasks: Sequence[Task]) -> None:
    write_tasks(path, tasks, render=lambda task: task.question)


def panel(tasks: Sequence[Task], size: int, seed: int) -> list[Task]:
    """Return ``size`` randomly drawn tasks, in the order of the list.

    Each data source gets its share, rounded by largest remainders, then by name.

    Raises:
        DatasetError: there are fewer tasks.
    """
    if len(tasks) < size:
        raise DatasetError(f"{len(tasks)} tasks, but a panel of {size} is wanted; lower `panel`, or give more of them")
    counts = Counter(task.data_source for task in tasks)
    exact = {source: size * count / len(tasks) for source, count in counts.items()}
    quota = {source: int(share) for source, share in exact.items()}
    by_remainder = sorted(exact, key=lambda source: (quota[source] - exact[source], source))
    for source in by_remainder[: size - sum(quota.values())]:
        quota[source] += 1
    rng = random.Random(f"panel:{seed}")
    chosen: set[str] = set()
    for source in sorted(counts):
        ids = [task.id for task in tasks if task.data_source == source]
        chosen.update(rng.sample(ids, quota[source]))
    return [task for task in tasks if task.id in chosen]
