"""What the strategies tell DeepSpeed and DDP; that they train alike is in test_two_ranks.py."""

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_modules.sharding.resharding import ShardsToo
from lightning_modules.sharding.strategies import ZeRO3


def test_live_parameters_reach_deepspeed():
    zero = ZeRO3(live_parameters=4_000_000).config["zero_optimization"]
    names = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
    assert [zero[name] for name in names] == [4_000_000, 4_000_000, 1_000_000]
    assert zero["sub_group_size"] == 100_000_000, "not lightning's 1e12, which is the whole shard at once"


def test_ddp_keeps_gradients_once():
    for words in ({"strategy": "ddp"}, {"strategy": "auto"}):
        trainer = L.Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, **words)
        assert trainer.strategy._ddp_kwargs["gradient_as_bucket_view"] is True, words


def test_a_checkpoint_is_written_straight_to_its_file(tmp_path, monkeypatch):
    """Lightning's own way holds all of it in memory once more."""
    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io._atomic_save", None)
    checkpoints = ShardsToo(TorchCheckpointIO(), torch.nn.Linear(1, 1))
    checkpoints.save_checkpoint({"weight": torch.ones(2)}, tmp_path / "a.ckpt")
    assert torch.equal(checkpoints.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)["weight"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
