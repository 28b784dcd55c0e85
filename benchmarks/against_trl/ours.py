"""Our side: ``python -m benchmarks.against_trl.ours PIPE``, started by trl_comparison."""

from __future__ import annotations

import functools
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from safetensors.torch import save_file

from benchmarks.against_trl import serving
from benchmarks.against_trl.cases import BETAS, Case, Inputs, reward
from benchmarks.against_trl.inputs import QUESTIONS, OneTurn, prepare
from callbacks.training.weight_sync import WeightSync
from data_modules.rollout_data_module import RolloutDataModule
from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.training.policy_module import PolicyModule
from rollout.engines.vllm_engine import VLLMEngine
from rollout.environments.question_answering import QuestionAnswering
from rollout.system import RolloutSystem
from rollout.trajectory import Action, ActionKind, Reward, StopReason, Task, Trajectory, Turn

DIVERGENCES = {0.0: "forward_kl", 1.0: "reverse_kl"}  # otherwise jsd


class EvenIds:
    def score(self, trajectory: Trajectory) -> Reward:
        return Reward(reward(trajectory.response_ids))


class Clock(L.Callback):
    """Measures wall and processor seconds of each iteration, from the end of one to the end of the next.

    Also measures those of the training part: scoring, forward, backward and optimiser. The rest is rollouts and weight
    synchronisation. The engine's process is included. Must be the first callback.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.loss = 0.0
        self.clipped = 0.0  # share of tokens whose gradient the clip removed, over the last batch's steps

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.ended = time.perf_counter(), self.cpu(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.tokens = float(sum(len(t.response_ids) for t in batch))
        self.began = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        training = {"training": time.process_time() - self.began[1], "training_s": time.perf_counter() - self.began[0]}
        now = time.perf_counter(), self.cpu(trainer)
        seconds, cpu = now[0] - self.ended[0], now[1] - self.ended[1]
        self.rows.append({"seconds": seconds, "cpu": cpu, "tokens": self.tokens} | training)
        metrics = trainer.callback_metrics
        self.loss = float(metrics.get("train/loss_policy", metrics.get("train/loss", 0.0)))
        self.clipped = float(metrics.get("train/clip_fraction", 0.0))
        self.ended = now

    @staticmethod
    def cpu(trainer: L.Trainer) -> float:
        """Return the processor seconds so far, of this process and the engine's."""
        rollouts = getattr(trainer.datamodule, "rollouts", None)
        if rollouts is None:
            return time.process_time()
        user, system = Path(f"/proc/{rollouts.engine.pid}/stat").read_text().rsplit(")")[1].split()[11:13]
        return time.process_time() + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Keep(L.Callback):
    """Keeps the gradient of the last optimiser step and the weights after it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.gradients: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, module: PolicyModule, optimizer: Any) -> None:
        parameters = module.policy.named_parameters()
        self.gradients = {f"gradient.{n}": p.grad.clone() for n, p in parameters if p.grad is not None}

    def on_train_end(self, trainer: L.Trainer, module: PolicyModule) -> None:
        weights = {f"weight.{n}": p.detach().clone() for n, p in module.policy.named_parameters()}
        save_file(self.gradients | weights, self.file)


def make_module(case: Case, folder: Path, inputs: Inputs) -> PolicyModule:
    student = str(folder / case.model)
    common: dict[str, Any] = {
        "lr": case.lr,
        "weight_decay": 0.0,
        "betas": BETAS,
        "max_grad_norm": case.max_grad_norm,
        "max_tokens_per_micro_batch": case.micro_rows * inputs.longest,
    }
    if case.kind == "grpo":
        advantage, aggregation = case.advantage, case.aggregation
        options = {"dual_clip": None, "num_mini_batches": case.num_mini_batches, "epochs": case.passes}
        return GRPO(student, advantage=advantage, aggregation=aggregation, **options, **common)
    kind = {"divergence": DIVERGENCES.get(case.beta, "jsd")}
    if case.beta not in DIVERGENCES:
        kind["jsd_beta"] = case.beta
    return ColdStartKD(student, f"{student}_teacher", ce_coef=0.0, schedule="constant", **kind, **common)


def given_batch(case: Case, inputs: Inputs) -> list[Trajectory]:
    """Read the completions of a file as trajectories; the sampler's log-probs are only logged."""
    found = []
    for row, ids in enumerate(inputs.completions[case.lengths]):
        prompt, index = divmod(row, inputs.samples)
        n = len(ids)
        turn = Turn(0, n, Action(ActionKind.ANSWER, answer=""), "eos", 0, n)
        task = Task(str(prompt), "?", ("a",), "made_up")
        parts = (task, tuple(inputs.prompt_ids[prompt]), tuple(ids), (1,) * n, (-7.0,) * n, (turn,), ())
        found.append(Trajectory(*parts, StopReason.ANSWER, str(prompt), index, reward=Reward(reward(ids))))
    return found


def make_data(case: Case, folder: Path, inputs: Inputs) -> RolloutDataModule:
    student = str(folder / case.model)
    rollouts = RolloutSystem(
        VLLMEngine(student, max_length=inputs.longest, max_num_seqs=inputs.rows),
        OneTurn(student, template="short"),
        QuestionAnswering({}),
        EvenIds(),
        max_turns=0,
        max_turn_tokens=inputs.completion_tokens,
        max_response_tokens=inputs.completion_tokens,
    )
    sizes = {"prompts_per_iteration": len(inputs.prompts), "group_size": inputs.samples}
    return RolloutDataModule(rollouts, [str(folder / QUESTIONS)], **sizes, iterations=case.iterations, seed=0)


def measure(case: Case, folder: Path, inputs: Inputs) -> dict[str, Any]:
    torch.set_num_threads(1)
    module, clock = make_module(case, folder, inputs), Clock()
    callbacks: list[L.Callback] = [clock]
    if case.lengths is None:
        callbacks.append(WeightSync())
    if case.gradient:
        callbacks.append(Keep(case.gradient))
    trainer = make_trainer(case, callbacks)
    if case.lengths is None:
        trainer.fit(module, datamodule=make_data(case, folder, inputs))
    else:
        loader = torch.utils.data.DataLoader([given_batch(case, inputs)] * case.iterations, batch_size=None)
        trainer.fit(module, loader)
    return {"rows": clock.rows[1:] or clock.rows, "loss": clock.loss, "clipped": clock.clipped}


def make_trainer(case: Case, callbacks: list[L.Callback]) -> L.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    limits = {"max_epochs": 1, "max_steps": case.iterations}
    return L.Trainer(accelerator="cpu", callbacks=callbacks, **limits, **dict.fromkeys(off, False))


def serve(measure: serving.Measure, prepare: serving.Function) -> None:
    """Run our side of the comparison: answer the runner's requests until the runner closes the pipe."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    packages = {"lightning": L, "torch": torch, "transformers": transformers}
    serving.serve(
        {"measure": functools.partial(serving.with_peak, measure), "prepare": prepare},
        {name: package.__version__ for name, package in packages.items()},
    )


if __name__ == "__main__":
    serve(measure, prepare)
