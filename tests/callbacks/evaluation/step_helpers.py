"""Steps written down by hand, for the tests about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from callbacks.evaluation.step_rows import StepRow
from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    Reward,
    StopReason,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
    Trajectory,
    Turn,
)

EPSILON, DELTA = 1e-6, 0.2

# docs/papers/sod.md 1.5: divergences of the paper's cases, and what we say became of their calls
CASE_A = ((0.5, 0.22, 0.3), ("ok", "ok", "answer"))
CASE_B = ((0.218, 0.6, 1.284), ("error", "error", "answer"))
CASE_C = ((0.3, 0.41, 0.54, 0.73, 0.39, 0.27, 0.2), ("ok", "error", "error", "ok", "ok", "ok", "answer"))


def weights_of(divergences: Sequence[float]) -> list[float]:
    """Eq. 7, as the running product that the paper writes."""
    product, weights = 1.0, [1.0]
    for before, d in zip(divergences, divergences[1:], strict=False):
        product *= (before + EPSILON) / (d + EPSILON)
        weights.append(min(product, 1 + DELTA))
    return weights


def make_steps(
    divergences: Sequence[float],
    outcomes: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    name: str = "q1",
    attempt: int = 0,
    entropies: Sequence[float] | None = None,
    acc: float | None = 1.0,
) -> list[StepRow]:
    """One trajectory. ``weights``: default: those of the divergences."""
    count = len(divergences)
    weights = weights or weights_of(divergences)
    return [
        StepRow(
            id=name, attempt=attempt, data_source="hand", step=k + 1, steps=count, tokens=5,
            divergence=divergences[k], weight=weights[k], signed=-divergences[k] / 2,
            teacher_entropy=(entropies or [0.3] * count)[k], outcome=outcomes[k], acc=acc,
        )
        for k in range(count)
    ]  # fmt: skip


def write_trajectory(
    tokenizer: Any, turns: Sequence[tuple[str, str]], outcomes: Sequence[str], *, name: str = "q1", index: int = 0
) -> Trajectory:
    """A trajectory of real text. ``turns``: (what the model writes, what it reads then; "" for nothing)."""
    made, calls, ids, mask = [], [], [], []
    for k, ((text, observation), outcome) in enumerate(zip(turns, outcomes, strict=True)):
        start, sampled = len(ids), [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        observed = tokenizer.encode(observation, add_special_tokens=False)
        kind = {"answer": ActionKind.ANSWER, "invalid": ActionKind.INVALID}.get(outcome, ActionKind.CALL)
        ids += [*sampled, *observed]
        mask += [1] * len(sampled) + [0] * len(observed)
        made.append(Turn(start, start + len(sampled), Action(kind), "stop", 3, len(ids)))
        if kind is ActionKind.CALL:
            request = ToolRequest("code_interpreter", {"code": text})
            calls.append(ToolCall(k, request, ToolResult(observation.strip(), CallOutcome(outcome)), 0.01))
    return Trajectory(
        task=Task(name, f"What is 6 * 7, asked as {name}?", ("42",), "hand"),
        prompt_ids=tuple(tokenizer.encode("Question", add_special_tokens=False)),
        response_ids=tuple(ids),
        loss_mask=tuple(mask),
        logprobs=tuple(-0.5 * m for m in mask),
        turns=tuple(made),
        calls=tuple(calls),
        stop_reason=StopReason.ANSWER,
        group=name,
        index=index,
        answer="42",
        reward=Reward(1.0, {"acc": 1.0}),
    )
