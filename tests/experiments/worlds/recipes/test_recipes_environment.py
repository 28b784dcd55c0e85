"""The workshop: what an action does, by hand."""

import asyncio

from experiments.worlds.recipes.environment import Recipes
from rollout.trajectory import Action, ActionKind, CallOutcome, Task, ToolCall, ToolRequest

TASK = Task("1", "make rope, order 1234. step 1", (), "recipes", metadata={"recipe": ["forge", "kiln"]})


def act(episode, *actions):
    calls = tuple(ToolRequest("act", {"action": action}) for action in actions)
    return asyncio.run(episode.step(Action(ActionKind.CALL, calls)))


def shown(step):
    return [(result.text, result.outcome) for result in step.results]


def test_only_the_right_step_with_the_right_device_leads_on():
    episode = Recipes(reward=2.0)(TASK)
    first = asyncio.run(episode.reset())
    assert first.text == TASK.question and first.measures == {"success": 0.0, "steps": 0.0}
    nothing = ("nothing happens. step 1", CallOutcome.ERROR)
    for wrong in ("step 1 kiln", "step 2 forge", "forge", ""):
        assert shown(step := act(episode, wrong)) == [nothing] and not step.done and step.reward == 0.0
    assert shown(act(episode, "step 1 forge")) == [("step 2", CallOutcome.OK)]
    last = act(episode, "step 2 kiln", "step 2 kiln")
    assert shown(last) == [("done", CallOutcome.OK), ("The product is finished.", CallOutcome.REFUSED)]
    assert last.done and last.reward == 2.0 and last.measures == {"success": 1.0, "steps": 6.0}
    assert act(episode, "step 2 kiln").reward == 0.0, "it is paid once"


def test_to_resume_is_to_have_lived_through_it():
    lived, resumed = Recipes()(TASK), Recipes()(TASK)
    done = act(lived, "step 1 loom", "step 1 forge")
    requests = [ToolRequest("act", {"action": action}) for action in ("step 1 loom", "step 1 forge")]
    calls = [ToolCall(0, request, result, 0.0) for request, result in zip(requests, done.results, strict=True)]
    assert asyncio.run(resumed.resume([], calls)) == 0.0
    assert act(resumed, "step 2 kiln").measures == act(lived, "step 2 kiln").measures == {"success": 1.0, "steps": 3.0}
