"""A small real LightningModule, data module and hand-made trajectories for the callback tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    Document,
    Reward,
    StopReason,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
    Trajectory,
    Turn,
)


def make_call(turn: int, query: str, texts: tuple[str, ...], outcome: CallOutcome = CallOutcome.OK) -> ToolCall:
    documents = tuple(Document(f"d{i}", f"Title {i}", text, 1.0) for i, text in enumerate(texts))
    return ToolCall(turn, ToolRequest("search", {"query": query}), ToolResult("shown", outcome, documents), 0.0125)


def make_trajectory(
    name: str = "q1",
    *,
    gold: tuple[str, ...] = ("Grey Harbor",),
    answer: str | None = "grey harbor",
    calls: tuple[ToolCall, ...] = (),
    source: str = "one_hop",
    stop: StopReason = StopReason.ANSWER,
    kinds: tuple[ActionKind, ...] = (ActionKind.CALL, ActionKind.ANSWER),
    reward: float | None = None,
    index: int = 0,
    observation: int = 3,
    tokens: int = 4,
) -> Trajectory:
    """Turns of ``tokens`` sampled tokens; every turn but the last is followed by ``observation`` observed ones."""
    turns, mask = [], []
    for i, kind in enumerate(kinds):
        start = len(mask)
        end = start + tokens
        after = end + (observation if i + 1 < len(kinds) else 0)
        turns.append(Turn(start, end, Action(kind), "stop", 7, after))
        mask += [1] * tokens + [0] * (after - end)
    return Trajectory(
        task=Task(name, f"Where was {name} born?", gold, source),
        prompt_ids=tuple(range(20, 28)),
        response_ids=tuple(range(30, 30 + len(mask))),
        loss_mask=tuple(mask),
        logprobs=tuple(-0.25 * m for m in mask),
        turns=tuple(turns),
        calls=calls,
        stop_reason=stop,
        group=name,
        index=index,
        answer=answer,
        reward=Reward(reward, {"em": reward}) if reward is not None else None,
        seconds=0.5,
    )


class Trajectories:
    """An evaluation dataloader: batches of trajectories, with a length, as the data modules give them."""

    def __init__(self, batches: list[list[Trajectory]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Trajectory]]:
        return iter(self.batches)


class Hands(L.LightningModule):
    """Hands evaluation batches on, as every module of the project does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch


class EvaluationData(L.LightningDataModule):
    """Probe name -> batches; ``prompt_modes`` says which dataloader is which."""

    def __init__(self, probes: dict[str, list[list[Trajectory]]]) -> None:
        super().__init__()
        self.probes = probes

    def prompt_modes(self, split: str) -> list[str]:
        return list(self.probes)

    def _loaders(self) -> list[Trajectories]:
        return [Trajectories(batches) for batches in self.probes.values()]

    def val_dataloader(self) -> list[Trajectories]:
        return self._loaders()

    def test_dataloader(self) -> list[Trajectories]:
        return self._loaders()


def make_learner(model_dir: Path, evaluations: Sequence[Any] = (), **rollout: Any) -> tuple[L.LightningModule, Any]:
    """A real policy module that learns to predict fixed tokens, one batch a step, and its data module.

    Args:
        evaluations: answers given in the first, second, ... validation (right is "grey harbor"); no validation when
            empty. The test gets the last one.
        rollout: ``rollouts=`` a rollout system for the data module.
    """
    from lightning_modules.training.policy_module import PolicyModule

    class Learner(PolicyModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            ids = torch.tensor([t.prompt_ids + t.response_ids for t in batch])
            loss = self.policy(input_ids=ids, labels=ids).loss
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            self.log("train/loss", loss, batch_size=1)

    class Data(EvaluationData):
        def __init__(self) -> None:
            super().__init__({})
            self.rollouts = rollout.get("rollouts")
            self.answers = iter(evaluations)

        def prompt_modes(self, split: str) -> list[str]:
            return ["agent"]

        def train_dataloader(self) -> Trajectories:
            return Trajectories([[make_trajectory(kinds=(ActionKind.ANSWER,))]] * 4)

        def val_dataloader(self) -> list[Trajectories]:
            return [AnswersInTurn(list(evaluations))] if evaluations else []

        def test_dataloader(self) -> list[Trajectories]:
            return [Trajectories([[make_trajectory(answer=(evaluations or ["grey harbor"])[-1])]])]

    return Learner(str(model_dir)), Data()


class AnswersInTurn(Trajectories):
    """One question; each pass gives the next answer (a list of answers gives several questions)."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__([[]])
        self.answers = iter(answers)

    def __iter__(self) -> Iterator[list[Trajectory]]:
        answers = next(self.answers)
        answers = [answers] if isinstance(answers, str) else answers
        yield [make_trajectory(f"q{i}", answer=a) for i, a in enumerate(answers)]


def policy_state(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
