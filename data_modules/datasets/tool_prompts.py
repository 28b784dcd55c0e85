r"""Writes SOD's prompts for reasoning with a tool (docs/algorithms/sod.md): one user message per task.

They have the meaning of recipe/demystify/reward.py in our words, with three corrections. The released code words a
whole file by its first row (``by_first_row``); here every task has the wording of its data source. Its answer format
puts the answer in quotation marks within \boxed{}, which never equals the gold answer; ours does not, and published
prompts are corrected. It prints all tests of LiveCodeBench, including those that score the answer; here only public
ones are shown (``lcb_examples`` None: all).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from data_modules.datasets.files import DatasetError
from rollout.rewards.arpo import is_math
from rollout.rewards.code.solution_tests import public_tests
from rollout.trajectory import Task

logger = logging.getLogger(__name__)

BEGIN = "Below is a {kind} problem. Write down how you reason about it."
TOOL = (
    "Python is at hand through the tool: let it do the arithmetic and the searching, and confirm with it what you have "
    "found."
)
STRATEGY = "Before any code, say in a few sentences how you intend to get there."
FORMAT = "Your last message calls nothing and closes with the result in \\boxed{}."
NO_UNITS = "Write only the bare final value into \\boxed{}, and leave its units out."
LETTER = "The result asked for here is the capital letter of the right option: put that letter alone into \\boxed{}."
SUBMIT = (
    "Try the program on cases of your own. Your last message calls nothing and holds the complete program in one block:"
    "\n```python\n# the program\n```"
)
CONTEST = "Write a Python program that does what the following task asks for and passes all of its tests."
STDIN = (
    "The program reads its input from standard input and prints its result to standard output. It must work for any "
    "input that the task allows, so do not build the examples into it."
)
STARTER = "Complete the code below and keep the names in it as they are.\n```python\n{code}\n```"
FUNCTION = "The tests call the function {name}: define it under exactly this name."

PREPARED_SOURCES = ("math_dapo", "mega-science")  # the file's prompts already hold the instructions
_QUOTED_BOX = re.compile(r"\\boxed\{\s*(['\"])([^'\"{}]*)\1\s*\}")


def with_tool_prompts(tasks: Sequence[Task], lcb_examples: int | None = 2, by_first_row: bool = False) -> list[Task]:
    """Return copies of the tasks whose ``prompt`` is SOD's prompt for reasoning with a tool (``tool_prompt``).

    Args:
        lcb_examples: see ``tool_prompt``.
        by_first_row: as released (recipe/demystify/reward.py), all tasks are put as the first is: programs behind a
            first row of mathematics are asked for a box. Each evaluation set has its own first row; training files
            count as one.

    Raises:
        DatasetError: tasks that are neither mathematics, choices between options, nor programs.
    """
    unknown = Counter(t.data_source for t in tasks if _ability(t) is None)
    if unknown:
        sources = ", ".join(f"{source} ({count})" for source, count in sorted(unknown.items()))
        raise DatasetError(
            "the prompts 'tool_reasoning' are for tasks whose ability is math, choice or code; there are others from "
            f"the data sources {sources}. Take the prompts 'as_given', leave these files out, or name the ability in "
            "the column 'ability'"
        )
    quoted = sum(_prepared(task) and _QUOTED_BOX.search(task.question) is not None for task in tasks)
    if quoted:
        logger.warning("%d published prompts ask for quotation marks inside \\boxed{}; they are mended", quoted)
    first: dict[Any, Task] = {}
    for task in tasks if by_first_row else ():
        first.setdefault(task.metadata.get("benchmark"), task)
    prompts = (tool_prompt(task, lcb_examples, first.get(task.metadata.get("benchmark"))) for task in tasks)
    return [dataclasses.replace(task, prompt=(("user", text),)) for task, text in zip(tasks, prompts, strict=True)]


def tool_prompt(task: Task, lcb_examples: int | None = 2, like: Task | None = None) -> str:
    r"""Return the user message for a task: its question, then rules that depend on its ability and data source.

    Mathematics gets the full prompt, except questions of ``PREPARED_SOURCES`` that ask for \boxed{} already. Training
    data must leave units out, evaluation sets need not. LiveCodeBench comes with examples.

    Args:
        lcb_examples: show at most this many public tests (``tests["public"]``). None: all tests, also hidden ones, as
            released (recipe/demystify/reward.py, map_lcb); the score is then one on shown tests.
        like: use the wording of this task's ability and data source; None: of the task itself.
    """
    like = like or task
    question, ability = task.question.strip(), _ability(like)
    if ability == "code":
        contest = "benchmark" in like.metadata
        return _joined(*(_contest(task, lcb_examples) if contest else (question,)), _rules(STRATEGY, SUBMIT))
    if _prepared(like):
        return _joined(_QUOTED_BOX.sub(r"\\boxed{\2}", question), NO_UNITS)
    if ability == "choice":
        kind = str(task.metadata.get("domain") or "multiple-choice")
        return _joined(BEGIN.format(kind=kind), question, _rules(TOOL, STRATEGY, FORMAT, LETTER))
    units = () if "benchmark" in like.metadata else (NO_UNITS,)
    kind = "science" if "science" in like.data_source else "math"
    return _joined(BEGIN.format(kind=kind), question, _rules(TOOL, STRATEGY, FORMAT, *units))


def _contest(task: Task, shown: int | None) -> tuple[str, ...]:
    tests: dict[str, Any] = task.metadata["tests"]
    starter, function = task.metadata.get("starter_code"), tests.get("fn_name")
    if shown is None and "test_code" not in tests:
        tests = {**tests, "public": len(tests.get("inputs", ()))}
    pairs = public_tests(tests)[:shown]
    examples = [f"Example {i}, input:\n{a.rstrip()}\nOutput:\n{b.rstrip()}" for i, (a, b) in enumerate(pairs, start=1)]
    if starter:
        form = STARTER.format(code=starter)
    else:
        form = FUNCTION.format(name=function) if function else STDIN
    return CONTEST, task.question.strip(), *examples, form


def _prepared(task: Task) -> bool:
    return task.data_source in PREPARED_SOURCES and "\\boxed" in task.question


def _ability(task: Task) -> str | None:
    ability = task.metadata.get("ability")
    if ability in ("math", "choice") or (ability == "code" and task.metadata.get("tests")):
        return ability
    return "math" if is_math(task) else None


def _rules(*rules: str) -> str:
    return "\n".join(f"- {rule}" for rule in rules)


def _joined(*parts: str) -> str:
    return "\n\n".join(parts)
