"""A stage of kind fit: trained, tested, killed, continued, evaluated. Over a toy module, through the command line."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from experiments.registry.project import ROOT
from experiments.stages.store import StageFolder

pytestmark = pytest.mark.slow  # starts trainers
FIT = """
experiment: {kind: fit, summary: a toy, reproduces: em .5}
seed_everything: 4
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  use_distributed_sampler: false
  callbacks:
    resume: {class_path: callbacks.training.resume.IterationCheckpoint}
model: {class_path: tests.experiments.toy_modules.Walk}
data: {class_path: tests.experiments.toy_modules.Noise, init_args: {batches: 12}}
"""


def wait_for(path, process, seconds=300):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)


def uninterrupted_walk():
    """The weights that an uninterrupted run ends with."""
    import lightning as L

    from tests.experiments.toy_modules import Noise, Walk

    L.seed_everything(4, verbose=False)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, **options)
    module = Walk()
    trainer.fit(module, datamodule=Noise(12))
    return module.walk.detach()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A fit stage: its process terminated in iteration 4, continued, stopped by Ctrl-C in iteration 7, continued, its
    process killed in iteration 10, continued to its end from the checkpoint before the last, of which a bit was
    flipped meanwhile."""
    from tests.experiments.conftest import Workshop

    workshop = Workshop(tmp_path_factory.mktemp("fit"))
    workshop.write("toy", FIT)
    store = StageFolder(workshop.graph("toy").target().folder)
    said = []
    for step, how in ((4, signal.SIGTERM), (7, signal.SIGINT), (10, signal.SIGKILL)):
        process = workshop.start("train", "toy", env=workshop.environment() | {"TOY_PAUSE": str(step)})
        marker = store.path / f"paused-{step}"
        wait_for(marker, process)
        os.kill(process.pid if how == signal.SIGINT else int(marker.read_text()), how)
        said.append((process.communicate(timeout=120)[1], process.returncode, store.state()))
    damaged = store.checkpoint.resolve()
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    last = workshop.run("train", "toy", "--resume", "last")
    assert f"{damaged.name} has SHA-256" in last.stdout and ".ckpt is used instead" in last.stdout, last
    return workshop, store, said, last


def test_stopping_says_how_to_continue(fitted):
    for (said, code, state), expected in zip(fitted[2], (130, 130, 1), strict=True):
        assert code == expected and state == "interrupted", said
        assert "make train EXP=toy RESUME=last" in said


def test_a_run_stopped_and_killed_ends_with_the_weights_of_an_uninterrupted_one(fitted):
    _, store, _, last = fitted
    assert last.returncode == 0 and "continuing from" in last.stdout, last.stdout + last.stderr
    assert json.loads((store.path / "steps.json").read_text()) == 12
    assert "RESUME=last: no stage" not in last.stdout
    assert torch.equal(torch.load(store.path / "final.pt")["walk"], uninterrupted_walk())


def test_strategies_go_by_their_names():
    """In a process of its own: where sharding.strategies was imported, the names are known already."""
    config = {
        "experiment": {"kind": "fit"},
        "trainer": {"accelerator": "cpu", "strategy": {"class_path": "lightning_modules.sharding.strategies.ZeRO2"}},
        "model": {"class_path": "tests.experiments.toy_modules.Walk"},
        "data": {"class_path": "tests.experiments.toy_modules.Noise"},
    }
    code = (
        "from experiments.stages.parser import cli\n"
        f"parsed = cli({config!r}, ['--trainer.strategy', 'zero3'], 'here', instantiate=True)\n"
        "print(type(parsed.trainer.strategy).__name__, parsed.trainer.strategy.config['communication_data_type'])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # the parser changes the directory for a moment
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1:] == ["ZeRO3 fp32"], done.stderr


def test_the_result_holds_what_was_tested(fitted):
    _, store, _, last = fitted
    result = store.result()
    assert result["test"]["em"]["mean"] == pytest.approx(float(torch.load(store.path / "final.pt")["walk"].sum()))
    assert result["seed"] == 4 and result["versions"]["torch"] and result["sessions"] == 4
    assert "toy" in last.stdout and "evaluation.json" in last.stdout
    assert "published, toy: em .5" in last.stdout, "the number to meet stands under the measured one"


def test_a_checkpoint_can_be_evaluated_and_another_models_cannot(fitted, tmp_path):
    workshop, store, *_ = fitted
    other = tmp_path / "other.ckpt"
    checkpoint = torch.load(store.path / "checkpoints" / "last.ckpt", weights_only=False)
    checkpoint["state_dict"] = {"walk": torch.zeros(3)}
    torch.save(checkpoint, other)
    wrong = workshop.run("evaluate", "toy", "--checkpoint", str(other))
    assert wrong.returncode == 1 and "size mismatch for walk" in wrong.stdout
    missing = workshop.run("evaluate", "toy", "--checkpoint", "nowhere.ckpt")
    assert missing.returncode == 2 and "no checkpoint at nowhere.ckpt" in missing.stderr
