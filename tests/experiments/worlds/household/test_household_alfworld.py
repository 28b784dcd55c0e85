"""The package itself as engine, and the simulator against it, move for move. Needs `make alfworld`."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from experiments.worlds.household import alfworld_tables
from experiments.worlds.household.environment import Household
from experiments.worlds.household.expert import Expert
from experiments.worlds.household.games import TASK_TYPES, Game
from experiments.worlds.household.generate import generate_game
from experiments.worlds.household.pddl import PddlGame, PddlPool
from experiments.worlds.household.problem import game_file
from experiments.worlds.household.simulator import Observation, Simulator
from rollout.trajectory import Action, ActionKind, InfrastructureError, Task, ToolRequest
from tests.experiments.worlds.household.recorded import (
    AT_FIRST,
    AT_FRIDGE,
    HOT_APPLE,
    NOTHING,
    OPENING,
    PLAY,
    WITH_KNIFE,
)

TEMPLATES = (
    "go to {place}",
    "open {place}",
    "close {place}",
    "take {item} from {place}",
    "move {item} to {place}",
    "heat {item} with {place}",
    "clean {item} with {place}",
    "cool {item} with {place}",
    "slice {item} with {other}",
    "use {item}",
    "examine {item}",
    "examine {place}",
    "  look ",
    "Look",
    "put {item} in/on {place}",
    "go to the \ud800 \x00 moon",
    "",
)
LONG = 120.0  # seconds: a deadline that is never met
WON = ("go to countertop 1", "take apple 1 from countertop 1", "go to microwave 1", "heat apple 1 with microwave 1",
       "go to fridge 1", "open fridge 1", "move apple 1 to fridge 1")  # fmt: skip


@pytest.fixture(scope="module")
def pool(alfworld_python, loop):
    pool = PddlPool(alfworld_python, 1, LONG)
    yield pool
    loop.run_until_complete(pool.close())


def task_of(**world) -> Task:
    return Task("kitchen", "", (), "pick_heat_then_place_in_recep", metadata={"household": world})


def act(command: str) -> Action:
    return Action(ActionKind.CALL, calls=(ToolRequest("act", {"action": command}),))


@pytest.mark.slow
def test_alfworld_says_what_was_recorded(pool, loop):
    async def run():
        game = await pool.open(HOT_APPLE)
        observations = [await game.reset(), *[await game.step(command) for command, _ in PLAY]]
        await game.close()
        return observations

    opening, *observations = loop.run_until_complete(run())
    assert (opening.text, opening.admissible) == (OPENING, AT_FIRST)
    assert [observation.text for observation in observations] == [text for _, text in PLAY]
    assert [observation.won for observation in observations] == [False] * (len(PLAY) - 1) + [True]
    said = dict(zip([command for command, _ in PLAY], observations, strict=True))
    assert said["take knife 1 from countertop 1"].admissible == WITH_KNIFE
    assert said["open fridge 1"].admissible == AT_FRIDGE


def random_command(draw: random.Random, game: Game, observation: Observation) -> str:
    """Draw a command: three in four are possible ones, and most of those stay at the same place."""
    if draw.random() < 0.25:
        place, (item, other) = draw.choice(game.receptacles).name, (draw.choice(game.items).name for _ in range(2))
        return draw.choice(TEMPLATES).format(place=place, item=item, other=other)
    staying = [command for command in observation.admissible if not command.startswith("go to")]
    return draw.choice(staying if draw.random() < 0.7 else observation.admissible)


async def play_both(game: Game, original: PddlGame, draw: random.Random, episode: int) -> int:
    """Play a game in both engines and compare each observation.

    The expert plays to the end; then a second episode of ``episode`` commands mixes the expert's with random ones.

    Returns:
        the number of commands of the first episode.
    """
    simulator, expert, commands = Simulator(game), Expert(game.goal), []

    async def both(command: str | None) -> Observation:
        ours = simulator.reset() if command is None else simulator.step(command)
        theirs = await (original.reset() if command is None else original.step(command))
        commands.append(command)
        assert ours == theirs, f"after {commands}"
        return ours

    observation = await both(None)
    while not observation.won:
        observation = await both(expert.act(observation))
    steps = len(commands) - 1
    expert, share, commands = Expert(game.goal), draw.choice((0.0, 0.5)), []
    observation = await both(None)
    for _ in range(episode):
        try:
            planned = expert.act(observation)
        except LookupError:  # the goal is reached
            planned = "inventory"
        observation = await both(planned if draw.random() < share else random_command(draw, game, observation))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TASK_TYPES)))
def test_simulator_and_alfworld_agree_on_every_word(pool, loop, number):
    game = generate_game(TASK_TYPES[number], number, size=("small", "full")[number == 0])

    async def run():
        original = await pool.open(game)
        steps = await play_both(game, original, random.Random(number), episode=10)
        await original.close()
        return steps

    assert loop.run_until_complete(run()) >= 3


@pytest.mark.slow
def test_any_sentence_that_a_game_may_have_goes_through_the_grammar(pool, loop):
    async def opening(sentence):
        game = await pool.open(replace(HOT_APPLE, sentence=sentence))
        text = (await game.reset()).text
        await game.close()
        return text

    sentence = "it's cold: heat (really!) an apple, or 2. Put it in-to fridge 1, please?"
    assert loop.run_until_complete(opening(sentence)) == OPENING.replace("put a hot apple in fridge", sentence)


@pytest.mark.slow
def test_a_game_file_is_played_through_the_environment(alfworld_python, tmp_path):
    async def run():
        household = Household(engine="alfworld", python=alfworld_python, workers=1)
        await household.start()
        (worker,) = household._pool._alive
        path = tmp_path / "game.tw-pddl"
        path.write_text(json.dumps(game_file(HOT_APPLE, worker.domain, worker.grammar)))
        task = task_of(file=str(path))
        household.check([task])
        environment = household(task)
        opening = await environment.reset()
        assert (opening.text, opening.info) == (OPENING, {"admissible": list(AT_FIRST)})
        strange = await environment.step(act("go to the \ud800 \x00 " + "x" * 10_000))
        assert strange.results[0].text == NOTHING
        steps = [await environment.step(act(command)) for command in WON]
        await environment.close()
        assert [step.done for step in steps] == [False] * 6 + [True]
        assert (steps[-1].reward, steps[-1].measures) == (10.0, {"success": 1.0, "steps": 8.0})
        assert household._pool.pids == (worker.process.pid,), "one process served it all"
        await household.close()
        assert household._pool.pids == () and worker.process.returncode is not None

    asyncio.run(run())


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_costs_its_episode_and_is_replaced(alfworld_python, tmp_path):
    async def run():
        household = Household(engine="alfworld", python=alfworld_python, workers=1, step_timeout_s=600.0)
        pool, task = household._pool, task_of(game=HOT_APPLE.to_json())
        bad = tmp_path / "bad.tw-pddl"
        bad.write_text(json.dumps({"pddl_domain": "(", "grammar": "?", "pddl_problem": "("}))
        broken = household(task_of(file=str(bad)))
        with pytest.raises(InfrastructureError, match=f"loading the game file {bad}"):
            await broken.reset()
        await broken.close()
        seen = set()
        for sent, said in ((signal.SIGKILL, "ended with exit code -9"), (signal.SIGSTOP, "not finished in 0.1 s")):
            environment = household(task)
            assert (await environment.reset()).text == OPENING
            (pid,) = pool.pids
            assert pid not in seen
            seen.add(pid)
            os.kill(pid, sent)
            pool.step_timeout_s = 0.1 if sent == signal.SIGSTOP else 600.0  # a stopped process answers in no time
            with pytest.raises(InfrastructureError, match=said):
                await environment.step(act("look"))
            assert pool.pids == ()
            await environment.close()
        await household.close()

    asyncio.run(run())


@pytest.mark.slow
def test_episodes_beyond_the_processes_wait_and_a_cancelled_one_leaves_no_answer_behind(pool, loop):
    async def run():
        first = await pool.open(HOT_APPLE)
        await first.reset()
        waiting = asyncio.create_task(pool.open(HOT_APPLE))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await first.close()
        second = await waiting
        reset = asyncio.create_task(second.reset())
        await asyncio.sleep(0.01)
        reset.cancel()
        await asyncio.gather(reset, return_exceptions=True)
        await second.close()
        assert pool.pids == (), "what it would still say is nobody's answer"

    loop.run_until_complete(run())


@pytest.mark.slow
def test_the_tables_are_alfworlds(alfworld_python):
    program = (
        "import json, alfworld.gen.constants as c; print(json.dumps([{k: sorted(v) for k, v in t.items()} for t in "
        "(c.VAL_RECEPTACLE_OBJECTS, c.VAL_ACTION_OBJECTS, "
        "{'open': c.OPENABLE_CLASS_LIST, 'move': c.MOVABLE_RECEPTACLES})]))"
    )
    told = subprocess.run([alfworld_python, "-c", program], capture_output=True, text=True, check=True).stdout
    holds, actions, others = json.loads(told.splitlines()[-1])
    movable = set(others["move"])
    whole = {k: {kind for kind in v if not kind.endswith("Sliced")} for k, v in (holds | actions).items()}
    assert alfworld_tables.CAN_HOLD == {place: whole[place] for place in holds if place not in movable}
    for verb in ("Cleanable", "Coolable", "Heatable", "Sliceable"):
        assert alfworld_tables.PROPERTIES[verb.lower()] == whole[verb]
    assert alfworld_tables.LAMP in whole["Toggleable"]
    assert (
        alfworld_tables.OPENABLE == set(others["open"]) - movable and alfworld_tables.PROPERTIES["container"] == movable
    )


@pytest.mark.parametrize(
    ("python", "said"),
    [("/nowhere/python", "cannot be started: No such file"), (sys.executable, "No module named 'textworld'")],
)
def test_a_python_without_alfworld_is_known_at_the_start(python, said):
    async def run():
        household = Household(engine="alfworld", python=python)
        try:
            await household.start()
        finally:
            await household.close()

    with pytest.raises(InfrastructureError, match=said):
        asyncio.run(run())


def test_half_an_answer_is_a_process_that_died(tmp_path):
    dying = tmp_path / "python"
    dying.write_text('#!/bin/sh\nprintf \'{"version": "0.4\'; exit 3\n')
    dying.chmod(0o755)
    with pytest.raises(InfrastructureError, match="ended with exit code 3 while importing alfworld"):
        asyncio.run(Household(engine="alfworld", python=str(dying)).start())
