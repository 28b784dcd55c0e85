"""Started by test_non_finite.py: SFT on two ranks, where rank 1 alone has a loss, or a gradient, that is not finite.

``python non_finite_worker.py FOLDER MODEL ddp|zero2|zero3``: each rank writes what ended its training.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from lightning_modules.algorithms.sft import SFT
from lightning_modules.sharding.strategies import ZeRO2, ZeRO3
from lightning_modules.training.optimisation import NonFiniteError
from tests.lightning_modules.helpers import fit, make_trajectories

torch.set_num_threads(1)


class Infinite(SFT):
    """Adds infinity to the loss of rank 1, whose gradient stays finite."""

    def token_losses(self, batch):
        columns = super().token_losses(batch)
        return {**columns, "loss": columns["loss"] + (math.inf if self.global_rank else 0.0)}


class NaNGradient(SFT):
    def token_losses(self, batch):
        columns = super().token_losses(batch)
        if self.global_rank:
            columns["loss"].register_hook(lambda gradient: gradient * math.nan)
        return columns


folder, model, strategy = sys.argv[1:]
make = {"ddp": lambda: "ddp", "zero2": lambda: ZeRO2(bucket_elements=100_000)}
make["zero3"] = lambda: ZeRO3(persistence_threshold=0, bucket_elements=100_000)
rows = make_trajectories(8)
for case, kind in (("loss", Infinite), ("gradient", NaNGradient)):
    module = kind(model, schedule="constant", lr=0.1)
    weights = []
    began = module.on_train_start
    module.on_train_start = lambda module=module, weights=weights, began=began: (
        began(),
        weights.extend(v.clone() for _, v in module.policy_weights()),
    )

    class Mine(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, _, module=module):
            return rows[4 * module.global_rank : 4 * module.global_rank + 4]

    try:
        fit(module, Mine(), devices=2, strategy=make[strategy]())
        said = "no error"
    except NonFiniteError as error:
        said = str(error)
    same = all(torch.equal(a, b) for a, (_, b) in zip(weights, module.policy_weights(), strict=True))
    path = Path(folder) / f"{case}-{module.global_rank}.txt"
    path.write_text(f"{said}; weights unchanged: {same}")
