"""An expert of the fictional world, which searches along the answer's chain in the task's metadata."""

from __future__ import annotations

import re

from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from rollout.tags import between
from rollout.trajectory import Task


class ExpertPolicy(CarelessPolicy):
    """A scripted expert that answers questions about the fictional world by searching, and writes its next turn as
    text.

    The chain comes from the task's metadata: ``mentions`` (the subject, then the entity of each hop) and ``relations``
    (keywords). With probability ``error_rate`` a hop starts with a broad query, mostly the name alone. If the results
    lack the fact, the expert says so and searches again with the relation added.
    """

    def next_turn(self, task: Task, transcript: str) -> str:
        """Return the text of the expert's next turn, tags included. ``transcript`` is everything since the prompt."""
        mentions, relations = task.metadata["mentions"], task.metadata["relations"]
        facts = [f"The {r} of {mentions[h]} is {mentions[h + 1]}." for h, r in enumerate(relations)]
        blocks = between(transcript, "<information>", "</information>")
        known = 0  # hops whose fact has been read, in order
        while known < len(facts) and any(facts[known] in block for block in blocks):
            known += 1
        if transcript.endswith("<answer>"):  # ARCap's diagnostic prompt without thinking
            return f" {mentions[-1]} </answer>"
        if known == len(facts):
            return f"<think>It is {mentions[-1]}.</think>\n<answer> {mentions[-1]} </answer>"
        query = f"{mentions[known]} {relations[known]}"
        if not blocks:
            thought = f"First {', then '.join(relations)}."
        elif known and facts[known - 1] in blocks[-1]:
            thought = f"It is {mentions[known]}. Next {relations[known]}."
        else:  # the last search was careless and returned nothing new
            return self._turn(f"Not found. Search {relations[known]}.", query)
        return self._turn(thought, self._careless(task, mentions[known], known) or query)

    def _careless(self, task: Task, mention: str, hop: int) -> str | None:
        rng = self.slips(task, hop)
        if rng is None:
            return None
        return rng.choices((mention, f"the {mention} found", f"what is {mention}"), weights=(5, 1, 1))[0]

    @staticmethod
    def _turn(thought: str, query: str) -> str:
        return f"<think>{thought}</think>\n<search> {query} </search>"


class ExpertEngine(WorldExpert):
    """Inference engine that answers with ``ExpertPolicy``, a scripted expert. ``error_rate`` is the probability that
    the search for a fact starts with a broad query.
    """

    QUESTION = re.compile(r"Question: (.*?)<\|im_end\|>", re.DOTALL)
    Policy = ExpertPolicy
