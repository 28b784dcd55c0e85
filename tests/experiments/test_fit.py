"""A stage of kind fit: trained, tested, killed, continued, evaluated. Over a toy module, through the command line."""

import json
import os
import signal
import time

import pytest
import torch

from experiments.store import StageFolder

FIT = """
experiment: {{kind: fit, summary: a toy}}
seed_everything: 4
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  use_distributed_sampler: false
  callbacks:
    resume: {{class_path: callbacks.resume.IterationCheckpoint}}
model: {{class_path: tests.experiments.toy_modules.Walk, init_args: {{pause_at: {pause_at}}}}}
data: {{class_path: tests.experiments.toy_modules.Noise, init_args: {{batches: 12}}}}
"""


def wait_for(path, seconds=120):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)


def weights(folder):
    return torch.load(folder / "final.pt")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    from tests.experiments.conftest import Workshop

    workshop = Workshop(tmp_path_factory.mktemp("fit"))
    workshop.write("toy", FIT.format(pause_at="null"))
    done = workshop.run("train", "toy")
    return workshop, done


def test_fit_then_test_then_result(uninterrupted):
    workshop, done = uninterrupted
    assert "Traceback" not in done.stdout, done.stdout
    stage = workshop.graph("toy").target()
    result = StageFolder(stage.folder).result()
    assert result["test"]["em"]["mean"] == pytest.approx(float(weights(stage.folder)["walk"].sum()))
    assert result["seed"] == 4 and result["versions"]["torch"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_and_continued_ends_with_the_same_weights(uninterrupted, workshop, how):
    reference, _ = uninterrupted
    marker = workshop.folder / "paused"
    workshop.write("toy", FIT.format(pause_at=str(marker)))
    process = workshop.start("train", "toy")
    wait_for(marker)
    stage = workshop.graph("toy").target()
    if how == signal.SIGKILL:
        os.kill(int(marker.read_text()), how)  # the stage's process, in the middle of an iteration
    else:
        process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (1 if how == signal.SIGKILL else 130)
    assert "RESUME=last" in err
    assert StageFolder(stage.folder).state() == "interrupted"

    continued = workshop.run("train", "toy", "--resume", "last")
    assert "continuing from" in continued.stdout, continued.stderr
    ours, theirs = weights(stage.folder), weights(reference.graph("toy").target().folder)
    assert torch.equal(ours["walk"], theirs["walk"])
    assert json.loads((stage.folder / "steps.json").read_text()) == 12
    assert StageFolder(stage.folder).result()["sessions"] == 2


def test_a_checkpoint_can_be_evaluated_and_another_models_cannot(uninterrupted, tmp_path):
    workshop, _ = uninterrupted
    stage = workshop.graph("toy").target()
    other = tmp_path / "other.ckpt"
    checkpoint = torch.load(stage.folder / "checkpoints" / "last.ckpt", weights_only=False)
    checkpoint["state_dict"] = {"walk": torch.zeros(3)}
    torch.save(checkpoint, other)
    wrong = workshop.run("evaluate", "toy", "--checkpoint", str(other))
    assert wrong.returncode == 1 and "size mismatch for walk" in wrong.stdout
    missing = workshop.run("evaluate", "toy", "--checkpoint", "nowhere.ckpt")
    assert missing.returncode == 2 and "no checkpoint at nowhere.ckpt" in missing.stderr
