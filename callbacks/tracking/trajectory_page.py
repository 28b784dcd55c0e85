"""Renders trajectories as one self-contained HTML page: no script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, Template

from callbacks.tracking.turn_metrics import turn_metrics
from rollout.protocols.base import FIRST_OBSERVATION, OWN_QUESTION
from rollout.protocols.text_protocol import shortened
from rollout.trajectory import ActionKind, Task, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
LONGEST = 400  # characters of a fact about the task
TEMPLATE = Path(__file__).with_suffix(".html")


@dataclass(frozen=True, slots=True)
class PageItem:
    """One trajectory to show on an HTML page, with its heading and its values per token.

    Args:
        signals: name -> one value per response token (advantage, reward, kl, ...).
    """

    trajectory: Trajectory
    heading: str  # "best", "worst", "question answered after recovery", ...
    signals: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.trajectory.response_ids)
        for name, values in self.signals.items():
            if len(values) != length:
                raise ValueError(
                    f"trajectory {self.trajectory.group}/{self.trajectory.index}: signal '{name}' has {len(values)} "
                    f"values, expected one for each of the {length} response tokens"
                )


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token id, special tokens included.

    A token that ends inside a character has an empty text. The token that completes the character has all of it. Bytes
    that never form a character show as U+FFFD.
    """
    texts: list[str] = []
    pending: list[int] = []
    for i, token in enumerate(ids):
        pending.append(token)
        text = str(tokenizer.decode(pending, skip_special_tokens=False))
        if text.endswith(REPLACEMENT) and len(pending) < 4 and i + 1 < len(ids):
            texts.append("")
        else:
            texts.append(text)
            pending = []
    return texts


@cache
def _template() -> Template:
    return Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))


def render_page(title: str, items: Sequence[PageItem], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return an HTML page, as text, that shows all given trajectories.

    Colours show the role of a token (prompt, model, observation), and an underline the sign and size of the first
    signal. Hovering over a token shows its id, mask, log-prob, weights and signals at the foot. A line above each turn
    shows its metrics (``turn_metrics``). The prompt is folded up to the header of the assistant's turn.

    A turn with its own prompt has three parts: the folded prompt as text and ids, the sampled tokens, and the next
    observation of the environment.
    """
    underlined = next((next(iter(item.signals)) for item in items if item.signals), None)
    return _template().render(title=title, underlined=underlined, items=[_shown(item, tokenizer) for item in items])


def _shown(item: PageItem, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    trajectory = item.trajectory
    turn_by_turn = any(turn.prompt_ids is not None for turn in trajectory.turns)
    return {
        "heading": item.heading,
        "question": trajectory.task.question,
        "facts": _facts(trajectory),
        "parts": (_turns if turn_by_turn else _conversation)(item, tokenizer),
        "calls": [
            (
                call.turn + 1, call.request.name, ", ".join(str(value) for value in call.request.arguments.values()),
                call.result.outcome.value, f"{call.latency_s * 1000:.1f} ms",
                " · ".join(document.title for document in call.result.documents),
            )
            for call in trajectory.calls
        ],
    }  # fmt: skip


def _conversation(item: PageItem, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    ids = item.trajectory.prompt_ids
    prompt = [
        {"role": "prompt", "note": f"id {token}   prompt", "text": text}
        for token, text in zip(ids, token_texts(tokenizer, ids), strict=True)
    ]
    response = _response(item, tokenizer, slice(None))
    for turn, line in zip(item.trajectory.turns, _turn_lines(item), strict=True):
        if turn.start < len(response):
            response[turn.start]["above"] = line
    begun = _header(tokenizer, ids)
    shown = prompt[begun:] + response
    return [{"prompt_title": "prompt", "prompt_length": len(ids), "prompt": prompt[:begun], "response": shown}]


def _header(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
    """Return the index at which the header of the assistant's turn begins: the last control token of the prompt.
    Without a control token, return the prompt's length. Templates may open (Qwen3.5) or close the thinking in this
    header."""
    control = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((i for i in range(len(ids) - 1, 0, -1) if ids[i] in control), len(ids))


def _turns(item: PageItem, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return one part of a page for each turn, if turns or conversations have their own prompts. A prompt is one text
    with its ids: a span per token would make a page of fifty turns too large for a browser."""
    trajectory, parts = item.trajectory, []
    for number, (turn, line) in enumerate(zip(trajectory.turns, _turn_lines(item), strict=True)):
        begins, shown = turn.prompt_ids is not None or not number, turn.observation_end > turn.end
        ids = (turn.prompt_ids or trajectory.prompt_ids) if begins else ()
        parts.append(
            {
                "line": line,
                "prompt_title": f"prompt of turn {number + 1}" if begins else f"continues turn {number}",
                "prompt_length": len(ids),
                "prompt_text": str(tokenizer.decode(list(ids), skip_special_tokens=False)),
                "prompt_ids": " ".join(map(str, ids)),
                "response": _response(item, tokenizer, slice(turn.start, turn.observation_end)),
                "seen": "" if shown else "\n".join(c.result.text for c in trajectory.calls if c.turn == number),
            }
        )
    return parts


def _facts(trajectory: Trajectory) -> list[tuple[str, str]]:
    task, reward = trajectory.task, trajectory.reward
    rows = [
        ("question", task.question),
        ("task", _task(task)),
        ("gold", " | ".join(task.golden_answers) or "none"),
        ("answer", trajectory.answer if trajectory.answer is not None else "none"),
        ("stop reason", trajectory.stop_reason.value),
    ]
    if reward is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in reward.parts.items())
        rows.append(("reward", f"{reward.total:g}" + (f" ({parts})" if parts else "")))
    first, last = trajectory.policy_versions
    version = f"{first}" if first == last else f"{first} to {last}"
    rows += [
        ("source", f"{task.data_source}, {task.id}, group {trajectory.group}, number {trajectory.index}"),
        ("size", f"{len(trajectory.response_ids)} response tokens, {sum(trajectory.loss_mask)} sampled, "
                 f"{len(trajectory.turns)} turns, {trajectory.seconds:.2f} s, weights {version}"),
    ]  # fmt: skip
    if trajectory.fork is not None:
        rows.append(("fork", f"of number {trajectory.fork.parent}, whose first {trajectory.fork.at} tokens it shares"))
    entropies = [f"{turn.entropy:.2f}" for turn in trajectory.turns if turn.entropy is not None]
    if entropies:
        rows.append(("entropy", f"at the beginning of each turn, in nats: {', '.join(entropies)}"))
    return rows


def _task(task: Task) -> str:
    """Return, as text, what the model does not see of a task. This is the question if an observation replaced it, and
    the metadata, such as the word to guess or the goal."""
    hidden = {name: value for name, value in task.metadata.items() if name not in (OWN_QUESTION, FIRST_OBSERVATION)}
    own = task.metadata.get(OWN_QUESTION, task.question)
    texts = [own] if own != task.question else []
    texts += [f"{name}: {value}" for name, value in hidden.items()]
    return "; ".join(shortened(text, LONGEST) for text in texts) or "none"


def _turn_lines(item: PageItem) -> list[str]:
    """Return the text line to show above each turn: its metrics, and its reward if the environment rewards turns."""
    turns = item.trajectory.turns
    paid = any(turn.reward for turn in turns)
    lines = []
    for number, (turn, metrics) in enumerate(zip(turns, turn_metrics(item.trajectory, item.signals), strict=True), 1):
        parts = [f"turn {number} of {len(turns)}", f"{turn.end - turn.start} tokens"]
        parts += ["played by the guide"] if turn.guided else []
        parts += [f"reward {turn.reward:.4g}"] if paid else []
        parts += [f"{name} {value:.4g}" for name, value in metrics.items()]
        if turn.action.kind is ActionKind.INVALID or not turn.action.well_formed:
            parts.append("invalid" if turn.action.error is None else f"invalid: {turn.action.error}")
        lines.append(" · ".join(parts))
    return lines


def _response(item: PageItem, tokenizer: PreTrainedTokenizerBase, span: slice) -> list[dict[str, Any]]:
    """Return role, note (shown on hovering) and text of each response token in ``span``, for the page's template. A
    sampled token also has its underline: the sign of the first of the item's signals, and its size in percent of the
    largest."""
    trajectory = item.trajectory
    versions = trajectory.token_versions
    several = len({*versions} - {-1}) > 1
    first = next(iter(item.signals.values()), ())
    scale = max((abs(value) for value in first), default=0.0) or 1.0
    positions = range(len(trajectory.response_ids))[span]
    tokens = []
    for i, text in zip(positions, token_texts(tokenizer, trajectory.response_ids[span]), strict=True):
        mask = trajectory.loss_mask[i]
        role = "model" if mask else "observation"
        note = f"id {trajectory.response_ids[i]}   {role}   mask {mask}"
        if mask:
            note += f"   log-prob {trajectory.logprobs[i]:.4f}" + (f"   weights {versions[i]}" if several else "")
        note += "".join(f"   {name} {values[i]:+.4g}" for name, values in item.signals.items())
        token: dict[str, Any] = {"role": role, "note": note, "text": text}
        if first and mask and abs(first[i]) > 1e-3 * scale:
            token["sign"] = "good" if first[i] > 0 else "bad"
            token["strength"] = max(10, round(100 * abs(first[i]) / scale))
        tokens.append(token)
    return tokens
