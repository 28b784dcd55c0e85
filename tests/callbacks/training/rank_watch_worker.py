"""Started by test_rank_watch.py: a training of many short iterations on two ranks, with collectives in each.

``rank_watch_worker.py FOLDER [RANK]`` under torchrun; RANK sleeps in a hook after some iterations.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import lightning as L
import torch

from callbacks.training.rank_watch import RankWatch
from callbacks.training.resume import IterationCheckpoint, find_checkpoint
from data_modules.loading.loaders import TrainLoader
from lightning_modules.sharding.strategies import ZeRO3

torch.set_num_threads(1)


class Sums(L.LightningModule):
    """Learns from its rank's numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        time.sleep(0.1)
        self.manual_backward((self.layer(batch) ** 2).sum())
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sleeper(L.Callback):
    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx % 10 == 5:
            time.sleep(1000)


if __name__ == "__main__":
    folder, *sleeping = sys.argv[1:]
    rank = int(os.environ["RANK"])
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    strategy = ZeRO3(persistence_threshold=0, bucket_elements=1000)
    limits = {"report_after_s": 4} if sleeping else {}
    callbacks = [RankWatch(**limits), IterationCheckpoint(keep_best=False), *(Sleeper(int(r)) for r in sleeping)]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=callbacks, default_root_dir=folder,
        **quiet,
    )  # fmt: skip
    loader = TrainLoader(2000, lambda i: torch.full((2, 4), float(i + rank)), "the same")
    checkpoint = find_checkpoint(Path(folder))
    trainer.fit(Sums(), loader, ckpt_path=None if checkpoint is None else str(checkpoint))
