"""Gates by hand, without gradient; their mean over any split; figures against a slow loop."""

import math
import random
from fractions import Fraction

import pytest
import torch

from lightning_modules.advantage_transforms.distillation import turn_index
from lightning_modules.maths.gates import gate, gate_mean, gate_metrics, token_gap, turn_parts


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_the_gap_is_teacher_minus_student_without_gradient():
    student, teacher = torch.tensor([[-1.0, -2.0, -9.0]]).requires_grad_(), torch.tensor([[-0.5, -4.0, -1.0]])
    teacher.requires_grad_()
    gap = token_gap(student, teacher)
    assert gap.tolist() == [[0.5, -2.0, 8.0]] and not gap.requires_grad
    assert token_gap(student, teacher, clamp=1.5).tolist() == [[0.5, -1.5, 1.5]]
    with pytest.raises(ValueError, match="clamp of the gap is 0.0"):
        token_gap(student, teacher, clamp=0.0)


@pytest.mark.parametrize("beta", [0.0, 1.0, 5.0])
def test_gates_by_hand(beta):
    gaps, entropies = [0.5, -0.2, 0.0, 2.0], [0.1, 0.9, 0.0, 3.0]
    gap, entropy = (torch.tensor([v], dtype=torch.float64).requires_grad_() for v in (gaps, entropies))
    expected = {
        "gap": [sigmoid(beta * d) for d in gaps],
        "entropy": [sigmoid(beta * h) for h in entropies],
        "soft_or": [sigmoid(beta * (1 - (1 - h) * (1 - d))) for d, h in zip(gaps, entropies, strict=True)],
    }
    for kind, values in expected.items():
        g = gate(kind, gap, entropy, beta)
        assert g[0].tolist() == pytest.approx(values) and not g.requires_grad
    assert gate("gap", gap, None).tolist() == gate("gap", gap, None, 5.0).tolist()
    assert gate("entropy", None, entropy, beta).min() >= 0.5


def test_what_is_refused():
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="unknown gate 'or'; expected gap, entropy or soft_or"):
        gate("or", one, one)
    with pytest.raises(ValueError, match="beta of the gate is -1.0"):
        gate("gap", one, one, -1.0)
    for kind, arguments, name in (
        ("gap", (None, one), "gap_BT"),
        ("entropy", (one, None), "entropy_BT"),
        ("soft_or", (one, None), "entropy_BT"),
        ("soft_or", (None, one), "gap_BT"),
    ):
        with pytest.raises(ValueError, match=f"gate '{kind}' reads {name}, which is None"):
            gate(kind, *arguments)


def test_the_mean_is_over_all_ranks_and_leaves_out_what_the_mask_does():
    generator = torch.Generator().manual_seed(0)
    gates, mask = torch.rand(6, 10, generator=generator), (torch.rand(6, 10, generator=generator) < 0.5).float()
    mask[0] = 0.0
    gates = gates.masked_fill(mask == 0, float("nan")).requires_grad_()
    expected = gates[mask > 0].mean().item()
    whole = gate_mean(gates, 3.0 * mask)  # a weight is no count
    assert whole.item() == pytest.approx(expected, rel=1e-6) and whole.shape == () and not whole.requires_grad
    sums = []
    for part in (slice(0, 1), slice(1, 6)):
        gate_mean(gates[part], mask[part], lambda s: sums.append(s) or s)
    for part in (slice(0, 1), slice(1, 6)):
        assert gate_mean(gates[part], mask[part], lambda _: sums[0] + sums[1]).item() == pytest.approx(expected)
    assert gate_mean(gates[:1], mask[:1]).item() == 0.0


# ---------------------------------------------------------------------- figures
def slow_parts(turns, parts):
    """Token by token: its place among its turn's tokens, and the stretch in which its middle lies."""
    out = []
    for row in turns:
        found = []
        for position, turn in enumerate(row):
            places = [p for p, t in enumerate(row) if t == turn]
            middle = Fraction(2 * places.index(position) + 1, 2 * len(places))
            found.append(next(k for k in range(1, parts + 1) if middle < Fraction(k, parts)) if turn else 0)
        out.append(found)
    return out


def random_turns(rng):
    rows, length = rng.randint(1, 5), rng.randint(1, 40)
    mask = torch.tensor([[int(rng.random() < 0.6) for _ in range(length)] for _ in range(rows)])
    return turn_index(mask)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("parts", [1, 7])
def test_parts_of_turns_against_a_slow_loop(seed, parts):
    turns = random_turns(random.Random(seed))
    assert turn_parts(turns, parts).tolist() == slow_parts(turns.tolist(), parts)


def test_parts_where_a_row_is_one_turn_and_where_there_is_none():
    """Turn 7 of a trajectory in a row of its own: the numbers before it are missing."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 0, 1, 1, 0, 0]])
    found = turn_parts(mask * torch.tensor([[7], [2]]))
    assert found.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3, 0], [0, 0, 0, 1, 0, 2, 3, 0, 0]]
    assert turn_parts(torch.zeros(2, 3, dtype=torch.int64)).tolist() == [[0] * 3] * 2
    assert turn_parts(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)


@pytest.mark.parametrize("seed", range(3))
def test_figures_against_a_slow_loop(seed):
    rng = random.Random(seed)
    turns, parts, shown = random_turns(rng), rng.randint(1, 10), rng.randint(1, 4)
    generator = torch.Generator().manual_seed(seed)
    gap = torch.randn(turns.shape, generator=generator)
    gates = gate("gap", gap, None)
    expected = {}
    for r, t in ((r, t) for r in range(len(turns)) for t in range(turns.shape[1]) if turns[r, t] > 0):
        turn, part = int(turns[r, t]), slow_parts([turns[r].tolist()], parts)[0][t]
        places = ("", f"/part{part}", f"/turn{turn}" if turn <= shown else "/later")
        values = {"gap": gap[r, t], "gate": gates[r, t], "gate_active": gates[r, t] > 0.5}
        for name, place in ((n, p) for n in values for p in places):
            total, count = expected.get(name + place, (0.0, 0))
            expected[name + place] = (total + float(values[name]), count + 1)
    unknown = torch.where(turns == 0, torch.nan, 0.0)
    found = gate_metrics(gap + unknown, gates + unknown, turns, parts, shown)
    assert set(expected) <= set(found)
    for name, (total, count) in found.items():
        assert (total.item(), count.item()) == pytest.approx(expected.get(name, (0.0, 0)), abs=1e-5), name
