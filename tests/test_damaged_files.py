"""Whatever bytes a reader is given: what is in them, or one line that names the file. Never a traceback.

A few examples each, the same in every run. ``FUZZ=5000 .venv/bin/pytest tests/test_damaged_files.py`` tries new ones.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callbacks.model_export.checkpoints import checkpoint_weights
from data_modules.datasets.conversations import read_conversations
from data_modules.datasets.files import DatasetError, read_rows
from data_modules.datasets.livecodebench import read_problems
from data_modules.datasets.questions import load_tasks
from data_modules.datasets.traces import read_traces
from experiments.registry.errors import ExperimentError
from experiments.registry.files import load_yaml
from experiments.registry.keys import PathHasher
from experiments.registry.overrides import parse
from experiments.stages.store import StageFolder
from retrieval.corpus import read_corpus
from retrieval.types import CorpusError
from rollout.skills.bank import SkillBankError
from rollout.skills.reading import OWN_BANKS, read_bank
from rollout.storage import SCHEMA, TrajectoryFileError, load_trajectories

REFUSALS = (ExperimentError, DatasetError, CorpusError, SkillBankError, TrajectoryFileError)

QUESTIONS = [
    {"id": str(n), "question": f"{n}?", "golden_answers": ["a", "b"], "data_source": "nq", "metadata": '{"x": 1}'}
    for n in range(4)
]
PASSAGES = [{"id": str(n), "contents": f'"Title {n}"\ntext {n}'} for n in range(4)]
CASE = {"input": "1", "output": "2", "testtype": "functional"}
OFFICIAL = {
    "question_content": "add", "public_test_cases": json.dumps([CASE]), "private_test_cases": json.dumps([CASE]),
    "metadata": '{"func_name": "f"}', "starter_code": "def f",
}  # fmt: skip
TRUTH = {"ground_truth": {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}}
TRACES = [
    {"instruction": "i", "input": "q", "output": "<think>x</think><answer>a</answer>"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
]
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "r"},
    {"role": "assistant", "content": "a"},
]
EXPERIMENT = b"""experiment: {kind: task, summary: a}
model: &a {class_path: x.Y, init_args: {lr: 1e-3, list: [1, 2], text: "${values.x}"}}
values: {x: 2024-01-02, y: !!str 3, z: *a}
"""


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]], path: Path, schema: Any = None) -> bytes:
    pl.DataFrame(rows, schema=schema).write_parquet(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("binary")
    torch.save({"state_dict": {"policy.w": torch.zeros(3)}}, folder / "x.ckpt")
    return {
        "questions.parquet": parquet(QUESTIONS, folder / "questions.parquet"),
        "corpus.parquet": parquet(PASSAGES, folder / "corpus.parquet"),
        "trajectories.parquet": parquet([], folder / "trajectories.parquet", SCHEMA),
        "weights.ckpt": (folder / "x.ckpt").read_bytes(),
    }


# name of the file -> what it holds (None: ``binary``), and what reads it
READERS: dict[str, tuple[bytes | None, Any]] = {
    "experiment.yaml": (EXPERIMENT, load_yaml),
    "result.json": (b'{"seconds": 1.5}', lambda path: StageFolder(path.parent).result()),
    "stage.json": (b'{"checkpoint": null, "sessions": []}', lambda path: StageFolder(path.parent).metadata()),
    "hashes.json": (b'{"a": "b"}', PathHasher),
    "questions.parquet": (None, load_tasks),
    "questions.jsonl": (lines(QUESTIONS), lambda path: load_tasks(path, columns={})),
    "questions.json": (json.dumps(QUESTIONS).encode(), lambda path: load_tasks(path, columns={})),
    "questions.csv": (
        b'id,question,answer\n1,"who, is",a\n2,what,b\n3,"line\nbreak",c\n',
        lambda path: load_tasks(path, columns={"golden_answers": "answer"}),
    ),
    "official.jsonl": (lines([OFFICIAL] * 2), lambda path: read_problems(path, read_rows(path))),
    "sod.jsonl": (
        lines([{"problem": "p", "reward_model": json.dumps(TRUTH)}] * 2),
        lambda path: read_problems(path, read_rows(path)),
    ),
    "traces.jsonl": (lines(TRACES), read_traces),
    "conversations.jsonl": (lines([{"messages": MESSAGES, "tools": [CALL]}] * 2), read_conversations),
    "corpus.jsonl": (lines(PASSAGES), lambda path: list(read_corpus(path))),
    "corpus.jsonl.gz": (gzip.compress(lines(PASSAGES)), lambda path: list(read_corpus(path))),
    "corpus.parquet": (None, lambda path: list(read_corpus(path))),
    "bank.json": (next(OWN_BANKS.glob("*.json")).read_bytes(), read_bank),
    "trajectories.parquet": (None, load_trajectories),
    "weights.ckpt": (None, checkpoint_weights),
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("[" * 2000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Cut short, bytes changed, put in or taken out; or something else altogether."""
    if draw(st.integers(0, 9)) == 0:
        others = [b"[" * 2000, b'{"a":' * 2000, b"1" * 5000, b"\xff\xfe", b'{"a\\nb": 1}\n']
        return draw(st.binary(max_size=80) | st.sampled_from(others))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        kind = draw(st.sampled_from(["cut", "flip", "insert", "remove"]))
        if kind == "cut":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + draw(st.binary(min_size=1, max_size=4)) + content[at:]
        elif kind == "remove":
            content = content[:at] + content[at + draw(st.integers(1, 20)) :]
        elif at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
    return content


@st.composite
def rewritten(draw: st.DrawFn, value: Any) -> Any:
    """The JSON value with one of its parts replaced, also inside JSON that is a text."""
    if isinstance(value, str) and value[:1] in ("[", "{") and draw(st.booleans()):
        return json.dumps(draw(rewritten(json.loads(value))))
    if not isinstance(value, (dict, list)) or not value or draw(st.integers(0, 5)) == 0:
        return draw(json_values)
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    if draw(st.integers(0, 9)) == 0:
        del changed[key]
    else:
        changed[key] = draw(rewritten(value[key]))
    return changed


def read_or_refuse(path: Path, content: bytes, read: Any) -> None:
    path.write_bytes(content)
    try:
        read(path)
    except ValueError as error:
        told = str(error)
        assert isinstance(error, REFUSALS) or path.suffix == ".ckpt", f"{type(error).__name__}: {told}"
        assert "\n" not in told and str(path.parent) in told, told


quiet = settings(
    deadline=None, database=None, max_examples=int(os.environ.get("FUZZ", 25)), derandomize="FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.mark.parametrize("name", READERS)
@quiet
@given(data=st.data())
def test_damaged_bytes_are_refused_in_a_line_or_read(name, data, tmp_path, binary):
    content, read = READERS[name]
    read_or_refuse(tmp_path / name, data.draw(damaged(content or binary[name])), read)


@pytest.mark.parametrize("name", [name for name, (content, _) in READERS.items() if content and ".json" in name[-6:]])
@quiet
@given(data=st.data())
def test_other_values_are_refused_in_a_line_or_read(name, data, tmp_path):
    content, read = READERS[name]
    if name.endswith(".jsonl"):
        rows = data.draw(rewritten([json.loads(line) for line in content.splitlines()]))
        changed = lines(rows if isinstance(rows, list) else [rows])
    else:
        changed = json.dumps(data.draw(rewritten(json.loads(content)))).encode()
    read_or_refuse(tmp_path / name, changed, read)


@quiet
@given(words=st.lists(st.text(max_size=12) | st.sampled_from(["--model.lr", "--", "--a.b=", "1e-3", "[", "{", "&a"])))
def test_overrides_are_refused_in_a_line_or_read(words):
    try:
        parse(words)
    except ExperimentError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["questions.jsonl", "corpus.jsonl", "traces.jsonl", "conversations.jsonl"])
@quiet
@given(data=st.data())
def test_no_line_is_lost(name, data, tmp_path):
    content, read = READERS[name]
    cut = data.draw(st.integers(0, len(content)))
    (tmp_path / name).write_bytes(content[:cut])
    whole = [line for line in content[:cut].split(b"\n") if line.strip()]
    try:
        found = len(read(tmp_path / name))
    except REFUSALS:
        return
    assert found == len(whole)
