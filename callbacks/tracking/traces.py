"""Trajectories as MLflow traces: a span per turn, tool call and reward, to be searched and compared in its UI."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from callbacks.tracking.mlflow_names import mlflow_name, storable
from rollout.trajectory import CallOutcome, ToolCall, Trajectory

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from transformers import PreTrainedTokenizerBase

NS = 1_000_000_000
FINE = (CallOutcome.OK, CallOutcome.EMPTY)


class TraceWriter:
    """Writes traces of one run in the background, as MLflow does with them.

    Args:
        client: of the store that ``mlflow.set_tracking_uri`` names.
        experiment_id, run_id: where they belong.
        tokenizer: decodes prompts and turns.
    """

    def __init__(
        self, client: MlflowClient, experiment_id: str, run_id: str, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._client = client
        self._start_trace = partial(client.start_trace, experiment_id=experiment_id, run_id=run_id)
        self._tokenizer = tokenizer

    def write(self, name: str, trajectory: Trajectory, tags: dict[str, str]) -> None:
        """Write one trace. A trajectory knows its seconds and those of each call. Turns share the other time by their
        sampled tokens, and the calls of one turn start together.

        Args:
            tags: of the trace, beside task, data source, stop reason, reward and the reward's parts.
        """
        reward, task = trajectory.reward, trajectory.task
        tags = tags | {"task": task.id, "data_source": task.data_source, "stop_reason": trajectory.stop_reason.value}
        if reward is not None:
            tags |= {"reward": f"{reward.total:g}", **{f"reward.{part}": f"{v:g}" for part, v in reward.parts.items()}}
        end = time.time_ns()
        at = end - round(trajectory.seconds * NS)
        with _own_random_state():
            inputs = {"question": task.question, "gold": list(task.golden_answers)}
            taken = {mlflow_name(tag): storable(value) for tag, value in tags.items()}
            root = self._start_trace(name, span_type="AGENT", inputs=inputs, tags=taken, start_time_ns=at)
            for number, seconds in enumerate(_turn_seconds(trajectory)):
                at = self._write_turn(root, trajectory, number, at, at + round(seconds * NS))
            if reward is not None:
                self._span(root, "reward", "EVALUATOR", {}, {"total": reward.total, **reward.parts}, at, at)
            self._client.end_trace(root.trace_id, {"answer": trajectory.answer}, end_time_ns=max(at, end))

    def _write_turn(self, root: Any, trajectory: Trajectory, number: int, start: int, end: int) -> int:
        """The turn and its calls; returns when the last of them ended."""
        turn = trajectory.turns[number]
        given = [*trajectory.prompt_ids, *trajectory.response_ids[: turn.start]]
        prompt = given if turn.prompt_ids is None else list(turn.prompt_ids)
        first = number == 0 or turn.prompt_ids is not None
        new = prompt if first else trajectory.response_ids[trajectory.turns[number - 1].end : turn.start]
        sampled = turn.end - turn.start
        usage = {"input_tokens": len(prompt), "output_tokens": sampled, "total_tokens": len(prompt) + sampled}
        attributes = {
            "mlflow.chat.tokenUsage": usage,
            "action": turn.action.kind.value,
            "finish_reason": turn.finish_reason,
            "policy_version": turn.policy_version,
            "reward": turn.reward,
        }
        text = {"text": self._text(trajectory.response_ids[turn.start : turn.end])}
        shown = {"prompt" if first else "observation": self._text(new)}
        self._span(root, f"turn {number + 1}", "LLM", shown, text, start, end, attributes)
        last = end
        for call in (call for call in trajectory.calls if call.turn == number):
            last = max(last, self._write_call(root, call, end))
        return last

    def _write_call(self, root: Any, call: ToolCall, start: int) -> int:
        end = start + round(call.latency_s * NS)
        result = call.result
        attributes = {"outcome": result.outcome.value, "documents": [document.title for document in result.documents]}
        status = "OK" if result.outcome in FINE else "ERROR"
        name, seen = call.request.name, {"text": result.text}
        self._span(root, name, "TOOL", call.request.arguments, seen, start, end, attributes, status)
        return end

    def _span(
        self,
        root: Any,
        name: str,
        kind: str,
        inputs: dict[str, Any],
        outputs: dict[str, Any],
        start: int,
        end: int,
        attributes: dict[str, Any] | None = None,
        status: str = "OK",
    ) -> None:
        span = self._client.start_span(
            name, root.trace_id, root.span_id, kind, inputs, attributes=attributes, start_time_ns=start
        )
        self._client.end_span(root.trace_id, span.span_id, outputs, status=status, end_time_ns=end)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _turn_seconds(trajectory: Trajectory) -> list[float]:
    """Of each turn, without its calls."""
    waits = [
        max((call.latency_s for call in trajectory.calls if call.turn == number), default=0.0)
        for number in range(len(trajectory.turns))
    ]
    sampling, tokens = max(0.0, trajectory.seconds - sum(waits)), sum(trajectory.loss_mask) or 1
    return [sampling * (turn.end - turn.start) / tokens for turn in trajectory.turns]


@contextmanager
def _own_random_state() -> Iterator[None]:
    """OpenTelemetry draws its ids from Python's global generator, which belongs to the training: what that draws must
    not depend on traces, nor ids of a resumed run repeat."""
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)
