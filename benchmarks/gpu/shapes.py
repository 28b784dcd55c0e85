"""Models, trajectories and questions of the check, with random weights in the shape of published models."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.gpu.frame import Setting
from experiments.registry.shapes import GPU_SPECS, MODELS, GPUSpec
from rollout.trajectory import Action, ActionKind, Reward, StopReason, Task, Trajectory, Turn

TINY = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 1024, "tie_word_embeddings": True,
}  # fmt: skip
FEW = 4  # layers of comparisons between two forms, which differ in every layer alike


def shape_of(setting: Setting, layers: int | None = None) -> dict[str, Any]:
    """Return the model's config.json as a dictionary."""
    whole = TINY if setting.cpu else MODELS[setting.model]
    return whole if layers is None else whole | {"num_hidden_layers": min(layers, whole["num_hidden_layers"])}


def model_folder(setting: Setting, layers: int | None = None) -> str:
    """Return the model's folder; the first row that needs it makes it."""
    folder = Path(setting.folder) / f"model-{layers or 'whole'}"
    if not folder.exists():
        making = folder.with_suffix(".tmp")
        dtype = "float32" if setting.cpu else "bfloat16"
        common.save_random_model(making, dtype, **shape_of(setting, layers), max_position_embeddings=32768)
        making.rename(folder)
    return str(folder)


def chip_here() -> GPUSpec | None:
    """Return the data sheet of this GPU, or None for an unknown GPU or without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower()
    return next((chip for key, chip in GPU_SPECS.items() if re.search(rf"\b{key}\b", name)), None)


def trajectories(lengths: Sequence[int], samples: int, vocabulary: int) -> list[Trajectory]:
    """Make trajectories of these lengths: a quarter is the prompt, then turns of 48 tokens and observations of 32. They
    form groups of ``samples`` whose rewards alternate between 0 and 1."""
    draw, made = random.Random(0), []

    def ids(n: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(n))

    for i, length in enumerate(lengths):
        prompt = length // 4
        turns, mask = [], []
        while len(mask) < length - prompt:
            start = len(mask)
            end = min(start + 48, length - prompt)
            observed = min(end + 32, length - prompt)
            turns.append(Turn(start, end, Action(ActionKind.INVALID), "length", 0, observed))
            mask += [1] * (end - start) + [0] * (observed - end)
        group, index = divmod(i, samples)
        made.append(
            Trajectory(
                task=Task(str(group), "?", ("a",), "check"),
                prompt_ids=ids(prompt),
                response_ids=ids(len(mask)),
                loss_mask=tuple(mask),
                logprobs=tuple(-math.log(vocabulary) * m for m in mask),
                turns=tuple(turns),
                calls=(),
                stop_reason=StopReason.MAX_TURNS,
                group=str(group),
                index=index,
                reward=reward(index),
            )
        )
    return made


def reward(index: int) -> Reward:
    """Reward half of a group, whatever it answered, because random weights answer nothing."""
    return Reward(float(index % 2), {"em": float(index % 2)})


class RewardInTurn:
    def score(self, trajectory: Trajectory) -> Reward:
        return reward(trajectory.index)


def make_questions(path: Path, number: int, words: int) -> None:
    """Write questions of about this many tokens; random weights do not depend on their contents."""
    from data_modules.datasets.questions import write_tasks

    draw = random.Random(0)
    texts = [" ".join(draw.choice(("town", "tower", "sea", "market")) for _ in range(words)) for _ in range(number)]
    write_tasks(path, [Task(f"q{i}", text, ("nowhere",), "check") for i, text in enumerate(texts)])
