"""Started by test_rank_watch.py: a training of many short iterations on two ranks, with collectives in each.

``python rank_watch_worker.py FOLDER ddp|zero3 ITERATIONS [RANK] [test]``; RANK sleeps in a hook after some iterations;
with ``test``, a test follows whose data rank 1 cannot set up.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
import torch

from callbacks.rank_watch import RankWatch, watch_from_the_start
from callbacks.resume import IterationCheckpoint, find_checkpoint
from data_modules.loaders import TrainLoader

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

    def test_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class NotOnRank1(L.LightningDataModule):
    def setup(self, stage):
        if self.trainer.global_rank == 1:
            raise ValueError("there are no questions on this rank")

    def test_dataloader(self):
        return [torch.zeros(2, 4)]


class Sleeper(L.Callback):
    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx % 10 == 5:
            time.sleep(1000)


if __name__ == "__main__":
    folder, strategy, iterations, *words = sys.argv[1:]
    sleeping = [word for word in words if word != "test"]
    rank = int(os.environ.get("LOCAL_RANK", 0))
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    if strategy == "zero3":
        from lightning_modules.strategies import ZeRO3

        strategy = ZeRO3(persistence_threshold=0, bucket_elements=1000)
    limits = {"report_after_s": 4, "stop_after_s": 9} if sleeping else {}
    callbacks = [RankWatch(**limits), IterationCheckpoint(keep_best=False), *(Sleeper(int(r)) for r in sleeping)]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=callbacks, default_root_dir=folder,
        **quiet,
    )  # fmt: skip
    watch_from_the_start(trainer)
    loader = TrainLoader(int(iterations), lambda i: torch.full((2, 4), float(i + rank)), "the same")
    checkpoint = find_checkpoint(Path(folder))
    module = Sums()
    trainer.fit(module, loader, ckpt_path=None if checkpoint is None else str(checkpoint))
    if rank == 0:
        torch.save(trainer.global_step, Path(folder, "done.pt"))
    if "test" in words:
        trainer.test(module, datamodule=NotOnRank1(), verbose=False)
