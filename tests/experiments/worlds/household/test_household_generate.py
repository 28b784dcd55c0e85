import pytest

from experiments.worlds.household.alfworld_tables import CAN_HOLD, LAMP, LAMP_PLACES, OPENABLE, PROPERTIES
from experiments.worlds.household.expert import Expert
from experiments.worlds.household.games import LOOK, TASK_TYPES, TREATABLE, TWO, Game
from experiments.worlds.household.generate import SIZES, generate_game
from experiments.worlds.household.simulator import Simulator

SEEDS = range(60)
EVERY = [(task_type, size) for task_type in TASK_TYPES for size in SIZES]


@pytest.mark.parametrize(("task_type", "size"), EVERY)
def test_every_game_can_be_solved_within_alfworlds_fifty_steps_and_is_not_solved_at_first(task_type, size):
    for seed in SEEDS:
        simulator = Simulator(generate_game(task_type, seed, size=size))
        expert, observation = Expert(simulator.game.goal), simulator.reset()
        assert not observation.won
        for _ in range(50):
            command = expert.act(observation)
            assert command in observation.admissible
            observation = simulator.step(command)
            if observation.won:
                break
        assert observation.won, f"{task_type} {size} {seed}: not solved"


@pytest.mark.parametrize(("task_type", "size"), EVERY)
def test_everything_lies_where_alfworld_lets_it_lie(task_type, size):
    for seed in SEEDS:
        game = generate_game(task_type, seed, size=size)
        kinds = {receptacle.name: receptacle.type for receptacle in game.receptacles}
        for item in game.items:
            place = kinds[item.place]
            assert place in LAMP_PLACES if item.type == LAMP else item.type in CAN_HOLD[place]
            assert item.type != game.goal.target or kinds[item.place] != game.goal.destination
        assert all(receptacle.openable == (receptacle.type in OPENABLE) for receptacle in game.receptacles)
        counts = len(game.receptacles), len(game.items)
        low, high = ((4, 4), (7, 8)) if size == "small" else ((7, 17), (34, 33))
        assert all(a <= n <= b for a, n, b in zip(low, counts, high, strict=True)), counts


def test_goals_fit_their_task_types():
    for task_type, size in EVERY:
        for seed in SEEDS:
            goal = generate_game(task_type, seed, size=size).goal
            assert goal.task_type == task_type
            assert (goal.toggle == LAMP) == (task_type == LOOK) == (goal.destination is None)
            if goal.treatment:
                assert goal.target in PROPERTIES[TREATABLE[goal.treatment[0]]]
                assert goal.destination != goal.treatment[1], "what is cooled in the fridge belongs elsewhere"


def test_a_seed_is_a_game_and_games_differ():
    drawn = [generate_game(TWO, seed) for seed in SEEDS]
    assert drawn == [generate_game(TWO, seed) for seed in SEEDS]
    assert len({str(game) for game in drawn}) == len(SEEDS)
    assert len({game.goal for game in drawn}) > 20
    assert generate_game(TWO, 0) != generate_game(TWO, 0, size="small")
    assert all(Game.from_json(game.to_json()) == game for game in drawn)
