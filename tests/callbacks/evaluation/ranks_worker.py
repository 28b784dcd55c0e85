"""Started by test_ranks.py on two ranks: ZeRO-3 training with checkpoints, resume, export and evaluation.

``python ranks_worker.py OUT MODEL``; asserts on both ranks, so that either one's failure fails the test.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import lightning as L
import torch

from callbacks.evaluation.arcap import ARCap
from callbacks.evaluation.evaluation import Evaluation
from callbacks.model_export.exporter import Export
from callbacks.trainer import settle_parameters
from callbacks.training.checkpoint_files import find_checkpoint, settle_checkpoints
from callbacks.training.resume import IterationCheckpoint
from callbacks.training.throughput import Throughput, rollout_tokens_per_s
from common.ranks import gather_lists
from lightning_modules.algorithms.sft import SFT
from lightning_modules.sharding import resharding
from lightning_modules.sharding.strategies import ZeRO3
from tests.callbacks.helpers import EvaluationData, Trajectories, make_trajectory

torch.set_num_threads(1)
OUT, MODEL = Path(sys.argv[1]), sys.argv[2]


class Position(Trajectories):
    """Resumable; another batch each step."""

    position = 0

    def __iter__(self):
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Last(L.Callback):
    """Keeps the weights that the last checkpoint holds (afterwards the best ones are put back)."""

    def on_train_end(self, trainer, module):
        settle_parameters(trainer)
        self.weights = {name: tensor.clone() for name, tensor in module.policy_weights()}


class Data(EvaluationData):
    """Rank 0 evaluates three questions, rank 1 one; of rank 1's two batches the last is empty."""

    def __init__(self) -> None:
        super().__init__({})

    def prompt_modes(self, split):
        return ["agent"]

    def setup(self, stage):
        rank = self.trainer.global_rank
        answers = {0: ["grey harbor", "x", "grey harbor"], 1: ["x"]}[rank]
        self.questions = [make_trajectory(f"r{rank}q{i}", answer=a) for i, a in enumerate(answers)]
        cut = 2 if rank == 0 else 1
        self.probes = {"agent": [self.questions[:cut], self.questions[cut:]]}
        self.loader = Position([[make_trajectory(tokens=3 + i + rank)] for i in range(4)])

    def train_dataloader(self):
        return self.loader

    def val_dataloader(self):
        return self._loaders()


def fit(stage: Path, steps: int, resume: bool = False):
    checkpoint = IterationCheckpoint()
    export = Export(choose="best")
    trainer = L.Trainer(
        default_root_dir=str(stage), accelerator="cpu", devices=2, max_steps=steps, val_check_interval=1,
        strategy=ZeRO3(persistence_threshold=0, bucket_elements=100_000), logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0, log_every_n_steps=1,
        callbacks=[Throughput(on_policy=False), checkpoint, export, Evaluation(), ARCap(), Last()],
    )  # fmt: skip
    module, data = SFT(MODEL, lr=0.01, schedule="constant"), Data()
    trainer.fit(module, datamodule=data, ckpt_path=str(find_checkpoint(stage)) if resume else None)
    settle_parameters(trainer)
    weights = {name: tensor.clone() for name, tensor in module.policy_weights()}
    return trainer, module, data, weights


def master_weights(stage: Path, which: str = "last") -> list[torch.Tensor]:
    """Rank 0's part of the float32 weights in a checkpoint."""
    path = find_checkpoint(stage, which) / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    return torch.load(path, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"]


def damage_last_checkpoint(stage: Path) -> None:
    """One bit of rank 1's shard; the checkpoint before it is used."""
    last = find_checkpoint(stage).resolve()
    shard = last / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    [line] = settle_checkpoints(stage)
    assert f"{shard} has SHA-256" in line and "iteration-00000001.ckpt is used instead" in line, line
    assert find_checkpoint(stage).resolve().name == "iteration-00000001.ckpt" and not last.exists()


def main() -> None:
    straight, _, _, expected = fit(OUT / "straight", 4)
    fit(OUT / "stage", 2)
    assert find_checkpoint(OUT / "stage").resolve().name == "iteration-00000002.ckpt"
    assert find_checkpoint(OUT / "stage").is_dir()
    if straight.is_global_zero:
        damage_last_checkpoint(OUT / "stage")
    torch.distributed.barrier()
    resharding.load_into_engine = None  # DeepSpeed's own loading does what nothing has changed for
    trainer, module, data, weights = fit(OUT / "stage", 4, resume=True)
    assert trainer.global_step == straight.global_step == 4
    # Validation is the same each time, so the first is best: its weights are exported, and put back for the test.
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    ends = [master_weights(OUT / name) for name in ("straight", "stage")]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)), "resumed training differs"
    assert not all(torch.equal(a, b) for a, b in zip(ends[0], master_weights(OUT / "stage", "best"), strict=True))
    metrics = trainer.test(module, datamodule=data, verbose=False)[0]
    assert metrics["test/em"] == 0.5 and metrics["test/em_n"] == 4.0, metrics
    assert [t.group for t in gather_lists(data.questions)] == ["r0q0", "r0q1", "r0q2", "r1q0"]
    # Rank 0 sampled 8 tokens in 1 s and rank 1 16 in 4 s; after the exchange rank 0 holds 16 of them.
    held, seconds = ((2, 1.0), (1, 4.0))[trainer.global_rank]
    assert rollout_tokens_per_s([make_trajectory()] * held, seconds) == 24 / 4.0, (
        "all tokens over the slowest rank's time"
    )
    if trainer.is_global_zero:
        torch.save(weights, OUT / "weights.pt")
        [last] = [callback.weights for callback in trainer.callbacks if isinstance(callback, Last)]
        torch.save(last, OUT / "last.pt")


if __name__ == "__main__":
    main()
