r"""Reward of ARPO (arXiv 2507.19849; docs/algorithms/arpo.md), as released and mended.

Source of the rule: RUC-NLPIR/ARPO, verl/utils/reward_score/deep_research.py. A response scores -1 for a bad format, 0
if its answer shares no token with the gold answer, else its accuracy, plus a bonus for using both tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from common.ranges import NonNegativeFloat, PositiveFloat
from rollout.rewards.mathematics import DEADLINE_SECONDS, math_equal
from rollout.rewards.scoring import exact_match, f1, normalize_answer
from rollout.tags import boxed, closing_brace
from rollout.tokenizer import decode, load_tokenizer
from rollout.trajectory import ActionKind, CallOutcome, Reward, Task, Trajectory

BOTH_TOOLS = frozenset({"search", "python"})
BAD_FORMAT = -1.0
EMPTY_RESULT = " <result></result>"  # stands for a tool result in the fixed format rule
MATH_SOURCES = frozenset({"aime24", "aime25", "math500", "gsm8k", "math"})  # where a task says no "ability"


def released_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed`` as ARPO's released code reads it (deep_research.py, 155-210); None if
    that fails.

    A ``\boxed`` followed by a space comes before every other, and is read up to the next dollar sign or the end.
    Escaped braces count. A last ``\boxed`` without a brace is an error, even if another box comes before it.

    >>> print(*map(released_boxed, (r"\boxed 12$ so \boxed{3}", r"\boxed{1}, \boxed2", r"\boxed{\{1}")))
    12 None None
    """
    _, spaced, rest = text.rpartition("\\boxed ")
    if spaced:
        return rest.partition("$")[0]
    _, found, rest = text.rpartition("\\boxed")
    end = closing_brace(rest) if found and rest.startswith("{") else None
    return None if end is None else rest[1:end]


def format_error(text: str, read: Callable[[str], str | None] = boxed) -> str | None:
    """Return why a response breaks ARPO's released format rule, or None if it keeps the rule.

    The response needs as many <think> as </think>, at least one; one <answer> and after it one </answer>; and an answer
    with a box that can be read. Every <search> must be followed by </search>, <result> and </result> in this order, and
    so must every <python> in a separate scan.

    Args:
        read: takes the answer out of its box.
    """
    opened, closed = text.count("<think>"), text.count("</think>")
    if opened != closed or not opened:
        return f"{opened} <think> and {closed} </think>; expected as many of both, at least one"
    opened, closed = text.count("<answer>"), text.count("</answer>")
    if (opened, closed) != (1, 1):
        return f"{opened} <answer> and {closed} </answer>; expected one of each"
    if text.index("<answer>") > text.index("</answer>"):
        return "</answer> stands before <answer>"
    for tool in sorted(BOTH_TOOLS):
        if _has_open_block(text, tool):
            return f"a <{tool}> without </{tool}> and a <result> block after it"
    answer = answer_text(text)
    if "\\boxed{" not in answer or "}" not in answer:
        return "no \\boxed{} in the answer"
    return None if read(answer) is not None else "the answer's \\boxed{ is never closed, or cannot be read"


def _has_open_block(text: str, tool: str) -> bool:
    position = 0
    while (start := text.find(f"<{tool}>", position)) >= 0:
        # The released code takes the first tag of each kind after the opening one, and then compares their positions.
        end, result = text.find(f"</{tool}>", start), text.find("<result>", start)
        position = text.find("</result>", result) if result >= 0 else -1
        if not start < end < result < position:
            return True
    return False


def answer_text(text: str) -> str:
    """Return the text between the first <answer> and the first </answer>; "" if they are missing or crossed."""
    return text.partition("<answer>")[2].partition("</answer>")[0]


def as_released(text: str, golds: Sequence[str], bonus: float = 0.1) -> Reward:
    r"""Return the reward of a whole response as ARPO's released code computes it, tool results and errors included.

    The score is token F1 for mathematics and questions alike: "-5" is "5", "12" is "1/2", and "\frac{1}{2}" is not
    "0.5". The texts "</search>" and "</python>" anywhere give the bonus. A gold answer that normalisation empties ("A")
    is never met.

    Tool results count as written by the model. A page or a program output with ``</answer>`` and a box in the last
    result earns its F1. One with "</search>" or "</python>" earns the bonus, and one that breaks the format costs 1.

    Returns:
        total in {-1} and [0, 1 + bonus]; parts f1, format and both_tools, as this rule sees them.
    """
    both = all(f"</{tool}>" in text for tool in BOTH_TOOLS)
    if format_error(text, released_boxed) is not None:
        return Reward(BAD_FORMAT, {"f1": 0.0, "format": 0.0, "both_tools": float(both)})
    score = f1(released_boxed(answer_text(text)), [gold for gold in golds if normalize_answer(gold)])
    total = score + bonus * both if score > 0 else 0.0
    return Reward(total, {"f1": score, "format": 1.0, "both_tools": float(both)})


def is_math(task: Task) -> bool:
    """Return whether a task is mathematics, by its ``ability``, else by its data source."""
    ability = task.metadata.get("ability")
    return ability == "math" if ability else task.data_source in MATH_SOURCES


class ArpoReward:
    """Reward of -1 for a bad format, 0 for a wrong answer, else accuracy plus the bonus for two tools.

    ``fixed`` scores the answer that the protocol parsed: mathematics by math-verify (1 or 0), questions by F1. Its
    format rule reads sampled text only, with an empty result block after an answered call, so tool results can neither
    break nor forge the format. The bonus needs one call of each tool that was executed and returned text.
    ``as_released`` is the function of that name.

    Parts, each in [0, 1]: em, f1, math (mathematical tasks only), format (1: kept), both_tools, answered. In
    ``as_released``, f1, format and both_tools follow that rule; em and math score the parsed answer.

    Args:
        tokenizer: Hugging Face folder, to read the response.
        variant: ``fixed`` or ``as_released``.
        bonus: bonus for the use of both tools (the paper's r_M).
        math_timeout_s: see ``mathematics.math_equal``.
    """

    def __init__(
        self,
        tokenizer: str,
        variant: Literal["fixed", "as_released"] = "fixed",
        bonus: NonNegativeFloat = 0.1,
        math_timeout_s: PositiveFloat = DEADLINE_SECONDS,
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self.variant, self.bonus, self.math_timeout_s = variant, bonus, math_timeout_s

    def score(self, trajectory: Trajectory) -> Reward:
        golds, answer = trajectory.task.golden_answers, trajectory.answer
        parts = {"em": exact_match(answer, golds), "f1": f1(answer, golds), "answered": float(answer is not None)}
        if is_math(trajectory.task):
            parts["math"] = float(math_equal(answer, golds, self.math_timeout_s))
        if self.variant == "as_released":
            released = as_released(self._response(trajectory), golds, self.bonus)
            return Reward(released.total, parts | released.parts)
        parts["format"] = float(format_error(self._sampled(trajectory)) is None)
        parts["both_tools"] = float(used_both_tools(trajectory))
        if not parts["format"]:
            return Reward(BAD_FORMAT, parts)
        accuracy = parts.get("math", parts["f1"])
        return Reward(accuracy + self.bonus * parts["both_tools"] if accuracy > 0 else 0.0, parts)

    def _response(self, trajectory: Trajectory) -> str:
        """Return the text of the whole response up to its first EOS."""
        ids, eos = trajectory.response_ids, self.tokenizer.eos_token_id
        return decode(self.tokenizer, ids[: ids.index(eos)] if eos in ids else ids, skip_special=True)

    def _sampled(self, trajectory: Trajectory) -> str:
        """Return the text that the model sampled, with an empty result block after each answered call."""
        texts = []
        for turn in trajectory.turns:
            texts.append(decode(self.tokenizer, trajectory.response_ids[turn.start : turn.end], skip_special=True))
            if turn.action.kind is ActionKind.CALL and turn.observation_end > turn.end:
                texts.append(EMPTY_RESULT)
        return "".join(texts)


def used_both_tools(trajectory: Trajectory) -> bool:
    """Return whether search and Python were each executed at least once with outcome OK and a text that is not
    empty."""
    useful = {
        call.request.name
        for call in trajectory.calls
        if call.result.outcome is CallOutcome.OK and call.result.text.strip()
    }
    return useful >= BOTH_TOOLS
