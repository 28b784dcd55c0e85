"""Count the files that a reader passes: in one batch, to the end of a loss, and from ``make train`` to a stage's work.

    python -m benchmarks.files_touched --list [OVERRIDES]

Traces real runs of `smoke` (GRPO with search and the vLLM engine; then SOD in its place), whose other stages it makes
in outputs/ if need be. The counts:

* *batch*: files with a function entered between the data loader's ``next`` and ``optimizer.step``, in all threads of
  the trainer and of the engine's process. Other servers are listed apart.
* *loss*: files on the way from the algorithm's class to its last arithmetic line, without configuration: the class's
  file; the files that call the methods an algorithm has to supply (the abstract methods of its bases); and every file
  reached from these methods, in that batch, in which a function with arithmetic was entered. A call whose value its
  caller throws away (logging) is not followed. Files without arithmetic are listed as plumbing.
* *stage*: packages (folders) of the files entered from ``python -m experiments train`` until the stage's process is
  *started*, and until it is *ready*: it has checked its configuration and builds model and trainer (LightningCLI's
  ``instantiate_classes``). *Returns*: how often the files, in the order of their first entry, come back to a package
  that they had left.

Functions that run while a module is imported are in none of the counts.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHORT = ("--data.iterations=2", "--trainer.val_check_interval=2", "--data.val_files=[]", "--data.test_files=[]")
GRPO, SOD = "lightning_modules.algorithms.grpo.GRPO", "lightning_modules.algorithms.sod.SOD"
POLICY = {"policy": "${stage:smoke_sft}/model", "num_mini_batches": 1}
MODELS = {GRPO: POLICY, SOD: POLICY | {"teacher": "${stage:smoke_model}/model"}}
EXPERIMENTS, STAGE, SERVERS = "experiments/__main__.py", "-m experiments stage", "-m retrieval."

# As sitecustomize of every interpreter of the run: notes each function of the project that is entered, with the line
# of the project that has called it; the same call at most once in 10 ms.
HOOK = r"""
import os, sys, threading, time

ROOT, FOLDER = os.environ["TOUCHED_ROOT"] + "/", os.environ["TOUCHED_FOLDER"]
MARKS = {"__next__": "loops/fetchers.py", "step": "core/optimizer.py", "instantiate_classes": "cli.py"}
names, noted = {}, {}

def begin():
    global file
    file = os.open(f"{FOLDER}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    write(time.monotonic_ns(), "begin", " ".join(sys.orig_argv[1:]), "", "", 0)

def write(*fields):
    os.write(file, ("\t".join(map(str, fields)) + "\n").encode())

def name_of(code):
    path = code.co_filename
    if path.startswith(ROOT) and "/.venv" not in path:
        return path[len(ROOT):], code.co_qualname
    return ("mark", code.co_name) if path.endswith("lightning/pytorch/" + MARKS.get(code.co_name, "\n")) else None

def enter(frame, event, argument):
    code = frame.f_code
    name = names[code] if code in names else names.setdefault(code, name_of(code))
    if name is None or not code.co_flags & 1:  # a module or the body of a class
        return
    caller, now = frame.f_back, time.monotonic_ns()
    while caller is not None and (names.get(caller.f_code) or ("mark",))[0] == "mark":
        caller = caller.f_back
    key = (code, caller and caller.f_code, caller and caller.f_lineno)
    if noted.get(key) != now // 10**7:
        noted[key] = now // 10**7
        write(now, *name, *(names[caller.f_code] if caller else ("", "")), caller.f_lineno if caller else 0)

begin()
os.register_at_fork(after_in_child=begin)
threading.settrace(enter)
sys.settrace(enter)
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the project that was entered, and where it was called from."""

    ns: int
    file: str  # "begin": a process with the command ``name``; "mark": a function of Lightning
    name: str
    caller_file: str
    caller: str
    line: int

    @staticmethod
    def read(text: str) -> Call:
        ns, file, name, caller_file, caller, line = text.split("\t")
        return Call(int(ns), file, name, caller_file, caller, int(line))


def trace(options: Sequence[str], folder: Path) -> list[list[Call]]:
    """Run ``train smoke`` with these options. Return the calls of each of its processes in order, ``begin`` first."""
    (folder / "hook").mkdir()
    (folder / "notes").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    paths = os.pathsep.join([str(folder / "hook"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    train(options, PYTHONPATH=paths, TOUCHED_ROOT=str(ROOT), TOUCHED_FOLDER=str(folder / "notes"))
    texts = [path.read_text().splitlines() for path in (folder / "notes").iterdir()]
    found = [[Call.read(line) for line in text] for text in texts]
    return sorted(found, key=lambda calls: calls[0].ns)


def train(options: Sequence[str], **variables: str) -> None:
    command = [sys.executable, "-m", "experiments", "train", "smoke", *SHORT, *options]
    subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=2, check=True)


def marks(calls: Iterable[Call], name: str) -> list[int]:
    return [call.ns for call in calls if (call.file, call.name) == ("mark", name)]


def files_of(calls: Iterable[Call]) -> set[str]:
    return {call.file for call in calls}


def within(calls: Iterable[Call], begin: int, end: int) -> list[Call]:
    return [call for call in calls if begin <= call.ns <= end and call.file not in ("begin", "mark")]


def reached(calls: Sequence[Call], roots: Iterable[tuple[str, str]], follow: Any = lambda call: True) -> list[Call]:
    """Return the calls of the root functions and all calls that follow from them, of the kind ``follow``."""
    known, before = set(roots), -1
    while len(known) > before:
        before = len(known)
        known |= {(c.file, c.name) for c in calls if (c.caller_file, c.caller) in known and follow(c)}
    return [call for call in calls if (call.file, call.name) in known]


@cache
def tree(file: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / file).read_text())))


@cache
def value_is_used(file: str, line: int) -> bool:
    """Whether the value of a call on this line is used. False for a statement that is only a call."""
    statements = (n for n in tree(file) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call))
    return not any(n.lineno <= line <= (n.end_lineno or n.lineno) for n in statements)


@cache
def calculates(file: str, function: str) -> bool:
    """Whether a function of this name has an arithmetic operator."""
    name = function.rpartition(".")[2]
    nodes = (m for n in tree(file) if isinstance(n, ast.FunctionDef) and n.name == name for m in ast.walk(n))
    operators = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.MatMult)
    return any(isinstance(n, (ast.BinOp, ast.AugAssign)) and isinstance(n.op, operators) for n in nodes)


def loss_files(class_path: str, batch: Sequence[Call]) -> tuple[set[str], set[str]]:
    """Return the files with the arithmetic of the loss, and separately the files that only pass values on."""
    module, _, name = class_path.rpartition(".")
    algorithm = getattr(importlib.import_module(module), name)
    abstract = {n for c in algorithm.__mro__ for n, f in vars(c).items() if getattr(f, "__isabstractmethod__", False)}
    own = {(file_of(f), f.__qualname__) for f in (getattr(algorithm, n) for n in abstract)}
    calls = reached(batch, own, lambda call: value_is_used(call.caller_file, call.line))
    callers = {call.caller_file for call in calls if (call.file, call.name) in own}
    arithmetic = {file_of(algorithm), *callers, *(call.file for call in calls if calculates(call.file, call.name))}
    return arithmetic, files_of(calls) - arithmetic


def file_of(thing: Any) -> str:
    return Path(inspect.getfile(inspect.unwrap(thing))).resolve().relative_to(ROOT).as_posix()


def stage_files(parent: Sequence[Call], stage: Sequence[Call], end: int) -> list[str]:
    """List the files in the order of their first entry: those of the parent until the stage's process begins, then
    those of the stage."""
    calls = within(parent, 0, stage[0].ns) + within(stage, 0, end)
    roots = {(call.file, call.name) for call in calls if call.caller_file == EXPERIMENTS}
    return list(dict.fromkeys([EXPERIMENTS, *(call.file for call in reached(calls, roots))]))


def returns(files: Sequence[str]) -> int:
    folders = [os.path.dirname(file) for file in files]
    return sum(b != a and b in folders[:i] for i, (a, b) in enumerate(zip(folders, folders[1:], strict=False), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the files of each count, too")
    options, overrides = parser.parse_known_args()
    train(overrides)  # makes the stages that the traced runs start from
    for class_path, settings in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = {"model": {"class_path": class_path, "init_args": settings}}
            Path(folder, "model.yaml").write_text(json.dumps(model))
            parent, *others = trace(["--fresh", f"--config={folder}/model.yaml", *overrides], Path(folder))
        stage = next(calls for calls in others if calls[0].name.startswith(STAGE))
        end = marks(stage, "step")[-1]
        window = max(ns for ns in marks(stage, "__next__") if ns < end), end
        servers = [calls for calls in others if calls[0].name.startswith(SERVERS)]
        batch = files_of(call for calls in others if calls not in servers for call in within(calls, *window))
        loss, plumbing = loss_files(class_path, within(stage, *window))
        name = class_path.rpartition(".")[2]
        rows: dict[str, Iterable[str]] = {
            f"batch of {name}": batch,
            f"batch of {name}: search server alone": files_of(c for s in servers for c in within(s, *window)) - batch,
            f"loss of {name}": loss,
            f"loss of {name}: plumbing": plumbing,
        }
        if class_path == GRPO:
            for until, ns in {"started": 0, "ready": marks(stage, "instantiate_classes")[0]}.items():
                path = stage_files(parent, stage, ns)
                packages = len({os.path.dirname(file) for file in path})
                rows[f"stage {until}: {packages} packages, {returns(path)} returns"] = path
        for what, found in rows.items():
            files = found if isinstance(found, list) else sorted(found)
            lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
            print(f"| {what} | {len(files)} files | {lines:,} lines |", flush=True)
            for file in files if options.list else ():
                print(f"    {file}")


if __name__ == "__main__":
    main()
