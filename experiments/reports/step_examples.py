"""A trajectory as Markdown: the question, then what was written and returned, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from callbacks.evaluation.step_rows import StepRow, turns_with_tokens
from experiments.reports.markdown import fenced, inline
from rollout.trajectory import Trajectory

MOST = 1500  # characters of one text; of a longer one the middle is left out


def example_text(trajectory: Trajectory, rows: Sequence[StepRow], tokenizer: Any, most: int = MOST) -> str:
    """Markdown without a heading. ``rows``: the trajectory's own, all of them; ``most``: characters of a text.

    Raises:
        ValueError: the rows are another trajectory's.
    """
    found = (rows[0].id, rows[0].attempt, len(rows)) if rows else None
    turns = turns_with_tokens(trajectory)
    expected = (trajectory.task.id, trajectory.index, len(turns))
    if found != expected:
        raise ValueError(f"steps of (question, attempt, number) {found} do not belong to the trajectory {expected}")
    parts = [_facts(trajectory, rows[0].acc), fenced(shortened(trajectory.task.question, most))]
    for turn, row in zip(turns, rows, strict=True):
        metrics = (
            f"w = {row.weight:.3f}, d = {row.divergence:.3f}, teacher entropy {row.teacher_entropy:.3f} nats, "
            f"{row.tokens} tokens, {row.outcome}"
        )
        parts.append(f"**Step {row.step} of {row.steps}**: {metrics}. The model wrote\n")
        parts.append(fenced(shortened(written(trajectory, turn, tokenizer), most)))
        back = returned(trajectory, turn, tokenizer)
        if back is not None:
            parts += ["and read\n", fenced(shortened(back, most))]
    return "\n".join(parts)


def _facts(trajectory: Trajectory, acc: float | None) -> str:
    task = trajectory.task
    facts = [f"question {task.id}", f"attempt {trajectory.index}"]
    if task.golden_answers:
        facts.append(f"expected {inline(' or '.join(task.golden_answers))}")
    facts.append("no answer" if trajectory.answer is None else f"answered {inline(trajectory.answer)}")
    if acc is not None:
        facts.append({1.0: "right", 0.0: "wrong"}.get(acc, f"accuracy {acc:g}"))
    return f"{', '.join(facts)}.\n"


def written(trajectory: Trajectory, turn: int, tokenizer: Any) -> str:
    """What the model sampled in a turn, tags kept, without the token that ends it."""
    span = trajectory.turns[turn]
    ids = list(trajectory.response_ids[span.start : span.end])
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=False)


def returned(trajectory: Trajectory, turn: int, tokenizer: Any) -> str | None:
    """What the turn's calls returned; where there were none, what the model was told instead (a correction). None
    where nothing followed."""
    span = trajectory.turns[turn]
    results = [call.result for call in trajectory.calls if call.turn == turn and call.result.text]
    if results:
        return "\n\n".join(result.text for result in results)
    if span.observation_end == span.end:
        return None
    return tokenizer.decode(list(trajectory.response_ids[span.end : span.observation_end]), skip_special_tokens=False)


def shortened(text: str, most: int) -> str:
    """At most about ``most`` characters, from both ends."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[len(text) - half :]}"
