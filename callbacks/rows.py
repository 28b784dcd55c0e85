"""One row per evaluated question, made from what the parser and the tools recorded, never from transcript text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import polars as pl

from callbacks.common import gather_lists
from rollout.files import replacing
from rollout.protocols.base import PromptMode
from rollout.rewards.scoring import exact_match, f1, normalize_answer
from rollout.trajectory import ActionKind, Document, ToolCall, Trajectory

SEARCH_TOOL = "search"
AGENT = PromptMode.AGENT.value


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """What an evaluation keeps of one trajectory. The columns of ``evaluation/<split>.parquet``."""

    id: str
    data_source: str
    probe: str  # a PromptMode value: "agent" is the normal search loop, the others are ARCap's probes
    em: float
    f1: float
    answer: str | None
    executed_searches: int
    hit_first: float  # 1.0 when a gold answer occurs in a document of the first executed search
    hit_any: float  # the same over all executed searches
    stop_reason: str
    response_tokens: int  # tokens the model sampled (observations are not counted)
    valid_turns: int
    turns: int
    failed: bool  # by infrastructure: counted, and left out of everything else


def contains_answer(document: Document, golden_answers: Sequence[str]) -> bool:
    """Whether any gold answer occurs in the document's title and text.

    Both sides are normalised as for exact match (lower case, no punctuation, no articles), and the gold answer's
    words must occur as consecutive whole words: "art" is not found in "Hartley". A gold answer that normalises
    to nothing ("The") is never found. Ours: specs/dgpo.md section 4, ``norm(a) in norm(docs)``, made aware of word
    boundaries, since a plain substring test counts every short answer as a hit. The title is read too because the
    model is shown it.
    """
    words = f" {normalize_answer(f'{document.title} {document.text}')} "
    golds = (normalize_answer(answer) for answer in golden_answers)
    return any(gold and f" {gold} " in words for gold in golds)


def executed_searches(trajectory: Trajectory) -> tuple[ToolCall, ...]:
    """Searches that ran, in order. Refused calls, invalid actions and infrastructure failures are not searches."""
    return tuple(call for call in trajectory.executed_calls if call.request.name == SEARCH_TOOL)


def search_hits(trajectory: Trajectory) -> tuple[float, float]:
    """(hit at first, hit at any): 1.0 or 0.0; a trajectory that never searched has (0.0, 0.0)."""
    golds = trajectory.task.golden_answers
    hits = [any(contains_answer(d, golds) for d in call.result.documents) for call in executed_searches(trajectory)]
    return (float(hits[0]), float(any(hits))) if hits else (0.0, 0.0)


def valid_action_counts(trajectory: Trajectory) -> tuple[int, int]:
    """(turns the protocol could read, all turns)."""
    valid = sum(turn.action.kind is not ActionKind.INVALID for turn in trajectory.turns)
    return valid, len(trajectory.turns)


def row_of(trajectory: Trajectory, probe: str = AGENT) -> EvaluationRow:
    task = trajectory.task
    hit_first, hit_any = search_hits(trajectory)
    valid, turns = valid_action_counts(trajectory)
    return EvaluationRow(
        id=task.id,
        data_source=task.data_source,
        probe=probe,
        em=float(exact_match(trajectory.answer, task.golden_answers)),
        f1=float(f1(trajectory.answer, task.golden_answers)),
        answer=trajectory.answer,
        executed_searches=len(executed_searches(trajectory)),
        hit_first=hit_first,
        hit_any=hit_any,
        stop_reason=trajectory.stop_reason.value,
        response_tokens=sum(trajectory.loss_mask),
        valid_turns=valid,
        turns=turns,
        failed=trajectory.failed_by_infrastructure,
    )


SCHEMA = {
    "id": pl.String,
    "data_source": pl.String,
    "probe": pl.String,
    "em": pl.Float64,
    "f1": pl.Float64,
    "answer": pl.String,
    "executed_searches": pl.Int64,
    "hit_first": pl.Float64,
    "hit_any": pl.Float64,
    "stop_reason": pl.String,
    "response_tokens": pl.Int64,
    "valid_turns": pl.Int64,
    "turns": pl.Int64,
    "failed": pl.Boolean,
}


def save_rows(path: Path, rows: Sequence[EvaluationRow]) -> None:
    with replacing(path) as temporary:
        pl.DataFrame([asdict(row) for row in rows], schema=SCHEMA).write_parquet(temporary)


def trajectories_of(outputs: Any, hook: str) -> list[Trajectory]:
    """Check what a validation or test step returned.

    Raises:
        TypeError: it is not a list of trajectories.
    """
    if isinstance(outputs, list) and all(isinstance(item, Trajectory) for item in outputs):
        return outputs
    raise TypeError(f"{hook} returned {type(outputs).__name__}, expected the batch's list[Trajectory]")


def probe_of(trainer: L.Trainer, split: str, dataloader_idx: int) -> str:
    """Name of the probe behind one evaluation dataloader, from ``datamodule.probe_names(split)``.

    Raises:
        ValueError: several dataloaders, but the data module does not name them.
    """
    names = getattr(trainer.datamodule, "probe_names", None)
    if names is None:
        if dataloader_idx == 0:
            return AGENT
        raise ValueError(
            f"found {split} dataloader number {dataloader_idx}, but {type(trainer.datamodule).__name__} has no "
            "probe_names(split) that says which prompt each dataloader stands for"
        )
    known = list(names(split))
    if dataloader_idx >= len(known):
        raise ValueError(f"{split} dataloader {dataloader_idx} has no name; probe_names({split!r}) gave {known}")
    return str(known[dataloader_idx])


class RowCollector(L.Callback):
    """Base of the evaluation callbacks: collects the rows of one evaluation over all dataloaders and ranks, then
    calls ``report`` once, with the same rows on every rank."""

    def __init__(self) -> None:
        self._rows: list[EvaluationRow] = []

    def report(
        self, trainer: L.Trainer, pl_module: L.LightningModule, split: str, rows: list[EvaluationRow]
    ) -> None:
        raise NotImplementedError

    def _start(self) -> None:
        self._rows = []

    def _collect(self, trainer: L.Trainer, split: str, outputs: Any, dataloader_idx: int) -> None:
        probe = probe_of(trainer, split, dataloader_idx)
        hook = "test_step" if split == "test" else "validation_step"
        self._rows += [row_of(trajectory, probe) for trajectory in trajectories_of(outputs, hook)]

    def _finish(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        rows, self._rows = gather_lists(self._rows), []
        if not trainer.sanity_checking:
            self.report(trainer, pl_module, split, rows)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start()

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._collect(trainer, "val", outputs, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._collect(trainer, "test", outputs, dataloader_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(trainer, pl_module, "test")
