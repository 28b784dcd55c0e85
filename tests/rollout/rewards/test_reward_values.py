"""What a reward may return: numbers of any library, finite; all else is one line that names reward and trajectory."""

from __future__ import annotations

import asyncio
import math
import random
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rollout.rewards.base import Scorer
from rollout.rewards.deadline import DeadlinePool
from rollout.storage import load_trajectories, save_trajectories
from rollout.trajectory import Reward, RewardError
from tests.lightning_modules.helpers import make_trajectory

TRAJECTORY = make_trajectory(random.Random(0), 7)
NUMBERS = [
    np.float32(0.5), np.float64(0.5), np.array(0.5), np.float16(0.5), np.longdouble(0.5), torch.tensor(0.5),
    torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(0.5, requires_grad=True), Decimal("0.5"), Fraction(1, 2), 0.5,
]  # fmt: skip
WHOLE = [1, True, np.int64(1), np.bool_(True), np.uint8(1), torch.tensor(1), torch.tensor(True)]
WRONG = [
    None, math.nan, math.inf, -math.inf, "1.0", b"1", 1j, [1.0], {"total": 1.0}, object(), np.float32("nan"), 10**400,
    np.array([1.0]), np.array(["a"]), np.str_("1"), torch.tensor([1.0, 2.0]), torch.tensor(math.inf), torch.tensor(1j),
    1e39, Decimal("NaN"), Decimal("sNaN"), np.datetime64("2026-01-01"),
]  # fmt: skip


class Returns:
    def __init__(self, make):
        self.make = make

    def score(self, trajectory):
        return self.make()


class ReturnsLater(Returns):
    score = None  # type: ignore[assignment]

    async def score_async(self, trajectory):
        return self.make()

    async def close(self): ...


def scored(make, kind=Returns):
    return asyncio.run(Scorer(kind(make)).score(TRAJECTORY))


@pytest.mark.parametrize("value", [*NUMBERS, *WHOLE], ids=repr)
def test_numbers_of_any_library_become_floats(value):
    expected = 0.5 if any(value is number for number in NUMBERS) else 1.0
    for found in (scored(lambda: value), scored(lambda: value, ReturnsLater)):
        assert found == Reward(expected) and type(found.total) is float
    found = scored(lambda: Reward(value, {"em": value}))
    assert found == Reward(expected, {"em": expected}) and type(found.parts["em"]) is float


@pytest.mark.parametrize("value", WRONG, ids=range(len(WRONG)))  # not repr: an address differs from worker to worker
def test_all_else_is_one_line(value):
    cases = {
        "the returned value": lambda: value,
        "the total": lambda: Reward(value),
        "the part 'em'": lambda: Reward(1.0, {"f1": 0.5, "em": value}),
    }
    for what, make in cases.items():
        for kind in (Returns, ReturnsLater):
            with pytest.raises(RewardError) as caught:
                scored(make, kind)
            start = f"{kind.__name__}, trajectory 7/0: {what} is "
            assert str(caught.value).startswith(start) and str(caught.value).endswith("; expected a finite number")
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
            assert repr(value)[:10] in str(caught.value)


@pytest.mark.parametrize("parts", [None, 0.5, [("em", 1.0)], {1: 0.5}], ids=repr)
def test_parts_are_numbers_by_name(parts):
    with pytest.raises(RewardError, match="trajectory 7/0: the parts are .*; expected a dict from names to finite num"):
        scored(lambda: Reward(1.0, parts))


def test_a_forgotten_await_is_no_number():
    class Forgot:
        async def score(self, trajectory):
            return Reward(1.0)

    with pytest.raises(RewardError, match="Forgot, trajectory 7/0: the returned value is <coroutine"):
        asyncio.run(Scorer(Forgot()).score(TRAJECTORY))


def test_what_changed_after_construction_is_checked():
    """A reward may fill its parts afterwards, and one that was pickled was not constructed here."""

    def filled():
        reward = Reward(1.0)
        reward.parts["em"] = math.nan
        return reward

    with pytest.raises(RewardError, match="the part 'em' is nan"):
        scored(filled)


def test_what_is_kept_is_stored_and_read_back(tmp_path):
    reward = scored(lambda: Reward(np.float32(0.25), {"em": torch.tensor(True), "f1": np.float64(0.5)}))
    save_trajectories(tmp_path / "t.parquet", [TRAJECTORY.replace(reward=reward)])
    [found] = load_trajectories(tmp_path / "t.parquet")
    assert found.reward == Reward(0.25, {"em": 1.0, "f1": 0.5})


@pytest.mark.slow
def test_what_another_process_returns_is_checked():
    pool = DeadlinePool("math.copysign")
    try:
        with pytest.raises(RewardError, match="Returns, trajectory 7/0: the returned value is nan"):
            scored(lambda: pool.call(math.nan, 1.0, timeout_s=60))
    finally:
        pool.close()
