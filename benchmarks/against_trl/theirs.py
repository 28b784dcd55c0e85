"""TRL's side, run in .venv-trl: ``python -m benchmarks.against_trl.theirs PIPE``, started by trl_comparison."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import trl
import trl.trainer.distillation_trainer
import trl.trainer.utils
from datasets import Dataset
from safetensors.torch import save_file
from transformers import TrainerCallback
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

from benchmarks.against_trl import serving
from benchmarks.against_trl.cases import BETAS, EPS, Case, Inputs, reward
from lightning_modules.maths.divergences import Rest, make_divergence, with_rest

LOSSES = {"token_mean": "dapo", "sequence_mean": "grpo"}
SCALES = {"std": "group", "centred": "none"}


class Clock(TrainerCallback):
    """Measures wall and processor seconds of each iteration (all optimiser steps of a batch) and of training: the rest
    after subtracting the ``timed`` parts."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.elsewhere = [0.0, 0.0]  # wall and processor seconds of the timed parts
        self.rows: list[dict[str, float]] = []
        self.tokens = 0
        self.loss = 0.0
        self.began: tuple[float, float] | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.began is None:
            self.began = time.perf_counter(), time.process_time()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step % self.steps:
            return
        now = time.perf_counter(), time.process_time()
        seconds, cpu = now[0] - self.began[0], now[1] - self.began[1]
        wall_elsewhere, cpu_elsewhere = self.elsewhere
        training = {"training": cpu - cpu_elsewhere, "training_s": seconds - wall_elsewhere}
        self.rows.append({"seconds": seconds, "cpu": cpu, "tokens": float(self.tokens)} | training)
        self.began, self.elsewhere = now, [0.0, 0.0]

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter(), time.process_time()
            result = function(*arguments, **options)
            self.elsewhere[0] += time.perf_counter() - began[0]
            self.elsewhere[1] += time.process_time() - began[1]
            return result

        return run


class Keep(TrainerCallback):
    """Keeps the gradient of the last optimiser step and the weights after it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.gradients = {f"gradient.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
        weights = {f"weight.{n}": p.detach().clone() for n, p in model.named_parameters()}
        save_file(self.gradients | weights, self.file)


def training_options(case: Case, folder: Path, inputs: Inputs) -> dict[str, Any]:
    """Return the options common to GRPO and distillation."""
    optimiser_steps = case.num_mini_batches * case.passes
    return {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": case.iterations * optimiser_steps,
        "per_device_train_batch_size": case.micro_rows,
        "gradient_accumulation_steps": inputs.rows // case.micro_rows // case.num_mini_batches,
        "learning_rate": case.lr,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": 0.0,
        "max_grad_norm": case.max_grad_norm,
        "max_completion_length": inputs.completion_tokens,
        "temperature": 1.0,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def grpo(case: Case, folder: Path, inputs: Inputs) -> GRPOTrainer:
    options = training_options(case, folder, inputs)
    config = GRPOConfig(
        **options,
        num_generations=inputs.samples,
        steps_per_generation=options["gradient_accumulation_steps"] * case.num_mini_batches,
        num_iterations=case.passes,
        beta=0.0,
        epsilon=0.2,
        loss_type=LOSSES[case.aggregation],
        scale_rewards=SCALES[case.advantage],
    )

    def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward(ids) for ids in completion_ids]

    def given(prompts: list[str], trainer: Any) -> dict[str, Any]:
        order = [inputs.prompts.index(prompt) for prompt in prompts[:: inputs.samples]]
        rows = [i * inputs.samples + k for i in order for k in range(inputs.samples)]
        completions = [inputs.completions[case.lengths][row] for row in rows]
        ids = [inputs.prompt_ids[row // inputs.samples] for row in rows]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    dataset = Dataset.from_dict({"prompt": inputs.prompts})
    rollout = None if case.lengths is None else given
    model = str(folder / case.model)
    return GRPOTrainer(model, reward_funcs=rewards, args=config, train_dataset=dataset, rollout_func=rollout)


def distillation(case: Case, folder: Path, inputs: Inputs) -> DistillationTrainer:
    """Run distillation. TRL samples one completion per prompt here, so the data set repeats every prompt ``samples``
    times."""
    config = DistillationConfig(**training_options(case, folder, inputs), beta=case.beta)
    dataset = Dataset.from_dict({"prompt": [p for p in inputs.prompts for _ in range(inputs.samples)]})
    teacher = str(folder / f"{case.model}_teacher")
    trainer = DistillationTrainer(str(folder / case.model), teacher, args=config, train_dataset=dataset)
    trainer._generate_single_turn = lambda *_: inputs.completions[case.lengths]  # the data set is in this order
    return trainer


def observe(trainer: Any, clock: Clock, inputs: Inputs) -> None:
    """Measure TRL's generation time, tokens and loss, and check that TRL reads the same prompts as our side."""
    generate, compute = trainer._generate, trainer.compute_loss

    def generated(prompts: list[str]) -> Any:
        found = generate(prompts)
        expected = sorted(ids for ids in inputs.prompt_ids for _ in range(inputs.samples))
        if sorted(list(ids) for ids in found[0]) != expected:
            raise RuntimeError("TRL read other prompt ids than ours; expected the ids of inputs.json, in any order")
        clock.tokens = sum(map(len, found[1]))
        clock.loss = 0.0
        return found

    def computed(*arguments: Any, **options: Any) -> Any:
        loss = compute(*arguments, **options)
        clock.loss += float(loss.detach())
        return loss

    trainer._generate, trainer.compute_loss = clock.timed(generated), computed
    if hasattr(trainer, "_calculate_rewards"):
        trainer._calculate_rewards = clock.timed(trainer._calculate_rewards)
    trainer.add_callback(clock)


def measure(case: Case, folder: Path, inputs: Inputs) -> dict[str, Any]:
    torch.set_num_threads(1)
    if case.compact:  # these two names decide what is projected; trl.kernels decides how
        trl.trainer.utils._use_triton = trl.trainer.distillation_trainer._use_triton = lambda device: True
    trainer = (grpo if case.kind == "grpo" else distillation)(case, folder, inputs)
    clock = Clock(case.num_mini_batches * case.passes)
    observe(trainer, clock, inputs)
    if case.gradient:
        trainer.add_callback(Keep(case.gradient))
    trainer.train()
    return {"rows": clock.rows[1:] or clock.rows, "loss": clock.loss}


def divergences() -> dict[str, Any]:
    """Return the largest differences between TRL's distillation losses (SDPO, GKD, GOLD) and ours, of values and of
    gradients with respect to the student's logits, on random distributions in float64."""
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.gold import GOLDTrainer
    from trl.experimental.sdpo import loss_utils

    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(64, 500, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    found = {}
    for beta in (0.0, 0.3, 1.0):
        jsd = functools.partial(make_divergence("jsd", beta=beta), normalised=True)
        p, q = student.log_softmax(-1), teacher.log_softmax(-1)
        ids = student.topk(20).indices
        top: dict[Rest, bool] = {"tail": True, "renormalised": False}
        pairs = {
            "GKD": (GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="none").sum(-1), jsd(p, q)),
            "GOLD": (
                GOLDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="none").sum(-1),
                jsd(p, q),
            ),
        }
        for rest, tail in top.items():
            options = {"distillation_topk": 20, "distillation_alpha": beta, "distillation_add_tail": tail}
            theirs = loss_utils.compute_topk_self_distillation_loss(student, teacher, **options)
            ours = jsd(with_rest(p.gather(-1, ids), rest), with_rest(q.gather(-1, ids), rest))
            pairs[f"SDPO, top-k, {rest}"] = (theirs, ours)
        for name, (theirs, ours) in pairs.items():
            gradients = (torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (theirs, ours))
            values = float((theirs - ours).detach().abs().max()), float((next(gradients) - next(gradients)).abs().max())
            found[f"{name}, beta {beta:g}"] = values
    return found


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func is experimental and warns each time
    transformers.logging.set_verbosity_error()
    packages = {"trl": trl, "torch": torch, "transformers": transformers, "accelerate": accelerate}
    serving.serve(
        {"measure": functools.partial(serving.with_peak, measure), "divergences": divergences},
        {name: package.__version__ for name, package in packages.items()},
    )
