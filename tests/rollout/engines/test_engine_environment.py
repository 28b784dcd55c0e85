"""Every rank's engine gets its own GPU and no part in the trainer's process group."""

import pytest

from common.env_vars import RANK_VARIABLES, child_environment


@pytest.mark.parametrize(
    ("outside", "device"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "2,3"),
        ({"LOCAL_RANK": "3"}, "3"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, "6"),
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "7"}, "7"),
    ],
)
def test_each_rank_has_its_own_device(outside, device):
    assert child_environment(outside, 1).get("CUDA_VISIBLE_DEVICES") == device


@pytest.mark.parametrize("ranks", [{"WORLD_SIZE": "8"}, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}])
def test_engines_over_several_devices_are_not_piled_up_by_several_ranks(ranks):
    with pytest.raises(ValueError, match="each of 8 ranks would start such an engine on the same first GPUs"):
        child_environment(ranks | {"LOCAL_RANK": "3"}, 1, several_devices=True)
    one_a_node = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert "CUDA_VISIBLE_DEVICES" not in child_environment(one_a_node, 1, several_devices=True)


def test_ranks_are_forgotten_and_threads_set():
    outside = dict.fromkeys(RANK_VARIABLES, "1") | {"HOME": "/home/x", "OMP_NUM_THREADS": "9"}
    child = child_environment(outside, 2)
    assert not set(RANK_VARIABLES) & child.keys()
    assert child["HOME"] == "/home/x" and child["OMP_NUM_THREADS"] == child["MKL_NUM_THREADS"] == "2"
