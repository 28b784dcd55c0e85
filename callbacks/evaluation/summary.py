"""Computes the metrics of an evaluation, with n and interval, from its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from callbacks.evaluation.attempts import attempts_of, sampling_metrics
from callbacks.evaluation.statistics import Interval, bootstrap_function, bootstrap_interval, bootstrap_pooled
from callbacks.evaluation_rows import AGENT, EvaluationRow
from rollout.trajectory import LEFT_OUT, StopReason

Value = Callable[[EvaluationRow], float | None]

SCORES: dict[str, Value] = {"em": lambda row: row.em, "f1": lambda row: row.f1}
# Metrics that are a mean over questions, None where a row has no such value.
MEANS: dict[str, Value] = {
    "searches": lambda row: row.executed_searches,
    "response_tokens": lambda row: row.response_tokens,
    "tool_calls": lambda row: row.tool_calls,
    "failed_calls": lambda row: row.failed_calls,
    "empty_calls": lambda row: row.empty_calls,
}
IF_KNOWN: dict[str, Value] = {
    "entropy_first": lambda row: row.entropy_first,
    "entropy_after_tools": lambda row: row.entropy_after_tools,
    "reward/total": lambda row: row.reward,
    "judge": lambda row: row.judged,
}
SIGMA = 0.1  # calls; of tool_productivity


def by_source(rows: Sequence[EvaluationRow]) -> dict[str, list[EvaluationRow]]:
    """Group evaluation rows by data source, sorted by the source's name."""
    sources = sorted({row.data_source for row in rows})
    return {source: [row for row in rows if row.data_source == source] for source in sources}


def per_question(rows: Iterable[EvaluationRow], value: Value) -> list[float]:
    """Return one number per question: the mean of ``value(row)`` over its attempts. Rows without a value are left out.

    Intervals resample these numbers, because attempts at one question are not independent.
    """
    found = [[value(row) for row in attempts] for attempts in attempts_of(rows).values()]
    known = [[float(v) for v in values if v is not None] for values in found]
    return [float(np.mean(values)) for values in known if values]


def summarize(rows: Sequence[EvaluationRow], *, resamples: int = 10_000) -> dict[str, Interval]:
    """Return the metrics of an evaluation with bootstrap intervals, computed from the rows of the normal search loop.
    Infrastructure failures are left out (their share is ``infrastructure_failures``). With several attempts per
    question, each question counts with its mean.

    Scores: ``em``, ``f1`` and ``acc`` (``row.accuracy``), each also as ``em/<data source>``; ``judge`` (right answers
    among those judged) and ``judge_failures`` (share of failed judgements); ``reward/total`` and ``reward/<part>``
    (over the rows that have the part, such as ``reward/math``); the metrics of ``sampling_metrics``.

    Behaviour, per question: ``searches``, ``tool_calls``, ``calls/<tool>`` (all executed), ``failed_calls``,
    ``empty_calls``, ``response_tokens`` (sampled), ``entropy_first``, ``entropy_after_tools`` (nats, over the
    questions where they were recorded), ``stop/<reason>`` (shares, all reasons), ``valid_actions`` (share of turns,
    pooled; n counts turns), and the metrics of ``tool_success``. Both: the metrics of ``per_call``.
    """
    agent = [row for row in rows if row.prompt_mode == AGENT]
    scored = [row for row in agent if not row.failed]

    def mean(part: Sequence[EvaluationRow], value: Value) -> Interval:
        return bootstrap_interval(per_question(part, value), resamples=resamples)

    def share(part: Sequence[EvaluationRow], found: Callable[[EvaluationRow], bool]) -> Interval:
        return bootstrap_pooled([(row.id, [float(found(row))]) for row in part], resamples=resamples)

    scores: dict[str, Value] = SCORES | {"acc": lambda row: row.accuracy}
    metrics = {name: mean(scored, value) for name, value in scores.items()}
    for source, part in by_source(scored).items():
        metrics |= {f"{name}/{source}": mean(part, value) for name, value in scores.items()}
    for reason in StopReason:
        if reason not in LEFT_OUT:
            metrics[f"stop/{reason.value}"] = mean(scored, lambda row, r=reason.value: float(row.stop_reason == r))
    metrics |= {name: mean(scored, value) for name, value in MEANS.items()}
    for tool in sorted({tool for row in scored for tool in row.calls}):
        metrics[f"calls/{tool}"] = mean(scored, lambda row, t=tool: row.calls.get(t, 0))
    metrics |= {name: metric for name, value in IF_KNOWN.items() if (metric := mean(scored, value)).n}
    for part in sorted({part for row in scored for part in row.reward_parts}):
        metrics[f"reward/{part}"] = mean(scored, lambda row, p=part: row.reward_parts.get(p))
    judged = [row for row in scored if row.judged is not None or row.judge_failed]
    if judged:
        metrics["judge_failures"] = share(judged, lambda row: row.judge_failed)
    metrics |= per_call(scored, resamples=resamples)
    metrics |= tool_success(scored, resamples=resamples)
    metrics |= sampling_metrics(scored, resamples=resamples)
    turns = [(row.id, [float(k < row.valid_turns)]) for row in scored for k in range(row.turns)]
    metrics["valid_actions"] = bootstrap_pooled(turns, resamples=resamples)
    metrics["infrastructure_failures"] = share(agent, lambda row: row.failed)
    return metrics


def per_call(rows: Sequence[EvaluationRow], *, resamples: int = 10_000) -> dict[str, Interval]:
    """Return scores in proportion to the number of tool calls, such as EM per 1000 calls, by metric name. Intervals
    resample questions; resamples without a call are left out.

    - ``em_per_1000_calls``, ``f1_per_1000_calls``: 1000 * sum of scores / sum of executed calls; absent without calls.
      Read them beside em and tool_calls: a model that answers from memory scores high.
    - ``accuracy_per_1000_calls``: the same by ``row.accuracy`` (the judge's verdict, else the reward's, else EM), over
      the questions that have one.
    - ``tool_productivity``: 100 * acc * calls / (calls + 0.1), the released evaluation's (docs/algorithms/arpo.md). acc
      is the mean of ``row.soft_accuracy`` (the judge's verdict, else the reward's, else F1), calls the mean number of
      executed calls, both over the questions with an acc. It grows with calls, and is 0 without any.
    """
    questions = attempts_of(rows).values()
    calls = [float(sum(row.tool_calls for row in attempts)) for attempts in questions]
    metrics: dict[str, Interval] = {}
    if sum(calls):
        for name, value in SCORES.items():
            scores = [float(sum(value(row) or 0.0 for row in attempts)) for attempts in questions]
            metrics[f"{name}_per_1000_calls"] = bootstrap_function(
                [scores, calls], lambda m: 1000 * m[0] / m[1], resamples=resamples
            )
    judged = attempts_of([row for row in rows if row.accuracy is not None]).values()
    calls = [float(sum(row.tool_calls for row in attempts)) for attempts in judged]
    if sum(calls):
        right = [float(sum(row.accuracy or 0.0 for row in attempts)) for attempts in judged]
        metrics["accuracy_per_1000_calls"] = bootstrap_function(
            [right, calls], lambda m: 1000 * m[0] / m[1], resamples=resamples
        )
    known = [row for row in rows if row.soft_accuracy is not None]
    if known:
        means = [per_question(known, lambda row: row.soft_accuracy), per_question(known, lambda row: row.tool_calls)]
        metrics["tool_productivity"] = bootstrap_function(
            means, lambda m: 100 * m[0] * m[1] / (m[1] + SIGMA), resamples=resamples
        )
    return metrics


def tool_success(rows: Sequence[EvaluationRow], *, resamples: int = 10_000) -> dict[str, Interval]:
    """Return the share of the model's tool calls that succeeded, pooled over calls, by metric name; empty without a
    call. Intervals resample questions, and n counts them.

    - ``tool_success``: executed without error and in time (an empty result is a result), of all calls: executed ones,
      those that the tool or the environment declined, and turns that the model ended and that could not be parsed
      (malformed calls). Turns and calls that a limit or the end of the trajectory cut off count nowhere.
    - ``tool_success_as_released``: the result's text holds none of ``FAILURE_MARKERS``, of executed and declined calls
      (docs/algorithms/sod.md, by our tools' texts: a time-out or a refusal in other words counts as a success).
    """
    questions = attempts_of(rows).values()
    metrics: dict[str, Interval] = {}
    for name, succeeded, attempted in (
        ("tool_success", "succeeded_calls", "attempted_calls"),
        ("tool_success_as_released", "unmarked_calls", "returned_calls"),
    ):
        sums = [[float(sum(getattr(r, f) for r in attempts)) for attempts in questions] for f in (succeeded, attempted)]
        if sum(sums[1]):
            metrics[name] = bootstrap_function(sums, lambda m: m[0] / m[1], resamples=resamples)
    return metrics
