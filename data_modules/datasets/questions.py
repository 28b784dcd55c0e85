"""Question files: parquet in the schema of Search-R1's nq_hotpotqa, read into typed ``Task`` rows.

Columns (Search-R1 scripts/data_process/qa_search_train_merge.py)::

    id              string
    question        string                          missing: extra_info.question, else the prompt's (see below)
    golden_answers  list[string]                    missing or null: reward_model.ground_truth.target
    data_source     string
    prompt          list[struct{role, content}]     shown to the model only with ``template: dataset``
    ability         string                          "math", "choice", "code" and "qa" become metadata["ability"]
    reward_model    struct{style, ground_truth: struct{target: list[string]}}
    extra_info      struct{split, index}            gives the id where ``id`` is missing

and two optional ones of ours: ``gold_passages`` list[struct{title, text}], one per hop in order, and ``metadata``, a
JSON object as a string or a struct. Of a struct only the plain fields are kept: released HotpotQA files carry all
ten paragraphs of a question there, of which the supporting ones become its gold passages (``gold_paragraphs.py``).

ARPO's RL files (docs/papers/arpo.md section 5) are read too. They differ in ``reward_model.ground_truth``, which is the
one gold answer itself, and hold the question in ``extra_info.question`` and as the bare user turn after a system
message; of a prompt without a system message the question is what follows "Question:". Their system prompt was written
with a backspace where "\\b" of "\\boxed" was meant; that is mended, and logged.

So is SOD's (``Open-AgentRL-30K.parquet``, docs/papers/sod.md section 4.5): data_source, prompt, ability, reward_model,
extra_info, and several abilities in one file. The question is the whole user turn, the id the data source with
``extra_info.index`` (with the row's number where the index does not tell rows apart). ``ground_truth`` is a gold
answer, a JSON list of them, or the tests of a program, as a JSON object or a struct: {inputs, outputs[, fn_name]} or
{test_code, entry_point, import_prefix}. They become ``metadata["tests"]`` (see ``ground_truths.read_tests``) and stand
in no prompt. Such a task has no gold answer: exact match and F1 are 0 for it and mean nothing, its metric is the
reward's part ``acc``. ``metadata["ability"]`` is "code" where there are tests, else what the ability column says (in
upper or lower case), else what the data source is known for (``ground_truths.ability_of``).

A column ``hint``, or ``extra_info.hint``, becomes ``metadata["hint"]``: what the teacher of OPSD is told.

Files of your own shape (CSV, JSON lines, parquet with other names) are read with ``columns``, see ``own_questions``.

Beside such files ``load_tasks`` takes the evaluation sets of ``benchmarks.py``, as ``name:path``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from data_modules.datasets.benchmarks import load_benchmark
from data_modules.datasets.files import DatasetError, shown, write_parquet
from data_modules.datasets.question_file import QUESTION_MARKER, SCHEMA, OnInvalidRow, QuestionFile
from rollout.trajectory import Task

_NAMED = re.compile(r"(\w+):(.+)")  # also of a misspelt name, so that the message is about the name


def load_tasks(
    path: str | Path | Sequence[str | Path],
    on_invalid_row: OnInvalidRow = "refuse",
    answers: bool = True,
    columns: Mapping[str, str] | None = None,
) -> list[Task]:
    """Read one or several question files, in order.

    Ids are made unique: where the same id occurs more than once (Search-R1's merged files take ``train_0`` from every
    source), it becomes ``<data_source>/<id>``. Rows, in messages, are counted from 0.

    Args:
        path: a parquet file, or several; ``name:path`` for an evaluation set, as "gsm8k:data/gsm8k.jsonl".
        on_invalid_row: ``drop`` leaves out rows that cannot be used, and logs how many and why. Evaluation sets are
            never
            cut: a metric over a part of them is another metric.
        answers: every row must have a gold answer or tests; False where the environment scores itself
            (``RolloutSystem.needs_answers``).
        columns: for files of another shape (CSV, JSON lines, JSON, parquet), our columns by the file's own names, as
            {"question": "prompt"}, and {} where the names are ours: ids and the data source may be missing then, and
            all faults are said by line, from 1. None: parquet files with the columns of this module.

    Raises:
        DatasetError: no such file, not a parquet file, a column is missing or has the wrong type, a row has no
            question, neither a gold answer nor tests, tests that cannot be run, a choice's gold answer that is no
            letter, no data source or no id, or no row is left; an id occurs twice in one data source; for an evaluation
            set what ``load_benchmark`` raises.
    """
    paths = [str(p) for p in ([path] if isinstance(path, (str, Path)) else path)]
    if not paths:
        raise DatasetError("no question file given; expected at least one parquet file")
    return unique([task for p in paths for task in _load(p, on_invalid_row, answers, columns)], paths)


def _load(path: str, on_invalid_row: OnInvalidRow, answers: bool, columns: Mapping[str, str] | None) -> list[Task]:
    named = _NAMED.fullmatch(path)
    if named and not Path(path).exists():
        return load_benchmark(named[1], named[2])
    return QuestionFile(Path(path), columns).tasks(on_invalid_row, answers)


def write_tasks(path: str | Path, tasks: Iterable[Task], render: Callable[[Task], str] | None = None) -> None:
    """Write tasks in the schema of the module docstring, so that ``load_tasks`` gives them back.

    Args:
        path: target; replaced in one step.
        render: text of the ``prompt`` column's user turn for tasks without a prompt of their own. Default:
            ``Question: <question>``.

    Raises:
        ValueError: metadata that JSON cannot hold.
    """
    render = render or (lambda task: f"{QUESTION_MARKER} {task.question}\n")
    rows = [_row(task, index, task.prompt or (("user", render(task)),)) for index, task in enumerate(tasks)]
    write_parquet(Path(path), pl.DataFrame(rows, schema=SCHEMA, orient="row"))


def _row(task: Task, index: int, prompt: Sequence[tuple[str, str]]) -> dict[str, Any]:
    answers = list(task.golden_answers)
    return {
        "id": task.id,
        "data_source": task.data_source,
        "question": task.question,
        "golden_answers": answers,
        "prompt": [{"role": role, "content": content} for role, content in prompt],
        "ability": task.metadata.get("ability", "fact-reasoning"),
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": str(task.metadata.get("split", "")), "index": index},
        "gold_passages": [{"title": title, "text": text} for title, text in task.gold_passages],
        "metadata": json.dumps(task.metadata, ensure_ascii=False),
    }


def unique(tasks: list[Task], paths: Sequence[str]) -> list[Task]:
    """Return the tasks of all files with unique ids, see ``load_tasks``. Raises DatasetError where that fails."""
    counts = Counter(task.id for task in tasks)
    if len(counts) == len(tasks):
        return tasks
    renamed = [
        task if counts[task.id] == 1 else dataclasses.replace(task, id=f"{task.data_source}/{task.id}")
        for task in tasks
    ]
    twice = [name for name, count in Counter(task.id for task in renamed).items() if count > 1]
    if twice:
        rows = [i for i, task in enumerate(renamed) if task.id == twice[0]]
        where = ", ".join(paths)
        raise DatasetError(
            f"{where}: {len(twice)} ids occur more than once in one data source, for example {twice[0]!r} in rows "
            f"{shown(rows)} (of all files together); make the ids unique"
        )
    return renamed
