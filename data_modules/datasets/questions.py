"""Question files: parquet in the schema of Search-R1's nq_hotpotqa, read into typed ``Task`` rows.

Columns (Search-R1 scripts/data_process/qa_search_train_merge.py)::

    id              string
    question        string                          missing: extra_info.question, else the prompt's (see below)
    golden_answers  list[string]                    missing or null: reward_model.ground_truth.target
    data_source     string
    prompt          list[struct{role, content}]     shown to the model only with ``template: dataset``
    ability         string                          "math", "choice", "code" and "qa" become metadata["ability"]
    reward_model    struct{style, ground_truth: struct{target: list[string]}}
    extra_info      struct{split, index}            the id if ``id`` is missing

Two columns are ours and optional: ``gold_passages`` list[struct{title, text}], one per hop in order, and ``metadata``,
a JSON object as a string or a struct. Only the plain fields of a struct are kept. Released HotpotQA files carry all ten
paragraphs of a question there; the supporting ones become its gold passages (``gold_paragraphs.py``).

ARPO's RL files: ``reward_model.ground_truth`` is the gold answer itself, and the
question is in ``extra_info.question`` or is the user turn after a system message; without a system message it follows
"Question:". Their system prompt has a backspace in place of the "\\b" of "\\boxed"; it is corrected, and logged.

SOD's file (``Open-AgentRL-30K.parquet``) mixes several abilities. The question is the
whole user turn, the id the data source with ``extra_info.index`` (the row's number if the index is not unique).
``ground_truth`` is a gold answer, a JSON list of them, or the tests of a program, as a JSON object or a struct:
{inputs, outputs[, fn_name]} or {test_code, entry_point, import_prefix}. Tests become ``metadata["tests"]``
(``ground_truths.read_tests``) and are never shown in a prompt. A task with tests has no gold answer: exact match and F1
are 0 and meaningless, and the reward's part ``acc`` is its metric. ``metadata["ability"]`` is "code" with tests, else
the ability column (any case), else derived from the data source (``ground_truths.ability_of``).

A column ``hint``, or ``extra_info.hint``, becomes ``metadata["hint"]`` for the teacher of OPSD.

``columns`` reads files of your own shape (CSV, JSON lines, parquet with other names), see ``own_questions``.
``load_tasks`` also reads the evaluation sets of ``benchmarks.py``, as ``name:path``.
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
    """Read one or several question files into a list of tasks, in order.

    Ids are made unique: an id that occurs more than once (Search-R1's merged files take ``train_0`` from every source)
    becomes ``<data_source>/<id>``. Messages count rows from 0.

    Args:
        path: a parquet file, or several; ``name:path`` for an evaluation set, as "gsm8k:data/gsm8k.jsonl".
        on_invalid_row: ``drop`` leaves out rows that cannot be used, and logs their number and faults. Evaluation sets
            are never cut, because a metric over a part of them is another metric.
        answers: every row must have a gold answer or tests; False if the environment scores itself
            (``RolloutSystem.needs_answers``).
        columns: for files of another shape (CSV, JSON lines, JSON, parquet), our columns by the file's own names, as
            {"question": "prompt"}; {} if the names are ours. Ids and the data source may then be missing, and messages
            count lines from 1. None: parquet files with the columns of this module.

    Raises:
        DatasetError: a missing or unreadable file, a missing or wrong column, or a row without question, answer (or
            tests), data source or id, with tests that cannot run, or with a choice that is not a letter; no row left;
            an id twice in one data source; for an evaluation set the errors of ``load_benchmark``.
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
    """Write tasks to a parquet file in Search-R1's schema (see the module docstring), so that ``load_tasks`` reads them
    back.

    Args:
        path: target; replaced atomically.
        render: text of the ``prompt`` column's user turn for tasks without a prompt. Default: ``Question: <question>``.

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
    """Return the tasks of all files with unique ids, see ``load_tasks``. Raises DatasetError if an id occurs twice in
    one data source.
    """
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
