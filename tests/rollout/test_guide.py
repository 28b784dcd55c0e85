"""A guide plays some turns of the policy's trajectories: which, with what seed, and how they are marked."""

import pytest

from common.schedules import Schedule
from rollout.loop.guide import Guide, plays
from rollout.programs.base import Program
from rollout.samplers.branching import BranchingSampler
from rollout.storage import load_trajectories, save_trajectories
from rollout.system import check_guide
from tests.rollout.samplers.branching_world import SAMPLING, TimedEngine, always, tasks


def roll(world, guided, seed=0, guide=True, n=4):
    """Four trajectories of two tasks, three searches each; the guide says so in every turn."""

    def reply(ids, sampling):
        done = world.results(ids)
        word = f"<think> guide {sampling.seed % 10**12:012d} </think>\n"
        action = f"<search> Mira {world.number(ids)} </search>" if done < 3 else "<answer> Grey Harbor </answer>"
        return (*world.encode(word), *world.encode(action))

    teacher = TimedEngine(reply, world.protocol.tokenizer, logprob=-0.25)
    options = {"guide": Guide(teacher, 0.5)} if guide else {}
    system = world.make(always(3), **options)
    found = system.rollout(tasks(2), n=n, sampling=SAMPLING, seed=seed, guided=guided)
    return found, system, teacher


def test_turns_are_drawn_by_group_key_and_turn(world):
    found, system, teacher = roll(world, 0.5)
    shown = [[turn.guided for turn in t.turns] for t in found]
    assert shown == [[plays(0.5, 0, t.group, t.index, k) for k in range(len(t.turns))] for t in found]
    assert 0.2 < sum(map(sum, shown)) / sum(map(len, shown)) < 0.8
    assert len(teacher.requests) == sum(map(sum, shown))
    for t in found:
        for turn in t.turns:
            said = system.protocol.decode(t.response_ids[turn.start : turn.end])
            assert ("guide" in said) == turn.guided
            assert set(t.logprobs[turn.start : turn.end]) == {-0.25 if turn.guided else -0.5}
            assert bool(turn.versions) != turn.guided and all(t.loss_mask[turn.start : turn.end])
            versions = t.token_versions[turn.start : turn.end]
            assert set(versions) == {-1 if turn.guided else 0}
    again, _, _ = roll(world, 0.5)
    assert [t.response_ids for t in again] == [t.response_ids for t in found]
    other, _, _ = roll(world, 0.5, seed=1)
    assert [[turn.guided for turn in t.turns] for t in other] != shown


def test_without_a_share_the_guide_has_no_effect(world):
    found, _, teacher = roll(world, 0.0)
    plain, _, _ = roll(world, 0.0, guide=False)
    assert [t.response_ids for t in found] == [t.response_ids for t in plain] and not teacher.requests
    whole, _, _ = roll(world, 1.0)
    assert all(turn.guided for t in whole for turn in t.turns) and whole[0].policy_versions == (-1, -1)


def test_the_guide_starts_with_the_first_turn_that_it_may_play(world):
    started = []

    class Counted(TimedEngine):
        async def start(self):
            started.append(self)
            await super().start()

    teacher = Counted(lambda ids, sampling: world.encode("<answer> Grey Harbor </answer>"), world.protocol.tokenizer)
    teacher.max_length = 300
    system = world.make(always(1), guide=Guide(teacher, 0.5))
    assert system.budgets.max_length == 300, "the smaller one"
    system.rollout(tasks(1), sampling=SAMPLING, seed=0)
    assert not started
    system.rollout(tasks(1), sampling=SAMPLING, seed=0, guided=1.0)
    assert started
    with pytest.raises(ValueError, match=r"guided is 0.5, but the rollout system has no guide"):
        world.make(always(1)).rollout(tasks(1), sampling=SAMPLING, seed=0, guided=0.5)


def test_marks_are_stored(world, tmp_path):
    found, _, _ = roll(world, 0.5)
    save_trajectories(tmp_path / "t.parquet", found)
    read = load_trajectories(tmp_path / "t.parquet")
    assert [t.turns for t in read] == [t.turns for t in found]


def test_a_share_falls_by_schedule():
    guide = Guide(None, Schedule(1.0, 0.0, 4, shape="cosine"))
    assert [round(guide.share_at(i), 3) for i in range(6)] == [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    assert Guide(None, 0.3).share_at(7) == 0.3
    with pytest.raises(ValueError, match=r"guide.share is 1.5; expected probabilities"):
        Guide(None, 1.5)
    with pytest.raises(ValueError, match=r"guide.share is 0, so that the guide never plays"):
        Guide(None, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BranchingSampler(2), None, False), "a sampler that forks"),
        ((None, None, True), "sleep_mode"),
        ((None, Program, False), "program"),
    ],
)
def test_what_a_guide_does_not_go_with(arguments, message):
    with pytest.raises(ValueError, match=f"rollouts has a guide and {message}; a guide plays turns of independent"):
        check_guide(*arguments)
