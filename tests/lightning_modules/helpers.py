"""Random but valid trajectories, and a short fit without files."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.trajectory import Action, ActionKind, Fork, Reward, StopReason, Task, Trajectory, Turn

VOCABULARY = 400


def make_trajectory(
    rng: random.Random,
    index: int,
    em: float = 0.0,
    spans: Sequence[int] | None = None,
    stop_reason: StopReason = StopReason.ANSWER,
) -> Trajectory:
    """``spans`` alternate sampled and observation lengths; the last is sampled if their number is odd."""
    spans = spans if spans is not None else [rng.randint(2, 6), rng.randint(1, 8), rng.randint(1, 5)]
    turns, mask, at = [], [], 0
    for i, n in enumerate(spans):
        if i % 2 == 0:
            following = spans[i + 1] if i + 1 < len(spans) else 0
            turns.append(Turn(at, at + n, Action(ActionKind.INVALID), "stop", 0, at + n + following))
        mask += [1 - i % 2] * n
        at += n
    return Trajectory(
        task=Task(str(index), "?", ("a",), "test"),
        prompt_ids=tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 9))),
        response_ids=tuple(rng.randrange(VOCABULARY) for _ in range(at)),
        loss_mask=tuple(mask),
        logprobs=tuple(-rng.random() * m for m in mask),
        turns=tuple(turns),
        calls=(),
        stop_reason=stop_reason,
        group=str(index),
        index=0,
        reward=None if stop_reason is StopReason.INFRASTRUCTURE else Reward(em, {"em": em}),
    )


def make_trajectories(n: int, seed: int = 0, em: Sequence[float] | None = None) -> list[Trajectory]:
    rng = random.Random(seed)
    return [make_trajectory(rng, i, em[i] if em is not None else float(i % 2)) for i in range(n)]


def make_group(
    rng: random.Random, name: str, rewards: Sequence[float], forks: Mapping[int, tuple[int, int]] | None = None
) -> list[Trajectory]:
    """A group of one prompt. ``forks``: by child, its parent and how many turns (with observations) it takes over."""
    spans: list[list[int]] = []
    made: list[Trajectory] = []
    for index, reward in enumerate(rewards):
        parent, turns = (forks or {}).get(index, (None, 0))
        kept = [] if parent is None else spans[parent][: 2 * turns]
        at = sum(kept)
        spans.append([*kept, *(rng.randint(1, 4 + i % 2) for i in range(5))])
        t = make_trajectory(rng, index, reward, spans[-1])
        changes: dict[str, Any] = {"group": name, "index": index}
        if made:
            changes["prompt_ids"] = made[0].prompt_ids
        if parent is not None:
            changes["fork"] = Fork(parent, at)
            for field in ("response_ids", "logprobs"):
                changes[field] = getattr(made[parent], field)[:at] + getattr(t, field)[at:]
        made.append(t.replace(**changes))
    return made


def judged_scores(old: Any, teacher: Any) -> Any:
    """Log-probs of a policy [B, T] and of the teacher of its only advantage transform."""
    from lightning_modules.advantage_transforms.teachers import Judged
    from lightning_modules.batch import LogprobBatch

    return LogprobBatch(old, teacher, judged=(Judged(teacher, teacher.new_ones(len(teacher))),))


def largest_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Over all entries of two states of the same model."""
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


def fit(module: Any, batches: Any, ckpt_path: Any = None, **options: Any) -> Any:
    """Train on the given batches (a list or a dataset of lists, or a data module that says how many it has), one per
    step, and return the Trainer."""
    import lightning as L
    import torch

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        False,
    )
    trainer = L.Trainer(**{"max_steps": len(batches), "accelerator": "cpu", **quiet, **options})
    whole = isinstance(batches, L.LightningDataModule)
    data = {"datamodule": batches} if whole else {"train_dataloaders": torch.utils.data.DataLoader(batches, None)}
    trainer.fit(module, **data, ckpt_path=ckpt_path)
    return trainer
