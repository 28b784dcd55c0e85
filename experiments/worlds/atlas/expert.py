"""An expert of the atlas, which searches along the chain in the task's metadata and boxes the answer."""

from __future__ import annotations

import json
import re

from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from rollout.trajectory import Task


class AtlasPolicy(CarelessPolicy):
    """A scripted expert on geographic questions that writes its next turn as text in the Hermes format.

    A turn repeats the fact that the last search found, then searches for the next one or answers. With probability
    ``error_rate`` a hop starts with a careless query, the name alone. If the result lacks the fact, the expert searches
    again with a keyword, then with all words of the passage.
    """

    def next_turn(self, task: Task, transcript: str) -> str:
        """Return the text of the expert's next turn, without its end token. ``transcript`` is everything since the
        question.
        """
        names, keywords, facts = (task.metadata[key] for key in ("names", "keywords", "facts"))
        found = re.findall(r"<tool_response>(.*?)</tool_response>", transcript, re.DOTALL)
        known = 0  # hops whose fact was found, in order
        while known < len(facts) and any(facts[known] in text for text in found):
            known += 1
        fresh = known and found and facts[known - 1] in found[-1]
        said = f"{facts[known - 1]}\n" if fresh else ""
        if known == len(facts):
            return f"{said}\\boxed{{{task.golden_answers[0]}}}"
        last = next((k for k in reversed(range(len(found))) if known and facts[known - 1] in found[k]), -1)
        attempts = len(found) - last - 1  # at this hop
        careless = self.slips(task, known) is not None
        keyword, all_words = keywords[known]
        wordings = [names[known]] * careless + [f"{keyword} {names[known]}", f"{names[known]} {all_words}"]
        query = wordings[min(attempts, len(wordings) - 1)]
        call = json.dumps({"name": "search", "arguments": {"query": query}}, ensure_ascii=False)
        return f"{said}<tool_call>\n{call}\n</tool_call>"


class AtlasExpert(WorldExpert):
    """Inference engine that answers with ``AtlasPolicy``, the scripted expert on geographic questions. ``error_rate``
    is the probability that the search for a fact starts with the name alone.
    """

    QUESTION = re.compile(r"<\|im_start\|>user\n(.*?)\n")
    Policy = AtlasPolicy
    ends_turns = True
