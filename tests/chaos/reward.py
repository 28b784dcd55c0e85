"""A reward that differs from trajectory to trajectory however little the model can do, so that every step moves it."""

from __future__ import annotations

from rollout.trajectory import CallOutcome, Reward, Trajectory


class SuccessfulCalls:
    """How many tool calls returned a text."""

    def score(self, trajectory: Trajectory) -> Reward:
        return Reward(float(sum(call.result.outcome is CallOutcome.OK for call in trajectory.calls)))
