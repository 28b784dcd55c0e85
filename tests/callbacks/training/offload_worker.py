"""Started by test_colocation.py: ``python offload_worker.py MODEL`` trains on a pretended device, with and without the
optimiser's states in the host's memory between its steps."""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[3]))

import lightning as L
import torch

from callbacks.training.weight_sync import WeightSync
from tests import pretended_device


class Learner(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(3, 2)

    def policy_weights(self):
        return iter(())

    def training_step(self, batch, batch_idx):
        assert places(self) <= {pretended_device.DEVICE.type}
        self.manual_backward(self.layer(batch).square().sum())
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def __init__(self, sleep_mode):
        super().__init__()
        self.rollouts = SimpleNamespace(engine=None, sleep_mode=sleep_mode, waited_s=0.0, load_weights=self.load)
        self.pushes = []

    def load(self, tensors, version):
        module = self.trainer.lightning_module
        self.pushes.append(places(module))
        if self.rollouts.sleep_mode and version == 2:  # what a checkpoint of now holds, and restores
            optimizer = self.trainer.optimizers[0]
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(12.0).view(4, 3), batch_size=1)


def states(module):
    return [v for s in module.optimizers().state.values() for v in s.values() if v.dim() > 0]


def places(module):
    return {value.device.type for value in states(module)}


def run(sleep_mode):
    torch.manual_seed(0)
    module, data = Learner(), Data(sleep_mode)
    options = {"strategy": pretended_device.strategy(), "accelerator": "auto", "logger": False, "max_epochs": 1}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(callbacks=[WeightSync()], **options, **quiet)
    trainer.fit(module, datamodule=data)
    return data.pushes, [p.detach().to("cpu") for p in module.parameters()]


if __name__ == "__main__":
    with pretended_device.Pretending():
        shared, expected = run(False)
        slept, found = run(True)
    there = pretended_device.DEVICE.type
    assert shared == [set(), *[{there}] * 4], shared
    assert slept == [set(), *[{"cpu"}] * 4], slept
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
