"""Steps, divergences and weights: the vectors of docs/algorithms/sod.md, a slow loop, order and padding."""

import math
import random

import pytest
import torch

from lightning_modules.advantage_transforms.distillation import (
    TurnDivergences,
    TurnInputs,
    UncertainTurns,
    divergence_ratios,
    last_turn,
    spread_turns,
    turn_divergences,
    turn_index,
    turn_means,
)


def given(*rows):
    """Divergences as if they had been measured; rows may differ in length."""
    most = max(len(r) for r in rows)
    d, n = (torch.tensor([[f(x) for x in r] + [0.0] * (most - len(r)) for r in rows]) for f in (float, lambda _: 1.0))
    return TurnDivergences(d, d, n)


@pytest.mark.parametrize(
    ("divergences", "weights"),
    [
        ((0.218, 0.6, 1.284), (1, 0.363, 0.170)),  # the paper's case B
        ((0.2, 0.4, 0.8), (1, 0.5, 0.25)),
        ((0.5, 0.22, 0.3), (1, 1.2, 1.2)),
        ((0.3, 0.41, 0.54, 0.73, 0.39, 0.27, 0.2), (1, 0.732, 0.556, 0.411, 0.769, 1.111, 1.2)),  # shape of case C
        ((0.7,), (1,)),
        ((0.0, 0.5), (1, 2e-6)),
        ((0.0, 0.0), (1, 1)),  # teacher = student
    ],
)
def test_vectors(divergences, weights):
    assert divergence_ratios(given(divergences))[0].tolist() == pytest.approx(weights, abs=5e-4, rel=1e-3)


def test_options():
    d = given((0.1, 0.4, 0.05), (0.5, 0.25), (0.3, 0.6))
    assert divergence_ratios(d, delta=None)[0].tolist() == pytest.approx([1, 0.25, 2.0], rel=1e-4)
    assert divergence_ratios(d, delta=5.0)[0].tolist() == pytest.approx([1, 0.25, 2.0], rel=1e-4)
    assert divergence_ratios(d, delta=0.0)[1].tolist() == pytest.approx([1, 1, 0])
    assert divergence_ratios(d, floor=0.3)[0].tolist() == pytest.approx([1, 0.3, 1.2], rel=1e-4)
    median = divergence_ratios(d, reference="batch_median", delta=None)  # of .1 .5 .3
    expected = [[1, 0.75, 6.0], [1, 1.2, 0], [1, 0.5, 0]]
    for row, values in zip(median.tolist(), expected, strict=True):
        assert row == pytest.approx(values, rel=1e-3)
    with pytest.raises(ValueError, match="reference_turn is 'last'; expected one of first"):
        divergence_ratios(d, reference="last")


def test_the_batch_reference_is_of_all_ranks():
    reference = "batch_median"
    rng = random.Random(0)
    rows = [[rng.random() for _ in range(rng.randint(1, 4))] for _ in range(7)]
    whole = divergence_ratios(given(*rows), reference=reference)
    firsts = torch.tensor([r[0] for r in rows])
    for part in (slice(0, 2), slice(2, 7)):
        mine = divergence_ratios(given(*rows[part]), reference=reference, gather=lambda _: firsts)
        assert torch.equal(mine, whole[part][:, : mine.shape[1]])
    nothing = turn_means(torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.int64))
    empty = TurnDivergences(nothing[0], nothing[0], nothing[1])
    called = []
    assert divergence_ratios(empty, reference=reference, gather=lambda v: called.append(v) or firsts).shape == (0, 0)
    assert len(called) == 1, "a rank without rows takes part in the collective"


# ---------------------------------------------------------------------- against a slow loop
def slow(student, teacher, mask, starts, delta, epsilon):
    """Position by position, with the paper's running product of neighbours' ratios."""
    turns, divergences, signed, weights, token_weights = [], [], [], [], []
    for s, t, m, b in zip(student, teacher, mask, starts, strict=True):
        sets, previous = [], 0
        for position, on in enumerate(m):
            if on:
                if not previous or b[position]:
                    sets.append([])
                sets[-1].append(position)
            previous = on
        d = [sum(abs(s[p] - t[p]) for p in turn) / len(turn) for turn in sets]
        product, w = 1.0, []
        for k in range(len(d)):
            product *= (d[k - 1] + epsilon) / (d[k] + epsilon) if k else 1.0
            w.append(min(product, 1 + delta) if k else 1.0)
        number, weight = [0] * len(m), [0.0] * len(m)
        for k, turn in enumerate(sets):
            for p in turn:
                number[p], weight[p] = k + 1, w[k]
        divergences.append(d)
        signed.append([sum(t[p] - s[p] for p in turn) / len(turn) for turn in sets])
        turns.append(number)
        weights.append(w)
        token_weights.append(weight)
    return turns, divergences, signed, weights, token_weights


@pytest.mark.parametrize("seed", range(4))
def test_against_a_slow_loop(seed):
    rng = random.Random(seed)
    rows, length = rng.randint(1, 6), rng.randint(1, 40)
    density = rng.choice([0.0, 0.3, 0.7, 1.0])  # 0: no model token at all; 1: one run, or adjacent turns only
    mask = [[int(rng.random() < density) for _ in range(length)] for _ in range(rows)]
    mask[0] = [0] * length  # a row without a model token
    starts = [[int(rng.random() < 0.2) for _ in range(length)] for _ in range(rows)]  # also where nothing was sampled
    student, teacher = ([[-3 * rng.random() for _ in range(length)] for _ in range(rows)] for _ in range(2))
    turns, d, signed, w, token_w = slow(student, teacher, mask, starts, 0.2, 1e-6)
    m = torch.tensor(mask, dtype=torch.float32)
    unknown = torch.where(m == 0, torch.nan, 0.0)  # what models would say elsewhere must not matter
    fast = turn_index(m, torch.tensor(starts))
    assert fast.tolist() == turns
    result = turn_divergences(torch.tensor(student) + unknown, torch.tensor(teacher) + unknown, fast)
    weights = divergence_ratios(result)
    for i in range(rows):
        k = len(d[i])
        assert result.absolute[i, :k].tolist() == pytest.approx(d[i], abs=1e-6)
        assert result.signed[i, :k].tolist() == pytest.approx(signed[i], abs=1e-6)
        assert weights[i, :k].tolist() == pytest.approx(w[i], rel=1e-4)
        assert not result.absolute[i, k:].any() and not weights[i, k:].any() and not result.tokens[i, k:].any()
    assert torch.allclose(spread_turns(weights, fast), torch.tensor(token_w), atol=1e-4)
    assert not torch.isnan(weights).any()


def test_padding_and_the_other_rows_change_nothing():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (-torch.rand(3, 12, generator=generator) for _ in range(2))
    mask = (torch.rand(3, 12, generator=generator) < 0.6).float()

    def weights(rows, pad):
        s, t, m = (torch.nn.functional.pad(x[rows], (0, pad)) for x in (student, teacher, mask))
        turns = turn_index(m)
        return spread_turns(divergence_ratios(turn_divergences(s, t, turns)), turns)

    whole = weights([0, 1, 2], 0)
    assert torch.equal(weights([0, 1, 2], 5)[:, :12], whole)
    for row in range(3):
        assert torch.equal(weights([row], 2)[0, :12], whole[row])


def test_the_last_turn_of_each_row():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    tokens = torch.tensor([[1, 1, 2], [3, 1, 0], [0, 0, 0]])
    last, has = last_turn(values, tokens)
    assert last.tolist() == [3.0, 5.0, 0.0] and has.tolist() == [True, True, False]
    last, has = last_turn(torch.zeros(2, 0), torch.zeros(2, 0))
    assert last.tolist() == [0.0, 0.0] and has.tolist() == [False, False]


def test_long_turns_are_summed_without_loss():
    student = torch.full((1, 200_000), -0.1)
    d = turn_divergences(student, torch.zeros_like(student), torch.ones(1, 200_000, dtype=torch.int64))
    assert float(d.absolute) == pytest.approx(0.1, rel=1e-6) and not math.isnan(float(d.signed))


@pytest.mark.parametrize(
    ("d", "h", "expected"),
    [
        ((0.101, 0.228, 0.022, 0.019, 0.138), (0.037, 0.025, 0.010, 0.006, 0.008), (1, 1, 0.142, 0, 0.597)),  # ATOD's
        ((0.1, 0.2, 0.4), (0.05, 0.15, 0.05), (0, 1, 1)),
        ((0.2, 0.1), (0.3, 0.1), (1, 0)),
        ((0.7,), (0.2,), (0.75,)),
        ((0.2, 0.2), (0.1, 0.1), (0.75, 0.75)),
    ],
)
def test_vectors_of_uncertain_turns(d, h, expected):
    """A row by itself, and beside a longer one."""
    weigh = UncertainTurns()
    assert weigh(TurnInputs([], given(d), torch.tensor([h]), None))[0].tolist() == pytest.approx(expected, abs=1e-3)
    longer = [9.0] * (len(d) + 2)
    both = weigh(TurnInputs([], given(d, longer), torch.tensor([[*h, 0.0, 0.0], longer]), None))
    assert both[0].tolist() == pytest.approx([*expected, 0.0, 0.0], abs=1e-3)
