"""Prompt templates of episodes: the meaning of verl-agent's (docs/algorithms/sdar.md) in our words.

Checkpoints trained on the published wording need that wording; give it as files (``EpisodeProtocol``'s option
``texts``).

Placeholders: all texts may have ``{observation}`` and ``{actions}``; ``first`` and ``later`` also ``{task}``. A shop's
texts need ``{task}`` in both, because its pages are shown without their instruction (only a first page whose text lacks
``{task}`` is shown whole). ``later`` also has ``{history}``, ``{taken}`` (turns so far), ``{shown}`` (turns in the
history) and ``{step}`` (number of the next turn).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PLACEHOLDER = re.compile(r"\{(\w+)\}")
AFTER = frozenset({"observation", "actions"})
FIRST = AFTER | {"task"}
LATER = FIRST | {"history", "taken", "shown", "step"}


@dataclass(frozen=True, slots=True)
class EpisodeTexts:
    first: str  # the prompt of the first turn
    later: str  # the prompt of every later turn, with prompts for each turn
    after: str  # the user's turn after an action, in one conversation

    def __post_init__(self) -> None:
        for name, known in (("first", FIRST), ("later", LATER), ("after", AFTER)):
            found = set(PLACEHOLDER.findall(getattr(self, name)))
            if unknown := sorted(found - known):
                raise ValueError(
                    f"the text '{name}' has the placeholder {{{unknown[0]}}}; expected some of "
                    + ", ".join(f"{{{p}}}" for p in sorted(known))
                )
            if not found & {"observation", "history"}:
                raise ValueError(f"the text '{name}' has no {{observation}}, so that the model would see nothing")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a template's text with its placeholders filled in one pass; braces in a value stay as they are."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


_HOW = (
    "It is your turn to act. Begin by reasoning about the situation, step by step, between <think> and </think>. Then "
    "pick one of the admissible actions and write it between <action> and </action>."
)
_PAST = (
    "So far you have taken {taken} step(s). These are the last {shown} observations and the actions you took on them: "
    "{history}\nThis is step {step}, and you now observe: {observation}\n"
)
_HOUSE = "You are an expert agent who acts in the household environment ALFRED, through text.\n"
_SHOP = "You are an expert agent who shops in the online store WebShop, through text.\n"
_SEARCH = (
    "You answer questions with the help of a search engine. Whenever there is something new, first reason about it "
    "between <think> and </think>. If you lack knowledge, search by writing <search> your query </search>. If you know "
    "enough, write the short answer alone between <answer> and </answer>. Never do both in one turn.\n"
)

TEXTS: dict[str, EpisodeTexts] = {
    "household": EpisodeTexts(
        first=f"{_HOUSE}You now observe: {{observation}}\nAdmissible actions are: [{{actions}}]\n\n{_HOW}",
        later=f"{_HOUSE}Your task is to: {{task}}\n{_PAST}Admissible actions are: [{{actions}}]\n\n{_HOW}",
        after=f"You now observe: {{observation}}\nAdmissible actions are: [{{actions}}]\n\n{_HOW}",
    ),
    "shopping": EpisodeTexts(
        first=f"{_SHOP}Your task is to: {{task}}\nYou now observe: {{observation}}\n"
        f"Admissible actions are: [{{actions}}]\n\n{_HOW}",
        later=f"{_SHOP}Your task is to: {{task}}\n{_PAST}Admissible actions are: [{{actions}}]\n\n{_HOW}",
        after=f"You now observe: {{observation}}\nAdmissible actions are: [{{actions}}]\n\n{_HOW}",
    ),
    "search": EpisodeTexts(
        first=f"{_SEARCH}Question: {{observation}}",
        later=f"{_SEARCH}Question: {{task}}\nYou have taken {{taken}} step(s):\n{{history}}",
        after="{observation}",
    ),
    # for tiny models, which learn the format from demonstrations
    "short": EpisodeTexts(
        first="{observation}\nactions: {actions}",
        later="Your task is to: {task}\n{history}{observation}\nactions: {actions}",
        after="{observation}\nactions: {actions}",
    ),
    # the same without the admissible actions
    "bare": EpisodeTexts(
        first="{observation}", later="Your task is to: {task}\n{history}{observation}", after="{observation}"
    ),
}


def read_texts(texts: str | Mapping[str, str]) -> EpisodeTexts:
    """Return the prompt templates of a built-in name, or of ``first``, ``later`` and ``after``, each a file or the text
    itself.

    Raises:
        ValueError: an unknown name, missing or unknown parts, or an unknown placeholder.
    """
    if isinstance(texts, str):
        if texts not in TEXTS:
            raise ValueError(f"texts is {texts!r}; expected one of {', '.join(TEXTS)}, or first, later and after")
        return TEXTS[texts]
    if set(texts) != {"first", "later", "after"}:
        raise ValueError(f"texts has {sorted(texts)}; expected first, later and after")
    return EpisodeTexts(**{name: _text(value) for name, value in texts.items()})


def _text(value: str) -> str:
    if "{" in value:
        return value
    path = Path(value)
    if not path.is_file():
        raise ValueError(f"texts: {value!r} is neither a file nor a text with placeholders")
    return path.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class PastTurn:
    """One turn of an episode: the observation before the action, the action, and its result."""

    observation: str
    action: str
    result: str


def household_history(turns: Sequence[PastTurn], number: int) -> str:
    """Return past turns as text, "[Observation i: '..', Action i: '..']" for each; ``number``: number of the first
    one."""
    shown = [
        f"[Observation {i}: '{turn.observation}', Action {i}: '{turn.action}']" for i, turn in enumerate(turns, number)
    ]
    return "\n" + "\n".join(shown) if shown else ""


def search_history(turns: Sequence[PastTurn], number: int) -> str:
    """Return past turns as text, "Step i:<search>..</search> <information>..</information>" for each."""
    return "\n".join(
        f"Step {i}:{turn.action} <information>{turn.result}</information>" for i, turn in enumerate(turns, number)
    )


def short_history(turns: Sequence[PastTurn], number: int) -> str:
    return "".join(f"{turn.observation}\n> {turn.action}\n" for turn in turns)


HISTORIES: dict[str, Callable[[Sequence[PastTurn], int], str]] = {
    "brackets": household_history,
    "search": search_history,
    "short": short_history,
}
