"""What the strategies tell DeepSpeed and DDP; that they train alike is in test_two_ranks.py."""

import lightning as L
import pytest

from lightning_modules.sharding.strategies import ZeRO2, ZeRO3


def test_live_parameters_reach_deepspeed():
    zero = ZeRO3(live_parameters=4_000_000).config["zero_optimization"]
    names = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
    assert [zero[name] for name in names] == [4_000_000, 4_000_000, 1_000_000]
    assert zero["sub_group_size"] == 100_000_000, "not lightning's 1e12, which is the whole shard at once"


def test_stage_2_refuses_options_of_stage_3():
    with pytest.raises(ValueError, match="offload_parameters, sub_group_size: no effect at stage 2"):
        ZeRO2(offload_parameters=True, sub_group_size=7)


def test_ddp_keeps_gradients_once():
    for words in ({"strategy": "ddp"}, {"strategy": "auto"}):
        trainer = L.Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, **words)
        assert trainer.strategy._ddp_kwargs["gradient_as_bucket_view"] is True, words
