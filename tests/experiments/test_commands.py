"""The Makefile, downloads, and finding a model to use."""

import gzip
import os
import subprocess
from dataclasses import replace

import pytest

from experiments.cli import build_parser, split_overrides
from experiments.commands import SERVER_OPTIONS, server_options
from experiments.download import assemble
from experiments.errors import ExperimentError
from experiments.launch import Launch
from experiments.project import ROOT
from experiments.runner import Request
from experiments.use import asked_task, find_model
from retrieval import server
from rollout.trajectory import Task


# The tests themselves run under `make test`, whose flags and level an inner make would take over.
OUTSIDE = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}


def make(*words):
    command = ["make", "-n", "--no-print-directory", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=OUTSIDE)
    return [line for line in done.stdout.splitlines() if "setup.sh" not in line]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train"], "train dgpo_tiny"),
        (["train", "EXP=kd_tiny", "SEED=2", "RESUME=last"], "train kd_tiny --seed 2 --resume last"),
        (["train", "FRESH=1", "ARGS=--model.kl_coef 0.01"], "train dgpo_tiny --fresh --model.kl_coef 0.01"),
        (["train", "LAUNCH=slurm", "NPROC=8", "TIME=1:00"],
         'train dgpo_tiny --launch slurm --processes 8 --sbatch="--time=1:00"'),
        (["evaluate", "CKPT=a b.ckpt"], 'evaluate dgpo_tiny --checkpoint "a b.ckpt"'),
        (["ask", "Q=Who wrote it?"], 'ask dgpo_tiny --question "$Q"'),
        (["dry-run", "EXP=x"], "dry-run x"),
        (["retriever", "EXP=x", "ARGS=--threads 8 --gpu"], "retriever x --port 8000 --threads 8 --gpu"),
        (["engine", "PORT=8101", "CKPT=a b"], 'engine-server dgpo_tiny --port 8101 --checkpoint "a b"'),
        (["reproduce", "SEEDS=0,1"], "reproduce dgpo_tiny --seeds 0,1"),
        (["ui", "PORT=5001"], "ui --port 5001"),
        (["clean", "ALL=1"], "clean --all"),
        (["export", "CKPT=last", "TO=a b"], 'export dgpo_tiny --checkpoint "last" --to "a b"'),
        (["export", "DTYPE=bfloat16"], "export dgpo_tiny --dtype bfloat16"),
    ],
)
def test_make_passes_on_what_it_is_given(words, command):
    [line] = make(*words)
    assert " ".join(line.split()) == f".venv/bin/python -m experiments {command}"


def test_make_alone_prints_help_and_sets_nothing_up():
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("setup", "train", "evaluate", "test", "retriever", "compare", "ui", "export", "experiments", "ask"):
        assert f"  {target} " in done.stdout
    assert "setting up" not in done.stdout


def test_retriever_hands_through_every_option_of_the_server():
    taken_by_us = {"index", "port", "gpu"}
    between_processes = {"parent", "ready_fd", "help"}
    theirs = {action.dest for action in server.build_parser()._actions} - between_processes
    assert {name.replace("-", "_") for name in SERVER_OPTIONS} | taken_by_us == theirs
    words = "--host 0.0.0.0 --threads 8 --device cpu --topk 5 --k1 1.2 --java-heap 2g --gpu".split()
    ours, overrides = split_overrides(["retriever", "x", *words])
    assert not overrides
    passed = server.parse_arguments(["--index", "i", *server_options(build_parser().parse_args(ours))])
    assert (passed.host, passed.threads, passed.device, passed.topk) == ("0.0.0.0", 8, "cpu", 5)
    assert (passed.k1, passed.java_heap, passed.gpu, passed.b) == (1.2, "2g", True, None)


def test_overrides_are_told_from_our_own_options():
    words = "dgpo_tiny --seed 1 --model.kl_coef 0.01 --fresh --trainer.max_steps=3 --config f.yaml --seed_everything 4"
    ours, theirs = split_overrides(words.split())
    assert ours == ["dgpo_tiny", "--seed", "1", "--fresh"]
    assert " ".join(theirs) == "--model.kl_coef 0.01 --trainer.max_steps=3 --config f.yaml --seed_everything 4"


def test_parts_are_joined_and_unpacked(tmp_path):
    (tmp_path / "part_aa").write_bytes(b"one ")
    (tmp_path / "part_ab.gz").write_bytes(gzip.compress(b"two"))
    assemble([tmp_path / "part_aa", tmp_path / "part_ab.gz"], tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"one two"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["part_aa", "part_ab.gz", "whole"]


def test_only_models_are_taken_for_models(workshop, tmp_path):
    workshop.task("x")
    request = Request(workshop.project, "x", (), None)
    with pytest.raises(ExperimentError, match="'x' .* has not been made yet: run make train EXP=x first"):
        find_model(request, None)
    with pytest.raises(ExperimentError, match="no checkpoint at /nowhere"):
        find_model(request, "/nowhere")
    with pytest.raises(ExperimentError, match="neither a .ckpt nor a Hugging Face folder"):
        find_model(request, str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert find_model(request, str(tmp_path)) == tmp_path / "model"


def test_a_question_that_is_asked_is_put_as_the_data_set_puts_its_own():
    assert asked_task(" who? ", None) == Task("asked", "who?", (), "asked")
    example = Task("q1", "where is it?", (), "nq", prompt=(("user", "Think. Question: where is it?\n"),))
    assert asked_task("who was she", example).prompt == (("user", "Think. Question: who was she?\n"),)
    with pytest.raises(ExperimentError, match="q1 does not hold its question"):
        asked_task("who?", replace(example, prompt=(("user", "Think."),)))
    with pytest.raises(ExperimentError, match="the question is empty"):
        asked_task("  ", None)


def test_commands_are_named_as_they_were_typed(workshop):
    request = Request(workshop.project, "x", ("--model.kl_coef", "0.01"), 3)
    assert request.again() == 'make train EXP=x SEED=3 ARGS="--model.kl_coef 0.01" RESUME=last'
    evaluation = replace(request, arguments=(), verb="evaluate", variables=("CKPT=a.ckpt",))
    assert evaluation.again() == "make evaluate EXP=x CKPT=a.ckpt SEED=3", "a test has nothing to go on from"
    of_four = Launch(nodes=4, node_rank=0, address="host0", port=29500, timeout_s=600.0)
    launched = replace(request, arguments=("--trainer.num_nodes=4",), variables=("LAUNCH=torchrun",), launch=of_four)
    said = 'make train EXP=x LAUNCH=torchrun SEED=3 ARGS="--trainer.num_nodes=4" MASTER_ADDR=host0 {}RESUME=last ({})'
    others = "and with NODE_RANK=1 to 3 on the other nodes"
    assert launched.again() == said.format("MASTER_PORT=29500 ", others)
    assert replace(launched, launch=replace(of_four, port=29400)).again() == said.format("", others)
    assert "MASTER" not in replace(launched, launch=replace(of_four, nodes=1)).again()
    assert "MASTER" not in launched.command(), "what is recorded with a result names no machine"
