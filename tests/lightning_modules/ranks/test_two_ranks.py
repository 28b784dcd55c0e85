"""Policy, critic and frozen teacher on two CPU ranks (ZeRO-3, ZeRO-2, DDP) do what one process does."""

from pathlib import Path

import pytest
import torch

from tests.processes import run_ranks

pytestmark = pytest.mark.slow  # two processes, each importing deepspeed
CONVERSATIONS = ["kd", "dgpo", "grpo", "aepo", "sod", "divergence", "opsd"]
IDLE = ["kd_idle", "dgpo_idle", "grpo_idle"]  # the second rank has no sampled token
FAILED = ["kd_failed", "grpo_failed"]  # in the second iteration no rank has any row
EPISODES = ["episode_grpo", "gigpo", "sdar", "sdar_jsd", "skill_sd", "rlsd", "idle_rank"]
SOME = ["kd", "dgpo", "aepo", "divergence", "grpo_idle", *FAILED, "sdar", "idle_rank"]  # ZeRO-2, DDP; ZeRO-3 has all
WORKER = Path(__file__).with_name("two_ranks_worker.py")


@pytest.fixture(scope="module")
def one(model_dir, teacher_dir):
    from tests.lightning_modules.ranks import two_ranks_worker

    return two_ranks_worker.run(str(model_dir), str(teacher_dir), lambda rows: rows)


def on_two_ranks(out, model_dir, teacher_dir, strategy, *names):
    run_ranks(WORKER, out, model_dir, teacher_dir, strategy, *names)
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module", params=["zero3", "zero2", "ddp"])
def both(request, one, model_dir, teacher_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "result.pt"
    names = () if request.param == "zero3" else SOME
    return request.param, one, on_two_ranks(out, model_dir, teacher_dir, request.param, *names)


def test_parameters_and_optimizer_in_host_memory(one, model_dir, teacher_dir, tmp_path):
    """On CPU ranks the device is the host: what is shown is that the path through DeepSpeed's offloading is right."""
    two = on_two_ranks(tmp_path / "result.pt", model_dir, teacher_dir, "offload", "kd", "dgpo", *FAILED)
    assert set(two) == {"kd", "dgpo", *FAILED} and all(found["sharded"] for found in two.values())
    for name, found in two.items():
        worst = max(float((one[name]["weights"][k] - found["weights"][k]).abs().max()) for k in found["weights"])
        assert worst < 1e-5, (name, worst)


def test_two_ranks_equal_one_process(both, model_dir):
    strategy, ones, twos = both
    assert set(twos) == set([*CONVERSATIONS, *IDLE, *FAILED, *EPISODES] if strategy == "zero3" else SOME)
    start = start_weights(model_dir)
    for algorithm, two in twos.items():
        one = ones[algorithm]
        assert two["sharded"] == (strategy == "zero3") and not one["sharded"]
        assert one["steps"] == two["steps"] == (2 if algorithm in FAILED else 1)
        assert one["weights"].keys() == two["weights"].keys()
        moved = max(float((one["weights"][f"policy.{k}"] - v).abs().max()) for k, v in start.items())
        worst = max(float((one["weights"][k] - two["weights"][k]).abs().max()) for k in one["weights"])
        assert moved > 1e-3, f"{algorithm}: nothing was learnt, so equality proves nothing"
        assert worst < 1e-5, f"{algorithm}: weights differ by {worst} after moving by {moved}"


def test_two_ranks_log_the_same_figures(both):
    for algorithm, side in both[2].items():
        one, two = both[1][algorithm]["figures"], side["figures"]
        comparable = [k for k in one if "grad_norm" not in k]  # DeepSpeed only knows the joint norm
        assert set(comparable) <= set(two)
        for key in comparable:
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), (algorithm, key)


def test_ranks_with_unequal_numbers_of_rows_learn_the_same_of_skills(both):
    """Turns of episodes are rows, of which each rank has as many as its episodes had turns; one rank has none at all.
    What a bandit is told is of all ranks' episodes."""
    found = {name: both[2][name]["rows"] for name in EPISODES if name in both[2]}
    for name, (first, second) in found.items():
        assert first != second and [first + second] == both[1][name]["rows"], found
    assert found["idle_rank"][1] == 0 < found["idle_rank"][0]
    arms = both[2]["sdar"]["learnt"]["arms"]
    assert arms == both[1]["sdar"]["learnt"]["arms"]
    assert sum(count for count, _ in arms.values()) == 7, "one of eight episodes failed"


def test_two_ranks_judge_as_one_process_does(both):
    """Every rank calls, with other numbers of micro-batches; rank 0's figures are those of its four trajectories."""
    for algorithm, side in both[2].items():
        expected = both[1][algorithm]["divergences"][: len(side["divergences"])]
        assert len(expected) == 4
        for found, figures in zip(side["divergences"], expected, strict=True):
            for name in figures:
                assert found[name] == pytest.approx(figures[name], rel=1e-3, abs=1e-5), (algorithm, name)


def start_weights(model_dir) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {k: v for k, v in load_file(model_dir / "model.safetensors").items() if k != "lm_head.weight"}
