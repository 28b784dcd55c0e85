"""Group advantages and hard attribution: by hand, against slow forms, and what they must not depend on."""

import random
import statistics

import pytest
import torch

from lightning_modules.maths.advantages import shared_token_advantages
from lightning_modules.maths.losses import group_advantages, zero_variance_groups

GROUPS = ["a"] * 4


@pytest.mark.parametrize(("convention", "expected"), [("std", 0.8660), ("centred", 0.5), ("leave_one_out", 0.6667)])
def test_conventions_by_their_reference_values(convention, expected):
    out = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), GROUPS, convention)
    assert out.tolist() == pytest.approx([expected, -expected, -expected, expected], abs=1e-4)


def slow(rewards, convention):
    """Straight from the definitions, one trajectory at a time."""
    out = []
    for i, r in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        if convention == "leave_one_out":
            out.append(r - statistics.mean(others))
        else:
            spread = statistics.stdev(rewards) + 1e-6 if convention == "std" else 1.0
            out.append((r - statistics.mean(rewards)) / spread)
    return out


@pytest.mark.parametrize("convention", ["std", "centred", "leave_one_out"])
def test_groups_of_any_size_and_in_any_order(convention):
    rng = random.Random(0)
    groups = ["q1"] * 5 + ["q1#2"] * 2 + ["q2"] * 3  # a repeated prompt is another group
    rewards = [round(rng.uniform(-1, 1.1), 3) for _ in groups]
    expected = [a for name in ("q1", "q1#2", "q2")
                for a in slow([r for r, g in zip(rewards, groups, strict=True) if g == name], convention)]  # fmt: skip
    order = list(range(len(groups)))
    rng.shuffle(order)
    out = group_advantages(torch.tensor([rewards[i] for i in order]), [groups[i] for i in order], convention)
    assert out.tolist() == pytest.approx([expected[i] for i in order], abs=1e-5)


@pytest.mark.parametrize("convention", ["std", "centred", "leave_one_out"])
@pytest.mark.parametrize("value", [1.0, 0.1])
def test_a_constant_group_is_exactly_zero(convention, value):
    assert group_advantages(torch.full((7,), value), ["a"] * 7, convention).tolist() == [0.0] * 7


def test_a_group_of_one_is_zero_or_as_in_verl_its_reward():
    rewards, groups = torch.tensor([0.7, 1.0, 0.0]), ["alone", "b", "b"]
    assert group_advantages(rewards, groups).tolist() == pytest.approx([0.0, 0.7071, -0.7071], abs=1e-4)
    assert group_advantages(rewards, groups, singleton="reward").tolist() == pytest.approx(
        [0.7, 0.7071, -0.7071], abs=1e-4
    )


def test_no_rows_and_unknown_conventions():
    assert group_advantages(torch.zeros(0), []).tolist() == []
    with pytest.raises(ValueError, match="unknown group advantage 'population'; expected std, centred"):
        group_advantages(torch.zeros(1), ["a"], "population")


def test_constant_groups_are_counted():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5])
    assert zero_variance_groups(rewards, ["a", "a", "b", "b", "alone"]) == 2


# ---------------------------------------------------------------------- hard attribution
def shared(values, forks, starts=None, members=None):
    rows = torch.tensor(values)
    members = members or [("g", i) for i in range(len(values))]
    forks = {("g", child): fork for child, fork in forks.items()}
    return shared_token_advantages(rows, starts or [1] * len(values), members, forks)


def slow_shared(values, starts, forks):
    """Token by token: who samples it first, by walking up; then the mean over all with the same answer."""

    def first(member, offset):
        while member in forks and offset < forks[member][1]:
            member = forks[member][0]
        return member

    out = [row[:] for row in values]
    for i, row in enumerate(values):
        for t in range(starts[i], len(row)):
            same = [values[j][t] for j in range(len(values)) if first(j, t - starts[j]) == first(i, t - starts[i])]
            out[i][t] = sum(same) / len(same)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_random_trees_against_the_slow_form(seed):
    rng = random.Random(seed)
    n, length, start = 7, 12, rng.randint(1, 3)
    forks = {i: (rng.randrange(i), rng.randint(0, length - start)) for i in range(1, n) if rng.random() < 0.8}
    values = [[0.0] * start + [rng.uniform(-1, 1) for _ in range(length - start)] for _ in range(n)]
    out = shared(values, forks, [start] * n)
    assert torch.allclose(out, torch.tensor(slow_shared(values, [start] * n, forks)), atol=1e-6)
    order = rng.sample(range(n), n)  # rows in another order
    moved = shared([values[i] for i in order], forks, [start] * n, [("g", i) for i in order])
    assert torch.allclose(moved, out[order], atol=1e-6)


def test_equal_forks_in_two_groups_do_not_mix():
    rows = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0], [0.0, 9.0]])
    members = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    out = shared_token_advantages(rows, [1] * 4, members, {("a", 1): (0, 1), ("b", 1): (0, 1)})
    assert out[:, 1].tolist() == [2, 2, 7, 7]


def test_a_parent_that_failed_still_joins_its_children():
    """0 and 2 are left, 1 failed; 2 and 3 branched off 1, which had branched off 0."""
    rows = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 4.0, 4.0, 4.0], [0.0, 7.0, 7.0, 7.0]])
    forks = {("g", 1): (0, 1), ("g", 2): (1, 2), ("g", 3): (1, 3)}
    out = shared_token_advantages(rows, [1] * 3, [("g", 0), ("g", 2), ("g", 3)], forks)
    assert out.tolist() == [[0, 4, 1, 1], [0, 4, 5.5, 4], [0, 4, 5.5, 7]]


def test_nothing_shared_changes_nothing_and_loops_are_refused():
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    members = [("g", 0), ("g", 1), ("g", 2)]
    assert torch.equal(shared_token_advantages(rows, [1] * 3, members, {}), rows)
    assert shared_token_advantages(torch.zeros(0, 1), [], [], {}).shape == (0, 1)
    with pytest.raises(ValueError, match="g/0 is its own ancestor"):
        shared_token_advantages(rows, [1] * 3, members, {("g", 0): (1, 2), ("g", 1): (0, 2)})
