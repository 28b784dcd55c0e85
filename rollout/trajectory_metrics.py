"""Metrics of a batch of trajectories: calls, forks, inherited tokens, entropies. Kept as sums, so that parts of a batch
and iterations of a run can be added; training and callbacks both read them here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rollout.trajectory import ActionKind, CallOutcome, ToolCall, Trajectory, Turn

CallKey = tuple[str, int, int, int]  # group, index of the trajectory that made the call, turn, position in the turn

ANSWER, INVALID, NONE = "answer", "invalid", "none"
ERRONEOUS = frozenset({CallOutcome.ERROR.value, CallOutcome.TIMEOUT.value, CallOutcome.REFUSED.value, INVALID})
# Of several calls in one step the worst says how it ended.
WORST_FIRST = (
    CallOutcome.INFRASTRUCTURE, CallOutcome.TIMEOUT, CallOutcome.ERROR, CallOutcome.REFUSED, CallOutcome.EMPTY,
    CallOutcome.OK,
)  # fmt: skip


def is_inherited(trajectory: Trajectory, turn: int) -> bool:
    """Whether a turn (and the calls in it) was copied from the trajectory that this one was forked from. A turn that
    the fork cuts in two is finished, and its calls are made, by the fork itself."""
    return trajectory.fork is not None and trajectory.turns[turn].observation_end <= trajectory.fork.at


def turns_after_tools(trajectory: Trajectory) -> list[int]:
    """Indices of the turns that follow what an executed call returned."""
    called = {call.turn for call in trajectory.executed_calls}
    turns = trajectory.turns
    followed = [i for i in called if i + 1 < len(turns)]
    read = [i for i in followed if turns[i].observation_end > turns[i].end or turns[i + 1].prompt_ids is not None]
    return sorted(i + 1 for i in read)


def outcome_of(trajectory: Trajectory, turn: int) -> str:
    """How a turn ended: ``ok``, ``empty``, ``error``, ``timeout``, ``refused`` (what became of its calls, the worst of
    several), ``invalid`` (no readable action; the model was told so), ``answer``, or ``none``: the trajectory was over
    with this step, which neither answered nor had a call executed (mostly one that was cut)."""
    action = trajectory.turns[turn].action
    if action.kind is ActionKind.ANSWER:
        return ANSWER
    outcomes = {call.result.outcome for call in trajectory.calls if call.turn == turn}
    if turn == len(trajectory.turns) - 1:  # what follows the end is recorded as refused: no fault of the step
        outcomes.discard(CallOutcome.REFUSED)
        if not outcomes:
            return NONE
    if action.kind is ActionKind.INVALID:
        return INVALID
    return next((outcome.value for outcome in WORST_FIRST if outcome in outcomes), NONE)


def first_error(trajectory: Trajectory) -> int | None:
    """Index of the first turn whose outcome is in ``ERRONEOUS``, None without one: no valid action, or a call that was
    refused, failed by its arguments or ran out of time. A last turn that was merely cut is no error."""
    turns = range(len(trajectory.turns))
    return next((turn for turn in turns if outcome_of(trajectory, turn) in ERRONEOUS), None)


def entropies(turns: Sequence[Turn]) -> list[float]:
    """Entropies in nats of those turns that have one recorded (``Turn.entropy``)."""
    return [turn.entropy for turn in turns if turn.entropy is not None]


@dataclass(frozen=True, slots=True)
class RolloutMetrics:
    """Sums over trajectories; ``+`` adds the sums of other trajectories (whole groups)."""

    trajectories: int = 0
    forked: int = 0  # trajectories that began as a copy of another
    tool_calls: int = 0  # executed; a call that forks have inherited counts once
    calls: Counter[str] = field(default_factory=Counter)  # the same by tool
    outcomes: Counter[str] = field(default_factory=Counter)  # all calls, refused ones included, by outcome
    response_tokens: int = 0  # observations included
    inherited_tokens: int = 0  # of those, copied from a fork's parent
    tokens_computed: int = 0  # prefill and decode tokens that the engine ran, over trajectories that know it
    tokens_computed_known: int = 0  # how many trajectories know it
    entropy_after_tools: float = 0.0  # nats, over turns that follow a tool's result (inherited turns left out) ...
    turns_after_tools: int = 0  # ... and have their entropy recorded: as many
    branch_probability: float = 0.0  # over own turns at whose beginning a fork was decided on ...
    branch_decisions: int = 0  # ... as many
    groups: int = 0  # with two usable trajectories or more
    distinct: float = 0.0  # sum over these groups of (different responses / trajectories)
    reward: float = 0.0
    rewarded: int = 0  # trajectories that have a reward

    def __add__(self, other: RolloutMetrics) -> RolloutMetrics:
        return RolloutMetrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def sums(self) -> dict[str, float]:
        """What is reported as a sum: trajectories, tool_calls, calls/<tool>."""
        totals: dict[str, float] = {"trajectories": self.trajectories, "tool_calls": self.tool_calls}
        return totals | {f"calls/{tool}": count for tool, count in sorted(self.calls.items())}

    def ratios(self) -> dict[str, tuple[float, float]]:
        """What is reported as a mean or a share: (sum, count) by name; the count may be 0."""
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
    """Metrics of whole groups. Trajectories that failed by infrastructure are left out; they are looked at only to find
    out whose calls their forks have inherited."""
    usable = [t for t in trajectories if not t.failed_by_infrastructure]
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
    """Every call with its key; an inherited call has the key it has in the trajectory that made it."""
    position: Counter[int] = Counter()
    for call in trajectory.calls:
        index = trajectory.index
        owner: Trajectory | None = trajectory
        while owner is not None and owner.fork is not None and is_inherited(owner, call.turn):
            index = owner.fork.parent
            owner = by_index.get((trajectory.group, index))
        yield (trajectory.group, index, call.turn, position[call.turn]), call
        position[call.turn] += 1
