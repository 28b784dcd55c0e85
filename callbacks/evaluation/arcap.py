"""Diagnoses which of a search agent's abilities is missing (ARCap).

Formulas: docs/algorithms/dgpo.md (Kotoge et al., arXiv 2508.20324). Their code for the prompts is not public;
``hit_raw`` follows the validation of the released training code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lightning as L

from callbacks.evaluation.collector import RowCollector
from callbacks.evaluation.evaluation import ARCAP_PREFIX, add_metrics
from callbacks.evaluation.statistics import Interval, bootstrap_interval
from callbacks.evaluation.summary import by_source, per_question
from callbacks.evaluation_rows import EvaluationRow
from common.ranges import PositiveInt
from rollout.protocols.base import PromptMode

# component -> (the prompts it is measured on, the value of one row)
COMPONENTS: dict[str, tuple[PromptMode, Callable[[EvaluationRow], float]]] = {
    "source_referencing": (PromptMode.GOLD_DIRECT, lambda row: row.em),
    "thinking": (PromptMode.GOLD_THINK, lambda row: row.em),
    "closed_book": (PromptMode.CLOSED_BOOK, lambda row: row.em),
    "hit_first": (PromptMode.AGENT, lambda row: row.hit_first),
    "hit_any": (PromptMode.AGENT, lambda row: row.hit_any),
    "hit_raw": (PromptMode.AGENT, lambda row: row.hit_raw),
    "searches": (PromptMode.AGENT, lambda row: float(row.executed_searches)),
}


def arcap(rows: Sequence[EvaluationRow], *, resamples: int = 10_000) -> dict[str, Interval]:
    """Return ARCap's metrics, which tell what a search agent cannot do: search, read its sources, or think. They are
    named ``arcap/<component>`` over all rows and ``arcap/<component>/<data source>``.

    - source_referencing ``= mean EM(answer | question, gold passages, prompt without thinking)``
    - thinking           ``= mean EM(answer | question, gold passages in one <information> block, thinking allowed)``
    - hit_first          ``= mean 1[a gold answer occurs in a document of the first executed search]``; no search: 0
    - hit_any            the same over all executed searches
    - hit_raw            a gold answer is a raw substring of any search result (case-sensitive, before the cut to 500
                         tokens)
    - searches           mean number of executed searches
    - closed_book        ``= mean EM(answer | question)``: answers from the model's memory

    Infrastructure failures are left out. A diagnostic prompt that was not run is absent, not zero.
    """
    metrics: dict[str, Interval] = {}
    for component, (mode, value) in COMPONENTS.items():
        part = [row for row in rows if row.prompt_mode == mode.value and not row.failed]
        if not part:
            continue
        name = f"{ARCAP_PREFIX}{component}"
        metrics[name] = bootstrap_interval(per_question(part, value), resamples=resamples)
        for source, of_source in by_source(part).items():
            metrics[f"{name}/{source}"] = bootstrap_interval(per_question(of_source, value), resamples=resamples)
    return metrics


class ARCap(RowCollector):
    """Logs the ARCap metrics (which ability a search agent lacks) after every validation and test. Also adds them to
    the stage's evaluation.json."""

    def __init__(self, resamples: PositiveInt = 10_000) -> None:
        super().__init__()
        self.resamples = resamples

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str, rows: list[EvaluationRow]) -> None:
        metrics = arcap(rows, resamples=self.resamples)
        add_metrics(trainer, pl_module, split, metrics, ARCAP_PREFIX)
