"""The worker's side of a server, in vLLM's own engine: a load that broke off leaves nothing to the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rollout.engines.weights.files import WeightFiles
from tests.rollout.engines.conftest import random_prompts

SCRIPT = """
import json, sys
from vllm import EngineArgs, LLMEngine, SamplingParams
from rollout.engines.vllm_backend import _prepare_cpu
from rollout.engines.vllm_servers.flags import FILES
from rollout.engines.weights.files import WeightFiles

folder, prompt, paths = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
engine = LLMEngine.from_engine_args(EngineArgs(
    model=folder, dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 28, disable_log_stats=True,
    worker_extension_cls="rollout.engines.vllm_servers.worker.ServedWorker",
    weight_transfer_config={"backend": FILES}, **_prepare_cpu(256),
))
whole = WeightFiles.tensors

def half(self, skip=()):
    for name, tensor in whole(self, skip):
        if "up_proj" in name or "k_proj" in name:  # the other part of a layer that vLLM fuses
            raise OSError("the file has gone")
        yield name, tensor

def load():
    engine.collective_rpc("end_broken_update")
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", args=({"paths": paths},))
    engine.collective_rpc("finish_weight_update")

WeightFiles.tensors = half
try:
    load()
except Exception as error:  # vLLM's own, around ours
    print("broke:", *str(error).splitlines())
WeightFiles.tensors = whole
load()
engine.reset_prefix_cache()
engine.add_request("0", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            print(json.dumps(list(output.outputs[0].token_ids)))
"""


@pytest.mark.slow
def test_a_load_that_broke_off_leaves_nothing_to_the_next_one(model_dir, other_reference):
    (prompt,) = random_prompts(1, seed=3, longest=20)
    weights = dict(other_reference.weights())
    order = sorted(weights, key=lambda name: ("up_proj" in name or "k_proj" in name, name))
    files = WeightFiles.write((name, weights[name]) for name in order)
    try:
        environment = os.environ | {"PYTHONPATH": ".", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [sys.executable, "-c", SCRIPT, str(model_dir), json.dumps(prompt), json.dumps(files.paths)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    finally:
        files.remove()
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert any(line.startswith("broke:") and "the file has gone" in line for line in said), said[-5:]
    ids = json.loads(said[-1])
    logprobs = other_reference.logprobs(prompt, tuple(ids))
    gaps = logprobs.amax(1) - logprobs[range(16), ids]
    assert gaps.max() < 1e-3, "each is the likeliest, but for a tie within rounding, which depends on the processor"
