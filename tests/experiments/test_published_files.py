"""Every recipe of the four papers reads the published files, with the faults that these have, before any stage runs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from data_modules.datasets.benchmark_names import split_reference
from experiments.commands.cli import main
from experiments.registry.listing import load, names
from experiments.registry.project import Project
from experiments.stages.data_files import read_data_files, references
from experiments.stages.graph import Graph
from tests.experiments.published import shapes, write_published

FAMILIES = ("dgpo", "sod", "sdar", "arpo")
RECIPES = 170  # at least, that read published files; the test prints how many


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("published")


@pytest.fixture
def published(folder, monkeypatch, tmp_path):
    for variable, value in write_published(folder).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path / "out"))
    return folder


@contextmanager
def holding(file, text):
    """The file with another text, for a while: the folder is all tests'."""
    own = file.read_text()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(own)


def recipes(project: Project) -> list[str]:
    return [name for name in names(project) if load(name, project)["experiment"]["family"].split("/")[0] in FAMILIES]


@pytest.mark.slow
def test_every_recipe_reads_them_and_counts_what_is_left_out(published, capsys):
    project = Project.from_environment()
    graph = Graph(project, "dgpo_qwen2.5_0.5b")
    expected = {
        str(published / variable / name): (len(rows), dropped)
        for variable, files in shapes().items() for name, (rows, dropped) in files.items()
    }  # fmt: skip
    read: set[str] = set()
    stages = [graph.stage(name) for name in recipes(project)]
    stages = [stage for stage in stages if any(str(published) in reference for reference in references(stage))]
    found = read_data_files(stages, project.root)
    assert not found.faults
    for file in found.files:
        path = split_reference(file.reference)[1]
        rows, dropped = expected[path]
        assert file.count == rows - dropped, str(file)
        assert any(f"{dropped} of {rows} rows are left out" in note for note in file.notes) == bool(dropped), str(file)
        read.add(path)
    assert read == set(expected), "no published file that no recipe reads"
    with capsys.disabled():
        print(f"\n{len(stages)} recipes read {len(read)} published files")
    assert len(stages) >= RECIPES


@pytest.mark.slow
def test_the_dry_run_says_what_is_left_out_and_a_fault_stops_it_there(
    published, capsys, monkeypatch, model_dir, tmp_path
):
    for name in ("Qwen2.5-3B-Instruct", "Qwen3-8B"):
        (tmp_path / "models" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "models" / name).symlink_to(model_dir)
    monkeypatch.setenv("COMPACT_AGENTS_MODELS", str(tmp_path / "models"))
    assert main(["dry-run", "arpo_qwen2.5_3b"]) == 0
    said = capsys.readouterr().err
    assert (
        "train_10k.parquet: 9 questions" in said
        and "1 of 10 rows are left out (counted from 0): 1 with no gold" in said
    )
    assert "final_sft_edition9.json: 3 traces" in said and "1 of them are left out: not_one_exchange 1" in said
    [traces] = published.rglob("final_sft_edition9.json")
    with holding(traces, '[{"conversations": []}]'):
        assert main(["dry-run", "arpo_qwen2.5_3b"]) == 2
    assert "all 1 traces would be left out: not_one_exchange 1" in capsys.readouterr().err
    with holding(published / "COMPACT_AGENTS_BENCHMARKS" / "gaia.jsonl", '{"Question": "", "answer": "x"}\n'):
        assert main(["dry-run", "arpo_qwen3_8b"]) == 2
    assert "gaia.jsonl: 1 of 1 rows with no text in column 'Question'" in capsys.readouterr().err
