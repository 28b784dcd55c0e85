"""The Makefile, downloads, and finding a model to use."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace

import pytest

from common.secret import SECRET_VARIABLE
from experiments.commands.agent_check import agent_check
from experiments.commands.ask import asked_task
from experiments.commands.cli import build_parser, split_overrides
from experiments.commands.models import evaluate, find_model
from experiments.commands.servers import SERVER_OPTIONS, server_options
from experiments.launch import runner
from experiments.launch.shared_secret import FILE
from experiments.registry.errors import ExperimentError
from experiments.registry.project import ROOT, Project
from experiments.stages.context import Node, RunContext
from experiments.stages.store import StageFolder
from retrieval import server
from rollout.engines.weights.files import PREFIX, SHARED_MEMORY
from rollout.trajectory import Task
from tests.processes import gone_within

# The tests themselves run under `make test`, whose flags and level an inner make would take over.
OUTSIDE = {
    name: value
    for name, value in os.environ.items()
    if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS")
}


def make(*words):
    command = ["make", "-n", "--no-print-directory", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=OUTSIDE)
    return [line for line in done.stdout.splitlines() if "setup.sh" not in line]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train"], "train dgpo_tiny --compare"),
        (["train", "EXP=arpo_tiny", "COMPARE=1"], "train arpo_tiny --compare"),
        (["train", "EXP=kd_tiny", "SEED=2", "RESUME=last"], "train kd_tiny --seed 2 --resume last"),
        (["train", "FRESH=1", "ARGS=--model.kl_coef 0.01"], "train dgpo_tiny --compare --fresh --model.kl_coef 0.01"),
        (
            ["train", "LAUNCH=slurm", "NPROC=8", "TIME=1:00"],
            'train dgpo_tiny --compare --launch slurm --processes 8 --sbatch="--time=1:00"',
        ),
        (["evaluate", "CKPT=a b.ckpt"], 'evaluate dgpo_tiny --checkpoint "a b.ckpt"'),
        (["ask", "Q=Who wrote it?"], 'ask dgpo_tiny --question "$Q"'),
        (["retriever", "EXP=x", "ARGS=--threads 8 --gpu"], "retriever x --port 8000 --threads 8 --gpu"),
        (["engine", "PORT=8101", "CKPT=a b"], 'engine-server dgpo_tiny --port 8101 --checkpoint "a b"'),
        (["preconditions", "EXP=x", "QUESTIONS=9", "ALLOW=a,b"], "preconditions x --questions 9 --allow a,b"),
        (["clean", "ALL=1"], "clean --all"),
        (["clean", "ALL=0", "FORCE=0"], "clean"),
        (["train", "FRESH=0", "COMPARE=0"], "train dgpo_tiny"),
        (["evaluate", "TRUST=0"], "evaluate dgpo_tiny"),
        (["export", "PUBLIC=0", "TRUST=0"], "export dgpo_tiny"),
        (["clean", "FORCE=1", "COMPACT_AGENTS_OUTPUTS=x"], "clean --force"),
        (["compare", "EXPS=a b", "ARGS=--paths.outputs x"], "compare a b --paths.outputs x"),
        (["experiments", "LIKE=sod", "HARDWARE=cpu"], 'list --like "sod" --hardware "cpu"'),
        (["export", "CKPT=last", "TO=a b"], 'export dgpo_tiny --checkpoint "last" --to "a b"'),
    ],
)
def test_make_passes_on_what_it_is_given(words, command):
    [line] = make(*words)
    assert " ".join(line.split()) == f".venv/bin/python -m experiments {command}"


@pytest.mark.parametrize(
    ("word", "said"),
    [("exp=x", "exp; did you mean EXP?"), ("FRSH=1", "FRSH; did you mean FRESH?"), ("Z=1", "Z; valid: EXP")],
)
def test_make_refuses_variables_that_mean_nothing(word, said):
    done = subprocess.run(["make", "-n", "train", word], cwd=ROOT, capture_output=True, text=True, env=OUTSIDE)
    assert done.returncode == 2 and not done.stdout
    [line] = done.stderr.splitlines()
    assert f"unknown variable {said}" in line


def test_every_variable_of_the_makefile_can_be_given():
    text = (ROOT / "Makefile").read_text()
    listed = set(text.split("VARIABLES :=")[1].split("ENVIRONMENT")[0].replace("\\", "").split())
    used = set(re.findall(r"\$\((?:or |if )?(?:\$\()?([A-Z_]+)\b", text))
    own = set(re.findall(r"^([A-Z_]+) :?=", text, flags=re.MULTILINE)) | {"MAKEFILE_LIST"}
    assert used - own <= listed, used - own - listed


def test_make_alone_prints_help_and_sets_nothing_up():
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("setup", "train", "evaluate", "test", "retriever", "compare", "ui", "export", "experiments", "ask"):
        assert f"  {target} " in done.stdout
    assert "setting up" not in done.stdout


def test_retriever_hands_through_every_option_of_the_server():
    taken_by_us = {"index", "port", "gpu"}
    between_processes = {"parent", "listen_fd", "ready_fd", "help"}
    theirs = {action.dest for action in server.build_parser()._actions} - between_processes
    assert {name.replace("-", "_") for name in SERVER_OPTIONS} | taken_by_us == theirs
    words = "--host 0.0.0.0 --threads 8 --device cpu --topk 5 --k1 1.2 --java-heap 2g --gpu".split()
    ours, overrides = split_overrides(["retriever", "x", *words])
    assert not overrides
    passed = server.parse_arguments(["--index", "i", *server_options(build_parser().parse_args(ours))])
    assert (passed.host, passed.threads, passed.device, passed.topk) == ("0.0.0.0", 8, "cpu", 5)
    assert (passed.k1, passed.java_heap, passed.gpu, passed.b) == (1.2, "2g", True, None)


def test_a_server_that_other_machines_reach_has_the_secret_of_the_outputs(run_here, workshop, monkeypatch):
    served = []
    seen = lambda command, *_: served.append((command, os.environ.get(SECRET_VARIABLE)))  # noqa: E731
    monkeypatch.setattr("experiments.commands.servers.serve", seen)
    words = ["retriever", "any", "--backend", "mine.yaml", "--port", "0"]
    assert run_here(*words).returncode == 0 and run_here(*words, "--host", "127.0.0.1").returncode == 0
    there = [*words, "--host", "0.0.0.0"]
    assert run_here(*there, "--secret-file", "mine").returncode == 0
    assert [secret for _, secret in served] == [None] * 3 and served[2][0][-2:] == ["--secret-file", "mine"]
    done = run_here(*there)
    command, secret = served[-1]
    path = workshop.project.outputs / FILE
    assert secret == path.read_text() and secret not in " ".join(command) + done.stdout + done.stderr
    assert f"clients must have {SECRET_VARIABLE} from {path}, as runs with these outputs have" in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(
        r"compact-agents \d+\.\d+\.\d+ \(commit (unknown|[0-9a-f]{40}(\+changes)?)\)\n", capsys.readouterr().out
    )


def test_overrides_are_told_from_our_own_options():
    words = "dgpo_tiny --seed 1 --model.kl_coef 0.01 --fresh --trainer.max_steps=3 --config f.yaml --seed_everything 4"
    ours, theirs = split_overrides(words.split())
    assert ours == ["dgpo_tiny", "--seed", "1", "--fresh"]
    assert " ".join(theirs) == "--model.kl_coef 0.01 --trainer.max_steps=3 --config f.yaml --seed_everything 4"


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"python3.11": "none", "python3.12": "3.12", "python3": "3.13"}, "takes python3.12"),
        ({"python3": "3.13"}, "3.11 or 3.12 is needed; found: python3 is Python 3.13.0. Install one"),
        ({"python3.12": "without venv"}, "found: python3.12 without venv (Ubuntu: apt-get install python3.12-venv)"),
    ],
)
def test_set_up_finds_a_python(tmp_path, there, said):
    for name, version in there.items():
        answers = {"none": "exit 127", "without venv": 'case "$*" in *ensurepip*) exit 1;; esac'}
        right = "0" if version in ("3.11", "3.12") else "1"
        default = f'case "$*" in *version_info*) exit {right};; *--version*) echo Python {version}.0;; esac'
        (tmp_path / name).write_text(f"#!/bin/sh\n{answers.get(version, default)}\n")
        (tmp_path / name).chmod(0o755)
    script = 'fail() { echo "$1"; exit 1; }; . scripts/find_python.sh; find_python; echo takes $PYTHON'
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run(
        [shutil.which("bash"), "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert said in done.stdout, done.stdout + done.stderr


SERVER = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print("serving", child.pid, flush=True)
child.wait()
"""
SERVE = """
import sys
from types import SimpleNamespace
from experiments.commands.command import serve
serve([sys.executable, "-c", sys.argv[1]], "toy server", SimpleNamespace(project=SimpleNamespace(root=".")))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_served_command_leaves_nothing_behind(number):
    command = [sys.executable, "-c", SERVE, SERVER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        below = int(serving.stdout.readline().split()[1])
        serving.send_signal(number)
        assert serving.wait(timeout=300) == 0
        assert gone_within(below)


ANSWERS_LATER = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words): ...
time.sleep(0.5)
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Health)
print("listens", flush=True)
server.serve_forever()
"""


SERVE_AND_TELL = """
import sys
from types import SimpleNamespace
from experiments.commands.command import answers, serve
context = SimpleNamespace(project=SimpleNamespace(root="."))
toy, port = sys.argv[1:]
serve([sys.executable, "-c", toy, port], "toy", context, ready=lambda: answers(int(port)), words="address\\n")
"""


def test_an_address_is_printed_when_it_answers_and_not_before():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-c", SERVE_AND_TELL, ANSWERS_LATER, str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as serving:
        assert [serving.stdout.readline() for _ in range(2)] == ["listens\n", "address\n"]
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(timeout=300) == 0


def test_only_models_are_taken_for_models(workshop, tmp_path):
    workshop.task("x")
    context = RunContext(workshop.project, "x", (), None)
    with pytest.raises(ExperimentError, match="'x' .* not been made yet; it has no other run: run make train EXP=x f"):
        find_model(context, None)
    with pytest.raises(ExperimentError, match="no checkpoint at /nowhere"):
        find_model(context, "/nowhere")
    with pytest.raises(ExperimentError, match="expected a .ckpt or a Hugging Face folder"):
        find_model(context, str(tmp_path))
    shards = tmp_path / "sharded.ckpt"
    (shards / "checkpoint").mkdir(parents=True)
    context = replace(context, verb="evaluate")
    with pytest.raises(
        ExperimentError, match="pickles, which can run code .*: make evaluate EXP=x CKPT=.*sharded.ckpt TRUST=1$"
    ):
        find_model(context, str(shards))
    assert find_model(context, str(shards), trust=True) == shards
    context = replace(context, verb="train")
    ours = context.project.outputs / "toy" / "last.ckpt"
    (ours / "checkpoint").mkdir(parents=True)
    assert find_model(context, str(ours)) == ours
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert find_model(context, str(tmp_path)) == tmp_path / "model"


def test_the_model_of_a_run_is_found_by_the_overrides_it_was_made_with(workshop):
    workshop.task("x", "text: a")
    plain, overridden = workshop.graph("x").target().folder, workshop.graph("x", "--task.text", "b").target().folder
    for folder in (plain, overridden):
        context = RunContext(workshop.project, "x", ("--task.text", "b"), None)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text("{}")
        assert find_model(context, None) == folder / "model"


def test_an_experiment_of_kind_test_has_the_model_that_it_tests(workshop, tmp_path):
    (tmp_path / "released").mkdir()
    (tmp_path / "released" / "config.json").touch()
    model = f"{{class_path: tests.experiments.toy_modules.Walk, init_args: {{policy: {tmp_path}/released}}}}"
    data = "{class_path: data_modules.evaluation_data.EvaluationData}"
    workshop.write("x", f"experiment: {{kind: test}}\nmodel: {model}\ndata: {data}\n")
    assert find_model(RunContext(workshop.project, "x", (), None), None) == tmp_path / "released"


def test_how_a_released_model_is_had_is_said_before_it_is_missed(workshop):
    needs = "{released: {path: models/released, how: make download EXP=x}}"
    model = "{class_path: tests.experiments.toy_modules.Walk, init_args: {policy: models/released}}"
    data = "{class_path: data_modules.evaluation_data.EvaluationData}"
    workshop.write("x", f"experiment: {{kind: test, needs: {needs}}}\nmodel: {model}\ndata: {data}\n")
    with pytest.raises(ExperimentError, match=r"needs: models/released \(make download EXP=x\)"):
        evaluate(Namespace(checkpoint=None, trust=False), RunContext(workshop.project, "x", (), None))


def test_agent_check_reads_what_it_is_given_before_a_model_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.commands.agent_check.start", None)
    given = ("--paths.questions", str(tmp_path / "none.parquet"), "--paths.model", str(tmp_path))
    context = RunContext(Project(), "my_grpo", given, None)
    (tmp_path / "last.ckpt").touch()
    program = "{class_path: rollout.programs.functions.FunctionProgram, init_args: {function: a.b}}"
    checked = replace(context, arguments=(*given, f"--data.rollouts.program={program}"))
    with pytest.raises(ExperimentError, match="is no model folder; make one of it first: make export EXP=my_grpo"):
        agent_check(Namespace(checkpoint=str(tmp_path / "last.ckpt"), question="why?"), checked)


def test_a_question_that_is_asked_is_put_as_the_data_set_puts_its_own():
    assert asked_task(" who? ", None) == Task("asked", "who?", (), "asked")
    example = Task("q1", "where is it?", (), "nq", prompt=(("user", "Think. Question: where is it?\n"),))
    assert asked_task("who was she", example).prompt == (("user", "Think. Question: who was she?\n"),)
    with pytest.raises(ExperimentError, match="q1 does not contain its question"):
        asked_task("who?", replace(example, prompt=(("user", "Think."),)))
    with pytest.raises(ExperimentError, match="the question is empty"):
        asked_task("  ", None)


def test_commands_are_named_as_they_were_typed(workshop):
    context = RunContext(workshop.project, "x", ("--model.kl_coef", "0.01"), 3)
    assert context.resume_command() == 'make train EXP=x SEED=3 RESUME=last ARGS="--model.kl_coef 0.01"'
    whole = replace(context, arguments=(), seed=None, compare=True)
    assert whole.resume_command() == "make train EXP=x COMPARE=1 RESUME=last" and whole.flags() == ["x", "--compare"]
    evaluation = replace(context, arguments=(), verb="evaluate", variables=("CKPT=a.ckpt",))
    assert evaluation.resume_command() == "make evaluate EXP=x CKPT=a.ckpt SEED=3", (
        "a test has nothing to continue from"
    )
    of_four = Node(count=4, rank=0, address="host0", port=29500, timeout_s=600)
    launched = replace(context, arguments=("--trainer.num_nodes=4",), variables=("LAUNCH=torchrun",), node=of_four)
    said = "make train EXP=x LAUNCH=torchrun SEED=3 MASTER_ADDR=host0 {}RESUME=last ARGS=--trainer.num_nodes=4 ({})"
    others = "and with NODE_RANK=1 to 3 on the other nodes"
    assert launched.resume_command() == said.format("MASTER_PORT=29500 ", others)
    assert replace(launched, node=replace(of_four, port=29400)).resume_command() == said.format("", others)
    assert "MASTER" not in replace(launched, node=replace(of_four, count=1)).resume_command()
    assert "MASTER" not in launched.command(), "what is recorded with a result names no machine"


@pytest.mark.slow
def test_a_command_leaves_no_temporary_file_and_removes_what_a_killed_run_left(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, ours = (SHARED_MEMORY / f"{PREFIX}{pid}-abcdefgh.safetensors" for pid in (dead.pid, os.getpid()))
    left.touch()
    ours.touch()
    words = [sys.executable, "-m", "experiments", "list"]
    subprocess.run(words, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL, check=True)
    assert not list(tmp_path.iterdir()) and not left.exists() and ours.exists()
    ours.unlink()


def made(workshop, name, *overrides, seed=None):
    """A run that is done, without its process."""
    context = RunContext(workshop.project, name, overrides, seed)
    stage = workshop.graph(name, *overrides, seed=seed).target()
    store = StageFolder(stage.folder)
    store.prepare(stage, {"command": context.command(), "arguments": [], "upstream": {}}, keep=False)
    store.finish({"seed": stage.config["seed_everything"], "seconds": 1.0, "kind": "task", "finished": 1.0})
    return context, stage


def test_a_run_that_is_missing_is_told_beside_those_that_are_there(workshop):
    workshop.task("a", "text: x")
    context, stage = made(workshop, "a", "--task.text=it's $5", seed=3)
    other = workshop.graph("a", seed=3).target()
    asked = replace(context, arguments=())
    with pytest.raises(ExperimentError) as caught:
        runner.folder_of(asked, other)
    said = f'1 other is there: {stage.key} (done: task.text "it\'s $5"): run make train EXP=a SEED=3 first'
    assert str(caught.value).endswith(f"has not been made yet; {said}")
    # The command of a stage below has the overrides that reach it, and no others.
    workshop.task("b", "source: '${stage:a}'")
    below = RunContext(workshop.project, "b", ("--task.text=t", "--stages.a.task.text=u v", "--paths.x=1"), 3)
    hint = below.for_stage(workshop.graph("b", *below.arguments, seed=3).target().upstream[0]).command()
    assert hint == """make train EXP=a SEED=3 ARGS="--paths.x=1 '--task.text=u v'\""""


def test_a_stage_is_made_from_the_beginning_with_the_launcher_and_the_gates_of_its_run(workshop):
    workshop.task("a", "text: x")
    model = "{class_path: m.A, init_args: {policy: '${stage:a}'}}"
    workshop.write("b", f"experiment: {{kind: fit}}\nmodel: {model}\ndata: {{class_path: d.A}}")
    words = ("--trainer.num_nodes=2",)
    node = Node(count=2, rank=0, address="host0", port=29400, timeout_s=600)
    context = RunContext(workshop.project, "b", words, None, variables=("LAUNCH=torchrun", "ALLOW=g"), node=node)
    target = workshop.graph("b", *words).target()
    said = context.for_stage(target).on_all_nodes(FRESH=1)
    assert said == (
        "make train EXP=b LAUNCH=torchrun ALLOW=g MASTER_ADDR=host0 FRESH=1 ARGS=--trainer.num_nodes=2 "
        "(and with NODE_RANK=1 on the other node)"
    )
    assert context.for_stage(target.upstream[0]).on_all_nodes(FRESH=1) == "make train EXP=a LAUNCH=torchrun FRESH=1"


def test_status_counts_the_runs_with_other_settings_and_seeds(workshop, run_here):
    workshop.task("a", "text: x")
    _, first = made(workshop, "a", "--task.text=y")
    _, second = made(workshop, "a", seed=7)
    lines = run_here("status", "a").stdout.splitlines()
    assert "a: 1 stage, 0 done, 1 to make" in lines and "  with other settings or seeds: 2 runs" in lines
    assert f'  a  {first.key} (done: task.text "y")' in lines
    assert f"  a  {second.key} (done: seed_everything 7)" in lines


def test_hints_after_training_work_for_the_run_that_was_trained(workshop):
    """Settings, seed and outputs are in them."""
    context = RunContext(workshop.project, "a", ("--model.lr=1", "--paths.outputs=/large disk"), 4)
    assert context.elsewhere("ui") == """make ui ARGS="'--paths.outputs=/large disk'\""""
    ask = context.command("ask", Q="...")
    assert ask == """make ask EXP=a SEED=4 Q=... ARGS="--model.lr=1 '--paths.outputs=/large disk'\""""
