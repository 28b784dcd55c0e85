"""Rewards of reasoning-gym: each data set has its scorer.

Source: the package ``reasoning_gym`` 0.1.25 (github.com/open-thought/reasoning-gym). Its scorers evaluate a model's
words as expressions in places (countdown, puzzle24), and raise on some. So they run in processes with a deadline. A
process makes the item again from data set, options, seed and index: two data sets (arc_agi, rearc) lose their score
when an item has been through JSON.
"""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from typing import Any

import reasoning_gym

from common.ranges import PositiveFloat
from rollout.rewards.deadline import DeadlineExceeded, DeadlinePool, WorkerDied
from rollout.trajectory import Reward, Trajectory

logger = logging.getLogger(__name__)

KEY = "reasoning_gym"  # of a task's metadata: {"dataset", "options", "seed", "size", "index"}
MAX_CHARACTERS = 10_000  # of an answer; a longer one is wrong
_PROCESSES = DeadlinePool(f"{__name__}.score_answer", workers=2, memory_mb=2048)


class ReasoningGymReward:
    """The score by the data set's scorer, from 0 to 1; 0 without an answer. The reward's part ``acc`` is 1 for the
    full score. If the scorer fails on an answer or takes too long, the answer scores 0 and is logged.

    Args:
        timeout_s: seconds of a scorer, which may first have to make the item again.
    """

    def __init__(self, timeout_s: PositiveFloat = 60.0) -> None:
        self.timeout_s = timeout_s

    def score(self, trajectory: Trajectory) -> Reward:
        task, answer = trajectory.task, trajectory.answer
        if KEY not in task.metadata:
            raise ValueError(f"{task.id} has no metadata.{KEY}; expected a task of the stage ReasoningGymTasks")
        value = 0.0
        if answer is not None and len(answer) <= MAX_CHARACTERS:
            value = _value(json.dumps(task.metadata[KEY], sort_keys=True), answer, self.timeout_s)
        return Reward(value, {"acc": float(value >= 1.0), "score": value, "answered": float(answer is not None)})


def _value(item: str, answer: str, timeout_s: float) -> float:
    value, fault = _remembered(item, answer, timeout_s)
    if fault:
        name = json.loads(item)["dataset"]
        logger.warning("the scorer of %s failed on %.60r, which scores 0: %s", name, answer, fault)
    return value


@lru_cache(maxsize=4096)  # the trajectories of a group repeat answers, and get the same score
def _remembered(item: str, answer: str, timeout_s: float) -> tuple[float, str]:
    fault = ""
    for _ in range(2):  # on a busy machine a second try may be in time
        try:
            return _PROCESSES.call(item, answer, timeout_s=timeout_s)
        except (DeadlineExceeded, WorkerDied) as error:
            fault = str(error)
    return 0.0, fault


def score_answer(item: str, answer: str) -> tuple[float, str]:
    """Return the score of an answer, and how the scorer failed ("" if it did not)."""
    about = json.loads(item)
    index = about.pop("index")
    data, entry = _item(json.dumps(about, sort_keys=True), index)
    try:
        value = float(data.score_answer(answer, entry))
    except Exception as error:  # of any kind: it parses a model's words
        return 0.0, f"{type(error).__name__}: {error}"
    return (value, "") if 0.0 <= value <= 1.0 else (0.0, f"it returned {value}")


@lru_cache(maxsize=256)
def _item(about: str, index: int) -> tuple[Any, dict[str, Any]]:
    data = dataset(**json.loads(about))
    return data, data[index]


def dataset(dataset: str, options: dict[str, Any], seed: int, size: int) -> Any:
    """Return a data set of reasoning-gym. Raises ValueError for an unknown name or options that it refuses."""
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym makes no data set {dataset} with {options}: {error}") from error
