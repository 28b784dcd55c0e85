"""Started by test_lora_ranks.py: DGPO with LoRA on two ranks under ZeRO-3, ZeRO-2 and DDP, one after the other.

``python lora_worker.py OUT MODEL``; plain SGD without clipping hides no wrong scale.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import lightning as L
import torch
from transformers import AutoModelForCausalLM

from callbacks.trainer import settle_parameters
from callbacks.training.resume import IterationCheckpoint
from lightning_modules.algorithms.dgpo import DGPO
from lightning_modules.models import lora, policy
from lightning_modules.models.lora import InitialPolicy, LoRA
from tests.lightning_modules.helpers import fit, make_trajectories

torch.set_num_threads(1)


class Adapted(DGPO):
    """Its teacher is the folder it starts from; B starts away from 0, so that A has a gradient from the first step."""

    def __init__(self, model):
        torch.manual_seed(1)  # A's draw
        options = {"num_mini_batches": 1, "max_grad_norm": 0.0, "max_tokens_per_micro_batch": 80, "logits_chunk": 16}
        super().__init__(model, model, kl_coef=0.1, lora=LoRA(4, 8.0), gradient_checkpointing=True, **options)

    def build_models(self):
        super().build_models()
        generator = torch.Generator().manual_seed(2)
        for _, layer in [*lora.layers(self.policy), *lora.layers(self.critic)]:
            b = layer.lora_B["default"].weight
            with policy.gathered([b], modifier_rank=0), torch.no_grad():
                b.copy_(0.1 * torch.randn(b.shape, generator=generator))

    def configure_optimizers(self):
        parts = self.trained_parts().values()
        groups = [{"params": [p for p in part.parameters() if p.requires_grad]} for part in parts]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)}


class FirstCheckpoint(L.Callback):
    """Keeps the checkpoint of the first iteration, to resume from."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def train(model, share, resume=None, callbacks=(), **options):
    """Two iterations: (merged weights, adapters of policy and critic, figures, module), whole, on every rank."""
    module = Adapted(model)
    options["callbacks"] = list(callbacks)
    trainer = fit(module, [share(make_trajectories(6, seed=3))] * 2, resume, **options)
    assert trainer.global_step == 2
    assert isinstance(module.reference, InitialPolicy)
    settle_parameters(trainer)
    merged = {name: tensor.clone() for name, tensor in module.policy_weights()}
    low_rank = dict(module.adapter_weights()) | {f"critic.{n}": w for n, w in lora.adapter_weights(module.critic)}
    return merged, low_rank, {k: float(v) for k, v in trainer.callback_metrics.items()}, module


def says_the_same(module, merged, model) -> float:
    """Largest difference in logits between the adapted model and a plain one with the weights that are pushed."""
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(model)
        base = plain(input_ids=ids).logits
        plain.load_state_dict(merged, strict=False)  # tied: the output matrix comes once
        adapted = module.policy(input_ids=ids).logits
        assert (adapted - base).abs().max() > 0.05
        return float((plain(input_ids=ids).logits - adapted).abs().max())


def main(out: Path, model: str) -> None:
    from lightning_modules.sharding.strategies import ZeRO2, ZeRO3

    rank = int(os.environ.get("LOCAL_RANK", 0))

    def share(rows):
        return rows[3 * rank : 3 * rank + 3]

    def zero3():
        return {"devices": 2, "strategy": ZeRO3(persistence_threshold=0, bucket_elements=100_000)}

    result = {}
    first = out / "first.ckpt"
    merged, low_rank, figures, module = train(model, share, callbacks=[FirstCheckpoint(first)], **zero3())
    assert policy.partitioned(module.parameters())
    result["zero3"] = (merged, low_rank, figures)
    result["gap"] = says_the_same(module, merged, model)
    del module
    stage = {"default_root_dir": str(out / "stage"), "enable_checkpointing": True}
    result["resumed"] = train(model, share, str(first), [IterationCheckpoint()], **stage, **zero3())[:2]
    for name, strategy in (("zero2", ZeRO2(bucket_elements=100_000)), ("ddp", "ddp")):
        result[name] = train(model, share, devices=2, strategy=strategy)[:3]
    if rank == 0:
        torch.save(result, out / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
