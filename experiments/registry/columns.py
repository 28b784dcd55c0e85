"""Columns of results tables (``experiment.columns``) and the score that compares methods (``experiment.score``).

Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT = ("em", "f1", "source_referencing", "thinking", "hit_first", "hit_any", "closed_book", "searches")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the results tables: one metric of a finished stage, and where it is stored."""

    title: str
    key: str  # in evaluation.json under "test", or with ``training`` in training.json
    interval: bool = False  # shown with its interval
    training: bool = False
    # Columns of evaluation/test.parquet that give the value and its interval over several seeds: the mean of one, or
    # ``per`` times the ratio of the sums of two. Empty: the mean of the seeds' values, except for metrics of several
    # attempts (``OVER_ATTEMPTS``).
    rows: tuple[str, ...] = ()
    per: float = 1000.0
    curve: str | None = None  # metric logged in training

    def value(self, test: Mapping[str, Any], training: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the metric's mean, interval and n as a mapping, or None if not measured. Training metrics have no
        interval."""
        if not self.training:
            return test.get(self.key)
        mean = (training or {}).get(self.key)
        return None if mean is None else {"mean": mean, "n": 1}

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names under which a run logs the column's metric."""
        return (self.curve,) if self.curve else () if self.training else (f"val/{self.key}", f"test/{self.key}")


def _training(title: str, key: str, curve: str = "") -> Column:
    return Column(title, key, training=True, curve=f"train/{curve}" if curve else None)


# Means whose title is their key
PLAIN = (
    "searches", "tool_calls", "failed_calls", "empty_calls", "tool_productivity", "entropy_after_tools",
    "valid_actions",
)  # fmt: skip
COLUMNS = {
    "em": Column("EM", "em", interval=True, rows=("em",)),
    "f1": Column("F1", "f1", interval=True, rows=("f1",)),
    "acc": Column("accuracy", "acc", interval=True, rows=("accuracy",)),
    "judge": Column("judge", "judge", interval=True, rows=("judged",)),
    "judge_failures": Column("judge failed", "judge_failures"),
    "math": Column("math equality", "reward/math", interval=True, rows=("reward/math",)),
    "source_referencing": Column("source ref.", "arcap/source_referencing"),
    "thinking": Column("thinking", "arcap/thinking"),
    "hit_first": Column("hit first", "arcap/hit_first"),
    "hit_any": Column("hit any", "arcap/hit_any"),
    "hit_raw": Column("hit, as released", "arcap/hit_raw"),
    "closed_book": Column("closed book", "arcap/closed_book"),
    **{name: Column(name.replace("_", " "), name) for name in PLAIN},
    "tool_success": Column(
        "tool success", "tool_success", interval=True, rows=("succeeded_calls", "attempted_calls"), per=1.0
    ),
    "tool_success_as_released": Column("tool success, as released", "tool_success_as_released"),
    **{
        f"{score}_per_1000_calls": Column(
            f"{title} per 1000 calls", f"{score}_per_1000_calls", interval=True, rows=(score, "tool_calls")
        )
        for score, title in {"em": "EM", "f1": "F1", "accuracy": "accuracy"}.items()
    },
    "with_skills": Column("with skills", "with_skills"),
    "entropy_first": Column("entropy, first turn", "entropy_first"),
    "response_tokens": Column("tokens", "response_tokens"),
    "infrastructure_failures": Column("failed", "infrastructure_failures"),
    # Over the whole training run; see callbacks.training.training_totals
    "train_trajectories": _training("trajectories in training", "trajectories"),
    "train_tool_calls": _training("tool calls in training", "tool_calls", "tool_calls"),
    "train_distinct": _training("distinct", "distinct", "distinct"),
    "train_forked": _training("forked", "forked", "forked"),
    "train_branch_probability": _training("branch probability", "branch_probability", "branch_probability"),
    "train_tokens_computed": _training("tokens computed / trajectory", "tokens_computed", "tokens_computed"),
    "train_inherited_tokens": _training("inherited tokens", "inherited_tokens", "inherited_tokens"),
    "train_reward": _training("reward, last 10 iterations", "last_reward", "reward"),
    "train_entropy_after_tools": _training(
        "entropy after tools, last 10 iterations", "last_entropy_after_tools", "entropy_after_tools"
    ),
}
# From callbacks.evaluation.attempts; followed by <k> or <k>/<data source>
OVER_ATTEMPTS = (
    "average/", "average_of_sets/", "pass/", "pass_first/", "maj/", "best_bootstrap/", "maj_bootstrap/",
)  # fmt: skip
SHORT = {"average": "avg", "average_of_sets": "avg. of sets", "pass": "pass", "maj": "maj"}  # as papers write them
# Prefixes; the rest of the name depends on the data.
FAMILIES = ("arcap/", "em/", "f1/", "acc/", "calls/", "reward/", "stop/", "turns/", *OVER_ATTEMPTS)


@dataclass(frozen=True, slots=True)
class Score:
    """The measure of a method's quality, such as EM. Results pages show it by seed and by kind of question, and compare
    methods by paired differences in it."""

    title: str
    column: str  # key of COLUMNS; evaluation.json has it also by data source, as <column>/<data source>
    part: str  # part of the reward; training logs train/<part>, validation val/<column>
    meaning: str = ""  # explained on the page, if not empty

    @property
    def rows(self) -> str:
        """The name of the score's column in evaluation/test.parquet."""
        return COLUMNS[self.column].rows[0]

    @property
    def curves(self) -> tuple[str, str]:
        return f"train/{self.part}", f"val/{self.column}"


SCORES = {
    "em": Score("EM", "em", "em"),
    "average": Score(
        "accuracy", "acc", "acc",
        "Accuracy: the share of correct attempts at a problem, mean over problems (average@k for k attempts). A judge "
        "decides what is correct, or the reward if no judge is configured.",
    ),
    "success": Score(
        "success", "acc", "success",
        "Success: the share of episodes that reached their goal according to the environment (all tasks have the same "
        "number of attempts).",
    ),
}  # fmt: skip


def score_of(name: str | None) -> Score:
    """Return the score (measure of quality) called ``name``; EM for None. Raises ValueError for an unknown name."""
    if name is not None and not (isinstance(name, str) and name in SCORES):
        raise ValueError(f"unknown score {name!r}; expected one of {', '.join(SCORES)}")
    return SCORES[name or "em"]


def is_column(name: object) -> bool:
    return isinstance(name, str) and (name in COLUMNS or any(name.startswith(f) and name != f for f in FAMILIES))


def known_columns() -> list[str]:
    """Return the names of all columns of results tables, for an error message. Prefixes end in <...>."""
    return [*COLUMNS, *(f"{family}<...>" for family in FAMILIES)]


def columns_of(names: Sequence[str] | None) -> dict[str, Column]:
    """Return the columns of a results table by name, in the given order; the default columns for None. Raises
    ValueError for an unknown name."""
    chosen = DEFAULT if names is None else tuple(names)
    unknown = [name for name in chosen if not is_column(name)]
    if unknown:
        if str(unknown[0]).startswith("steps/"):  # of an earlier version
            raise ValueError(f"unknown column {unknown[0]!r}; now '{unknown[0].replace('steps', 'turns', 1)}'")
        raise ValueError(f"unknown column {unknown[0]!r}; expected some of {', '.join(known_columns())}")
    return {name: COLUMNS.get(name) or Column(_title(name), name, name.startswith(OVER_ATTEMPTS)) for name in chosen}


def _title(name: str) -> str:
    """Return a column's title as papers write it, such as ``pass@8``, after the data source if the name has one."""
    metric, _, rest = name.partition("/")
    attempts, _, source = rest.partition("/")
    if metric not in SHORT:
        return name
    return " ".join([*filter(None, [source]), f"{SHORT[metric]}@{attempts}"])
