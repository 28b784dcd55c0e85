"""An exported model behind ``vllm serve`` with its card's flags: the OpenAI client gets the call that was trained."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import Qwen3Config, Qwen3ForCausalLM

from callbacks.model_export.exporter import write_folder
from callbacks.model_export.serving import TEMPLATE
from experiments.commands.command import make_graph
from experiments.commands.export import export
from experiments.registry.project import Project
from experiments.stages.context import RunContext
from experiments.stages.store import StageFolder
from rollout.engines.base import SamplingParams
from rollout.programs.base import Model
from rollout.programs.protocol import ProgramProtocol
from rollout.programs.served_model import ServedModel
from rollout.protocols.hermes import HermesProtocol
from rollout.system import RolloutSystem
from rollout.tools.schemas import SCHEMAS
from rollout.trajectory import Task, Trajectory
from tests.rollout.chat_models import chat_model
from tests.rollout.programs.playing import Own
from tests.rollout.serving import free_port

QUESTION, PROGRAM = "How many primes are below 100?", "print(25)"
CALL = f'<tool_call>\n{{"name": "code_interpreter", "arguments": {{"code": "{PROGRAM}"}}}}\n</tool_call><|im_end|>'
FIT = """
experiment: {{kind: fit, algorithm: GRPO}}
model: {{class_path: m.A, init_args: {{policy: "{folder}"}}}}
data:
  class_path: d.A
  init_args:
    rollouts:
      class_path: rollout.system.RolloutSystem
      init_args:
        protocol:
          class_path: rollout.protocols.hermes.HermesProtocol
          init_args: {{tokenizer: "{folder}", thinking: false, tools_in: system}}
"""
SMALL = ["--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20)]
STARTS_S = 900  # three imports of vLLM, beside other tests


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[str, Qwen3ForCausalLM, list[int]]:
    """A tokenizer's folder, a model that answers one prompt by one call, and this prompt."""
    folder = chat_model(tmp_path_factory.mktemp("tokenizer"), "qwen3")
    protocol = HermesProtocol(folder, thinking=False, tools_in="system")
    prompt = protocol.prompt_ids(Task(id="0", question=QUESTION, golden_answers=(), data_source="test"))
    call = protocol.tokenizer(CALL, add_special_tokens=False)["input_ids"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(protocol.tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
                eos_token_id=protocol.tokenizer.eos_token_id, pad_token_id=protocol.tokenizer.pad_token_id,
            )
        )  # fmt: skip
    ids = torch.tensor([prompt + call])
    labels = ids.where(torch.arange(ids.shape[1]) >= len(prompt), -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(1000):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        if loss < 0.01:
            return folder, model.eval(), prompt
    pytest.fail("the model has not learnt the call")


@contextlib.contextmanager
def served(command: str, folder: Path):
    """A client of the server that ``command`` starts in ``folder``, as small as it can be."""
    port = free_port()
    # The last: without a process for the worker, which imports vLLM once more.
    local = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    words = [*shlex.split(command), "--host", "127.0.0.1", "--port", str(port), *SMALL]
    log = folder / "log"
    with log.open("w") as output:
        child = subprocess.Popen(
            words, cwd=folder, env=os.environ | local, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + STARTS_S
        while not is_ready(port):
            assert child.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=STARTS_S) as client:
            yield client
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with its engine's process
        child.wait()


def played(folder: str, client: openai.OpenAI) -> Trajectory:
    """The rollout of a program that asks the served model once."""

    async def agent(task: Task, model: Model) -> int:
        asked: list[Any] = [{"role": "user", "content": QUESTION}]
        await model.chat(messages=asked, tools=[SCHEMAS["code_interpreter"]])
        return 1

    engine = ServedModel([str(client.base_url)], client.models.list().data[0].id, timeout=STARTS_S)
    protocol = ProgramProtocol(folder, thinking=False, tools_in="system")
    system = RolloutSystem(engine, protocol, program=Own(agent), max_turns=1, max_turn_tokens=100)
    task = Task(id="0", question=QUESTION, golden_answers=(), data_source="test")
    try:
        return system.rollout([task], sampling=SamplingParams(100, temperature=0.0), seed=0)[0]
    finally:
        system.close()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.slow
def test_the_served_export_gives_the_trained_call_to_the_openai_client(workshop, trained, tmp_path, capsys):
    folder, model, prompt = trained
    workshop.write("calls", FIT.format(folder=folder))
    project = Project(root=workshop.folder, experiment_dirs=(workshop.files,), outputs=workshop.folder / "outputs")
    context = RunContext(project, "calls", (), None)
    stage = make_graph(context).target()
    store = StageFolder(stage.folder)
    store.prepare(stage, {"name": "calls"}, keep=False)
    write_folder(model, model.state_dict(), store.path / "model", folder)
    store.finish({"seconds": 1.0})
    export(Namespace(to=str(tmp_path / "export"), checkpoint=None, trust=False, dtype=None, public=False), context)

    card = ModelCard.load(tmp_path / "export" / "README.md").text
    [recorded] = [line for line in card.splitlines() if line.startswith("vllm serve export ")]
    [printed] = re.findall("to serve it: (.*)", capsys.readouterr().out)
    assert recorded.removeprefix("vllm ") in printed
    for flag in ("--tool-call-parser hermes", "--default-chat-template-kwargs", f"--chat-template export/{TEMPLATE}"):
        assert flag in recorded
    with served(printed, tmp_path) as client:
        trajectory = played(folder, client)
        ask: Any = client.chat.completions.create
        answer = ask(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": QUESTION}],
            tools=[SCHEMAS["code_interpreter"]],
            temperature=0.0,
            max_tokens=100,
            extra_body={"return_token_ids": True},
        )
    # The same model as the engine of an agent program: the row is what it would have sampled here.
    assert list(trajectory.prompt_ids) == prompt
    assert trajectory.turns[0].action.calls[0].arguments == {"code": PROGRAM}
    assert HermesProtocol(folder).decode(trajectory.response_ids) == CALL
    assert answer.prompt_token_ids == prompt, "the server shows another prompt than the rollouts"
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
    assert (call.function.name, json.loads(call.function.arguments)) == ("code_interpreter", {"code": PROGRAM})
