"""``make engine``, from the command line to a server that answers."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from experiments.registry.project import ROOT


@pytest.mark.slow
def test_an_experiments_engine_is_served_with_overrides(model_dir, tmp_path):
    words = ["dgpo_tiny", "--checkpoint", str(model_dir), "--port", "0", "--data.rollouts.engine.max_num_seqs", "2"]
    command = [sys.executable, "-m", "experiments", "engine-server", *words]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"COMPACT_AGENTS_OUTPUTS": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline().startswith(f"loading {model_dir} into rollout.engines.vllm_engine.")
        line = process.stdout.readline()
        assert line.startswith("engine ready at http://127.0.0.1:"), line
        health = json.load(urllib.request.urlopen(f"{line.split()[3]}/health", timeout=300))
        assert (health["model"], health["max_length"], health["vocab_size"]) == (str(model_dir), 1024, 400)
        assert (health["weights"], health["version"], health["refusal"]) == ("start", 0, None)
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
        assert process.wait(timeout=300) == 0  # this is how one ends it
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
        process.stderr.close()


def test_what_cannot_be_served_is_said(tmp_path):
    command = [sys.executable, "-m", "experiments", "engine-server", "dgpo_tiny", "--port", "0"]
    environment = os.environ | {"COMPACT_AGENTS_OUTPUTS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has not been made yet; it has no other run: run make train EXP=" in done.stderr
