"""``make engine``, from the command line to vLLM servers that answer."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import psutil
import pytest

from common.secret import SECRET_VARIABLE
from experiments.registry.project import ROOT
from rollout.engines.base import SamplingParams
from rollout.engines.vllm_servers.engine import VLLMServers
from tests.rollout.engines.vllm_processes import free_port


def served(*words, **environment):
    environment = {"COMPACT_AGENTS_EXPERIMENTS": str(ROOT / "tests" / "chaos" / "experiments"), **environment}
    return [sys.executable, "-m", "experiments", "engine-server", *words], os.environ | environment


@pytest.mark.slow
def test_an_experiments_engine_is_served_with_overrides(model_dir, tmp_path, monkeypatch):
    """For other machines, so with the secret of the outputs; the printed command has it nowhere."""
    port = free_port()
    words = ["dgpo_tiny", "--checkpoint", str(model_dir), "--port", str(port), "--host", "0.0.0.0"]
    words += ["--flags=--max-num-seqs 3", "--data.rollouts.engine.max_length", "200"]
    command, environment = served(*words, COMPACT_AGENTS_OUTPUTS=str(tmp_path))
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = [process.stdout.readline() for _ in range(2)]
        while said[-1] and not said[-1].startswith("vLLM serves "):
            said.append(process.stdout.readline())
        assert said[-1] == f"vLLM serves {model_dir} at http://0.0.0.0:{port} (Ctrl-C ends it)\n"
        secret = next(tmp_path.glob(".secret-*")).read_text()
        assert f"vllm serve {model_dir} --host 0.0.0.0" in said[0] and secret not in "".join(said)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/weight_info", timeout=60)
        monkeypatch.setenv(SECRET_VARIABLE, secret)

        async def main():
            engine = VLLMServers([f"http://127.0.0.1:{port}"], str(model_dir), 200)
            await engine.start()
            found = await engine.generate([1, 2, 3], SamplingParams(4, seed=1))
            await engine.close()
            return found, engine._servers[0].facts

        found, facts = asyncio.run(main())
        assert len(found.token_ids) == 4 and facts["max_length"] == 200
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
        assert process.wait(timeout=300) == 0  # this is how one ends it
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def test_what_cannot_be_served_is_said(tmp_path):
    (tmp_path / "empty").write_text("")
    for words, said in (
        (["dgpo_tiny"], "has not been made yet; it has no other run: run make train EXP="),
        (["chaos_ranks"], "VLLMServers; `vllm serve` can stand for rollout.engines.vllm_engine.VLLMEngine alone"),
        (["smoke", "--checkpoint", ".", "--secret-file", str(tmp_path / "empty")], "--secret-file: .* is empty"),
    ):
        command, environment = served(*words, "--port", "0", COMPACT_AGENTS_OUTPUTS=str(tmp_path))
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert said.split(".*")[0] in done.stderr and said.split(".*")[-1] in done.stderr


def test_flags_follow_from_the_experiment(tmp_path):
    words = ["grpo_qwen3_0.6b", "--checkpoint", "a model", "--dry", "--transport", "nccl", "--lora-rank", "32"]
    command, environment = served(
        *words, "--data.rollouts.engine.kv_cache_bytes=1000", COMPACT_AGENTS_OUTPUTS=str(tmp_path)
    )
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    said = shlex.split(done.stdout)
    pairs = dict(zip(said, said[1:], strict=False))
    assert said[said.index("vllm") :][:3] == ["vllm", "serve", "a model"] and "VLLM_SERVER_DEV_MODE=1" in said
    assert pairs["--weight-transfer-config"] == '{"backend": "nccl"}' and pairs["--max-lora-rank"] == "32"
    assert pairs["--kv-cache-memory-bytes"] == "1000" and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in said
    assert ("--enforce-eager" in said) != ("--gpu-memory-utilization" in said)


def test_a_server_ends_with_its_launcher():
    """Also if that is killed: its port would stay in use."""
    code = (
        "import subprocess, sys; from experiments.commands.command import _end_with_parent; "
        "print(subprocess.Popen(['sleep', '600'], preexec_fn=_end_with_parent).pid, flush=True); input()"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    server = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.communicate()
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
