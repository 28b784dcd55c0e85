"""Advantages of turns: by hand, against slow forms, and what they must not depend on."""

import random
import statistics

import pytest
import torch

from lightning_modules.maths.turn_advantages import (
    discounted_returns,
    gigpo_advantages,
    information_gain_advantages,
    similar_states,
    tree_values,
    turn_advantages,
)

EPS = 1e-6


def doubles(*rows):
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


# ---------------------------------------------------------------------- GRPO over turns
# Trajectory 0 wins in one turn, trajectory 1 fails in three, of which the second was invalid.
RETURNS, PENALTIES, GROUPS, MEMBERS = [10.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.1, 0.0], ["g"] * 4, [0, 1, 1, 1]


def make_rows(seed, penalised=True):
    """Groups of 1 to 4 trajectories of 1 to 6 turns each, shuffled; returns often equal."""
    rng, rows = random.Random(seed), []
    for group in range(rng.randint(1, 5)):
        for member in range(rng.randint(1, 4)):
            outcome, turns = rng.choice([0.0, 0.0, 10.0, 3.3]), rng.randint(1, 6)
            for turn in range(turns):
                penalty = 0.1 * (rng.random() < 0.3) if penalised else 0.0
                reward = (outcome if turn == turns - 1 else 0.0) + (0.7 if rng.random() < 0.2 else 0.0)
                state = f"room {rng.randrange(3)}"  # the same names in every group
                rows.append((f"g{group}", member, turn, state, outcome, reward, penalty))
    rng.shuffle(rows)
    return rows


def slow_turns(rows, by, singleton, scores, divide=True):
    out = []
    for group, *_ in rows:
        mine = [(r[1], s) for r, s in zip(rows, scores, strict=True) if r[0] == group]
        trajectories = {m: [s for n, s in mine if n == m] for m, _ in mine}
        score = scores[len(out)]
        if by == "rows":
            values = [s for _, s in mine]
            n, mean = len(values), statistics.mean(values)
            variance = statistics.variance(values) if n > 1 else 0.0
        else:
            n, mean = len(trajectories), statistics.mean(statistics.mean(v) for v in trajectories.values())
            parts = [statistics.mean((s - mean) ** 2 for s in v) for v in trajectories.values()]
            variance = sum(parts) / (n - 1) if n > 1 else 0.0
        if n == 1:
            out.append(score if singleton == "reward" else 0.0)
        elif len({s for _, s in mine}) == 1:
            out.append(0.0)
        else:
            out.append((score - mean) / (variance**0.5 + EPS if divide else 1.0))
    return out


@pytest.mark.parametrize("singleton", ["zero", "reward"])
@pytest.mark.parametrize("by", ["rows", "trajectories"])
@pytest.mark.parametrize("seed", range(3))
def test_turns_against_a_slow_form(seed, by, singleton):
    rows = make_rows(seed)
    groups, members, _, _, returns, _, penalties = zip(*rows, strict=True)
    expected = slow_turns(rows, by, singleton, [r - p for r, p in zip(returns, penalties, strict=True)])
    found = turn_advantages(*doubles(returns, penalties), groups, members, by, EPS, singleton)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("by", ["rows", "trajectories"])
@pytest.mark.parametrize("value", [1.0, 0.1])
def test_equal_scores_are_exactly_zero(by, value):
    """In float64 too, where the mean of seven times 0.1 is not 0.1."""
    members, turns = [0, 1, 1, 1, 2, 2, 3], [0, 0, 1, 2, 0, 1, 0]
    for dtype in (torch.float32, torch.float64):
        returns, penalties = torch.full((7,), value, dtype=dtype), torch.full((7,), 0.1, dtype=dtype)
        assert turn_advantages(returns, penalties, ["a"] * 7, members, by).tolist() == [0.0] * 7
        for norm in ("mean_norm", "mean_std_norm"):
            apart = (["a"] * 7, range(7), [0] * 7, ["hall"] * 7)
            assert gigpo_advantages(returns, penalties, *apart, norm=norm, statistics=by).tolist() == [0.0] * 7
            rewards = returns * 0.0
            found = gigpo_advantages(rewards, penalties, ["a"] * 7, members, turns, ["hall"] * 7, norm=norm)
            assert found.tolist() == [0.0] * 7


def test_what_has_nothing_to_be_compared_with():
    returns, penalties, groups, members = torch.tensor([3.0, 10.0, 10.0]), torch.tensor([0.1, 0.1, 0]), "abb", [0, 0, 0]
    by_rows = turn_advantages(returns, penalties, groups, members)
    assert by_rows.tolist() == pytest.approx([0.0, -0.7071, 0.7071], abs=1e-3), "one trajectory's turns are compared"
    assert turn_advantages(returns, penalties, groups, members, singleton="reward")[0].item() == pytest.approx(2.9)
    alone = turn_advantages(returns, penalties, groups, members, "trajectories")
    assert alone.tolist() == [0.0] * 3
    alone = turn_advantages(returns, penalties, groups, members, "trajectories", singleton="reward")
    assert alone.tolist() == pytest.approx([2.9, 9.9, 10.0])


def test_no_rows_dtype_gradient_and_what_is_refused():
    nothing = torch.zeros(0)
    assert turn_advantages(nothing, nothing, [], []).shape == (0,)
    assert gigpo_advantages(nothing, nothing, [], [], [], []).shape == (0,)
    returns = torch.tensor([1.0, 0.0]).requires_grad_()
    found = turn_advantages(returns, torch.zeros(2), ["a", "a"], [0, 1])
    assert found.dtype == torch.float32 and not found.requires_grad
    assert found.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)
    with pytest.raises(ValueError, match="unknown statistics 'turns'; expected rows or trajectories"):
        turn_advantages(returns, returns, ["a", "a"], [0, 1], "turns")
    with pytest.raises(ValueError, match="singleton is 'mean'; expected zero or reward"):
        turn_advantages(returns, returns, ["a", "a"], [0, 1], singleton="mean")


# ---------------------------------------------------------------------- GiGPO
def test_discounted_returns_by_hand():
    """Trajectory 0: rewards 1, 0, 4; trajectory 1: 2 in turn 1, turn 0 is not among the rows. Rows in any order."""
    rewards, names = torch.tensor([4.0, 2.0, 0.0, 1.0]), torch.tensor([0, 1, 0, 0])
    assert discounted_returns(rewards, names, [2, 1, 1, 0], 0.5).tolist() == [4.0, 2.0, 2.0, 2.0]
    assert discounted_returns(rewards, names, [2, 1, 1, 0], 0.0).tolist() == rewards.tolist()
    assert discounted_returns(rewards, names, [2, 1, 1, 0], 1.0).tolist() == [4.0, 2.0, 4.0, 5.0]
    with pytest.raises(ValueError, match="two rows are the same turn"):
        discounted_returns(rewards, names, [2, 1, 1, 1], 0.5)
    with pytest.raises(ValueError, match="turn -1; expected turns counted from 0"):
        discounted_returns(rewards, names, [2, 1, -1, 1], 0.5)


def test_gigpo_by_hand():
    """Two trajectories of a task. 0: hall, kitchen (won). 1: hall, hall (invalid), kitchen, hall. Gamma .5.

    Returns 10 and 0; G of 0: 5, 10; of 1: 0, 0 - .1, 0, 0. Hall: 5, 0, -.1, 0, mean 1.225; kitchen: 10, 0, mean 5.
    Episodes: 10, 10, 0, -.1, 0, 0, mean 19.9 / 6.
    """
    rewards, penalties = doubles([0.0, 10.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.1, 0.0, 0.0])
    rows = (rewards, penalties, ["t"] * 6, [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 2, 3])
    anchors = ["hall", "kitchen", "hall", "hall", "kitchen", "hall"]
    step = [5 - 1.225, 5.0, -1.225, -0.1 - 1.225, -5.0, -1.225]
    episode = [s - 19.9 / 6 for s in (10.0, 10.0, 0.0, -0.1, 0.0, 0.0)]
    for w in (0.0, 1.0, 0.3):
        found = gigpo_advantages(*rows, anchors, turn_weight=w, gamma=0.5)
        assert found.tolist() == pytest.approx([e + w * s for e, s in zip(episode, step, strict=True)])
    scaled = gigpo_advantages(*rows, anchors, gamma=0.5, norm="mean_std_norm")
    stds = [statistics.stdev(v) + EPS for v in ([10, 10, 0, -0.1, 0, 0], [5, 0, -0.1, 0], [10, 0])]
    parts = [e / stds[0] + s / stds[1 + (a == "kitchen")] for e, s, a in zip(episode, step, anchors, strict=True)]
    assert scaled.tolist() == pytest.approx(parts)
    with pytest.raises(ValueError, match="unknown norm 'std'; expected mean_norm or mean_std_norm"):
        gigpo_advantages(*rows, anchors, norm="std")


def test_similar_states_by_hand():
    """difflib: 2 M / T. "diet" against "tide" has M = 2 (.5), "tide" against "diet" 1 (.25): the order matters."""
    assert similar_states(["tide", "diet"], ["g"] * 2, [0, 1], [0, 0], 0.5) == [0, 0]
    assert similar_states(["diet", "tide"], ["g"] * 2, [0, 1], [0, 0], 0.5) == [0, 1]
    assert similar_states(["diet", "tide"], ["g"] * 2, [1, 0], [0, 0], 0.5) == [0, 0], "by member, not by row"
    assert similar_states(["abcdefghij"] * 2, ["g", "h"], [0, 0], [0, 0], 0.9) == [0, 1], "groups are apart"
    # one letter of ten a step: each resembles the one before (.9) and joins the first set alone, where it still does
    chain = ["abcdefghij", "abcdefghiX", "abcdefghYX", "abcdefgZYX"]
    assert similar_states(chain, ["g"] * 4, [0] * 4, [0, 1, 2, 3], 0.9) == [0, 0, 1, 1]


def slow_gigpo(rows, w, gamma, divide, by, singleton):
    def turns_of(row):
        return [r for r in rows if r[:2] == row[:2]]

    episodes = [sum(r[5] for r in turns_of(row)) - row[6] for row in rows]
    steps = [sum(gamma ** (r[2] - row[2]) * r[5] for r in turns_of(row) if r[2] >= row[2]) - row[6] for row in rows]
    states = [(f"{group}/{state}", *rest) for group, *rest, state, _, _, _ in rows]
    episode = slow_turns(rows, by, singleton, [round(e, 9) for e in episodes], divide)
    step = slow_turns(states, "rows", "zero", [round(s, 9) for s in steps], divide)
    return [e + w * s for e, s in zip(episode, step, strict=True)]


@pytest.mark.parametrize("norm", ["mean_norm", "mean_std_norm"])
@pytest.mark.parametrize("by", ["rows", "trajectories"])
@pytest.mark.parametrize("seed", range(3))
def test_gigpo_against_a_slow_form_and_in_any_order(seed, by, norm):
    rows, rng = make_rows(seed), random.Random(seed)
    singleton, w, gamma = rng.choice(["zero", "reward"]), rng.random(), rng.choice([1.0, 0.95, 0.5])

    def fast(order):
        groups, members, turns, states, _, rewards, penalties = zip(*(rows[i] for i in order), strict=True)
        options = {"turn_weight": w, "gamma": gamma, "norm": norm, "statistics": by, "singleton": singleton}
        return gigpo_advantages(*doubles(rewards, penalties), groups, members, turns, states, **options)

    expected = slow_gigpo(rows, w, gamma, norm == "mean_std_norm", by, singleton)
    found = fast(range(len(rows)))
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    order = rng.sample(range(len(rows)), len(rows))
    assert torch.allclose(fast(order), found[order], atol=1e-9)


# ---------------------------------------------------------------------- IGPO
def slow_information_gain(gains, outcomes, groups, gamma, pool):
    """A_k = sum over j >= k of gamma^(j - k) z_j, each z from plain statistics of its pool."""
    found = []
    for row, group in enumerate(groups):
        mine = [i for i, g in enumerate(groups) if g == group]
        ends, turns = [outcomes[i] for i in mine], [gain for i in mine for gain in gains[i]]
        if pool == "joint":
            ends = turns = ends + turns

        def z(value, of):
            deviation = (statistics.pvariance(of) + 1e-8) ** 0.5 if len(of) > 1 else 1.0
            return (value - statistics.fmean(of)) / (deviation + EPS)

        rewards = [*(z(gain, turns) for gain in gains[row]), z(outcomes[row], ends)]
        found.append([sum(gamma ** (j - k) * r for j, r in enumerate(rewards) if j >= k) for k in range(len(rewards))])
    return found


def test_information_gain_by_hand():
    """Gains 0.5, -0.5 and 0: mean 0, deviation sqrt(1/6); outcomes 1 and 0: +-1."""
    first, second = information_gain_advantages([[0.5, -0.5], [0.0]], [1.0, 0.0], ["g", "g"], gamma=0.5)
    z = 0.5 / (1 / 6) ** 0.5
    assert second == pytest.approx([0.5 * -1, -1], rel=1e-5)
    assert first == pytest.approx([z + 0.5 * (-z + 0.5), -z + 0.5, 1], rel=1e-5)


@pytest.mark.parametrize("pool", ["separate", "joint"])
def test_gains_that_are_not_known_are_in_no_mean(pool):
    """Turns without a gain have the advantage of the outcome; the others are as if these had no turns but the last."""
    outcomes, groups = [1.0, 0.0, 1.0], ["g"] * 3
    found = information_gain_advantages([[0.2], [0.4, 0.1], [None, None]], outcomes, groups, pool=pool)
    expected = information_gain_advantages([[0.2], [0.4, 0.1], []], outcomes, groups, pool=pool)
    assert found == [*expected[:2], expected[2] * 3]


@pytest.mark.parametrize("pool", ["separate", "joint"])
@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_information_gain_against_a_slow_form_and_in_any_order(pool, gamma):
    rng = random.Random(0)
    groups = [f"g{i % 4}" for i in range(13)]
    gains = [[rng.gauss(0, 1) for _ in range(rng.randint(0, 4))] for _ in groups]
    outcomes = [float(rng.random() < 0.5) for _ in groups]
    expected = slow_information_gain(gains, outcomes, groups, gamma, pool)
    order = rng.sample(range(13), 13)
    found = information_gain_advantages(*([x[i] for i in order] for x in (gains, outcomes, groups)), gamma, pool)
    for place, row in enumerate(order):
        assert found[place] == pytest.approx(expected[row], rel=1e-9)
    with pytest.raises(ValueError, match="unknown pool 'all'"):
        information_gain_advantages([], [], [], pool="all")


# ---------------------------------------------------------------------- AT2PO
def test_a_tree_by_hand():
    """a -> b -> (c, d), a -> e, and f alone; rewards 1, 0, 0, 1 have mean 0.5 and deviation 0.5."""
    paths = [["a", "b", "c"], ["a", "b", "d"], ["a", "e"], ["f"]]
    sure = dict.fromkeys("abcdef", 0.3)
    values = tree_values(paths, [1.0, 0.0, 0.0, 1.0], ["g"] * 4, sure, "equal")
    one = 0.5 / (0.5 + EPS)
    assert values == pytest.approx({"c": one, "d": -one, "e": -one, "f": one, "b": 0.0, "a": -one / 2})
    assert values == tree_values(paths, [1.0, 0.0, 0.0, 1.0], ["g"] * 4, sure), "equally sure: equal weights"
    unsure = sure | {"c": 0.3 + 1.0986122886681098}  # weight 3 of 4
    values = tree_values(paths, [1.0, 0.0, 0.0, 1.0], ["g"] * 4, unsure)
    assert values["b"] == pytest.approx(one / 2)
    assert set(tree_values(paths, [1.0] * 4, ["g"] * 4, sure).values()) == {0.0}


def test_a_trajectory_that_ends_where_another_goes_on():
    values = tree_values([["a"], ["a", "b"]], [1.0, 0.0], ["g", "g"], {"a": 0.1, "b": 0.1})
    assert values["a"] == pytest.approx(0.0) and values["b"] == pytest.approx(-1.0, rel=1e-5)


def test_groups_are_trees_of_their_own():
    paths, rewards, groups = [["a"], ["b"], ["c"], ["d"]], [1.0, 0.0, 5.0, 5.0], ["g", "g", "h", "h"]
    assert [*tree_values(paths, rewards, groups, dict.fromkeys("abcd", 0.0)).values()] == pytest.approx(
        [1, -1, 0, 0], rel=1e-5
    )
