"""Data types of a rollout: trajectories, tasks, turns, actions, calls, rewards.

A trajectory is one token sequence, exactly as the engine saw it::

    prompt_ids    [P]  chat template + question
    response_ids  [L]  sampled turn | observation | sampled turn | ...
    loss_mask     [L]  1 1 1 1 1 1    0 0 0 0 0     1 1 1 1 1 1
    logprobs      [L]  sampler's log-prob where loss_mask is 1, else 0.0

Token ids are never decoded, edited and tokenised again: new text (an observation) is tokenised once, when it is
appended.  All spans are half-open ``[start, end)`` offsets into ``response_ids``.

A protocol with per-turn prompts (a window of history, as in verl-agent) gives each turn its own ``prompt_ids``. Then
``response_ids`` contains only the sampled turns, and models read the *rows* that ``split_turns`` returns. An agent
program with several conversations has one after the other in ``response_ids``; the first turn of each has its prompt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Number
from typing import Any, Protocol, cast

from common.errors import one_line
from common.text import plain_json, whole

Runs = tuple[tuple[int, int], ...]


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Merge adjacent runs (version, number of tokens) of the same policy version, and drop empty runs.

    >>> merged([(3, 2), (3, 1), (4, 0), (5, 2)])
    ((3, 3), (5, 2))
    """
    kept: list[tuple[int, int]] = []
    for version, count in runs:
        if count and kept and kept[-1][0] == version:
            kept[-1] = (version, kept[-1][1] + count)
        elif count:
            kept.append((version, count))
    return tuple(kept)


def runs_of(policy_version: int, runs: Runs, count: int) -> Runs:
    """Return the runs (policy version, number of tokens) of the first ``count`` tokens. Empty ``runs`` mean that
    ``policy_version`` sampled all.

    >>> runs_of(7, (), 3), runs_of(5, ((4, 2), (5, 3)), 3)
    (((7, 3),), ((4, 2), (5, 1)))
    """
    left, kept = count, []
    for version, length in runs or ((policy_version, count),):
        kept.append((version, min(length, left)))
        left -= kept[-1][1]
    return merged(kept)


def recorded(runs: Runs) -> Runs:
    """Return runs (policy version, number of tokens) as a turn stores them: empty if one version sampled all tokens."""
    return runs if len(runs) > 1 else ()


class StopReason(StrEnum):
    """Why a trajectory ended. Each value is also a metric, ``stop/<value>``."""

    ANSWER = "answer"  # the protocol parsed a final answer
    EOS = "eos"  # the model ended its turn without an action, which ends the trajectory in this protocol
    MAX_TURNS = "max_turns"  # the last allowed model turn held no answer
    LENGTH = "length"  # the token budget of the response was used up
    ENVIRONMENT_DONE = "environment_done"  # the environment ended the episode
    INFRASTRUCTURE = "infrastructure"  # a tool or the engine failed, not through the model's fault
    PROGRAM_DONE = "program_done"  # the agent program returned
    PROGRAM_FAILED = "program_failed"  # it raised or died
    PROGRAM_TIMEOUT = "program_timeout"  # its time was over
    UNSCORED = "unscored"  # it ended without a reward


class ActionKind(StrEnum):
    """Kinds of action that a protocol parses from a turn."""

    CALL = "call"
    ANSWER = "answer"
    INVALID = "invalid"


class CallOutcome(StrEnum):
    """How a tool call ended. Only ``INFRASTRUCTURE`` is a failure that is not the model's fault."""

    OK = "ok"
    EMPTY = "empty"  # executed, returned nothing
    ERROR = "error"  # executed, the tool reports an error caused by its arguments (bad code, bad query)
    TIMEOUT = "timeout"  # executed, ran past its deadline for reasons of its arguments
    REFUSED = "refused"  # not executed: over the call limit, search disabled, unknown tool
    INFRASTRUCTURE = "infrastructure"  # not the model's fault; the trajectory is left out of statistics


LEFT_OUT = frozenset({StopReason.INFRASTRUCTURE, StopReason.UNSCORED})
EXECUTED = frozenset({CallOutcome.OK, CallOutcome.EMPTY, CallOutcome.ERROR, CallOutcome.TIMEOUT})
LARGEST = 3.4e38  # about the largest float32
ENDED_HERE = "the trajectory ended here"  # start of the detail of calls in the last turn, which are not executed


class InfrastructureError(RuntimeError):
    """A service that the rollout needs failed (retriever down, engine dead). Never the policy's fault."""


class RewardError(ValueError):
    """A reward is not a finite number. Ends the run, unlike an ``InfrastructureError``, because it would recur."""


class PermanentFailure(InfrastructureError):
    """A failure of a service that a retry would repeat, such as a rejected API key.

    It costs one trajectory, like any ``InfrastructureError``. If every call fails, the share of failed trajectories
    ends the run (option max_infrastructure_failures)."""


@dataclass(frozen=True, slots=True)
class Task:
    """One question (or episode) for the policy to solve: a row of the data set's parquet files."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    data_source: str  # e.g. "nq", "fictional_1hop"; metrics are reported by it
    gold_passages: tuple[tuple[str, str], ...] = ()  # (title, text) per hop, in order; for ARCap's diagnostic prompts
    metadata: dict[str, Any] = field(default_factory=dict)  # e.g. {"hops": 2, "split": "unseen"}
    prompt: tuple[tuple[str, str], ...] = ()  # (role, content): the data set's own wording, for ``template: dataset``
    skills: str = ""  # further advice for the model that reads the task; protocols put it into the user's turn


@dataclass(frozen=True, slots=True)
class ToolRequest:
    name: str
    arguments: dict[str, Any]  # {"query": "..."} for search, {"code": "..."} for Python


@dataclass(frozen=True, slots=True)
class Action:
    """The action parsed from one model turn: tool calls, a final answer, or invalid text."""

    kind: ActionKind
    calls: tuple[ToolRequest, ...] = ()
    answer: str | None = None
    error: str | None = None  # why it is INVALID; for a CALL: which part was not executed, or executed differently
    well_formed: bool = True  # False: not in the protocol's format, but executed (verl-agent's "invalid")
    ended: bool = True  # the model ended the turn; False: it was cut, and the next tokens must close it


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    title: str
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one tool call. The model reads ``text``; ``documents`` is for metrics. Lone surrogates become
    U+FFFD.

    Raises:
        TypeError, ValueError: on construction, if a text is not a ``str``, the outcome is unknown, a score is not a
            finite number, or ``info`` is not plain JSON (``plain_json``): it could not be saved.
    """

    text: str
    outcome: CallOutcome
    documents: tuple[Document, ...] = ()
    detail: str | None = None  # for the log, never shown to the model
    info: dict[str, Any] = field(default_factory=dict)  # facts for prompts and metrics, plain JSON

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"the text of a ToolResult is {type(self.text).__name__}; expected str")
        object.__setattr__(self, "outcome", CallOutcome(self.outcome))
        if not isinstance(self.detail, str | None):
            raise TypeError(f"the detail of a ToolResult is {type(self.detail).__name__}; expected str or None")
        object.__setattr__(self, "documents", tuple(map(_checked, self.documents)))
        for name in ("text", "documents", "detail"):
            object.__setattr__(self, name, whole(getattr(self, name)))
        object.__setattr__(self, "info", plain_json(self.info, "info"))

    @classmethod
    def of(cls, returned: Any) -> ToolResult:
        """Return a tool's return value, a ToolResult or a text for the model, as a ToolResult. Raises TypeError for
        other types."""
        if isinstance(returned, cls):
            return returned
        if not isinstance(returned, str):
            raise TypeError(f"the result is {type(returned).__name__}; expected a text or a ToolResult")
        return cls(returned, CallOutcome.OK if returned.strip() else CallOutcome.EMPTY)


def _checked(document: Any) -> Document:
    if not isinstance(document, Document):
        raise TypeError(f"a document of a ToolResult is {type(document).__name__}; expected Document")
    for name in ("id", "title", "text"):
        if not isinstance(value := getattr(document, name), str):
            raise TypeError(f"the {name} of a document is {type(value).__name__}; expected str")
    if not math.isfinite(document.score):
        raise ValueError(f"the score of a document is {document.score}; expected a finite number")
    return document if type(document.score) is float else dataclasses.replace(document, score=float(document.score))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a trajectory, with its result."""

    turn: int  # index into Trajectory.turns
    request: ToolRequest
    result: ToolResult
    latency_s: float

    @property
    def executed(self) -> bool:
        return self.result.outcome in EXECUTED

    @property
    def declined(self) -> bool:
        """Whether the tool or the environment refused the tool call. False if only the end of the trajectory cut it
        off."""
        return self.result.outcome is CallOutcome.REFUSED and not (self.result.detail or "").startswith(ENDED_HERE)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: a span of sampled tokens, the action parsed from it, and the span of the observation that
    follows."""

    start: int
    end: int
    action: Action
    finish_reason: str  # engine's: "stop", "eos", "length"
    policy_version: int  # of its last token
    observation_end: int  # == end when nothing followed; observation is [end, observation_end)
    observation_truncated: bool = False  # or the turn's own prompt left history out
    # Mean entropy (nats) of the distributions its first tokens were drawn from, one number per turn; None where the
    # engine was not asked for top log-probs. See rollout.samplers.base.
    entropy: float | None = None
    # Probability of a fork at the turn's start, or None (rollout.samplers.branching).
    branch_probability: float | None = None
    # The turn's own prompt, with per-turn prompts, or its conversation's; see the module docstring.
    prompt_ids: tuple[int, ...] | None = None
    reward: float = 0.0  # the environment's reward for this turn; rewards of a reward function are not included
    version_runs: Runs = ()  # (policy version, tokens) in order, where the weights changed in its middle
    guided: bool = False  # sampled by the guide (``rollout.loop.guide``), not by the policy

    @property
    def versions(self) -> Runs:
        """Pairs of (policy version, number of tokens) in order, over all tokens of the turn; empty if a guide sampled
        them."""
        return () if self.guided else runs_of(self.policy_version, self.version_runs, self.end - self.start)


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of a trajectory: ``total`` enters the objective, ``parts`` (em, f1, format, ...) are logged. All are
    kept as Python floats.

    Raises:
        RewardError: on construction, if the total or a part is not a finite number (see ``finite_number``), or a part
            is called ``total``.
    """

    total: float
    parts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", finite_number(self.total, "the total"))
        if not isinstance(self.parts, Mapping) or not all(isinstance(name, str) for name in self.parts):
            raise RewardError(f"the parts are {_shown(self.parts)}; expected a dict from names to finite numbers")
        if "total" in self.parts:
            raise RewardError("a part is called total, which is the name of the whole; give it another name")
        parts = {name: finite_number(value, f"the part {name!r}") for name, value in self.parts.items()}
        object.__setattr__(self, "parts", parts)


def finite_number(value: Any, what: str) -> float:
    """Return a number, or a scalar of NumPy or PyTorch, as a finite float. Booleans become 0 and 1.

    Args:
        value: of any type.
        what: its name in the error.

    Raises:
        RewardError: it is not a number, NaN, infinite, or above the largest float32, the type of advantages.
    """
    number = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if isinstance(number, Number) and not isinstance(number, complex):
        try:
            if abs(found := float(cast("Any", number))) <= LARGEST:
                return found
        except (OverflowError, ValueError):  # an int without end, a signalling NaN
            pass
    raise RewardError(f"{what} is {_shown(value)}; expected a finite number")


@contextmanager
def scored_by(source: object, trajectory: Any) -> Iterator[None]:
    """Add the names of the reward (or environment) and the trajectory to RewardErrors raised in the block."""
    try:
        yield
    except RewardError as error:
        name = getattr(source, "__name__", type(source).__name__)  # an environment may be its class
        raise RewardError(f"{name}, trajectory {trajectory.group}/{trajectory.index}: {error}") from error


def _shown(value: object) -> str:
    text = one_line(repr(value))
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True, slots=True)
class Fork:
    """The point where a branched trajectory left its parent."""

    parent: int  # index within the group
    at: int  # response offset: [0, at) is shared with the parent


class TrajectoryPrefix(Protocol):
    """The fields that a fork copies from another trajectory, finished or still running."""

    @property
    def task(self) -> Task: ...
    @property
    def group(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...
    @property
    def loss_mask(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def turns(self) -> Sequence[Turn]: ...
    @property
    def calls(self) -> Sequence[ToolCall]: ...
    @property
    def fork(self) -> Fork | None: ...


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished rollout. The module docstring shows its layout.

    Raises:
        ValueError: on construction, if the per-token fields differ in length, if a turn's span is not
            exactly the mask's ones, or if a log-prob is positive or not finite.
    """

    task: Task
    prompt_ids: tuple[int, ...]  # [P]
    response_ids: tuple[int, ...]  # [L]
    loss_mask: tuple[int, ...]  # [L]
    logprobs: tuple[float, ...]  # [L]
    turns: tuple[Turn, ...]
    calls: tuple[ToolCall, ...]
    stop_reason: StopReason
    group: str  # all trajectories of one prompt share it
    index: int  # position in the group
    reward: Reward | None = None
    fork: Fork | None = None
    answer: str | None = None  # parsed final answer, only from sampled text
    seconds: float = 0.0
    # Prompt tokens not in the cache plus sampled tokens, summed over the requests of this trajectory. Does not count
    # the requests of a branch's parent. None if unknown.
    tokens_computed: int | None = None
    episode: Trajectory | None = None  # of a row: the trajectory that the row is part of (never stored)
    row: int | None = None  # of a row: the index of its first turn in the episode
    # Position in the rollout batch of all ranks, if groups were moved between ranks
    # (data_modules.loading.token_balance); never stored.
    batch_index: int | None = None

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        who = f"trajectory {self.name}"
        if not (len(self.loss_mask) == len(self.logprobs) == n):
            raise ValueError(
                f"{who}: {n} response ids, {len(self.loss_mask)} mask entries, "
                f"{len(self.logprobs)} log-probs; expected three equal lengths"
            )
        covered = [0] * n
        for turn in self.turns:
            covered[turn.start : turn.end] = [1] * (turn.end - turn.start)
        if covered != list(self.loss_mask):
            raise ValueError(f"{who}: turns do not cover exactly the masked-in tokens")
        if n and not (max(self.logprobs) <= 1e-4 and math.isfinite(sum(self.logprobs))):
            wrong = next(x for x in self.logprobs if not -math.inf < x <= 1e-4)
            raise ValueError(f"{who}: a log-prob is {wrong}; expected finite numbers of at most 0")

    @property
    def name(self) -> str:
        """The text ``group/index``, which names the trajectory in messages."""
        return f"{self.group}/{self.index}"

    @property
    def left_out(self) -> bool:
        """Whether an infrastructure failure ended the trajectory, or its program gave no reward. Every statistic and
        the gradient leave it out."""
        return self.stop_reason in LEFT_OUT

    @property
    def trainable(self) -> bool:
        """Whether the policy trains on the trajectory: it has a sampled token and is not left out."""
        return any(self.loss_mask) and not self.left_out

    @property
    def executed_calls(self) -> tuple[ToolCall, ...]:
        return tuple(c for c in self.calls if c.executed)

    @property
    def policy_versions(self) -> tuple[int, int]:
        """Policy versions of the first and the last token that the policy sampled; (-1, -1) without any."""
        runs = [run for turn in self.turns for run in turn.versions]
        return (runs[0][0], runs[-1][0]) if runs else (-1, -1)

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The policy version that sampled each response token [L]; -1 for observation tokens and turns of a guide."""
        found = [-1] * len(self.response_ids)
        for turn in self.turns:
            at = turn.start
            for version, count in turn.versions:
                found[at : at + count] = [version] * count
                at += count
        return tuple(found)

    def replace(self, **changes: Any) -> Trajectory:
        return dataclasses.replace(self, **changes)


def split_turns(trajectory: Trajectory) -> list[Trajectory]:
    """Split a trajectory into the batch rows that the trained model reads.

    Without per-turn prompts the only row is the trajectory itself. Otherwise a row begins at each turn that has its own
    prompt: this turn and those that continue it, their prompt and their calls, with the trajectory's reward, group and
    index. A row without a sampled token is left out, so a trajectory whose prompt filled ``max_length`` has none."""
    if not any(trajectory.loss_mask):
        return []
    if all(turn.prompt_ids is None for turn in trajectory.turns):
        return [trajectory]
    rows, turns = [], trajectory.turns
    first = [k for k, turn in enumerate(turns) if turn.prompt_ids is not None or k == 0]
    for k, after in zip(first, [*first[1:], len(turns)], strict=True):
        start, end = turns[k].start, turns[after - 1].end
        if not any(trajectory.loss_mask[start:end]):
            continue
        rows.append(
            trajectory.replace(
                prompt_ids=turns[k].prompt_ids or trajectory.prompt_ids,
                response_ids=trajectory.response_ids[start:end],
                loss_mask=trajectory.loss_mask[start:end],
                logprobs=trajectory.logprobs[start:end],
                turns=tuple(_moved(turn, -start, end) for turn in turns[k:after]),
                calls=tuple(dataclasses.replace(c, turn=c.turn - k) for c in trajectory.calls if k <= c.turn < after),
                tokens_computed=None,
                episode=trajectory,
                row=k,
            )
        )
    return rows


def _moved(turn: Turn, by: int, last: int) -> Turn:
    ends = {"end": turn.end + by, "observation_end": min(turn.observation_end, last) + by}
    return dataclasses.replace(turn, start=turn.start + by, **ends)
