"""What starting costs: the registry and the command line import nothing heavy, a dry run only what it validates."""

import subprocess
import sys

import pytest

from experiments.registry.project import ROOT

HEAVY = {"torch", "lightning", "transformers", "vllm", "deepspeed", "mlflow", "polars", "numpy"}
# For a training, never to validate one.
LATER = {
    "mlflow",
    "vllm",
    "deepspeed",
    "transformers",
    "peft",
    "scipy",
    "matplotlib",
    "pandas",
    "sympy",
}


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import experiments.commands.cli", HEAVY),
        ("from experiments.commands.cli import main; main(['dry-run', 'dgpo_tiny'])", LATER),
        pytest.param(
            "from experiments.commands.cli import main; main(['dry-run', 'sod_qwen3_0.6b'])",
            LATER,
            marks=pytest.mark.slow,
        ),
        ("from experiments.commands.cli import main; main(['dry-run', 'world_tiny'])", LATER | {"torch"}),
    ],
    ids=["command line", "dry run", "dry run with DeepSpeed", "dry run of a task"],
)
def test_what_is_not_imported(code, unwanted):
    report = f"{code}; import sys; print(sorted({unwanted!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout[-500:] + done.stderr[-500:]


@pytest.mark.slow
def test_the_fork_server_holds_no_thread_and_no_gpu():
    """A fork with a GPU's context is useless, and one with another thread's lock hangs."""
    code = (
        "import importlib, threading, torch\n"
        "from experiments.launch.fork_server import LIBRARIES\n"
        "def refuse(*args): raise AssertionError('the GPU is looked at')\n"
        "torch.cuda._lazy_init = torch.cuda.device_count = torch.cuda.is_available = refuse\n"
        "for name in LIBRARIES: importlib.import_module(name)\n"
        "print(threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1"], done.stderr[-500:]
