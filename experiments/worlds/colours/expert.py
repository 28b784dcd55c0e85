"""The engine that plays the model for demonstrations of all agents."""

from __future__ import annotations

import re

from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from rollout.trajectory import Task

TOLD = re.compile(r"(?:is|says: it is) (\w+)\.")
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>'


class ColourPolicy(CarelessPolicy):
    """Writes the next turn from what the conversation says. With probability ``error_rate`` it first looks up
    "colour", which finds nothing."""

    def next_turn(self, task: Task, transcript: str) -> str:
        if told := TOLD.findall(transcript):
            return told[-1]
        thing = task.metadata["thing"]
        careless = "nothing found." not in transcript and self.slips(task, 0) is not None
        if "Which word shall I look up?" in transcript:
            return "colour" if careless and "The worker" not in transcript else thing
        return CALL % ("colour" if careless else thing)


class ColourExpert(WorldExpert):
    """Answers as ``ColourPolicy``."""

    QUESTION = re.compile(r"(day \d+: what colour is the \w+\?)")
    Policy = ColourPolicy
    ends_turns = True


class BoxedColourPolicy(ColourPolicy):
    """As ``ColourPolicy``, with the answer in a box, as ``HermesProtocol`` reads it."""

    def next_turn(self, task: Task, transcript: str) -> str:
        turn = super().next_turn(task, transcript)
        return turn if "<tool_call>" in turn else f"\\boxed{{{turn}}}"


class BoxedColourExpert(ColourExpert):
    """Answers as ``BoxedColourPolicy``."""

    Policy = BoxedColourPolicy
