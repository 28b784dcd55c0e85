"""One iteration of the papers' recipes on random models of the published shapes, on a processor.

    .venv/bin/python -m tests.end_to_end.true_shapes grpo_qwen3_0.6b sod_qwen3_0.6b [--dtype bfloat16] [--ranks 2]

A recipe stays as it is, but for lengths, files, ranks and what a processor lacks. The model has the published
config.json (of Llama 4 of 16 layers), the published chat template, and control tokens with the published ids; it was
taught a single tool call, so that the tool runs and its result is read. Rewards differ by the sampled ids, so that no
gradient is zero. Needs some 20 GB of memory and 5 minutes a recipe; the test
takes 4 of the layers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from experiments.worlds.tokenizer_training import TAG_TOKENS, train_tokenizer
from rollout.trajectory import Reward, Task, Trajectory

ROOT = Path(__file__).parents[2]

TOOL_CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'
SEARCH = "<think>Where?</think> <search>old tower</search>"
QWEN_CONTROL = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<tool_call>": 151657,
    "</tool_call>": 151658, "<tool_response>": 151665, "</tool_response>": 151666, "<think>": 151667,
    "</think>": 151668,
}  # fmt: skip
LLAMA_CONTROL = {
    "<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|start_header_id|>": 128006, "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008, "<|eot_id|>": 128009, "<|python_tag|>": 128010,
}  # fmt: skip
# Llama-3.2-1B-Instruct's config.json, but for the layers: 16
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128_256,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    shape: str  # of shapes.MODELS, or "llama"
    template: str  # of tests/rollout/templates
    call: str  # what the model is taught to write
    end: str  # the token after it
    options: tuple[str, ...]  # FOLDER is where models and questions lie


SEARCHES = ("--data.rollouts.environment.tools.search=benchmarks.gpu.searches.SlowSearch",
            "--data.rollouts.environment.tools.search.median_s=0.01")  # fmt: skip
POLICY = ("--model.policy=FOLDER/model", "--paths.base=FOLDER/model")
QUESTIONS = ("--paths.questions=FOLDER", "--paths.retriever=RETRIEVER")
SOD = (
    *POLICY,
    "--data.prompts=as_given",
    "--paths.rl=FOLDER",
    "--paths.benchmarks=FOLDER",
    "--paths.teacher=FOLDER/model",
)
ARPO = (*POLICY, "--paths.arpo=FOLDER", "--paths.benchmarks=FOLDER", "--values.system=arpo")
RECIPES = {
    "grpo_qwen3_0.6b": Recipe("qwen3-0.6b", "qwen3", TOOL_CALL, "<|im_end|>", SOD),
    "sod_qwen3_0.6b": Recipe("qwen3-0.6b", "qwen3", TOOL_CALL, "<|im_end|>", SOD),
    "dgpo_qwen2.5_0.5b": Recipe(
        "qwen2.5-0.5b", "qwen2_5", SEARCH, "<|im_end|>",
        ("--model.policy=FOLDER/model", "--paths.student=FOLDER/model", "--paths.teacher=FOLDER/model", *QUESTIONS,
         *SEARCHES),
    ),
    "sdar_qwen2.5_3b_search": Recipe("qwen2.5-0.5b", "qwen2_5", SEARCH, "<|im_end|>", (*POLICY, *QUESTIONS, *SEARCHES)),
    "arpo_llama3.1_8b": Recipe("llama", "llama3_2", SEARCH, "<|eot_id|>", (*ARPO, *SEARCHES)),
}  # fmt: skip
COMMON = (
    "--trainer.accelerator=cpu",
    "--trainer.val_check_interval=1",
    "--trainer.callbacks.weight_sync.probe=true",
    "--trainer.callbacks.turn_divergence=null",
    "--trainer.callbacks.export=null",
    "--trainer.callbacks.resume=null",
    "--trainer.enable_checkpointing=false",  # else Lightning's own: 7 GB
    "--data.train_files=[FOLDER/questions.parquet]",
    "--data.val_files=[]",
    "--data.test_files=[]",
    "--data.iterations=1",
    "--data.prompts_per_iteration=2",
    "--data.max_prompt_tokens=768",
    "--data.rollouts.engine.max_length=1280",
    "--data.rollouts.engine.kv_cache_bytes=600000000",  # two sequences of 28 layers in float32
    "--data.rollouts.max_turns=2",
    "--data.rollouts.max_turn_tokens=48",
    "--data.rollouts.max_observation_tokens=96",
    "--data.rollouts.max_response_tokens=256",
    "--data.rollouts.reward=tests.end_to_end.true_shapes.DifferingReward",
    "--model.num_mini_batches=1",
    "--model.logits_chunk=256",
    "--model.liger=false",
    "--model.warmup_steps=0",
    "--model.lr=1e-4",  # one step is to be seen in the weights
)


class DifferingReward:
    """A share that depends on every sampled id, so that members of a group differ wherever their tokens do."""

    def score(self, trajectory: Trajectory) -> Reward:
        sampled = [t for t, mine in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if mine]
        return Reward(hash(tuple(sampled)) % 1000 / 1000, {})  # of integers the hash is the same in every process


def make_tokenizer(folder: Path, template: str, control: dict[str, int]) -> Any:
    """The published control tokens at the published ids above a small BPE; the entries between are never text."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    small = train_tokenizer([TOOL_CALL, SEARCH, (ROOT / "README.md").read_text()], vocab_size=1000)
    parts = json.loads(small.backend_tokenizer.to_str())
    parts["added_tokens"] = []
    entries = parts["model"]["vocab"]
    for number in range(len(entries), min(control.values())):
        entries[f"<unused {number}>"] = number
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    names = {number: name for name, number in control.items()}
    for number in range(min(names), max(names) + 1):
        name = names.get(number, f"<|reserved_{number}|>")
        tokenizer.add_tokens([AddedToken(name, special=name not in TAG_TOKENS, normalized=False)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>" if "<|im_end|>" in control else "<|eot_id|>",
        pad_token="<|endoftext|>" if "<|endoftext|>" in control else "<|end_of_text|>",
        bos_token="<|begin_of_text|>" if "<|begin_of_text|>" in control else None,
        chat_template=(ROOT / "tests" / "rollout" / "templates" / f"{template}.jinja").read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )
    assert {name: made.convert_tokens_to_ids(name) for name in control} == control
    made.save_pretrained(folder)
    return made


def make_model(folder: Path, name: str, layers: int | None = None) -> None:
    """Random weights in the published shape; the last two layers learn the call after the prompt of the recipe.
    ``layers``: instead of the published number."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from experiments.registry.shapes import MODELS

    recipe = RECIPES[name]
    tokenizer = make_tokenizer(folder, recipe.template, LLAMA_CONTROL if recipe.shape == "llama" else QWEN_CONTROL)
    config = LLAMA if recipe.shape == "llama" else MODELS[recipe.shape]
    config = config if layers is None else config | {"num_hidden_layers": layers}
    torch.manual_seed(0)
    full = AutoConfig.for_model(**config, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=32768)
    model = AutoModelForCausalLM.from_config(full, dtype=torch.float32)
    said = tokenizer.encode(recipe.call + recipe.end, add_special_tokens=False)
    ids = torch.tensor([[*prompt_ids(name, folder), *said]])
    *_, before, last = model.model.layers
    read: list[tuple[Any, Any]] = []  # what the last two layers are given, which they do not change
    hook = before.register_forward_pre_hook(lambda _, *given: read.append(given), with_kwargs=True)
    with torch.no_grad():
        model(ids[:, :-1], use_cache=False)
    hook.remove()
    [((hidden, *rest), options)] = read
    learning = [*before.parameters(), *last.parameters(), *model.model.norm.parameters()]
    optimiser = torch.optim.Adam(learning, lr=1e-3)
    for _ in range(100):
        states = last(before(hidden, *rest, **options), *rest, **options)[0, -len(said) :]
        loss = torch.nn.functional.cross_entropy(model.lm_head(model.model.norm(states)), torch.tensor(said))
        loss.backward(inputs=learning)
        optimiser.step()
        optimiser.zero_grad()
        if loss < 0.005:
            break
    assert loss < 0.5, f"the call was not learnt (loss {float(loss):.2f})"
    model.save_pretrained(folder)


def prompt_ids(name: str, folder: Path) -> list[int]:
    """As the recipe's protocol writes the first question."""
    from data_modules.datasets.questions import load_tasks
    from experiments.registry.overrides import parse
    from experiments.registry.project import Project
    from experiments.stages.graph import Graph
    from experiments.stages.parser import instantiate

    stage = Graph(Project(), name, parse(options(name, folder.parent))).target()
    protocol = instantiate(stage.config["data"]["init_args"]["rollouts"]["init_args"]["protocol"], "protocol")
    [task, *_] = load_tasks(folder.parent / "questions.parquet")
    return protocol.prompt_ids(task)


def write_questions(path: Path) -> None:
    from data_modules.datasets.questions import write_tasks

    texts = [f"Where was tower number {i} built?" for i in range(8)]
    write_tasks(path, [Task(f"q{i}", text, ("nowhere",), "nq") for i, text in enumerate(texts)])


def options(name: str, folder: Path, retriever: str = "http://127.0.0.1:8000") -> list[str]:
    words = (*COMMON, *RECIPES[name].options)
    return [word.replace("FOLDER", str(folder)).replace("RETRIEVER", retriever) for word in words]


class Silent(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering() -> Iterator[str]:
    """Address of a server that knows nothing: a recipe asks its retriever before it starts, and never again, as its
    search is ``SlowSearch``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def prepare(name: str, folder: Path, layers: int | None) -> None:
    """Model and questions, unless they are there; in a process of its own, whose memory training needs."""
    if not (folder / "model" / "config.json").exists():
        write_questions(folder / "questions.parquet")
        call = f"make_model(Path({str(folder / 'model')!r}), {name!r}, {layers})"
        code = f"from tests.end_to_end.true_shapes import *; {call}"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def run(name: str, folder: Path, dtype: str, ranks: int, samples: int = 2) -> dict[str, float]:
    """Train for one iteration by the command that a user types; what was logged of it."""
    with answering() as retriever:
        return _run(name, folder, dtype, ranks, samples, retriever)


def _run(name: str, folder: Path, dtype: str, ranks: int, samples: int, retriever: str) -> dict[str, float]:
    words = [
        *options(name, folder, retriever),
        f"--data.group_size={samples}",
        f"--data.rollouts.engine.dtype={dtype}",
        f"--trainer.devices={ranks}",
        f"--trainer.precision={'bf16-mixed' if dtype == 'bfloat16' else '32-true'}",
        *(["--trainer.strategy=auto"] if ranks == 1 else []),
    ]
    outputs = folder / "outputs"
    own = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    environment = own | {"COMPACT_AGENTS_OUTPUTS": str(outputs), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "experiments", "train", name, *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name}:\n{done.stdout[-4000:]}")
    return logged(outputs)


def logged(outputs: Path) -> dict[str, float]:
    """The last value of every metric of the newest run."""
    from mlflow import MlflowClient

    from callbacks.tracking.run_info import SQLITE

    client = MlflowClient(f"{SQLITE}/{outputs}/mlflow.db")
    experiments = [e.experiment_id for e in client.search_experiments()]
    [newest, *_] = client.search_runs(experiments, order_by=["attributes.start_time DESC"])
    return newest.data.metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", choices=list(RECIPES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, help="instead of the published number: 2 ranks with 28 need 30 GB")
    parser.add_argument("--keep", type=Path, help="folder for models and outputs, which stay")
    given = parser.parse_args()
    for name in given.recipes:
        folder = given.keep and given.keep / RECIPES[name].shape or Path(tempfile.mkdtemp())
        prepare(name, folder, given.layers)
        found = run(name, folder, given.dtype, given.ranks)
        names = (
            "train/loss_policy",
            "train/reward",
            "train/grad_norm",
            "train/tool_calls_per_trajectory",
            "weight_sync/probe_gap",
        )
        print(f"{name}, {given.dtype}, {given.ranks} ranks:", {key: found.get(key) for key in names}, flush=True)
        if given.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
