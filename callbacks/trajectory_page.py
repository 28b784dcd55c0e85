"""Trajectories as one HTML page that needs nothing else: no script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from callbacks.turn_figures import turn_figures
from rollout.trajectory import ActionKind, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class PageItem:
    """One trajectory of a page. ``signals``: name -> one value per response token (advantage, reward, kl, ...)."""

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
    """The text of each token, special tokens included. Tokens that end inside a character have an empty text, and the
    token that completes the character carries it whole; bytes that never form a character show as U+FFFD."""
    texts: list[str] = []
    pending: list[int] = []
    for i, token in enumerate(ids):
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith(REPLACEMENT) and len(pending) < 4 and i + 1 < len(ids):
            texts.append("")
        else:
            texts.append(text)
            pending = []
    return texts


def roles(trajectory: Trajectory) -> Iterator[str]:
    """Role of each response token: "model" where it was sampled, "observation" elsewhere."""
    return ("model" if m else "observation" for m in trajectory.loss_mask)


def render_page(title: str, items: Sequence[PageItem], tokenizer: PreTrainedTokenizerBase) -> str:
    """One page with all trajectories, in the order given.

    Tokens are coloured by role (prompt, model, observation); a coloured underline shows the sign and size of the
    first signal. Hovering (or focusing) a token shows its id, mask, sampler log-prob (the weights that sampled it,
    where several have) and signals at the foot. With signals every turn has a line above it with what they say about
    the whole turn (``turn_figures``).

    Where turns have prompts of their own, each stands below such a line, signals or not: its prompt, folded, as text
    and ids; what was sampled; and what the environment showed next.
    """
    contents = "".join(
        f'<li><a href="#t{n}">{escape(item.heading)}</a> · {escape(item.trajectory.task.question)}</li>'
        for n, item in enumerate(items)
    )
    articles = "\n".join(_article(n, item, tokenizer) for n, item in enumerate(items))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n{_legend(items)}\n"
        f"<nav><ol>{contents}</ol></nav>\n{articles}\n</body></html>\n"
    )


def _article(number: int, item: PageItem, tokenizer: PreTrainedTokenizerBase) -> str:
    turn_by_turn = any(turn.prompt_ids is not None for turn in item.trajectory.turns)
    body = (_turns if turn_by_turn else _conversation)(item, tokenizer)
    return (
        f'<article id="t{number}"><h2>{escape(item.heading)}</h2>{_header(item.trajectory)}'
        f"{body}{_calls(item.trajectory)}</article>"
    )


def _conversation(item: PageItem, tokenizer: PreTrainedTokenizerBase) -> str:
    trajectory = item.trajectory
    prompt = _tokens(trajectory.prompt_ids, tokenizer, ["prompt"] * len(trajectory.prompt_ids), [])
    starts = [turn.start for turn in trajectory.turns]
    lines = dict(zip(starts, _turn_lines(item), strict=True)) if item.signals else {}
    notes, tints = _response_notes(item), _tints(item)
    response = _tokens(trajectory.response_ids, tokenizer, list(roles(trajectory)), notes, tints, lines)
    return (
        f"<details><summary>prompt, {len(trajectory.prompt_ids)} tokens</summary>"
        f'<pre class="seq">{prompt}</pre></details><pre class="seq">{response}</pre>'
    )


def _turns(item: PageItem, tokenizer: PreTrainedTokenizerBase) -> str:
    """A prompt is one text and the list of its ids, not a span for each token: prompts are most of such an episode, and
    those of fifty turns would make a page that no browser opens."""
    trajectory, parts = item.trajectory, []
    notes, tints, shown_as = _response_notes(item), _tints(item), list(roles(trajectory))
    for number, (turn, line) in enumerate(zip(trajectory.turns, _turn_lines(item), strict=True)):
        ids = trajectory.prompt_ids if turn.prompt_ids is None else turn.prompt_ids
        text = escape(tokenizer.decode(ids, skip_special_tokens=False))
        span = slice(turn.start, turn.observation_end)
        sampled = _tokens(trajectory.response_ids[span], tokenizer, shown_as[span], notes[span], tints[span])
        parts.append(
            f"{line}<details><summary>prompt of turn {number + 1}, {len(ids)} tokens</summary>"
            f'<pre class="seq"><span class="p">{text}</span></pre>'
            f'<p class="ids">ids: {" ".join(map(str, ids))}</p></details><pre class="seq">{sampled}</pre>'
        )
        if seen := "\n".join(call.result.text for call in trajectory.calls if call.turn == number):
            parts.append(f'<pre class="seq"><span class="o">{escape(seen)}</span></pre>')
    return "".join(parts)


def _header(trajectory: Trajectory) -> str:
    task, reward = trajectory.task, trajectory.reward
    rows = [
        ("question", task.question),
        ("gold", " | ".join(task.golden_answers)),
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
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows) + "</dl>"


def _calls(trajectory: Trajectory) -> str:
    if not trajectory.calls:
        return "<p>No calls.</p>"
    rows = "".join(
        f"<tr><td>{call.turn}</td><td>{escape(call.request.name)}</td>"
        f"<td>{escape(', '.join(str(v) for v in call.request.arguments.values()))}</td>"
        f"<td>{call.result.outcome.value}</td><td>{call.latency_s * 1000:.1f} ms</td>"
        f"<td>{escape(' · '.join(d.title for d in call.result.documents))}</td></tr>"
        for call in trajectory.calls
    )
    head = "".join(f"<th>{name}</th>" for name in ("turn", "tool", "arguments", "outcome", "latency", "documents"))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _response_notes(item: PageItem) -> list[str]:
    trajectory = item.trajectory
    versions = trajectory.token_versions
    several = len({*versions} - {-1}) > 1
    notes = []
    for i, mask in enumerate(trajectory.loss_mask):
        note = f"mask {mask}"
        if mask:
            note += f"   log-prob {trajectory.logprobs[i]:.4f}" + (f"   weights {versions[i]}" if several else "")
        for name, values in item.signals.items():
            note += f"   {name} {values[i]:+.4g}"
        notes.append(note)
    return notes


def _turn_lines(item: PageItem) -> list[str]:
    """The line above each turn: its figures, and its reward where the environment gives any for single turns."""
    turns = item.trajectory.turns
    paid = any(turn.reward for turn in turns)
    lines = []
    for number, (turn, figures) in enumerate(zip(turns, turn_figures(item.trajectory, item.signals), strict=True), 1):
        parts = [f"turn {number} of {len(turns)}", f"{turn.end - turn.start} tokens"]
        parts += [f"reward {turn.reward:.4g}"] if paid else []
        parts += [f"{name} {value:.4g}" for name, value in figures.items()]
        if turn.action.kind is ActionKind.INVALID or not turn.action.well_formed:
            parts.append("invalid" if turn.action.error is None else f"invalid: {turn.action.error}")
        lines.append(f'<b class="turn">{escape(" · ".join(parts))}</b>')
    return lines


def _tints(item: PageItem) -> list[float]:
    """First signal per token, scaled to [-1, 1] by its largest absolute value; empty without signals."""
    if not item.signals:
        return []
    values = next(iter(item.signals.values()))
    scale = max((abs(v) for v in values), default=0.0) or 1.0
    return [v / scale for v in values]


def _tokens(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    token_roles: Sequence[str],
    notes: Sequence[str],
    tints: Sequence[float] = (),
    before: Mapping[int, str] | None = None,
) -> str:
    """Spans, one a token. Neighbouring texts are written without anything between them: the page is in <pre>.
    ``before``: HTML above some tokens, by their place."""
    spans = []
    for i, text in enumerate(token_texts(tokenizer, ids)):
        note = f"id {ids[i]}   {token_roles[i]}" + (f"   {notes[i]}" if notes else "")
        tint = ""
        if tints and token_roles[i] == "model" and abs(tints[i]) > 1e-3:
            sign = "good" if tints[i] > 0 else "bad"
            strength = max(10, round(100 * abs(tints[i])))
            tint = f' style="border-bottom-color:color-mix(in srgb,var(--{sign}) {strength}%,transparent)"'
        shown = escape(text) if text else "▫"
        spans.append((before or {}).get(i, ""))
        spans.append(f'<span class="{token_roles[i][0]}" data-n="{escape(note, quote=True)}"{tint}>{shown}</span>')
    return "".join(spans)


def _legend(items: Sequence[PageItem]) -> str:
    first = next((next(iter(item.signals)) for item in items if item.signals), None)
    underline = (
        f'underline: {escape(first)}, <span class="m pos">positive</span> <span class="m neg">negative</span> · '
        if first
        else ""
    )
    return (
        '<p class="legend"><span class="p">prompt</span> <span class="m">model (sampled, trained)</span> '
        f'<span class="o">observation (not trained)</span> · {underline}hover a token for its figures</p>'
    )


STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1b1f;--line:#d5d5dc;--p:#ececf1;--m:#dbe9ff;--o:#fff0d1;--good:#158a3c;
--bad:#c62828;--bar:#1b1b1f;--barfg:#fff}
@media (prefers-color-scheme:dark){:root{--bg:#16171b;--fg:#e6e6ea;--line:#3a3b42;--p:#2a2b31;--m:#1d3557;--o:#4a3a14;
--good:#5fd68a;--bad:#ff7b7b;--bar:#e6e6ea;--barfg:#16171b}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem 1rem 4rem;max-width:72rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,sans-serif}
article{border-top:1px solid var(--line);margin-top:2rem;padding-top:.5rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:.5rem 0}dt{opacity:.7}dd{margin:0}
pre.seq{white-space:pre-wrap;overflow-wrap:anywhere;font:14px/1.7 ui-monospace,monospace;border:1px solid var(--line);
border-radius:6px;padding:.7rem;margin:.6rem 0}
span.p,span.m,span.o{border-bottom:3px solid transparent}
span.p{background:var(--p)}span.m{background:var(--m)}span.o{background:var(--o)}
span.pos{border-bottom-color:var(--good)}span.neg{border-bottom-color:var(--bad)}
p.ids{font:12px/1.5 ui-monospace,monospace;overflow-wrap:anywhere;opacity:.75;margin:.3rem 0}
b.turn{display:block;font:600 12px/1.6 system-ui,sans-serif;opacity:.75;margin:.3rem 0 .1rem}
pre.seq span[data-n]:hover{outline:2px solid var(--fg);outline-offset:-1px}
pre.seq span[data-n]:hover::after{content:attr(data-n);position:fixed;left:0;right:0;bottom:0;padding:.6rem 1rem;
white-space:pre-wrap;background:var(--bar);color:var(--barfg);font:15px/1.4 ui-monospace,monospace;z-index:9}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
th,td{text-align:left;padding:.2rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
summary{cursor:pointer}
"""
