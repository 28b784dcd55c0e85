"""An expert that searches and computes: the source of the demonstrations of the world with numbers."""

from __future__ import annotations

import re

from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from rollout.tags import between
from rollout.trajectory import Task

RESULT = " <result>\n", "\n</result>"


class ToolExpertPolicy(CarelessPolicy):
    """Text in, text out, in ARPO's format: what the expert writes next in one trajectory.

    The task's metadata say what is to be looked up (``steps``: mention, keyword, what the passage tells) and computed
    (``code``). It has two habits that cost calls. With probability ``error_rate`` a search starts with the bare name,
    and when the result does not hold the fact, the expert says so and searches for the keyword, too. With the same
    probability its first program keeps the result to itself, and a second one has to print it.
    """

    def next_turn(self, task: Task, transcript: str) -> str:
        """The expert's next turn, tags included, after ``transcript`` (everything since the prompt)."""
        steps, code = task.metadata["steps"], task.metadata["code"]
        facts = [f"The {keyword} of {mention} is {told}." for mention, keyword, told in steps]
        results, computed = between(transcript, *RESULT), between(transcript, f"</python>{RESULT[0]}", RESULT[1])
        known = 0  # steps whose fact has been read, in order
        while known < len(facts) and any(facts[known] in result for result in results):
            known += 1
        answer = task.golden_answers[0]
        if known == len(facts) and (not code or answer in (text.strip() for text in computed)):
            return f"<think>It is {answer}.</think> <answer> \\boxed{{{answer}}} </answer>"
        if known == len(facts):
            return self._compute(task, code, steps, bool(computed))
        mention, keyword, _ = steps[known]
        kept = _kept(steps[:known])
        if f"<search> {mention} </search>" in transcript:  # it was careless, and did not bring the fact
            return self._search(f"Not found.{kept} Search {keyword}.", f"{mention} {keyword}")
        if not known:
            thought = f"First {', then '.join(keyword for _, keyword, _ in steps)}."
        else:
            thought = f"It is {steps[known - 1][2]}.{kept} Next {keyword}."
        return self._search(thought, mention if self.slips(task, known) else f"{mention} {keyword}")

    def _compute(self, task: Task, code: str, steps: list[list[str]], again: bool) -> str:
        if again:
            return f"<think>Not shown. Print it.</think> <python> print({code}) </python>"
        thought = f"It is {steps[-1][2]}.{_kept(steps[:-1])} Compute." if steps else "Compute."
        program = f"x = {code}" if self.slips(task, len(steps)) else f"print({code})"
        return f"<think>{thought}</think> <python> {program} </python>"

    @staticmethod
    def _search(thought: str, query: str) -> str:
        return f"<think>{thought}</think> <search> {query} </search>"


def _kept(steps: list[list[str]]) -> str:
    """Numbers found earlier are said again, so that what is needed next always stands near."""
    return "".join(f" Keep {told}." for _, _, told in steps if told.isdigit())


class ToolExpertEngine(WorldExpert):
    """Engine over ``ToolExpertPolicy``; ``error_rate``: probability of a careless search or program."""

    QUESTION = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
    Policy = ToolExpertPolicy
