"""A training that changes its number of ranks, and its strategy, on the way ends where an uninterrupted one does.

Three launches: two ranks, one, two again; AdamW, two parameter groups with settings of their own, warm-ups of other
lengths, a frozen teacher that is in no checkpoint.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_modules.sharding.trained_state import (
    WEIGHTS,
    Piece,
    TrainedState,
    flat_groups,
    read_state,
    stage2_fragments,
    stage3_fragments,
)
from tests.processes import run_ranks

WORKER = Path(__file__).with_name("other_ranks_worker.py")
# Algorithm and strategies of the three legs: two ranks to step 2, one rank to step 4, two ranks to step 6.
CHAINS = {
    "zero3_kd": ("kd", "zero3", "zero3", "zero3"),
    "zero3_dgpo": ("dgpo", "zero3", "zero3", "zero3"),
    "zero2_dgpo": ("dgpo", "zero2", "zero2", "zero2"),
    "ddp_dgpo": ("dgpo", "ddp", "auto", "ddp"),
    "there_and_back_dgpo": ("dgpo", "zero3", "auto", "zero3"),
    "between_kd": ("kd", "ddp", "zero2", "ddp"),
}


def launch(folder, number, ranks, plan, *models):
    out = folder / f"launch{number}.pt"
    said = run_ranks(WORKER, out, *models, ranks, json.dumps(plan), timeout=580)
    return torch.load(out, weights_only=False), said


@pytest.fixture(scope="module")
def legs(model_dir, teacher_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("legs")
    found, texts = {}, []
    for number, ranks in enumerate((2, 1, 2)):
        plan = [
            {
                "algorithm": algorithm, "strategy": strategies[number], "until": 2 * number + 2,
                "folder": str(folder / f"{chain}-{number}"),
                "resume": str(folder / f"{chain}-{number - 1}") if number else "",
            }
            for chain, (algorithm, *strategies) in CHAINS.items()
        ]  # fmt: skip
        if number == 2:
            plan.append({
                "algorithm": "dgpo", "strategy": "zero3_whole", "until": 4, "folder": str(folder / "other_sub_groups"),
                "resume": str(folder / "zero3_dgpo-0"),
            })  # fmt: skip
        results, text = launch(folder, number, ranks, plan, model_dir, teacher_dir)
        texts.append(text)
        found |= {Path(name).name: result for name, result in results.items()}
    return found, texts, folder


@pytest.fixture(scope="module")
def straight(model_dir, teacher_dir, tmp_path_factory):
    from tests.lightning_modules.ranks import other_ranks_worker as worker

    def whole(algorithm):
        leg = worker.Leg(algorithm, "auto", str(tmp_path_factory.mktemp(algorithm)), worker.STEPS)
        return worker.run(leg, str(model_dir), str(teacher_dir), 1)

    return {algorithm: whole(algorithm) for algorithm in ("kd", "dgpo")}


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_two_ranks_then_one_then_two_again_equal_one_uninterrupted_process(legs, straight, chain):
    parts = [legs[0][f"{chain}-{number}"] for number in range(3)]
    whole = straight[CHAINS[chain][0]]
    assert [part["steps"] for part in parts] == [2, 4, 6] and [len(part["figures"]) for part in parts] == [2, 2, 2]
    figures = [step for part in parts for step in part["figures"]]
    for number, (found, expected) in enumerate(zip(figures, whole["figures"], strict=True)):
        for name in expected:
            if "grad_norm" not in name:  # DeepSpeed knows the joint norm
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), (number, name)
    weights = parts[-1]["weights"]
    assert weights.keys() == whole["weights"].keys()
    worst = max(float((weights[k] - v).abs().max()) for k, v in whole["weights"].items())
    moved = max(float((weights[k] - v).abs().max()) for k, v in parts[0]["weights"].items())
    assert moved > 1e-3 and worst < 2e-5, f"weights differ by {worst} after moving by {moved}"


@pytest.mark.slow
def test_the_same_ranks_go_on_with_another_sub_group_size(legs):
    """DeepSpeed's own loading takes no other sub-groups than its own; a file written in some goes on as it did."""
    weights, expected = (legs[0][name]["weights"] for name in ("other_sub_groups", "zero3_dgpo-1"))
    assert legs[0]["other_sub_groups"]["steps"] == 4
    assert max(float((weights[k] - v).abs().max()) for k, v in expected.items()) < 2e-5
    groups = flat_groups((legs[2] / "zero3_dgpo-0" / "checkpoints" / "last.ckpt").resolve() / "checkpoint")
    own = flat_groups((legs[2] / "other_sub_groups" / "checkpoints" / "last.ckpt").resolve() / "checkpoint")
    assert len(groups) > len(own) and sum(groups, []) == sum(own, []), "the same parameters, cut otherwise"


@pytest.mark.slow
def test_the_log_says_what_does_not_go_on(legs):
    for text, there, here in zip(legs[1][1:], (2, 1), (1, 2), strict=True):
        assert text.count(f"written by {there} ranks, this run has {here}") == len(CHAINS)


@pytest.mark.slow
def test_a_rank_s_missing_file_is_named(legs, tmp_path):
    last = (legs[2] / "zero3_dgpo-0" / "checkpoints" / "last.ckpt").resolve()
    state = read_state(last)
    assert state.ranks == 2 and state.stage == 3 and len(state.groups) == 2
    assert state.groups[0]["lr"] != state.groups[1]["lr"]
    with pytest.raises(ValueError, match="1 missing, .* first 'policy.more'"):
        state.require({name: state.count(name) for name in state.pieces} | {"policy.more": 3}, last)
    (tmp_path / "checkpoint").mkdir()
    for path in (last / "checkpoint").glob("*.pt"):
        if "rank_1_" not in path.name:
            (tmp_path / "checkpoint" / path.name).symlink_to(path)
    with pytest.raises(ValueError, match="was written by 2 ranks, but holds the optimiser's files of 1"):
        read_state(tmp_path)


def test_parts_of_parameters_are_put_together_from_any_number_of_ranks():
    sizes = {"a": 5, "b": 1, "c": 6}
    values = {name: torch.arange(size) + 10.0 * i for i, (name, size) in enumerate(sizes.items())}
    assert [(f.name, f.start, f.count, f.at) for f in stage3_fragments(sizes, 1, 3)] == [
        ("a", 2, 2, 0), ("b", 1, 0, 2), ("c", 2, 2, 3),
    ]  # fmt: skip
    for ranks in (1, 2, 3, 7):
        pieces = {name: [] for name in sizes}
        for rank in range(ranks):
            for f in stage3_fragments(sizes, rank, ranks):
                pieces[f.name].append(Piece(f.start, f.count, {WEIGHTS: values[f.name][f.start : f.start + f.count]}))
        state = TrainedState([list(sizes)], [{}], pieces, {}, {})
        for name, size in sizes.items():
            assert state.whole(name, WEIGHTS, (size,)).equal(values[name])
            for start in range(size):
                out = torch.zeros(size - start)
                state.copy(name, WEIGHTS, start, out)
                assert out.equal(values[name][start:])
        with pytest.raises(ValueError, match="a: elements 3 to 6 of 5"):
            state.copy("a", WEIGHTS, 3, torch.zeros(3))
    # twelve elements on two ranks: b and the beginning of c end the first rank's part, or begin the second's

    def address(start, numel):
        return SimpleNamespace(start=start, numel=numel)

    mappings = [{"a": address(0, 5), "b": address(5, 1)}, {"c": address(0, 6)}]
    assert [(f.name, f.start, f.count, f.at) for f in stage2_fragments(mappings, 1)] == [("c", 0, 6, 0)]
    middle = {"a": address(0, 1), "b": address(1, 1), "c": address(2, 2)}
    mappings = [{"a": address(0, 4)}, middle, {"c": address(0, 4)}]
    assert [(f.start, f.count, f.at) for f in stage2_fragments(mappings, 1)] == [(4, 1, 0), (0, 1, 1), (0, 2, 2)]
    assert [(f.start, f.count, f.at) for f in stage2_fragments(mappings, 2)] == [(2, 4, 0)]


def test_parameters_of_a_group_count_their_steps_each_for_itself():
    pieces = {name: [Piece(0, 1, {WEIGHTS: torch.zeros(1)})] for name in "ab"}
    step = torch.tensor(3.0)
    state = TrainedState([["a", "b"]], [{}], pieces, {"a": {"step": step}, "b": {"step": step}}, {})
    first, second = (state.counted(name)["step"] for name in "ab")
    first += 1
    assert (float(first), float(second), float(step)) == (4.0, 3.0, 3.0)
