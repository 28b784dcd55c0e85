import asyncio
import json
import time

import pytest

from experiments.worlds.household.environment import Household
from experiments.worlds.household.expert import Expert
from experiments.worlds.household.games import TASK_TYPES
from experiments.worlds.household.generate import generate_game
from experiments.worlds.household.simulator import Observation
from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    InfrastructureError,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
)
from tests.experiments.worlds.household.recorded import AT_FIRST, HOT_APPLE, NOTHING, OPENING, PLAY


def task_of(world, name: str = "kitchen") -> Task:
    return Task(name, "put a hot apple in fridge", (), "pick_heat_then_place_in_recep", metadata={"household": world})


HEAT = task_of({"game": HOT_APPLE.to_json()})


def act(*commands: str, tool: str = "act") -> Action:
    return Action(ActionKind.CALL, calls=tuple(ToolRequest(tool, {"action": command}) for command in commands))


def episode(steps, household: Household | None = None, task: Task = HEAT, **options):
    """What ``steps`` (an async function of the opened environment) returns."""

    async def run():
        environment = (household or Household())(task, **options)
        opening = await environment.reset()
        try:
            return await steps(environment, opening)
        finally:
            await environment.close()

    return asyncio.run(run())


def test_plays_an_episode_to_the_reward():
    async def steps(environment, opening):
        assert (opening.text, opening.info) == (OPENING, {"admissible": list(AT_FIRST)})
        return [await environment.step(act(command)) for command, _ in PLAY]

    found = episode(steps)
    assert [step.results[0].text for step in found] == [text for _, text in PLAY]
    for number, (step, (_, text)) in enumerate(zip(found, PLAY, strict=True), start=1):
        won = number == len(PLAY)
        assert (step.done, step.reward) == (won, 10.0 if won else 0.0)
        assert step.measures == {"success": float(won), "steps": float(number)}
        assert step.results[0].outcome is (CallOutcome.ERROR if text == NOTHING else CallOutcome.OK)
        assert len(step.latencies_s) == 1 and step.latencies_s[0] >= 0
    assert "close fridge 1" in found[7].results[0].info["admissible"]
    json.dumps([step.results[0].info for step in found])  # plain JSON


def test_an_expert_plays_through_the_environment_in_every_task():
    for task_type in TASK_TYPES:
        game = generate_game(task_type, 5, size="small")

        async def steps(environment, opening, game=game):
            expert, text, admissible, done = Expert(game.goal), opening.text, opening.info["admissible"], False
            while not done:
                command = expert.act(Observation(text, tuple(admissible), False))
                step = await environment.step(act(command))
                text, admissible, done = step.results[0].text, step.results[0].info["admissible"], step.done
            return step

        step = episode(steps, task=task_of({"game": game.to_json()}))
        assert (step.reward, step.measures["success"]) == (10.0, 1.0)


@pytest.mark.parametrize("text", ["\x00\x1b[2J", "\ud800 go to fridge 1", ""])
def test_whatever_the_model_writes_gets_the_worlds_answer(text):
    async def steps(environment, _):
        return await environment.step(act(text))

    step = episode(steps)
    assert (step.results[0].text, step.results[0].outcome, step.done) == (NOTHING, CallOutcome.ERROR, False)
    assert step.measures == {"success": 0.0, "steps": 1.0}


def test_invalid_and_final_turns_run_nothing():
    async def steps(environment, _):
        return [await environment.step(Action(kind)) for kind in (ActionKind.INVALID, ActionKind.ANSWER)]

    invalid, answer = episode(steps)
    assert (invalid.results, invalid.done, invalid.reward) == ((), False, 0.0)
    assert (answer.results, answer.done, answer.reward) == ((), True, 0.0)
    assert answer.measures == {"success": 0.0, "steps": 0.0}


def test_what_may_not_run_is_refused():
    async def unknown(environment, _):
        return (await environment.step(act("look", tool="search"))).results[0]

    async def disabled(environment, _):
        return (await environment.step(act("look"))).results[0]

    async def after_the_end(environment, _):
        return (await environment.step(act(*(command for command, _ in PLAY), "look"))).results[-1]

    for result in (episode(unknown), episode(disabled, tools_enabled=False), episode(after_the_end)):
        assert result.outcome is CallOutcome.REFUSED and result.detail == result.text


def test_a_branch_goes_on_where_its_parent_was():
    calls = [
        ToolCall(turn, ToolRequest("act", {"action": command}), ToolResult(text, CallOutcome.OK), 0.0)
        for turn, (command, text) in enumerate(PLAY[:-1])
    ]

    async def steps(environment, _):
        assert await environment.resume((), calls) == 0.0
        return await environment.step(act(PLAY[-1][0]))

    step = episode(steps)
    assert (step.done, step.reward, step.measures) == (True, 10.0, {"success": 1.0, "steps": float(len(PLAY))})


def test_many_episodes_at_once_keep_apart_and_do_not_hold_the_loop_up():
    async def one(household, number):
        environment = household(HEAT)
        await environment.reset()
        for command, text in PLAY[: number % len(PLAY) + 1]:
            await asyncio.sleep(0)
            assert (await environment.step(act(command))).results[0].text == text
        await environment.close()

    async def run():
        household, began = Household(), time.process_time()
        await household.start()
        await asyncio.gather(*(one(household, number) for number in range(200)))
        await household.close()
        return time.process_time() - began

    assert asyncio.run(run()) < 20, "some 5000 steps; the simulator makes thousands a second"


BAD = {
    "no world": Task("no world", "", (), "pick_two_obj_and_place"),
    "both": task_of({"game": {}, "file": "x"}, "both"),
    "a number": task_of({"file": 3}, "a number"),
    "no game": task_of({"game": {"sentence": "put"}}, "no game"),
    "a file": task_of({"file": "game.tw-pddl"}, "a file"),
}


def test_tasks_that_cannot_be_played_are_found_before_training():
    with pytest.raises(ValueError) as error:
        Household().check([HEAT, *BAD.values()])
    assert [line.split(":")[0] for line in str(error.value).splitlines()[1:]] == [f"task {name}" for name in BAD]
    assert "the simulator cannot play the game file game.tw-pddl; take engine: alfworld" in str(error.value)
    Household().check([HEAT])
    with pytest.raises(ValueError, match="and 5 more"):
        Household().check([BAD["no game"]] * 10)


@pytest.mark.parametrize("name", BAD)
def test_where_nobody_checked_the_episode_ends_with_a_reason(name):
    async def run():
        await Household()(BAD[name]).reset()

    with pytest.raises(InfrastructureError, match=f"task {name}: "):
        asyncio.run(run())
