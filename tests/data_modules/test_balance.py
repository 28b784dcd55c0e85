"""Groups change ranks so that tokens are even; what is learnt stays what one process learns."""

import itertools
import random

import pytest
import torch

from data_modules.loading.token_balance import assign
from tests.data_modules import balance_worker
from tests.processes import run_ranks


def sums(costs, wanted):
    return [sum(costs[r][i] for r, i in part) for part in wanted]


def test_against_brute_force():
    rng = random.Random(0)
    exact = 0
    for _ in range(150):
        ranks, share = rng.choice([(2, 2), (2, 3), (2, 4), (3, 2)])
        costs = [[rng.choice([rng.randint(0, 9), rng.randint(50, 90)]) for _ in range(share)] for _ in range(ranks)]
        wanted = assign(costs)
        everything = [(r, i) for r in range(ranks) for i in range(share)]
        assert sorted(key for part in wanted for key in part) == everything, "none is lost or doubled"
        assert [len(part) for part in wanted] == [share] * ranks
        best = min(
            max(sums(costs, [p[k * share : (k + 1) * share] for k in range(ranks)]))
            for p in (itertools.permutations(everything) if ranks * share < 7 else halves(everything))
        )
        found = max(sums(costs, wanted))
        assert found <= max(map(sum, costs)) and found <= 1.25 * best, (costs, wanted, best)
        exact += found == best
    assert exact > 130


def halves(items):
    for chosen in itertools.combinations(items, len(items) // 2):
        yield [*chosen, *(i for i in items if i not in chosen)]


@pytest.mark.slow
def test_two_ranks_with_uneven_groups_learn_what_one_process_learns(model_dir, tmp_path):
    run_ranks(balance_worker.__file__, model_dir, tmp_path, 2, timeout=400)
    balance_worker.run(str(model_dir), tmp_path, 1)
    alone, together = (torch.load(tmp_path / f"ranks{ranks}.pt", weights_only=False) for ranks in (1, 2))
    assert set(together) == {"balanced", "as rolled out", "one ahead"}
    for name, found in together.items():
        worst = max(float((found["weights"][k] - v).abs().max()) for k, v in alone[name]["weights"].items())
        assert worst < 1e-5 < 1e-3 < found["moved"], (name, worst, found["moved"])
        if name != "as rolled out":
            assert all(before > 1.5 and after < 1.1 for before, after in found["imbalance"]), found["imbalance"]
        else:
            assert found["imbalance"] == [None, None]
