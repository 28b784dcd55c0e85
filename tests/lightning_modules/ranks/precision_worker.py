"""Started by test_precision.py: ``python precision_worker.py OUT MODEL``, on two ranks; the test imports it, too.

Supervised steps in bfloat16 under ZeRO-2 and ZeRO-3, whole and with a checkpoint half way, and one iteration of PPO on
packed rows with gradient checkpointing under ZeRO-3 in float32.
"""

import os
import random
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some virtual machines advertise AMX and cannot run it

import torch

from lightning_modules.algorithms.ppo import PPO
from lightning_modules.algorithms.sft import SFT
from lightning_modules.models.policy import named_weights
from tests.lightning_modules.helpers import fit, make_group, make_trajectories

STEP = 2e-7  # AdamW's first steps are as long as the learning rate; weights are about 0.2
BATCHES = [make_trajectories(4)] * 4  # the same, so that signs of gradients last and steps add up
GROUPS = [t for q in ("q1", "q2") for t in make_group(random.Random(ord(q[1])), q, [1, 0, 0.5, 1])]


def make(model: str) -> SFT:
    """Without decay, and with betas that forget: every step of a weight is as long as the learning rate."""
    common = {"schedule": "constant", "weight_decay": 0.0, "betas": (0.0, 0.0), "max_tokens_per_micro_batch": 40}
    return SFT(model, lr=STEP, packing=True, **common)


def check_moved(start: dict, end: dict) -> None:
    """Nearly all weights of a matrix have moved by the sum of four steps of about 1e-6 of themselves."""
    for name, weights in end.items():
        if name.endswith("up_proj.weight"):
            moved = (weights - start[name]).abs()
            assert (moved > 0).float().mean() > 0.9, name
            assert moved.max() < 4.5 * STEP and moved.mean() > 3 * STEP, (name, moved.max(), moved.mean())


class SGD(PPO):
    """Replaces AdamW, whose scale-free steps would hide a gradient of the wrong size."""

    def configure_optimizers(self):
        groups = [{"params": list(part.parameters())} for part in self.trained_parts().values()]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)}


def ppo(model: str, rows: list, packing: bool, **options) -> dict:
    common = {"max_grad_norm": 0.0, "max_tokens_per_micro_batch": 60, "logits_chunk": 4}
    module = SGD(model, packing=packing, gradient_checkpointing=packing, **common)
    fit(module, [rows], **options)
    parts = {"policy": module.policy, "critic": module.critic}
    return {f"{name}.{k}": v.clone() for name, part in parts.items() for k, v in named_weights(part)}


def masters(module) -> dict:
    from deepspeed.utils import safe_get_full_fp32_param

    return {k: safe_get_full_fp32_param(p).clone() for k, p in module.policy.named_parameters()}


def in_bfloat16(model: str, strategy, folder: Path, rank: int) -> dict:
    """The masters after four steps, and after two, a checkpoint and two more; the weights that models compute with."""
    mine = [rows[2 * rank : 2 * rank + 2] for rows in BATCHES]
    options = {"devices": 2, "precision": "bf16-mixed"}
    module = make(model)
    found: dict = {}

    def save_half_way(outputs, batch, batch_idx):
        if batch_idx == 1:
            module.trainer.save_checkpoint(folder)

    module.on_train_batch_end = save_half_way
    module.on_train_end = lambda: found.update(masters=masters(module))
    trainer = fit(module, mine, strategy=strategy(), **options)
    found["frequencies"] = module.policy.model.rotary_emb.inv_freq.clone()
    found["kept"] = {k: v.clone() for k, v in module.policy_weights()}
    found["gradients"] = trainer.strategy.deepspeed_engine.optimizer.gradient_accumulation_dtype
    again = make(model)
    again.on_train_end = lambda: found.update(resumed=masters(again))
    fit(again, mine, ckpt_path=folder, strategy=strategy(), max_steps=4, **options)
    return found


if __name__ == "__main__":
    from lightning_modules.sharding.strategies import ZeRO2, ZeRO3

    torch.set_num_threads(1)
    out, model = sys.argv[1:]
    rank = int(os.environ.get("LOCAL_RANK", 0))
    zero2 = partial(ZeRO2, bucket_elements=100_000)
    zero3 = partial(ZeRO3, persistence_threshold=0, bucket_elements=100_000)
    result = {
        "zero2": in_bfloat16(model, zero2, Path(f"{out}.zero2"), rank),  # first: ZeRO-3 stays announced to transformers
        "zero3": in_bfloat16(model, zero3, Path(f"{out}.zero3"), rank),
        "ppo": ppo(model, GROUPS[4 * rank : 4 * rank + 4], packing=True, devices=2, strategy=zero3()),
    }
    if rank == 0:
        torch.save(result, out)
