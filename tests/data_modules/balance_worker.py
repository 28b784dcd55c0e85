"""Started by test_balance.py: GRPO on questions of which one rank's make long trajectories, the other's short ones.

``python balance_worker.py MODEL FOLDER RANKS``
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
import torch

from data_modules.datasets.questions import write_tasks
from data_modules.rollout_data_module import RolloutDataModule
from lightning_modules.algorithms.grpo import GRPO
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.rewards.qa import ExactMatchReward
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from tests.data_modules.toys import make_task, trainer
from tests.rollout.scripted import ToyRetriever
from tests.rollout.scripted_engine import ScriptedEngine

torch.set_num_threads(1)
QUESTIONS = 4


class GRPOWithSGD(GRPO):
    """Plain SGD: a gradient of the wrong size, or at the wrong step, shows."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)}


class Imbalance(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(trainer.datamodule.token_imbalance)


def questions(path, model):
    """All are asked in each iteration; of which kind each is: the first half of the first pass is long."""
    probe = RolloutDataModule(
        system(model), [write(path, ["short"] * QUESTIONS)], prompts_per_iteration=QUESTIONS, seed=1
    )
    probe.setup("fit")
    first = {task.id for task in probe.prompts(0)[: QUESTIONS // 2]}
    probe.close()
    return write(path, ["long" if f"q{i}" in first else "short" for i in range(QUESTIONS)])


def write(path, kinds):
    write_tasks(path, [make_task(i, kind) for i, kind in enumerate(kinds)])
    return str(path)


def system(model):
    protocol = SearchR1Protocol(model, template="short")

    def script(ids, sampling):
        number, kind = re.search(r"Question (\d+) (\w+)", protocol.decode(list(ids))).groups()
        thought = "<think> Mira Voss was born " + "in Grey Harbor " * (40 if kind == "long" else 1) + "</think>"
        return f"{thought} <answer> {f'answer {number}' if sampling.seed % 3 else 'no idea'} </answer>"

    environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
    return RolloutSystem(ScriptedEngine(script, protocol.tokenizer), protocol, environment, ExactMatchReward())


def run(model, folder, ranks):
    results = {}
    for name, balanced, staleness in (("balanced", True, 0), ("as rolled out", False, 0), ("one ahead", True, 1)):
        path = folder / f"questions{ranks}-{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}"
        path.mkdir(exist_ok=True)
        files = [questions(path / f"{name}.parquet", model)]
        data = RolloutDataModule(
            system(model), files, prompts_per_iteration=QUESTIONS, group_size=3, iterations=2, seed=1,
            balance_tokens=balanced, max_off_policy_iterations=staleness,
        )  # fmt: skip
        # six trajectories a rank and four steps: a rank's own numbers would deal them otherwise than one process does
        module = GRPOWithSGD(
            model, num_mini_batches=4, max_grad_norm=0.0, max_tokens_per_micro_batch=400, logits_chunk=64
        )
        watch = Imbalance()
        one = trainer(folder, ranks=ranks, max_epochs=1, callbacks=[watch])
        one.fit(module, datamodule=data)
        weights = {k: v.clone() for k, v in module.policy_weights()}
        start = _start(model)
        moved = max(float((weights[k] - v).abs().max()) for k, v in start.items() if k in weights)
        results[name] = {"weights": weights, "moved": moved, "imbalance": watch.seen}
        data.close()
    if one.global_rank == 0:
        torch.save(results, folder / f"ranks{ranks}.pt")


def _start(model):
    from safetensors.torch import load_file

    return load_file(Path(model) / "model.safetensors")


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
