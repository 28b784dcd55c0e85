"""A module and a data module small enough to be killed and continued many times."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import lightning as L
import torch


class Walk(L.LightningModule):
    """Parameters on a random walk: any step repeated or left out, any draw of another generator, shows.

    In step TOY_PAUSE (from 1) it writes ``paused-<step>``, with its process id, into the stage's folder and waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.walk = torch.nn.Parameter(torch.zeros(4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if os.environ.get("TOY_PAUSE") == str(batch_idx + 1):
            (Path(self.trainer.default_root_dir) / f"paused-{batch_idx + 1}").write_text(str(os.getpid()))
            time.sleep(600)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(((self.walk - batch - torch.randn(4)) ** 2).sum())
        optimizer.step()

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        folder = Path(self.trainer.default_root_dir)
        figure = {"mean": float(self.walk.sum()), "low": 0.0, "high": 0.0, "n": 1}
        (folder / "evaluation.json").write_text(json.dumps({"test": {"em": figure}}))
        torch.save({"walk": self.walk.detach()}, folder / "final.pt")
        (folder / "steps.json").write_text(json.dumps(self.trainer.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Batches:
    """A loader with a position, as the real ones have."""

    def __init__(self, batches: int) -> None:
        self.batches, self.position = batches, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        while self.position < self.batches:
            self.position += 1
            yield torch.full((4,), float(self.position))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Noise(L.LightningDataModule):
    ready = False

    def __init__(self, batches: int = 10) -> None:
        super().__init__()
        self.batches = batches

    def setup(self, stage: str) -> None:
        self.ready = True

    def train_dataloader(self) -> Batches:
        return Batches(self.batches)

    def test_dataloader(self) -> Batches:
        return Batches(1)


class Share(Walk):
    """``Walk`` on several ranks; each writes the number of every step into ``rank-R-of-N``.

    Steps take TOY_SLOW seconds, and TOY_PAUSE holds rank TOY_PAUSE_RANK.

    Args:
        note: folder of the stage it depends on.
    """

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note

    def setup(self, stage: str) -> None:
        assert (Path(self.note) / "note.txt").is_file()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        time.sleep(float(os.environ.get("TOY_SLOW", "0")))
        folder, rank = Path(self.trainer.default_root_dir), self.trainer.global_rank
        with (folder / f"rank-{rank}-of-{self.trainer.world_size}").open("a") as stream:
            stream.write(f"{batch_idx + 1}\n")
        if os.environ.get("TOY_PAUSE_RANK", str(rank)) == str(rank):
            super().training_step(batch, batch_idx)
        else:
            pause = os.environ.pop("TOY_PAUSE", None)
            super().training_step(batch, batch_idx)
            if pause:
                os.environ["TOY_PAUSE"] = pause

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        torch.save(self.walk.detach(), Path(self.trainer.default_root_dir) / f"walk-{self.trainer.global_rank}.pt")
        if self.trainer.is_global_zero:
            super().test_step(batch, batch_idx)
