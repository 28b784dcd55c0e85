"""Gymnasium environments in text, through the package ``gymnasium``."""

import asyncio

import gymnasium
import pytest
from gymnasium.spaces import Text

from data_modules.datasets.questions import load_tasks
from data_modules.datasets.seed_tasks import SeedTasks
from rollout.environments.gymnasium_text import GymnasiumText
from rollout.trajectory import Action, ActionKind, CallOutcome, Task, ToolRequest

WORDS = ["left", "down", "right", "up"]
LAKE = {"environment": "FrozenLake-v1", "options": {"is_slippery": False}, "actions": WORDS}


class Echo(gymnasium.Env):
    """Says what it heard, and the seed. Ends by truncation after two steps."""

    action_space = observation_space = Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return {"said": f"seed {seed} {options}"}, {}

    def step(self, action):
        self.steps += 1
        return {"said": action}, 0.5, False, self.steps == 2, {}


gymnasium.register("CompactAgentsEcho-v0", Echo, disable_env_checker=True)


def play(factory, *words, metadata=None, name="act", enabled=True):
    """The first observation and the steps of one episode."""

    async def run():
        task = Task("a", "q", (), "d", metadata=metadata or {})
        environment = factory(task, tools_enabled=enabled)
        first = await environment.reset()
        steps = [
            await environment.step(Action(ActionKind.CALL, (ToolRequest(name, {"action": word}),))) for word in words
        ]
        await environment.close()
        return first, steps

    return asyncio.run(run())


def test_an_episode_equals_gymnasiums_own():
    first, steps = play(GymnasiumText(**LAKE), *"down down right right down right".split())
    own = gymnasium.make("FrozenLake-v1", is_slippery=False)
    seen = [own.reset()[0]]
    rewards, ends = [], []
    for word in "down down right right down right".split():
        state, reward, ended, cut, _ = own.step(WORDS.index(word))
        seen, rewards, ends = [*seen, state], [*rewards, reward], [*ends, ended or cut]
    assert [first.text, *(step.results[0].text for step in steps)] == list(map(str, seen))
    assert [step.reward for step in steps] == rewards and [step.done for step in steps] == ends
    assert first.measures == {"success": 0.0, "episode_return": 0.0}
    assert steps[-1].done and steps[-1].measures == {"success": 1.0, "episode_return": 1.0}
    assert first.info == steps[0].results[0].info == {"admissible": WORDS}


def test_a_word_that_is_no_action_changes_nothing():
    first, (wrong, right) = play(GymnasiumText(**LAKE), "fly", " DOWN ")
    assert wrong.results[0].outcome is CallOutcome.ERROR and not wrong.done and wrong.reward == 0.0
    assert wrong.results[0].text == "There is no action fly. The actions are: left, down, right, up."
    assert right.results[0].text == "4"


class Cliff(gymnasium.Env):
    """Each step costs 1; ends at the second. ``reset`` reads a generator that may be at its end."""

    action_space, observation_space = gymnasium.spaces.Discrete(1), Text(20)
    starts = iter([])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return next(self.starts) if options else "edge", {}

    def step(self, action):
        self.steps += 1
        return "edge", -1.0, self.steps == 2, False, {}


gymnasium.register("CompactAgentsCliff-v0", Cliff, disable_env_checker=True)


def test_where_steps_cost_doing_nothing_is_no_success():
    factory = GymnasiumText("CompactAgentsCliff-v0", actions=["go"], success_return=-2.0)
    first, steps = play(factory, "sit", "sit", "go", "go")
    assert first.measures == steps[1].measures == {"success": 0.0, "episode_return": 0.0}
    assert [step.measures["success"] for step in steps] == [0.0, 0.0, 0.0, 1.0]


def test_an_end_of_iteration_in_an_environment_is_an_error_and_no_endless_wait():
    factory = GymnasiumText("CompactAgentsCliff-v0", actions=["go"])
    with pytest.raises(RuntimeError, match="StopIteration"):
        play(factory, "go", metadata={"options": {"at": 1}})


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [({}, CallOutcome.ERROR), ({"action": ["down"]}, CallOutcome.ERROR), ({"action": 1}, CallOutcome.OK)],
)
def test_a_call_with_wrong_arguments_is_the_models(arguments, outcome):
    async def run():
        environment = GymnasiumText("FrozenLake-v1", options={"is_slippery": False})(Task("a", "q", (), "d"))
        await environment.reset()
        step = await environment.step(Action(ActionKind.CALL, (ToolRequest("act", arguments),)))
        await environment.close()
        return step

    assert asyncio.run(run()).results[0].outcome is outcome


def test_after_the_end_and_for_other_tools_it_refuses():
    _, steps = play(GymnasiumText(**LAKE), "right", "down", "left")  # a hole
    assert steps[1].done and steps[2].results[0].outcome is CallOutcome.REFUSED and steps[2].reward == 0.0
    for options in ({"name": "search"}, {"enabled": False}):
        _, (step,) = play(GymnasiumText(**LAKE), "down", **options)
        assert step.results[0].outcome is CallOutcome.REFUSED


def test_text_spaces_parts_of_observations_seeds_and_truncation():
    factory = GymnasiumText(
        "CompactAgentsEcho-v0", observation="heard {observation[said]}", first="go: {observation[said]}"
    )
    first, steps = play(factory, "Hello", "you", metadata={"seed": 7, "options": {"a": 1}})
    assert first.text == "go: seed 7 {'a': 1}"
    assert [step.results[0].text for step in steps] == ["heard Hello", "heard you"]
    assert [step.done for step in steps] == [False, True]
    assert steps[1].measures == {"success": 1.0, "episode_return": 1.0} and first.info == {}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"environment": "Nope-v1"}, "environment Nope-v1 cannot be made"),
        ({"environment": "no_such_module:A-v0"}, "cannot be made"),
        ({"environment": "FrozenLake-v1", "options": {"sides": 3}}, "cannot be made with {'sides': 3}"),
        ({"environment": "Pendulum-v1"}, "expected a Discrete space"),
        ({"environment": "Blackjack-v1", "actions": ["stick"]}, "expected 2 different words"),
        ({"environment": "Blackjack-v1", "actions": ["hit", "Hit"]}, "expected 2 different words"),
        ({"environment": "Blackjack-v1", "observation": "{observation[3]}"}, "does not fit the observation"),
        ({"environment": "Blackjack-v1", "first": "{state}"}, "does not fit the observation"),
        ({"environment": "CompactAgentsEcho-v0", "actions": ["a"]}, "without `actions`"),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumText(**options)


@pytest.mark.parametrize("metadata", [{"seed": "x"}, {"seed": -1}, {"seed": True}, {"options": [1]}])
def test_tasks_that_cannot_be_reset_are_refused(metadata):
    with pytest.raises(ValueError, match=r"a: metadata\.(seed|options) is .*; expected"):
        GymnasiumText(**LAKE).check([Task("a", "q", (), "d", metadata=metadata)])


def test_splits_of_seeds_have_none_in_common(tmp_path):
    assert SeedTasks("lake", 5, 3, 2, options={"a": 1}).run(tmp_path) == {"train": 5, "val": 3, "test": 2}
    seeds = {
        split: {task.metadata["seed"] for task in load_tasks(tmp_path / f"{split}.parquet", answers=False)}
        for split in ("train", "val", "test")
    }
    assert [len(s) for s in seeds.values()] == [5, 3, 2] and len(set.union(*seeds.values())) == 10
    assert load_tasks(tmp_path / "val.parquet", answers=False)[0].metadata["options"] == {"a": 1}
