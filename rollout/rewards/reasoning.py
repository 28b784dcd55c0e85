r"""Reward of reasoning with a Python tool: mathematics, multiple choice and programs (SOD, arXiv 2605.07725;
docs/algorithms/sod.md), mended and as released.

Sources of the rules: YoungZ365/SOD, recipe/demystify/reward.py (compute_score), verl/workers/reward_manager/dapo.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from common.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from rollout.rewards.answers import choice_letter, released_program, strict_box, submitted_program, without_quotes
from rollout.rewards.code.solution_tests import CodeTests, TestOutcome, public_tests
from rollout.rewards.mathematics import DEADLINE_SECONDS, math_equal
from rollout.tokenizer import decode, load_tokenizer
from rollout.tools.python.base import Runner
from rollout.trajectory import ActionKind, Reward, Task, Trajectory

Ability = Literal["math", "choice", "code"]
Math = Literal["equal", "strict_box"]
Shaping = Literal["none", "intended", "as_released"]
WRONG = -1.0
PER_ROUND, AT_MOST = 0.1, -0.6  # of the shaping of wrong answers


def ability(task: Task) -> Ability:
    """Return how a task is judged: "math", "choice" or "code". Its ``ability`` decides, else its data source, as in the
    released code.

    Raises ValueError for another ability.
    """
    named = task.metadata.get("ability")
    if named is None:
        source = task.data_source.lower()
        return "code" if "code" in source else "choice" if "gpqa" in source else "math"
    if named not in get_args(Ability):
        raise ValueError(f"task {task.id}: ability is {named!r}; expected one of {', '.join(get_args(Ability))}")
    return named


def shaped(score: float, rounds: int, shaping: Shaping) -> float:
    """Return a score, with credit for tool calls added if it is negative. Other scores stay unchanged.

    ``intended``: 0.1 for each round, up to -0.6. ``as_released``: the reward manager never passes the number of turns,
    so the formula min(-0.6, score + 0.1 * (num_turns - 2) / 2) sees 0 turns and gives -1.1.

    Args:
        rounds: turns whose calls were executed.
    """
    if score >= 0 or shaping == "none":
        return score
    num_turns = 2 * rounds + 2 if shaping == "intended" else 0  # as in verl: the question, and the turns of both sides
    return min(AT_MOST, score + PER_ROUND * (num_turns - 2) / 2)


def overlong(length: int, limit: int, buffer: int, penalty: float) -> float:
    """Return DAPO's penalty for a long response: 0 for up to ``limit - buffer`` tokens, then linear, down to
    ``-penalty`` at ``limit``."""
    return min(-(length - (limit - buffer)) / buffer * penalty, 0.0)


class ReasoningReward:
    r"""Reward of -1 or 1 for mathematics and multiple choice. For programs it is the share of tests passed, or -1
    without a program.

    The task's ability decides (see ``ability``). A solution's program is the last ```python block of the last turn, if
    that is an answer; its tests are ``task.metadata["tests"]`` (``code.solution_tests``). Other trajectories have no
    answer.

    total = score + shaping + overlong. Parts: acc (1: right; for programs: all tests passed), answered, score, shaping
    and overlong (0 or below). Programs also have tests_passed (the share), acc_public and acc_hidden (1: all tests that
    a prompt may show passed, and all others; absent without such tests).

    Args:
        tokenizer: Hugging Face folder, to read the response.
        runner: runs programs: ``rollout.tools.python.local.LocalSandbox`` or
            ``rollout.tools.python.fusion.SandboxFusion``, with its own limits (released: 30 s, 1024 MB). null: no task
            needs a program.
        math: ``equal``: math-verify judges the parsed answer without quotes, or its letter. ``strict_box``: as
            released, the last box within the last 100 characters of the response, tool results included, must equal the
            gold answer as text.
        tool_shaping: shaping of negative scores, see ``shaped``.
        overlong_buffer: last tokens of the budget, over which the penalty grows, see ``overlong``. null: no penalty.
        overlong_penalty: its greatest value.
        max_response_tokens: the budget of the rollout (the same option there), tool results included.
        test_concurrency: tests in flight at once, over all trajectories.
        max_timeouts: see ``CodeTests``.
        code_as_released: take the last ```python block anywhere in the response (``released_program``), however the
            trajectory ended; for its tests see ``as_released`` of ``CodeTests``.
        math_timeout_s: see ``mathematics.math_equal``.

    Raises:
        ValueError: no tokenizer in the folder, or an ``overlong_buffer`` above ``max_response_tokens``.
    """

    def __init__(
        self,
        tokenizer: str,
        runner: Runner | None = None,
        math: Math = "equal",
        tool_shaping: Shaping = "none",
        overlong_buffer: PositiveInt | None = None,
        overlong_penalty: NonNegativeFloat = 1.0,
        max_response_tokens: PositiveInt | None = None,
        test_concurrency: PositiveInt = 8,
        code_as_released: bool = False,
        math_timeout_s: PositiveFloat = DEADLINE_SECONDS,
        max_timeouts: PositiveInt | None = 3,
    ) -> None:
        if overlong_buffer is not None and not 0 < overlong_buffer <= (max_response_tokens or 0):
            raise ValueError(
                f"overlong_buffer is {overlong_buffer}, max_response_tokens {max_response_tokens}; expected a buffer "
                "between 1 and max_response_tokens, which is that of the rollout"
            )
        self.math, self.math_timeout_s = math, math_timeout_s
        self.tool_shaping: Shaping = tool_shaping
        self.overlong_buffer, self.overlong_penalty = overlong_buffer, overlong_penalty
        self.max_response_tokens = max_response_tokens
        options = {"concurrency": test_concurrency, "as_released": code_as_released, "max_timeouts": max_timeouts}
        self.code = None if runner is None else CodeTests(runner, **options)
        self.tokenizer = load_tokenizer(tokenizer)

    async def start(self) -> None:
        """Start the runner of programs. A sandbox that cannot protect the machine fails here."""
        if self.code is not None:
            await self.code.start()

    async def score_async(self, trajectory: Trajectory) -> Reward:
        """Return the reward of a finished trajectory.

        Raises:
            InfrastructureError: the runner or math-verify's process fails.
            ValueError: a program without a runner or tests, or a choice without a gold letter.
        """
        if ability(trajectory.task) == "code":
            score, parts = await self._program(trajectory)
        else:
            score, parts = await asyncio.to_thread(self._answer, trajectory)
        rounds = len({call.turn for call in trajectory.executed_calls})
        parts["score"] = score
        parts["shaping"] = shaped(score, rounds, self.tool_shaping) - score
        parts["overlong"] = self._overlong(len(trajectory.response_ids))
        return Reward(score + parts["shaping"] + parts["overlong"], parts)

    async def close(self) -> None:
        """Close the runner of programs."""
        if self.code is not None:
            await self.code.close()

    def _overlong(self, length: int) -> float:
        if self.overlong_buffer is None or self.max_response_tokens is None:
            return 0.0
        return overlong(length, self.max_response_tokens, self.overlong_buffer, self.overlong_penalty)

    def _answer(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        task = trajectory.task
        if self.math == "strict_box":
            answer = strict_box(decode(self.tokenizer, trajectory.response_ids, skip_special=True))
            right = answer in task.golden_answers
        else:
            answer = trajectory.answer
            right = self._chosen(answer, task) if ability(task) == "choice" else self._equal(answer, task)
        return 1.0 if right else WRONG, {"acc": float(right), "answered": float(answer is not None)}

    def _equal(self, answer: str | None, task: Task) -> bool:
        bare = None if answer is None else without_quotes(answer)
        return math_equal(bare, [without_quotes(gold) for gold in task.golden_answers], self.math_timeout_s)

    def _chosen(self, answer: str | None, task: Task) -> bool:
        golds = [choice_letter(gold) for gold in task.golden_answers]
        if None in golds or not golds:
            raise ValueError(f"task {task.id}: a choice with the gold answers {task.golden_answers}; expected a letter")
        return choice_letter(answer) in golds

    async def _program(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        task = trajectory.task
        tests, who = task.metadata.get("tests"), f"task {task.id} ({task.data_source}) is answered by a program"
        if self.code is None:
            raise ValueError(
                f"{who}, but the reward has no runner; set runner, such as rollout.tools.python.local.LocalSandbox"
            )
        if not tests:
            raise ValueError(f"{who}, and its metadata has no tests")
        program = self._submitted(trajectory, self.code.as_released)
        report = None if program is None else await self.code.run(program, tests)
        outcomes = () if report is None else report.outcomes
        share = report.share_passed if report is not None else 0.0
        parts = {"acc": float(share == 1.0), "answered": float(program is not None), "tests_passed": share}
        return WRONG if report is None or not report.compiles else share, parts | _by_visibility(outcomes, tests)

    def _submitted(self, trajectory: Trajectory, as_released: bool) -> str | None:
        if as_released:
            return released_program(decode(self.tokenizer, trajectory.response_ids, skip_special=True))
        last = trajectory.turns[-1] if trajectory.turns else None
        if last is None or last.action.kind is not ActionKind.ANSWER:
            return None
        text = decode(self.tokenizer, trajectory.response_ids[last.start : last.end])
        return submitted_program(text.replace(self.tokenizer.eos_token, ""))


def _by_visibility(outcomes: Sequence[TestOutcome], tests: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics acc_public and acc_hidden: 1.0 if the program passed all public (hidden) tests, else 0.0. A
    metric without such tests is left out. ``outcomes`` is empty if no program ran."""
    public, total = len(public_tests(tests)), len(tests.get("inputs", ())) or 1  # of assertions none is public
    passed = [outcome is TestOutcome.PASSED for outcome in outcomes]
    parts = {"acc_public": float(bool(passed) and all(passed[:public]))} if public else {}
    return parts | ({"acc_hidden": float(bool(passed) and all(passed[public:]))} if public < total else {})
