"""An expert that searches and computes, for demonstrations in the world with numbers."""

from __future__ import annotations

import re

from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from rollout.tags import between
from rollout.trajectory import Task

RESULT = " <result>\n", "\n</result>"


class ToolExpertPolicy(CarelessPolicy):
    """A scripted expert that searches and computes, and writes its next turn as text in ARPO's format.

    The task's metadata list the facts to look up (``steps``: mention, keyword, content of the passage) and the program
    (``code``). The expert has two costly habits. With probability ``error_rate`` a search starts with the bare name; if
    the result lacks the fact, the expert says so and adds the keyword. With the same probability its first program
    prints nothing, and a second program must print the result.
    """

    def next_turn(self, task: Task, transcript: str) -> str:
        """Return the text of the expert's next turn, tags included. ``transcript`` is everything since the prompt."""
        steps, code = task.metadata["steps"], task.metadata["code"]
        facts = [f"The {keyword} of {mention} is {told}." for mention, keyword, told in steps]
        results, computed = between(transcript, *RESULT), between(transcript, f"</python>{RESULT[0]}", RESULT[1])
        known = 0  # facts that have been read, in order
        while known < len(facts) and any(facts[known] in result for result in results):
            known += 1
        answer = task.golden_answers[0]
        if known == len(facts) and (not code or answer in (text.strip() for text in computed)):
            return f"<think>It is {answer}.</think> <answer> \\boxed{{{answer}}} </answer>"
        if known == len(facts):
            return self._compute(task, code, steps, bool(computed))
        mention, keyword, _ = steps[known]
        kept = _kept(steps[:known])
        if f"<search> {mention} </search>" in transcript:  # the search was careless and did not return the fact
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
    """Return text that repeats the numbers found so far, so that the next turn can copy them from nearby."""
    return "".join(f" Keep {told}." for _, _, told in steps if told.isdigit())


class ToolExpertEngine(WorldExpert):
    """Inference engine that answers with ``ToolExpertPolicy``, a scripted expert. ``error_rate`` is the probability of
    a careless search or program.
    """

    QUESTION = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
    Policy = ToolExpertPolicy
