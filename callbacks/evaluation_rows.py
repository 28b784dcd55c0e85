"""The row that an evaluation keeps of each trajectory, read from the recorded turns and tool calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import polars as pl

from common.files import replacing
from rollout.protocols.base import PromptMode
from rollout.rewards.scoring import exact_match, f1, normalize_answer
from rollout.trajectory import ActionKind, CallOutcome, Document, StopReason, ToolCall, Trajectory
from rollout.trajectory_metrics import entropies, turns_after_tools

SEARCH_TOOL = "search"
AGENT = PromptMode.AGENT.value
SCORED_HERE = ("em", "f1", "answered")  # parts of a reward that a row has, or shows, anyway
# What the released code of SOD takes for a failed call, wherever its text stands (docs/algorithms/sod.md).
FAILURE_MARKERS = ("error when executing tool", "traceback", "execution timed out", "request failed")


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """Scores, counts and outcome of one evaluated trajectory. The fields are the columns of
    ``evaluation/<split>.parquet``."""

    id: str
    data_source: str
    prompt_mode: str  # a PromptMode value: "agent" is the normal search loop, the others are ARCap's diagnostic prompts
    em: float
    f1: float
    answer: str | None
    executed_searches: int
    hit_first: float  # 1.0 when a gold answer occurs in a document of the first executed search
    hit_any: float  # the same over all executed searches
    stop_reason: str
    response_tokens: int  # tokens the model sampled (observations are not counted)
    valid_turns: int
    turns: int
    failed: bool  # by infrastructure: counted, and left out of everything else
    attempt: int = 0  # of several at the same question, from 0
    tool_calls: int = 0  # executed calls of all tools
    calls: dict[str, int] = field(default_factory=dict)  # the same by tool; tools without a call are absent
    failed_calls: int = 0  # executed, and ended as an error or ran out of time
    empty_calls: int = 0  # executed, and came back with nothing
    entropy_first: float | None = None  # entropy (nats) at the first tokens of the first turn, or None if not recorded
    entropy_after_tools: float | None = None  # the same, mean over the turns that follow a tool's result
    reward: float | None = None  # the reward of the run, or None if not scored
    reward_parts: dict[str, float] = field(default_factory=dict)  # its parts, without those that are columns above
    judged: float | None = None  # 1.0 right, 0.0 wrong, or None if not judged, or the judge failed
    judge_failed: bool = False
    attempted_calls: int = 0  # executed ones, those a tool or the environment declined, and ``malformed_calls``
    succeeded_calls: int = 0  # of those: executed without error and in time
    returned_calls: int = 0  # executed or declined: the model was given a text
    unmarked_calls: int = 0  # of those: the text holds none of FAILURE_MARKERS
    hit_raw: float = 0.0  # 1.0 when a gold answer is a raw part of what any search returned, as released
    ability: str | None = None  # of the task, which decides how an answer is judged ("math", "choice", "code")

    @property
    def math(self) -> float | None:
        """Mathematical equality with the gold answer if the reward compares formulas; else None."""
        return self.reward_parts.get("math")

    @property
    def verdict(self) -> float | None:
        """Correctness of the answer according to the reward, or None if the reward does not say. It is the part ``acc``
        (correctness without shaping), else mathematical equality, else the environment's ``success``."""
        return self.reward_parts.get("acc", self.reward_parts.get("math", self.reward_parts.get("success")))

    @property
    def accuracy(self) -> float | None:
        """Correctness of the answer by the best available source: the judge, else the reward (``verdict``), else exact
        match. None if the judge failed."""
        return self._right(self.em)

    @property
    def soft_accuracy(self) -> float | None:
        """Correctness of the answer like ``accuracy``, but with F1 in place of exact match."""
        return self._right(self.f1)

    def _right(self, otherwise: float) -> float | None:
        if self.judged is not None or self.judge_failed:
            return self.judged
        return otherwise if self.verdict is None else self.verdict


def contains_answer(document: Document, golden_answers: Sequence[str]) -> bool:
    """Return whether any gold answer occurs in the document's title or text.

    Both sides are normalised as for exact match (lower case, no punctuation, no articles). The gold answer's words must
    occur as consecutive whole words: "art" is not found in "Hartley". A gold answer that normalises to nothing ("The")
    is never found. This is ``norm(a) in norm(docs)`` (docs/algorithms/dgpo.md, ARCap) with word boundaries: a plain
    substring test counts every short answer as a hit.
    """
    words = f" {normalize_answer(f'{document.title} {document.text}')} "
    golds = (normalize_answer(answer) for answer in golden_answers)
    return any(gold and f" {gold} " in words for gold in golds)


def executed_searches(trajectory: Trajectory) -> tuple[ToolCall, ...]:
    """Return the search calls that were executed, in order, without refused, invalid and failed ones."""
    return tuple(call for call in trajectory.executed_calls if call.request.name == SEARCH_TOOL)


def search_hits(trajectory: Trajectory) -> tuple[float, float]:
    """Return whether the first search, and whether any search, found a gold answer, as two floats 1.0 or 0.0. Both are
    0.0 without a search."""
    golds = trajectory.task.golden_answers
    hits = [any(contains_answer(d, golds) for d in call.result.documents) for call in executed_searches(trajectory)]
    return (float(hits[0]), float(any(hits))) if hits else (0.0, 0.0)


def raw_hit(trajectory: Trajectory) -> float:
    """Return 1.0 if any gold answer is a raw substring of a search result, else 0.0. "art" is found in "party", "mira"
    is not found in "Mira". DGPO's released validation does the same (main_ppo.py, info_contains_answer), on the cut
    text that the model saw."""
    texts = [call.result.text for call in executed_searches(trajectory)]
    return float(any(gold in text for gold in trajectory.task.golden_answers if gold for text in texts))


def valid_action_counts(trajectory: Trajectory) -> tuple[int, int]:
    """Return how many turns of the trajectory are valid, and how many it has. The protocol can read the action of a
    valid turn."""
    valid = sum(t.action.kind is not ActionKind.INVALID and t.action.well_formed for t in trajectory.turns)
    return valid, len(trajectory.turns)


def malformed_calls(trajectory: Trajectory) -> int:
    """Count the turns that the model ended itself but the protocol could not read: failed attempts at a tool call.

    A turn that a token limit cut does not count, because a call might have followed.
    """
    last = len(trajectory.turns) - 1 if trajectory.stop_reason is StopReason.LENGTH else None
    return sum(
        turn.action.kind is ActionKind.INVALID and turn.action.ended and turn.finish_reason != "length" and i != last
        for i, turn in enumerate(trajectory.turns)
    )


def row_of(trajectory: Trajectory, prompt_mode: str = AGENT) -> EvaluationRow:
    task, reward = trajectory.task, trajectory.reward
    hit_first, hit_any = search_hits(trajectory)
    valid, turns = valid_action_counts(trajectory)
    executed = trajectory.executed_calls
    outcomes = Counter(call.result.outcome for call in executed)
    failed_calls = outcomes[CallOutcome.ERROR] + outcomes[CallOutcome.TIMEOUT]
    returned = [call.result.text.lower() for call in trajectory.calls if call.executed or call.declined]
    after = entropies([trajectory.turns[i] for i in turns_after_tools(trajectory)])
    return EvaluationRow(
        id=task.id,
        data_source=task.data_source,
        prompt_mode=prompt_mode,
        em=float(exact_match(trajectory.answer, task.golden_answers)),
        f1=float(f1(trajectory.answer, task.golden_answers)),
        answer=trajectory.answer,
        executed_searches=len(executed_searches(trajectory)),
        hit_first=hit_first,
        hit_any=hit_any,
        stop_reason=trajectory.stop_reason.value,
        response_tokens=sum(trajectory.loss_mask),
        valid_turns=valid,
        turns=turns,
        failed=trajectory.left_out,
        attempt=trajectory.index,
        tool_calls=len(executed),
        calls=dict(sorted(Counter(call.request.name for call in executed).items())),
        failed_calls=failed_calls,
        empty_calls=outcomes[CallOutcome.EMPTY],
        entropy_first=trajectory.turns[0].entropy if trajectory.turns else None,
        entropy_after_tools=sum(after) / len(after) if after else None,
        reward=None if reward is None else reward.total,
        reward_parts={} if reward is None else {k: v for k, v in reward.parts.items() if k not in SCORED_HERE},
        attempted_calls=len(returned) + malformed_calls(trajectory),
        succeeded_calls=len(executed) - failed_calls,
        returned_calls=len(returned),
        unmarked_calls=sum(not any(marker in text for marker in FAILURE_MARKERS) for text in returned),
        hit_raw=raw_hit(trajectory),
        ability=task.metadata.get("ability"),
    )


TYPES = {"str": pl.String, "int": pl.Int64, "float": pl.Float64, "bool": pl.Boolean}
SCHEMA = {
    column.name: TYPES[str(column.type).removesuffix(" | None")]
    for column in fields(EvaluationRow)
    if not str(column.type).startswith("dict")
} | {"accuracy": pl.Float64}


def record_of(row: EvaluationRow, tools: Sequence[str], parts: Sequence[str]) -> dict[str, Any]:
    """Convert an evaluation row to a record (dict) of the parquet file. It has columns ``calls/<tool>`` (0 without a
    call), ``reward/<part>`` (null without the part) and ``accuracy``."""
    record: dict[str, Any] = {**asdict(row), "accuracy": row.accuracy}
    calls, reward_parts = record.pop("calls"), record.pop("reward_parts")
    record |= {f"calls/{tool}": calls.get(tool, 0) for tool in tools}
    return record | {f"reward/{part}": reward_parts.get(part) for part in parts}


def save_rows(path: Path, rows: Sequence[EvaluationRow]) -> None:
    """Write evaluation rows to a parquet file at ``path``. Files of earlier versions lack the columns from ``attempt``
    on."""
    tools = sorted({tool for row in rows for tool in row.calls})
    parts = sorted({part for row in rows for part in row.reward_parts})
    schema = SCHEMA | {f"calls/{tool}": pl.Int64 for tool in tools} | {f"reward/{part}": pl.Float64 for part in parts}
    with replacing(path) as temporary:
        pl.DataFrame([record_of(row, tools, parts) for row in rows], schema=schema).write_parquet(temporary)
