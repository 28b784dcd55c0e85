"""Prompts of a teacher with a text made from the finished trajectories: another attempt's solution or error messages
(SDPO), or advice that a language model writes (OPID)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from common.ranges import FiniteFloat, NonNegativeFloat, PositiveInt
from lightning_modules.advantage_transforms.base import Algorithm, validate_choice
from lightning_modules.advantage_transforms.teacher_prompts import RenderedPrompts, positions_of
from rollout.protocols.text_protocol import control_tokens
from rollout.services.chat_client import ChatClient
from rollout.trajectory import CallOutcome, InfrastructureError

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)
Errors = Literal["never", "without_solution", "always"]

ATTEMPTS_TEMPLATE = (
    "{question}\n\n{told}\n\nOnly you are shown this. Answer the question itself from the beginning, as if you had to "
    "find the solution: reason in steps and use the tools where they help."
)
SOLUTION = "Another attempt at this question was right:\n\n{text}"
ERRORS = "The last attempt at this question met these errors:\n\n{text}"
LESSON_TEMPLATE = "{question}\n\nOnly you are given this advice for the question, from an earlier attempt:\n{told}"
WRITER_PROMPT = """An agent tried to solve a task with tools. Its attempt {outcome}.

Task:
{question}

Attempt:
{attempt}

Write advice for an agent that begins the same task, in two to four short sentences. {wanted} Do not mention the \
attempt, and do not give the final answer away. Reply with the advice only."""
WANTED = {
    True: "Say which steps lead to the goal, and in which order to decide.",
    False: "Say which mistakes to avoid, and by which signs they are noticed.",
}

PATIENCE = 3  # iterations in a row without any advice, before the training stops


class MadePrompts(RenderedPrompts):
    """Base of prompts with a text that is made from the trajectories of the iteration. Control tokens in it are
    removed, its end is cut at ``max_tokens``, and a trajectory whose prompt exceeds the model's positions is not
    judged.

    Logged: ``train/told`` (share of trajectories that the teacher judges), ``train/told_tokens`` (tokens added to
    their prompts).
    """

    def __init__(self, template: str, max_tokens: PositiveInt) -> None:
        super().__init__(template)
        self.max_tokens = max_tokens

    def __call__(self, algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> list[Sequence[int] | None]:
        read, limit = super().__call__(algorithm, trajectories), positions_of(algorithm)
        for row, (ids, t) in enumerate(zip(read, trajectories, strict=True)):
            if ids is not None and limit is not None and len(ids) + len(t.response_ids) > limit:
                read[row] = None
        pairs = [(ids, t) for ids, t in zip(read, trajectories, strict=True) if ids is not None]
        mean = algorithm.metrics.mean
        mean("train/told", len(pairs), len(trajectories))
        mean("train/told_tokens", sum(len(ids) - len(t.prompt_ids) for ids, t in pairs), len(pairs))
        return read

    def plain(self, algorithm: Algorithm, text: str) -> str:
        """Return a text without control tokens, its end cut at ``max_tokens``."""
        tokenizer = algorithm.data.rollouts.protocol.tokenizer
        return cut(tokenizer, without_control_tokens(tokenizer, text), self.max_tokens)


class AttemptPrompts(MadePrompts):
    """Tells the teacher what the attempts have shown: another right attempt of the group, or else the error messages of
    the attempt itself. This is SDPO's reprompting (docs/algorithms/distillation.md).

    The solution is the first right trajectory of the group, as released. A trajectory without a text is not judged,
    such as the only right one of a group.

    Logged: see ``MadePrompts``; ``train/told_solution`` (share of trajectories with a solution).

    Args:
        solution: whether to tell a solution.
        success_threshold: smallest reward of a right attempt.
        own_solution: whether a right attempt may be told itself.
        errors: when to tell error messages of failed calls and invalid actions: never, without_solution, or always.
        thinking: whether the solution keeps text between thinking tags.
        max_tokens: of each text; the end of a longer one is cut.
        template: the teacher's question: a text with {question} and {told}.
    """

    def __init__(
        self,
        solution: bool = True,
        success_threshold: FiniteFloat = 0.5,
        own_solution: bool = False,
        errors: Errors = "without_solution",
        thinking: bool = False,
        max_tokens: PositiveInt = 1024,
        template: str = ATTEMPTS_TEMPLATE,
    ) -> None:
        super().__init__(template, max_tokens)
        self.errors: Errors = validate_choice("errors", errors, Errors)
        if not solution and errors == "never":
            raise ValueError("solution is false and errors is never: there is nothing to tell the teacher")
        self.solution, self.success_threshold, self.own_solution = solution, success_threshold, own_solution
        self.thinking = thinking

    def texts(self, algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> list[str | None]:
        right: dict[str, list[Trajectory]] = {}
        for t in trajectories:
            if self.solution and t.reward is not None and t.reward.total >= self.success_threshold:
                right.setdefault(t.group, []).append(t)
        found: list[str | None] = []
        solved = 0
        for t in trajectories:
            others = (other for other in right.get(t.group, ()) if self.own_solution or other.index != t.index)
            solution, parts = next(others, None), []
            if solution is not None:
                text = transcript(algorithm.data.rollouts.protocol.decode, solution, self.thinking)
                parts.append(SOLUTION.format(text=self.plain(algorithm, text)))
            if self.errors == "always" or (self.errors == "without_solution" and solution is None):
                if messages := self.plain(algorithm, error_messages(t)):
                    parts.append(ERRORS.format(text=messages))
            solved += solution is not None
            found.append("\n\n".join(parts) or None)
        algorithm.metrics.mean("train/told_solution", solved, len(found))
        return found


class LessonPrompts(MadePrompts):
    """Tells the teacher advice that a language model writes about each finished trajectory, right or wrong. This is
    OPID's episode skill (docs/algorithms/distillation.md).

    All trajectories of this rank are requested at once. One whose advice fails is not judged; the log counts them
    (``train/told``). Three iterations in a row without any advice stop the training.

    Args:
        client: chat endpoint of the model that writes.
        success_threshold: smallest reward of a right attempt.
        temperature: of the writer.
        attempt_tokens: of the attempt that the writer reads; the end of a longer one is cut.
        max_tokens: of the advice.
        template: the teacher's question: a text with {question} and {told}.
    """

    def __init__(
        self,
        client: ChatClient,
        success_threshold: FiniteFloat = 0.5,
        temperature: NonNegativeFloat = 0.4,
        attempt_tokens: PositiveInt = 2048,
        max_tokens: PositiveInt = 256,
        template: str = LESSON_TEMPLATE,
    ) -> None:
        super().__init__(template, max_tokens)
        self.client, self.success_threshold, self.temperature = client, success_threshold, temperature
        self.attempt_tokens = attempt_tokens
        self._silent = 0  # iterations without any advice

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.client.model}, temperature={self.temperature})"

    def texts(self, algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> list[str | None]:
        protocol = algorithm.data.rollouts.protocol
        prompts = []
        for t in trajectories:
            right = t.reward is not None and t.reward.total >= self.success_threshold
            attempt = cut(protocol.tokenizer, transcript(protocol.decode, t), self.attempt_tokens)
            asked = {"question": t.task.question, "attempt": attempt, "wanted": WANTED[right]}
            prompts.append(WRITER_PROMPT.format(outcome="succeeded" if right else "failed", **asked))
        replies = asyncio.run(self._ask_all(prompts)) if prompts else []
        failures = [reply for reply in replies if isinstance(reply, InfrastructureError)]
        if failures:
            logger.warning("LessonPrompts: no advice for %d of %d: %s", len(failures), len(replies), failures[0])
        self._silent = self._silent + 1 if failures and len(failures) == len(replies) else 0
        if self._silent == PATIENCE:
            raise failures[0]
        texts = ("" if isinstance(reply, InfrastructureError) else reply for reply in replies)
        return [self.plain(algorithm, without_thinking(text)) or None for text in texts]

    async def _ask_all(self, prompts: Sequence[str]) -> list[str | InfrastructureError]:
        try:
            return await asyncio.gather(*map(self._ask, prompts))
        finally:
            await self.client.close()

    async def _ask(self, prompt: str) -> str | InfrastructureError:
        try:
            message = [{"role": "user", "content": prompt}]
            return await self.client.complete(message, temperature=self.temperature, max_tokens=4 * self.max_tokens)
        except InfrastructureError as error:
            return error


def transcript(decode: Callable[[list[int]], str], trajectory: Trajectory, thinking: bool = False) -> str:
    """Return a trajectory as text: what the model wrote, and what its calls returned.

    Args:
        decode: from token ids to text.
        trajectory: finished.
        thinking: whether to keep text between thinking tags.
    """
    parts = []
    for number, turn in enumerate(trajectory.turns):
        said = decode(list(trajectory.response_ids[turn.start : turn.end]))
        parts.append(said if thinking else without_thinking(said))
        parts += [call.result.text for call in trajectory.calls if call.turn == number]
    return "\n".join(part.strip() for part in parts if part.strip())


def without_thinking(text: str) -> str:
    """Return a turn's text without what precedes its last ``</think>``, and without thinking that was cut off.

    >>> [without_thinking(text) for text in ("<think>Hm.</think> north", "Hm.</think>north", "a<think>b")]
    ['north', 'north', 'a']
    """
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def error_messages(trajectory: Trajectory) -> str:
    """Return the error messages that a trajectory has met: of failed calls, and why an action was not executed."""
    failed = (call for call in trajectory.calls if call.result.outcome not in (CallOutcome.OK, CallOutcome.EMPTY))
    found = [call.result.text for call in failed]
    found += [turn.action.error for turn in trajectory.turns if turn.action.error]
    return "\n".join(dict.fromkeys(text.strip() for text in found if text.strip()))


def without_control_tokens(tokenizer: Any, text: str) -> str:
    """Return a text without the control tokens that it quotes, which would end or open a turn of the chat."""
    for token in sorted(control_tokens(tokenizer), key=len, reverse=True):
        text = text.replace(token, "")
    return text.strip()


def cut(tokenizer: Any, text: str, most: int) -> str:
    """Return a text without what follows its first ``most`` tokens."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return text if len(ids) <= most else tokenizer.decode(ids[:most]).rstrip("\ufffd")
