"""Inputs of both sides: a case, the prompts, and completions for cases without generation. Without torch, because the
sides have different environments and share files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LEARNING_RATE, BETAS, EPS = 1e-5, (0.9, 0.999), 1e-8  # small, so that lengths do not drift during a measurement


@dataclass(frozen=True)
class Case:
    """One measurement, the same for both sides."""

    kind: Literal["grpo", "distillation"]
    model: str  # folder of the student; the teacher's ends with "_teacher"
    lengths: str | None  # name of the given completions; None: the trainer generates
    iterations: int = 4  # including the first, which is not counted
    num_mini_batches: int = 1  # optimiser steps per batch
    passes: int = 1  # passes over the batch: TRL's num_iterations
    micro_rows: int = 16  # of the longest prompt and the longest completion
    advantage: Literal["std", "centred"] = "std"
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    beta: float = 1.0  # of the generalised JSD: 0 forward KL, 1 reverse KL
    max_grad_norm: float = 1.0  # 0: no clipping
    lr: float = LEARNING_RATE
    compact: bool = False  # TRL only: apply the output matrix to completion tokens only, as its CUDA path does
    return_memory: bool = False  # return freed blocks at once, so that the peak counts live tensors
    threads: int = 1  # of torch; our engine has as many
    gradient: str | None = None  # file for the last step's gradient and the weights after it


@dataclass(frozen=True)
class Inputs:
    """The prompts and completions that both sides measure, one batch for all cases of a folder."""

    prompts: list[str]  # as the model reads them, with the chat template applied
    prompt_ids: list[list[int]]
    samples: int
    completion_tokens: int  # the longest completion
    completions: dict[str, list[list[int]]]  # by name of the lengths; the samples of a prompt are adjacent

    @classmethod
    def read(cls, folder: Path) -> Inputs:
        return cls(**json.loads((folder / "inputs.json").read_text()))

    def write(self, folder: Path) -> None:
        (folder / "inputs.json").write_text(json.dumps(vars(self)))

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.samples

    @property
    def longest(self) -> int:
        return max(map(len, self.prompt_ids)) + self.completion_tokens


def reward(completion_ids: Sequence[int]) -> float:
    """Return the percentage of even ids: cheap, and different for every completion. The unit is per cent because TRL
    adds 1e-4 and we add 1e-6 to the standard deviation of a group's rewards."""
    return 100.0 * sum(i % 2 == 0 for i in completion_ids) / max(len(completion_ids), 1)
