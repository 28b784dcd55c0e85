"""Stops a run when too large a share of trajectories fails by infrastructure."""

from __future__ import annotations

from collections.abc import Sequence

from common.make_command import continue_command
from common.ranks import gather_objects
from rollout.trajectory import InfrastructureError, Trajectory


class TooManyFailuresError(InfrastructureError):
    """Too large a share of trajectories failed for reasons that are not the model's; the run can be resumed."""


def sum_over_ranks(counts: tuple[int, int]) -> tuple[int, int]:
    """Element-wise sum, the same on every rank. A collective where torch.distributed runs, else the identity."""
    everything = gather_objects(counts)
    return sum(c[0] for c in everything), sum(c[1] for c in everything)


class FailureGuard:
    """Counts infrastructure failures of consecutive batches, over all ranks, so that all ranks stop together.

    Args:
        max_share: share of failed trajectories in [0, 1] above which a batch is a bad one.
        patience: consecutive bad batches at which ``check`` raises.
    """

    def __init__(self, max_share: float, patience: int = 1) -> None:
        self.max_share = max_share
        self.patience = patience
        self.share = 0.0  # of the last batch
        self._bad_in_a_row = 0

    def check(self, trajectories: Sequence[Trajectory], what: str, reasons: Sequence[str] = ()) -> None:
        """Raises TooManyFailuresError at the ``patience``-th bad batch in a row. Every rank must call.

        Args:
            what: what was being rolled out, for the message.
            reasons: why trajectories failed, latest last (``RolloutSystem.failures``), for the message.
        """
        failed, total = sum_over_ranks((sum(t.failed_by_infrastructure for t in trajectories), len(trajectories)))
        self.share = failed / total if total else 0.0
        self._bad_in_a_row = self._bad_in_a_row + 1 if self.share > self.max_share else 0
        if self._bad_in_a_row >= self.patience:
            times = f" {self.patience} times in a row" if self.patience > 1 else ""
            last = f" Last reason on this rank: {reasons[-1]}." if reasons else ""
            raise TooManyFailuresError(
                f"{what}: {failed} of {total} trajectories failed by infrastructure, more than the allowed "
                f"{self.max_share:.0%}{times} (options max_infrastructure_failures, max_consecutive_failures).{last} "
                "See that retriever and engine are up and fast enough, then continue after the last checkpoint: "
                f"{continue_command()}"
            )
