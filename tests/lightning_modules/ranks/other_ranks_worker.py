"""Started by test_other_ranks.py: pieces of trainings, each from where another has stopped, on the ranks of one launch.

``python other_ranks_worker.py OUT MODEL TEACHER RANKS PLAN``; PLAN is JSON, a list of ``Leg``'s arguments.
"""

import gc
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import lightning as L
import torch

from callbacks.training.resume import IterationCheckpoint, find_checkpoint
from data_modules.loading.loaders import TrainLoader
from data_modules.training_data import TrainingData
from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.dgpo import DGPO
from lightning_modules.models import policy
from tests.lightning_modules.helpers import make_group, make_trajectories

torch.set_num_threads(1)
STEPS = 6


@dataclass
class Leg:
    """``folder`` is copied from the leg before; training goes on from its checkpoint, if any, to step ``until``."""

    algorithm: str
    strategy: str
    folder: str
    until: int
    resume: str = ""


class Smooth:
    """AdamW as the module makes it, with an eps at which the noise of another order of sums does not decide a sign."""

    def configure_optimizers(self):
        made = super().configure_optimizers()
        for group in made["optimizer"].param_groups:
            group["eps"] = 1e-3
        return made


class SmoothKD(Smooth, ColdStartKD):
    pass


class SmoothDGPO(Smooth, DGPO):
    pass


class Data(TrainingData):
    """Batch i depends on i alone; a rank has its half of it."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def setup(self, stage):
        self._loader = self._loader or TrainLoader(STEPS, self.share, "the same")

    def share(self, i):
        rows = self.make(i)
        share = len(rows) // self.world_size
        return rows[self.rank * share : (self.rank + 1) * share]


class Watch(L.Callback):
    """Figures of every step; stops at ``until`` as a kill would, in the middle of the epoch."""

    def __init__(self, until):
        self.until, self.figures = until, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.figures.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        trainer.should_stop = trainer.global_step >= self.until


def supervised(i):
    return make_trajectories(8, seed=i)


def on_policy(i):
    rng = random.Random(i)
    return [t for name in ("q1", "q2") for t in make_group(rng, f"{name}-{i}", [1, 0, 0.5, 1])]


def made(algorithm, model, teacher):
    common = {"max_grad_norm": 0.0, "max_tokens_per_micro_batch": 25, "logits_chunk": 4}
    if algorithm == "kd":
        return SmoothKD(model, teacher, lr=3e-3, warmup_steps=2, weight_decay=0.1, **common), supervised
    rates = {"lr": 3e-3, "critic_lr": 1e-2, "critic_warmup_steps": 3}
    return SmoothDGPO(model, teacher, kl_coef=0.1, num_mini_batches=2, weight_decay=0.1, **rates, **common), on_policy


def strategy(name):
    from lightning_modules.sharding.strategies import ZeRO2, ZeRO3

    sharded = {"persistence_threshold": 0, "bucket_elements": 100_000}
    return {
        "zero3": lambda: ZeRO3(**sharded, sub_group_size=20_000),
        "zero3_whole": lambda: ZeRO3(**sharded),  # a group's shard at once
        "zero2": lambda: ZeRO2(bucket_elements=100_000),
    }.get(name, lambda: name)()


def run(leg, model, teacher, devices):
    module, make = made(leg.algorithm, model, teacher)
    watch = Watch(leg.until)
    callbacks = [watch, IterationCheckpoint(keep_best=False)]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy(leg.strategy), max_epochs=1, callbacks=callbacks,
        default_root_dir=leg.folder, limit_val_batches=0, **quiet,
    )  # fmt: skip
    checkpoint = str(find_checkpoint(leg.resume)) if leg.resume else None
    trainer.fit(module, datamodule=Data(make), ckpt_path=checkpoint)
    weights = {f"policy.{k}": v.clone() for k, v in module.policy_weights()}
    if getattr(module, "critic", None) is not None:
        weights |= {f"critic.{k}": v.clone() for k, v in policy.named_weights(module.critic)}
    return {"figures": watch.figures, "weights": weights, "steps": trainer.global_step}


if __name__ == "__main__":
    out, model, teacher, ranks, plan = sys.argv[1:]
    found = {}
    for words in json.loads(plan):
        leg = Leg(**words)
        found[leg.folder] = run(leg, model, teacher, int(ranks))
        gc.collect()
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        torch.save(found, out)
