"""Stops a run when too large a share of trajectories fails by infrastructure."""

from __future__ import annotations

from collections.abc import Sequence

from common.make_command import continue_command
from common.ranks import gather_objects
from rollout.trajectory import InfrastructureError, StopReason, Trajectory


class TooManyFailuresError(InfrastructureError):
    """Too large a share of trajectories failed because of infrastructure, such as an engine or a tool. The run can be
    resumed.
    """


def sum_over_ranks(counts: tuple[int, int]) -> tuple[int, int]:
    """Return the sums of two counts over all ranks. A collective."""
    everything = gather_objects(counts)
    return sum(c[0] for c in everything), sum(c[1] for c in everything)


class FailureGuard:
    """Counts trajectories that infrastructure failed, over all ranks, and stops all ranks together after too many bad
    batches.

    Args:
        max_share: a batch is bad if a larger share of its trajectories failed.
        patience: consecutive bad batches at which ``check`` raises.
    """

    def __init__(self, max_share: float, patience: int = 1) -> None:
        self.max_share = max_share
        self.patience = patience
        self.share = 0.0  # of the last batch
        self._bad_in_a_row = 0

    def check(self, trajectories: Sequence[Trajectory], what: str, reasons: Sequence[str] = ()) -> None:
        """Raise TooManyFailuresError at the ``patience``-th consecutive batch with too many infrastructure failures, or
        programs without a reward. A collective.

        Args:
            what: name of the batch, for the message.
            reasons: why trajectories failed, latest last (``RolloutSystem.failures``).
        """
        failed, total = sum_over_ranks((sum(t.left_out for t in trajectories), len(trajectories)))
        self.share = failed / total if total else 0.0
        self._bad_in_a_row = self._bad_in_a_row + 1 if self.share > self.max_share else 0
        if self._bad_in_a_row >= self.patience:
            times = f" {self.patience} times in a row" if self.patience > 1 else ""
            last = f" Last reason on this rank: {reasons[-1]}." if reasons else ""
            unscored, cure = "", "See that retriever and engine are up and fast enough"
            if any(t.stop_reason is StopReason.UNSCORED for t in trajectories):
                unscored = " or have no reward"
                cure = "Let the program return a reward, or set its failure_reward"
            raise TooManyFailuresError(
                f"{what}: {failed} of {total} trajectories failed by infrastructure{unscored}, more than the "
                f"allowed {self.max_share:.0%}{times} (options max_infrastructure_failures, max_consecutive_failures)."
                f"{last} {cure}, then continue after the last checkpoint: {continue_command()}"
            )
