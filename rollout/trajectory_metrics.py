"""Metrics of a batch of trajectories: calls, forks, inherited tokens, entropies.

They are sums, so that parts of a batch and iterations of a run can be added. Training and callbacks both use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rollout.trajectory import ActionKind, CallOutcome, ToolCall, Trajectory, Turn

CallKey = tuple[str, int, int, int]  # group, index of the trajectory that made the call, turn, position in the turn

ANSWER, INVALID, NONE = "answer", "invalid", "none"
ERRONEOUS = frozenset({CallOutcome.ERROR.value, CallOutcome.TIMEOUT.value, CallOutcome.REFUSED.value, INVALID})
# The worst of a turn's calls decides how the turn ended.
WORST_FIRST = (
    CallOutcome.INFRASTRUCTURE, CallOutcome.TIMEOUT, CallOutcome.ERROR, CallOutcome.REFUSED, CallOutcome.EMPTY,
    CallOutcome.OK,
)  # fmt: skip


def is_inherited(trajectory: Trajectory, turn: int) -> bool:
    """Whether a forked trajectory copied a turn and its calls from its parent.

    A turn that the fork cuts in two is not inherited: the fork finishes it and makes its calls."""
    return trajectory.fork is not None and trajectory.turns[turn].observation_end <= trajectory.fork.at


def turns_after_tools(trajectory: Trajectory) -> list[int]:
    """Return the indices of a trajectory's turns that follow the result of an executed tool call."""
    called = {call.turn for call in trajectory.executed_calls}
    turns = trajectory.turns
    followed = [i for i in called if i + 1 < len(turns)]
    read = [i for i in followed if turns[i].observation_end > turns[i].end or turns[i + 1].prompt_ids is not None]
    return sorted(i + 1 for i in read)


def outcome_of(trajectory: Trajectory, turn: int) -> str:
    """Return how a turn ended, as a text.

    ``ok``, ``empty``, ``error``, ``timeout``, ``refused``: the outcome of its calls, the worst of several.
    ``invalid``: no action could be parsed, and the model was told so. ``answer``: it answered. ``none``: the last turn,
    without an answer or an executed call (usually cut off)."""
    action = trajectory.turns[turn].action
    if action.kind is ActionKind.ANSWER:
        return ANSWER
    outcomes = {call.result.outcome for call in trajectory.calls if call.turn == turn}
    if turn == len(trajectory.turns) - 1:  # calls after the end are recorded as refused, which is not the turn's fault
        outcomes.discard(CallOutcome.REFUSED)
        if not outcomes:
            return NONE
    if action.kind is ActionKind.INVALID:
        return INVALID
    return next((outcome.value for outcome in WORST_FIRST if outcome in outcomes), NONE)


def first_error(trajectory: Trajectory) -> int | None:
    """Return the index of the first erroneous turn (outcome in ``ERRONEOUS``), or None.

    Such a turn has no valid action, or a call that was refused, failed by its arguments or timed out. A last turn that
    was only cut off does not count."""
    turns = range(len(trajectory.turns))
    return next((turn for turn in turns if outcome_of(trajectory, turn) in ERRONEOUS), None)


def entropies(turns: Sequence[Turn]) -> list[float]:
    """Return the recorded entropies (``Turn.entropy``) of turns, in nats."""
    return [turn.entropy for turn in turns if turn.entropy is not None]


@dataclass(frozen=True, slots=True)
class RolloutMetrics:
    """Rollout metrics as sums over the trajectories of whole groups. ``+`` adds the sums of other groups."""

    trajectories: int = 0
    forked: int = 0  # trajectories that began as a copy of another
    tool_calls: int = 0  # executed; a call that forks inherited counts once
    calls: Counter[str] = field(default_factory=Counter)  # the same by tool
    outcomes: Counter[str] = field(default_factory=Counter)  # all calls, refused ones included, by outcome
    response_tokens: int = 0  # observations included
    inherited_tokens: int = 0  # response tokens copied from a fork's parent
    tokens_computed: int = 0  # prefill and decode tokens of the engine, over trajectories that know them
    tokens_computed_known: int = 0  # number of those trajectories
    entropy_after_tools: float = 0.0  # nats, sum over turns after a tool's result, without inherited turns ...
    turns_after_tools: int = 0  # ... number of those turns whose entropy is recorded
    branch_probability: float = 0.0  # sum over own turns at which a fork was considered ...
    branch_decisions: int = 0  # ... number of those turns
    groups: int = 0  # groups with at least two usable trajectories
    distinct: float = 0.0  # sum over these groups of (different responses / trajectories)
    reward: float = 0.0
    rewarded: int = 0  # number of trajectories with a reward

    def __add__(self, other: RolloutMetrics) -> RolloutMetrics:
        return RolloutMetrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def sums(self) -> dict[str, float]:
        """Return the metrics that are reported as sums: trajectories, tool_calls, calls/<tool>."""
        totals: dict[str, float] = {"trajectories": self.trajectories, "tool_calls": self.tool_calls}
        return totals | {f"calls/{tool}": count for tool, count in sorted(self.calls.items())}

    def ratios(self) -> dict[str, tuple[float, float]]:
        """Return (sum, count) by name for metrics that are reported as means or shares. The count may be 0."""
        called = sum(self.outcomes.values())
        outcomes = [outcome for outcome in CallOutcome if outcome is not CallOutcome.INFRASTRUCTURE]
        return {
            "distinct": (self.distinct, self.groups),
            "branch_probability": (self.branch_probability, self.branch_decisions),
            "forked": (self.forked, self.trajectories),
            "inherited_tokens": (self.inherited_tokens, self.response_tokens),
            "tokens_computed": (self.tokens_computed, self.tokens_computed_known),
            "entropy_after_tools": (self.entropy_after_tools, self.turns_after_tools),
            **{f"call_outcome/{outcome}": (self.outcomes[outcome.value], called) for outcome in outcomes},
        }

    def as_json(self) -> dict[str, Any]:
        return {f.name: dict(v) if isinstance(v := getattr(self, f.name), Counter) else v for f in fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RolloutMetrics:
        values: dict[str, Any] = {k: Counter(v) if isinstance(v, dict) else v for k, v in data.items()}
        return cls(**values)


def rollout_metrics(trajectories: Sequence[Trajectory]) -> RolloutMetrics:
    """Compute the metrics of whole groups of trajectories, without those that failed by infrastructure.

    Failed trajectories are used only to find which calls their forks inherited."""
    usable = [t for t in trajectories if not t.left_out]
    by_index = {(t.group, t.index): t for t in trajectories}
    calls = {key: call for t in usable for key, call in _keyed_calls(t, by_index)}
    executed = [call for call in calls.values() if call.executed]
    after = [
        entropy
        for t in usable
        for entropy in entropies([t.turns[i] for i in turns_after_tools(t) if not is_inherited(t, i)])
    ]
    own = [turn for t in usable for i, turn in enumerate(t.turns) if not is_inherited(t, i)]
    decisions = [turn.branch_probability for turn in own if turn.branch_probability is not None]
    members: dict[str, list[Trajectory]] = {}
    for t in usable:
        members.setdefault(t.group, []).append(t)
    groups = [group for group in members.values() if len(group) > 1]
    known = [t.tokens_computed for t in usable if t.tokens_computed is not None]
    rewards = [t.reward.total for t in usable if t.reward is not None]
    return RolloutMetrics(
        trajectories=len(usable),
        forked=sum(t.fork is not None for t in usable),
        tool_calls=len(executed),
        calls=Counter(call.request.name for call in executed),
        outcomes=Counter(call.result.outcome.value for call in calls.values()),
        response_tokens=sum(len(t.response_ids) for t in usable),
        inherited_tokens=sum(t.fork.at for t in usable if t.fork is not None),
        tokens_computed=sum(known),
        tokens_computed_known=len(known),
        entropy_after_tools=sum(after),
        turns_after_tools=len(after),
        branch_probability=sum(decisions),
        branch_decisions=len(decisions),
        groups=len(groups),
        distinct=sum(len({t.response_ids for t in group}) / len(group) for group in groups),
        reward=sum(rewards),
        rewarded=len(rewards),
    )


def _keyed_calls(
    trajectory: Trajectory, by_index: Mapping[tuple[str, int], Trajectory]
) -> Iterator[tuple[CallKey, ToolCall]]:
    """Yield (key, call) for each tool call of a trajectory. An inherited call has the key of the trajectory that made
    the call."""
    position: Counter[int] = Counter()
    for call in trajectory.calls:
        index = trajectory.index
        owner: Trajectory | None = trajectory
        while owner is not None and owner.fork is not None and is_inherited(owner, call.turn):
            index = owner.fork.parent
            owner = by_index.get((trajectory.group, index))
        yield (trajectory.group, index, call.turn, position[call.turn]), call
        position[call.turn] += 1
