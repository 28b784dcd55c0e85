"""Started by test_turn_divergence.py on two ranks: tests scored together, and the same by one alone.

``python turn_ranks_worker.py OUT MODEL TEACHER``.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import lightning as L
import torch

from callbacks.evaluation.turn_divergence import TurnDivergence
from lightning_modules.training.policy_module import EvaluateOnly
from tests.callbacks.helpers import EvaluationData, make_trajectory

torch.set_num_threads(1)
OUT, MODEL, TEACHER = Path(sys.argv[1]), *sys.argv[2:4]
QUESTIONS = [make_trajectory(f"q{i}", tokens=3 + i) for i in range(6)]


def evaluate(name: str, parts: list[list[int]], **options) -> None:
    """``parts``: of each rank, its questions."""

    class Data(EvaluationData):
        def setup(self, stage):
            self.probes = {"agent": [[QUESTIONS[i] for i in parts[self.trainer.global_rank]]]}

    trainer = L.Trainer(
        default_root_dir=str(OUT / name), accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[TurnDivergence(TEACHER, max_trajectories=4)], **options,
    )  # fmt: skip
    trainer.test(EvaluateOnly(MODEL), datamodule=Data({"agent": []}), verbose=False)


def main() -> None:
    # The four that come first are, by their ids' hashes, 4, 5, 0 and 3. Forks, since they have imported everything.
    evaluate("shared", [[4, 1, 0], [5, 2, 3]], devices=2, strategy="ddp_fork")
    evaluate("lonely", [[4, 0, 5, 3], [2, 1]], devices=2, strategy="ddp_fork")  # rank 1 has none of them
    evaluate("one", [[0, 1, 2, 3, 4, 5]], devices=1)  # last: what has computed with threads is not to be forked


if __name__ == "__main__":
    main()
