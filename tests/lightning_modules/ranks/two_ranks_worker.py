"""Started by test_two_ranks.py: one step of KD, one iteration each of DGPO, GRPO, AEPO, SOD, OPSD, two teachers'
distributions and of what learns from episodes (two_ranks_episodes.py), on one process or on two.

``python two_ranks_worker.py OUT MODEL TEACHER zero3|zero2|ddp|offload [NAME ...]``: of all trainings, or of those
named; plain SGD without clipping hides no wrong scale.
"""

import dataclasses
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[3]))

import lightning as L
import torch

from common import ranks
from lightning_modules.advantage_transforms.distillation import IncorrectOnly
from lightning_modules.advantage_transforms.divergence_loss import DivergenceLoss
from lightning_modules.advantage_transforms.skill_teacher import SkillTeacher
from lightning_modules.algorithms.aepo import AEPO
from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.dgpo import DGPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.opsd import OPSD
from lightning_modules.algorithms.sod import SOD
from lightning_modules.models import policy
from lightning_modules.training import optimisation
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.trajectory import StopReason, Task
from tests.lightning_modules.helpers import fit, make_group, make_trajectories, make_trajectory
from tests.lightning_modules.ranks.two_ranks_episodes import Training, episode_trainings

torch.set_num_threads(1)


class SGD:
    """Replaces AdamW, whose scale-free steps would hide a gradient of the wrong size."""

    def configure_optimizers(self):
        if hasattr(self, "trained_parts"):
            groups = [{"params": list(part.parameters())} for part in self.trained_parts().values()]
        else:
            groups = optimisation.decay_groups(self.policy, 0.01)
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)}


class KDWithSGD(SGD, ColdStartKD):
    pass


class DGPOWithSGD(SGD, DGPO):
    pass


class GRPOWithSGD(SGD, GRPO):
    pass


class AEPOWithSGD(SGD, AEPO):
    pass


class SODWithSGD(SGD, SOD):
    pass


class OPSDWithSGD(SGD, OPSD):
    pass


class Questions(L.LightningDataModule):
    """What OPSD asks of a RolloutDataModule, and one batch."""

    group_size = 4

    def __init__(self, model, rows):
        super().__init__()
        self.rollouts = SimpleNamespace(protocol=SearchR1Protocol(model, template="short"))
        self.training_questions = tuple(TOLD.values())
        self.rows = rows

    def __len__(self):
        return 1

    def train_dataloader(self):
        return torch.utils.data.DataLoader([self.rows], batch_size=None)


class Judged(L.Callback):
    """Divergences at the end of a training, of this rank's trajectories: the second rank of two has one of them."""

    def __init__(self, teacher, rows):
        self.teacher, self.rows = teacher, rows

    def on_train_end(self, trainer, pl_module):
        mine = [t for t in self.rows if not t.left_out]
        mine = mine[:1] if trainer.global_rank else mine
        self.figures = pl_module.turn_divergences(mine, self.teacher, pl_module.max_tokens_per_micro_batch)


def batch():
    """Eight trajectories of unequal lengths; the last one failed by infrastructure, so the second rank has less."""
    rows = make_trajectories(7, seed=3)
    return [*rows, make_trajectory(random.Random(9), 7, stop_reason=StopReason.INFRASTRUCTURE)]


def groups():
    """Two groups of four, one per rank, with branches; the last trajectory of the second failed."""
    rng = random.Random(4)
    first = make_group(rng, "q1", [1, 0, 0, 1], {2: (0, 1), 3: (2, 2)})
    *second, last = make_group(rng, "q2", [0.5, 0, 1, 0], {1: (0, 1)})
    return [*first, *second, last.replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None)]


def of_sources():
    """The same with their group as data source, so that a teacher of the second's tasks has nothing on rank 0."""
    return [t.replace(task=dataclasses.replace(t.task, data_source=t.group)) for t in groups()]


def idle(rows):
    """The first four of ``rows``, and for the second rank four prompts of which nothing was sampled."""

    def shares():
        rng = random.Random(6)
        nothing = [make_trajectory(rng, 0, 0.0, [], StopReason.LENGTH) for _ in range(4)]
        return [*rows()[:4], *(t.replace(group="long", index=i) for i, t in enumerate(nothing))]

    return shares


TOLD = {name: Task(name, f"Who wrote {name}?", (f"the potter of {name}",), "test") for name in ("q1", "q2")}


def told(model: str):
    """Two groups of four whose prompts a protocol made; the whole second one, that of rank 1, failed."""
    protocol = SearchR1Protocol(model, template="short")

    def rows():
        rng = random.Random(5)
        made = [t for name in TOLD for t in make_group(rng, name, [1, 0, 0, 1])]
        made = [t.replace(task=TOLD[t.group], prompt_ids=tuple(protocol.prompt_ids(TOLD[t.group]))) for t in made]
        failed = {"stop_reason": StopReason.INFRASTRUCTURE, "reward": None}
        return [t.replace(**failed) if t.group == "q2" else t for t in made]

    return rows


def alone(rows):
    """A share of trajectories as the only batch."""
    return [rows]


def then_failures(rows):
    """A share of trajectories, then a batch of which infrastructure failed all."""
    return [rows, [t.replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None) for t in rows]]


def trainings(model: str, teacher: str):
    common = {"max_grad_norm": 0.0, "max_tokens_per_micro_batch": 25, "logits_chunk": 4}
    on_policy = {"num_mini_batches": 2, "entropy_coef": 0.01, **common}
    yield Training("kd", batch, KDWithSGD(model, teacher, schedule="constant", **common), alone)
    yield Training("dgpo", batch, DGPOWithSGD(model, teacher, kl_coef=0.1, **on_policy), alone)
    grouped = {"reference": teacher, "kl_coef": 0.1, "epochs": 2, **on_policy}
    grpo = GRPOWithSGD(model, aggregation="sequence_mean", advantage="global", **grouped)
    yield Training("grpo", groups, grpo, alone)
    yield Training("aepo", groups, AEPOWithSGD(model, attribution="hard", **grouped), alone)
    yield Training("kd_idle", idle(batch), KDWithSGD(model, teacher, schedule="constant", **common), alone)
    yield Training("dgpo_idle", idle(batch), DGPOWithSGD(model, teacher, kl_coef=0.1, **on_policy), alone)
    yield Training("grpo_idle", idle(groups), GRPOWithSGD(model, **grouped), alone)
    yield Training("kd_failed", batch, KDWithSGD(model, teacher, schedule="constant", **common), then_failures)
    yield Training("grpo_failed", groups, GRPOWithSGD(model, **grouped), then_failures)
    robust = {"reference_turn": "batch_median", "adv_clamp": 1.0}  # of both ranks' rows
    yield Training("sod", groups, SODWithSGD(model, teacher, epochs=2, **robust, **on_policy), alone)
    first = DivergenceLoss(teacher, top_k=7, support="both", weights=[IncorrectOnly(0.6)], name="first")
    second = DivergenceLoss(model, top_k=None, divergence="jsd", tasks={"data_source": ["q2"]}, name="second")
    losses = {"advantage_transforms": [first, second], "epochs": 2, **on_policy}
    yield Training("divergence", of_sources, GRPOWithSGD(model, **losses), alone)
    yield Training("opsd", told(model), OPSDWithSGD(model, **on_policy), lambda rows: Questions(model, rows))
    longer = on_policy | {"max_tokens_per_micro_batch": 400, "logits_chunk": 64}  # prompts of about a hundred tokens
    yield from episode_trainings(model, teacher, SGD, **longer)


def run(model: str, teacher: str, share, names=(), **options) -> dict:
    """Train each module (named) on ``share(rows)`` and return figures and weights (whole, on every rank)."""
    result = {}
    for name, rows, module, data in trainings(model, teacher):
        if names and name not in names:
            continue
        settings = {k: v() if k == "strategy" else v for k, v in options.items()}  # a strategy serves one Trainer
        judged = Judged(teacher, share(rows()))
        trainer = fit(module, data(share(rows())), callbacks=[judged], **settings)
        weights = {f"policy.{k}": v.clone() for k, v in module.policy_weights()}
        if name == "dgpo":
            weights |= {f"critic.{k}": v.clone() for k, v in policy.named_weights(module.critic)}
        figures = {k: float(v) for k, v in trainer.callback_metrics.items()}
        result[name] = {"figures": figures, "weights": weights, "steps": trainer.global_step}
        result[name] |= {"sharded": sharded(module), "divergences": judged.figures, "learnt": learnt(module)}
        result[name]["rows"] = ranks.gather_objects(rows_learnt_from(module))
    return result


def sharded(module) -> bool:
    """Whether each rank holds a part of every model, a frozen teacher's included."""
    models = [getattr(module, name, None) for name in ("teacher", "reference")]
    teacher = [next(model.parameters()).numel() for model in models if model is not None]
    return policy.partitioned(module.parameters()) and not any(teacher)


def learnt(module) -> dict:
    """What the retriever of skills has been told of all ranks' episodes."""
    taught = [a for a in getattr(module, "advantage_transforms", ()) if isinstance(a, SkillTeacher)]
    return taught[0].skills.retriever.state_dict() if taught else {}


def rows_learnt_from(module) -> int:
    """Of this rank; of supervised learning 0."""
    last = getattr(module, "_last", None)
    return 0 if last is None else len(last[0])


if __name__ == "__main__":
    from lightning_modules.sharding.strategies import ZeRO2, ZeRO3

    out, model, teacher, strategy, *names = sys.argv[1:]
    rank = int(os.environ.get("LOCAL_RANK", 0))
    make = {
        "zero3": lambda: ZeRO3(persistence_threshold=0, bucket_elements=100_000),
        "zero2": lambda: ZeRO2(bucket_elements=100_000),
        "ddp": lambda: "ddp",
        "offload": lambda: ZeRO3(True, True, persistence_threshold=0, bucket_elements=100_000),
    }[strategy]
    figures = run(model, teacher, lambda rows: rows[4 * rank : 4 * rank + 4], names, devices=2, strategy=make)
    if rank == 0:
        torch.save(figures, out)
