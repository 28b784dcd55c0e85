"""The stage graph and the content keys: stable where nothing changed, different where anything did."""

import ast
import os
import re

import pytest

from experiments.registry.errors import ExperimentError
from experiments.registry.keys import FOLDERS, PathHasher
from experiments.registry.project import PACKAGES, ROOT
from experiments.stages.graph import closure, missing_files

FIT = """
experiment: {kind: fit}
values: {lr: 0.1}
trainer:
  max_steps: 3
  logger: {class_path: l.Logger, init_args: {run_name: "${experiment.name}", save_dir: "${experiment.folder}"}}
  callbacks:
    bar: {class_path: callbacks.training.progress.Progress}
    guard: {class_path: callbacks.training.collapse_guard.CollapseGuard}
model: {class_path: m.A, init_args: {policy: "${stage:base}/model", lr: "${values.lr}"}}
data: {class_path: d.A}
"""


@pytest.fixture
def chain(workshop):
    workshop.task("base", "text: hello")
    workshop.write("fit", FIT)
    return workshop


def key(workshop, *overrides, seed=None, target="fit"):
    return workshop.graph(target, *overrides, seed=seed).target().key


def test_references_are_the_graph_and_become_folders(chain):
    stage = chain.graph("fit").target()
    assert [s.name for s in closure([stage])] == ["base", "fit"]
    [base] = stage.upstream
    assert stage.config["model"]["init_args"]["policy"] == f"{base.folder}/model"
    assert stage.config["trainer"]["logger"]["init_args"] == {"run_name": "fit", "save_dir": str(stage.folder)}
    assert stage.folder == chain.project.outputs / "fit" / stage.key


def test_keys_are_stable(chain):
    assert key(chain) == key(chain)
    before = key(chain)
    chain.write("fit", "# a comment\n" + FIT.replace("{kind: fit}", "{kind: fit, summary: words, compare: [base]}"))
    assert key(chain) == before


@pytest.mark.parametrize(
    "change",
    [
        ["--trainer.logger=false"],
        ["--trainer.log_every_n_steps=1"],
        ["--trainer.devices", "2", "--trainer.num_nodes", "4"],
        ["--trainer.callbacks.bar=null"],
    ],
)
def test_what_only_watches_and_the_number_of_ranks_are_outside_the_key(chain, change):
    assert key(chain, *change) == key(chain)


@pytest.mark.parametrize(
    "change",
    [
        ["--model.lr=0.2"],
        ["--trainer.max_steps=4"],
        ["--trainer.callbacks+=c.X"],
        ["--seed_everything=1"],
        ["--stages.base.task.text=bye"],
    ],
)
def test_everything_else_is_in_the_key(chain, change):
    assert key(chain, *change) != key(chain)


def test_overrides_reach_interpolations(chain):
    assert chain.graph("fit", "--values.lr=0.2").target().config["model"]["init_args"]["lr"] == 0.2


def test_an_upstream_change_reaches_everything_below(chain):
    before = key(chain)
    chain.task("base", "text: changed")
    assert key(chain) != before


def test_contents_of_input_files_decide_not_their_place(workshop, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"rows")
    workshop.task("x", f"text: {tmp_path}/a.parquet")
    first = key(workshop, target="x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.parquet").write_bytes(b"rows")
    workshop.task("x", f"text: {tmp_path}/elsewhere/b.parquet")
    assert key(workshop, target="x") == first
    (tmp_path / "elsewhere" / "b.parquet").write_bytes(b"other rows")
    assert key(workshop, target="x") != first


@pytest.mark.parametrize(
    "given",
    [
        ["--data.files+={}"],
        ["--data=d.B", "--data.files={}"],
    ],
)
def test_contents_of_files_that_only_the_parser_sees_are_in_the_key(chain, tmp_path, given):
    table = tmp_path / "mine.jsonl"
    words = [word.format(table) for word in given]
    table.write_text("rows")
    first = key(chain, *words)
    assert key(chain, *words) == first
    table.write_text("other rows")
    assert key(chain, *words) != first


NUMBERS = "experiment: {{kind: fit}}\nmodel: {{class_path: tests.experiments.toys.Options, init_args: {{{given}}}}}\n"


def test_a_folder_is_read_only_where_an_option_takes_a_path(workshop, tmp_path, monkeypatch):
    """Options that take no text are refused by the check of the types, which comes after the key."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("1")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    read = []
    monkeypatch.setattr(PathHasher, "__call__", lambda _, path: read.append(str(path)) or "hash")
    folder = f"{tmp_path}/folder"
    for option, value, is_read in (
        ("lr", folder, False),
        ("rates", f"[{folder}]", False),
        ("kind", folder, False),
        ("nothing", folder, False),
        ("own", folder, True),
        ("several", f"[{folder}]", True),
        ("nested", f"{{a: {folder}}}", True),
        ("policy", folder, True),
        ("own", f"{tmp_path}/pipe", False),
        ("own", f"{tmp_path}/loop", False),
        ("own", "/dev/zero", False),
        ("own", "/proc", False),
        ("own", "/proc/self/fd", False),
        ("own", "/", False),
        ("own", "a/" * 5000, False),
    ):
        read.clear()
        workshop.write("x", NUMBERS.format(given=f"{option}: {value}") + "data: {class_path: d.A}\n")
        workshop.graph("x").target()
        assert read == ([folder] if is_read else []), (option, value)


@pytest.mark.parametrize(
    ("class_path", "option", "is_read"),
    [
        ("retrieval.index.BuildIndex", "encoder: {{query_prefix: {path}}}", "never"),
        ("retrieval.index.BuildIndex", "encoder: {{model: {path}}}", "always"),
        ("retrieval.index.BuildIndex", "java_heap: {path}", "as a file"),
        ("rollout.protocols.hermes.HermesProtocol", "instruction: {path}", "as a file"),
        ("rollout.tools.web.web_search.BrightDataSearch", "zone: {path}", "as a file"),
        ("experiments.worlds.household.published.ListHousehold", "folder: {path}", "always"),
    ],
)
def test_a_folder_in_a_text_of_ours_is_no_input(workshop, tmp_path, monkeypatch, class_path, option, is_read):
    """``query_prefix: /usr/lib`` is a prefix; 50,000 files of a folder were read for it."""
    read = []
    monkeypatch.setattr(PathHasher, "__call__", lambda _, path: read.append(path) or "hash")
    (tmp_path / "text.txt").write_text("text")
    for path in (tmp_path, tmp_path / "text.txt"):
        read.clear()
        given = option.format(path=path)
        workshop.write("x", f"experiment: {{kind: task}}\ntask: {{class_path: {class_path}, init_args: {{{given}}}}}\n")
        workshop.graph("x").target()
        expected = is_read == "always" or (is_read == "as a file" and path.is_file())
        assert read == ([path] if expected else []), path


def test_options_of_ours_that_name_a_folder_are_known():
    """By the text about the option. One that is not known keeps its key when the folder's files change."""
    watching = {"MLflowLogger.save_dir", "MLflowLogger.artifact_location", "SearchCache.path", "ShardsToo.module"}
    named = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            about = ast.get_docstring(node) or ""
            for function in (f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"):
                for option in (*function.args.args, *function.args.kwonlyargs):
                    text = re.search(rf"^ +{option.arg}: (.*(?:\n {{8,}}.*)*)", about, re.MULTILINE)
                    hint = ast.unparse(option.annotation) if option.annotation else "Any"
                    if text and "folder" in text[1].lower() and re.search(r"\b(str|Any)\b", hint):
                        named.add((node.name, option.arg))
    assert ("BuildIndex", "vectors") in named and len(named) > 20
    assert {f"{name}.{option}" for name, option in named if option not in FOLDERS} <= watching


def test_a_folder_too_large_for_an_input_is_refused_in_a_line(workshop, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.registry.keys.MOST", 3)
    for name in "abcd":
        (tmp_path / "many" / name).mkdir(parents=True)
    workshop.task("x", f"text: {tmp_path}/many")
    with pytest.raises(ExperimentError, match=r"'text' is \S+/many: a folder of more than 3 files; name the"):
        workshop.graph("x").target()


def test_folder_hash_sees_names_and_contents(tmp_path):
    hasher = PathHasher(tmp_path / "cache.json")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("1")
    first = hasher(folder)
    (folder / "a").rename(folder / "b")
    renamed = hasher(folder)
    (folder / "b").write_text("2")
    assert len({first, renamed, hasher(folder)}) == 3
    hasher.save()
    assert PathHasher(tmp_path / "cache.json")(folder) == hasher(folder)


def test_seed_reaches_what_is_not_fixed(workshop):
    workshop.task("world", "text: w", about="fixed_seed: true")
    workshop.task("middle", "source: '${stage:world}'")
    workshop.task("top", "source: '${stage:middle}', text: '${seed_everything}'")
    stages = {s.name: s for s in closure([workshop.graph("top", seed=3).target()])}
    assert {n: s.config["seed_everything"] for n, s in stages.items()} == {"world": 0, "middle": 3, "top": 3}
    assert stages["top"].config["task"]["init_args"]["text"] == 3
    other = {s.name: s for s in closure([workshop.graph("top").target()])}
    assert stages["world"].key == other["world"].key
    assert stages["middle"].key != other["middle"].key


def test_circles_and_unknown_stages(workshop):
    workshop.task("a", "source: '${stage:b}'")
    workshop.task("b", "source: '${stage:a}'")
    with pytest.raises(ExperimentError, match="stages run in a circle: a -> b -> a"):
        workshop.graph("a").target()
    workshop.task("a", "source: '${stage:bb}'")
    with pytest.raises(ExperimentError, match="'a' refers to an unknown stage 'bb'"):
        workshop.graph("a").target()


def test_missing_input_files_are_named_with_their_neighbours(workshop, tmp_path):
    (tmp_path / "train.parquet").touch()
    workshop.task("base")
    workshop.task("x", f"text: {tmp_path}/trian.parquet, source: '${{stage:base}}/made_later.parquet'")
    [line] = missing_files(workshop.graph("x").target(), workshop.project.root)
    assert line == f"task.init_args.text: no file '{tmp_path}/trian.parquet'; did you mean '{tmp_path}/train.parquet'?"


def test_evaluation_sets_by_name_are_files_too(workshop, tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text("one")
    workshop.task("x", f"text: 'gsm8k:{tmp_path}/gsm8k.jsonl'")
    key = workshop.graph("x").target().key
    assert missing_files(workshop.graph("x").target(), workshop.project.root) == []
    (tmp_path / "gsm8k.jsonl").write_text("another")
    assert workshop.graph("x").target().key != key, "the file's content is part of the key"
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "gsm8k.jsonl").write_text("one")
    workshop.task("x", f"text: 'gsm8k:{tmp_path}/moved/gsm8k.jsonl'")
    assert workshop.graph("x").target().key == key, "where it lies is not"
    workshop.task("x", f"text: 'math:{tmp_path}/moved/gsm8k.jsonl'")
    assert workshop.graph("x").target().key != key, "read as another set it is another input"
    workshop.task("x", f"text: 'gsm8k:{tmp_path}/gsm8.jsonl'")
    [line] = missing_files(workshop.graph("x").target(), workshop.project.root)
    wrong, right = f"gsm8k:{tmp_path}/gsm8.jsonl", f"gsm8k:{tmp_path}/gsm8k.jsonl"
    assert line == f"task.init_args.text: no file '{wrong}'; did you mean '{right}'?"
