"""Shared fixtures. Environment variables are set before torch is imported anywhere."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some virtual machines advertise AMX and cannot run it
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import gc
import resource
import signal
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in its background; it is inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # a quarter of the time of importing every test goes to the search for garbage, of which there is none


def pytest_collection_finish() -> None:
    gc.freeze()  # nor does any test look through what was imported
    gc.enable()


TEXTS = [
    "<think> birthplace of Mira Voss </think>\n<search> Mira Voss birthplace </search>\n\n<information>Doc 1(Title: "
    '"Mira Voss") The birthplace of Mira Voss is Grey Harbor.\n</information>\n\n<answer> Grey Harbor </answer>',
    "Question: Where was the potter Mira Voss born?",
] * 4


def forget_ranks_seeds_and_stores() -> None:
    names = ("PL_", "MASTER_", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    names += ("MLFLOW_TRACKING_URI", "COMPACT_AGENTS_SECRET")
    for name in [name for name in os.environ if name.startswith(names)]:
        del os.environ[name]


@pytest.fixture
def file_limit():
    """A real limit on file sizes, the nearest a test can come to a full disk without a file system of its own. Without
    a size it is taken back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    set_limit = lambda size=soft: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # noqa: E731
    yield set_limit
    set_limit()


def make_model_dir(path: Path, *, seed: int = 0, hidden_size: int = 32, layers: int = 2, tie: bool = True) -> Path:
    """Write a tiny random Qwen3 with its tokenizer: a real Hugging Face folder, nothing downloaded."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from experiments.worlds.tokenizer_training import train_tokenizer

    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    config = Qwen3Config(
        vocab_size=400,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(hidden_size // 4, 32),  # vLLM's CPU attention wants a multiple of 32
        max_position_embeddings=1024,
        tie_word_embeddings=tie,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,  # peaked enough that greedy decoding is no coin toss
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def no_traces_in_the_environment():
    """What Lightning and MLflow leave there would reach later tests, and the ranks that they start."""
    forget_ranks_seeds_and_stores()
    yield
    forget_ranks_seeds_and_stores()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("teacher"), seed=1, hidden_size=48)
