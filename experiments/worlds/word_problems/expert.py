"""An expert that solves word problems with the code interpreter, one calculation per call."""

from __future__ import annotations

import json
import re

from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from rollout.tags import between
from rollout.trajectory import Task

TOOL = "code_interpreter"
SLIPS = ("stale", "silent", "broken")  # mistakes of a careless turn ...
WEIGHTS = (5, 4, 1)  # ... and their weights


class WordExpertPolicy(CarelessPolicy):
    """A scripted expert that solves a word problem with the code interpreter, and writes its turns as text.

    The task's metadata hold ``formulas``, ``results`` and ``told``, the sentences that ask for them. The expert repeats
    the sentence before each calculation, which shows how far it has come. With probability ``error_rate`` a calculation
    first goes wrong in one of three ways: it uses a variable of an earlier program, which no longer exists; it prints
    nothing; or the call is not well-formed JSON. After reading the result, the expert repeats the calculation
    correctly.
    """

    def next_turn(self, task: Task, transcript: str) -> str:
        """Return the text of the expert's next turn, without its end token. ``transcript`` is everything since the
        prompt.
        """
        formulas, results = task.metadata["formulas"], task.metadata["results"]
        responses = between(transcript, "<tool_response>\n", "\n</tool_response>")
        known = 0
        for response in responses:
            known += known < len(results) and response.strip() == f"= {results[known]}"
        if known == len(formulas):
            return f"The answer is \\boxed{{ {results[-1]} }}."
        formula = formulas[known]
        if responses and response_failed(responses[-1]):
            return f"Again: {formula}.\n{call(printing(formula))}"
        return f"{task.metadata['told'][known]} {formula}.\n{self._call(task, known, formula)}"

    def _call(self, task: Task, turn: int, formula: str) -> str:
        rng = self.slips(task, turn)
        if rng is None:
            return call(printing(formula))
        kind = rng.choices(SLIPS, WEIGHTS)[0]
        if kind == "stale" and turn:
            return call(printing(f"x {formula.split()[1]} {formula.split()[2]}"))
        if kind == "broken":
            return call(printing(formula)).replace("}}\n", "}\n")
        return call(f"x = {formula}")


def printing(formula: str) -> str:
    """Return a Python program that prints a label and the formula's value. The label puts a space before every
    number."""
    return f"print('=', {formula})"


def call(code: str) -> str:
    """Return the text of a call of the code interpreter, in the format of Qwen's template."""
    return f"<tool_call>\n{json.dumps({'name': TOOL, 'arguments': {'code': code}})}\n</tool_call>"


def response_failed(response: str) -> bool:
    """Return whether a tool's response is anything but a labelled number."""
    return not response.strip().removeprefix("= ").removeprefix("-").isdigit()


class WordExpertEngine(WorldExpert):
    """Inference engine that answers with ``WordExpertPolicy``, a scripted expert. Turns end with the tokenizer's EOS.
    ``error_rate`` is the probability that a calculation first goes wrong.
    """

    QUESTION = re.compile(r"<\|im_start\|>user\n((?:(?!<tool_response>).)*?)<\|im_end\|>", re.DOTALL)
    Policy = WordExpertPolicy
    ends_turns = True
