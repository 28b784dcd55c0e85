"""Questions for the scripted engine, and a LightningModule that learns nothing and writes down what it is given."""

from __future__ import annotations

import lightning as L
import torch

from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.rewards.qa import ExactMatchReward
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from rollout.trajectory import Task
from tests.rollout.scripted import ToyRetriever
from tests.rollout.scripted_engine import ScriptedEngine


def make_task(number: int, kind: str = "right", source: str = "made_up") -> Task:
    """The scripted engine answers "answer <number>" to ``right`` questions and nonsense to ``wrong`` ones, either by
    the seed of the request to ``mixed`` ones; a ``broken`` one fails by infrastructure."""
    return Task(
        id=f"q{number}",
        question=f"Question {number} {kind}",
        golden_answers=(f"answer {number}",),
        data_source=source,
        gold_passages=(("Title", f"The answer is answer {number}."),) if number % 2 == 0 else (),
        metadata={"hops": 1},
    )


class Recorder(L.LightningModule):
    """Keeps every batch. After each training step (``push``) the next version of the "weights" goes to the engine;
    ``stop_after``: raises in that training step."""

    def __init__(self, push: bool = True, stop_after: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = False
        self.push, self.stop_after = push, stop_after
        self.train_batches, self.val_batches, self.test_batches = [], [], []

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def training_step(self, batch, batch_idx):
        self.train_batches.append(batch)
        self.optimizers().step()
        if self.stop_after == len(self.train_batches):
            raise RuntimeError("the machine was switched off")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.push:
            version = self.trainer.global_step
            self.trainer.datamodule.rollouts.load_weights([("weight", self.weight.detach())], version)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.val_batches.append((dataloader_idx, batch))

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.test_batches.append((dataloader_idx, batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(folder, ranks: int = 1, **options) -> L.Trainer:
    options = {"enable_checkpointing": False, "num_sanity_val_steps": 0, **options}
    if ranks > 1:
        options["strategy"] = "ddp"
    return L.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=ranks, logger=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


def sampled_by(trajectories) -> set[int]:
    return {version for t in trajectories for version in t.policy_versions}


def scripted_system(model: str, script, **options) -> RolloutSystem:
    """A rollout system for tests in processes of their own; ``script(ids, sampling)`` is what its engine says."""
    protocol = SearchR1Protocol(model, template="short")
    environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
    return RolloutSystem(
        ScriptedEngine(script, protocol.tokenizer), protocol, environment, ExactMatchReward(), **options
    )
