from __future__ import annotations

from typing import Protocol

from rollout.trajectory import Reward, Trajectory


class RewardFunction(Protocol):
    def score(self, trajectory: Trajectory) -> Reward:
        """Score a finished trajectory from its parsed answer, calls and task. Pure: prints nothing, draws nothing."""
        ...
