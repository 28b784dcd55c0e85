"""What is counted of models agrees with what transformers makes of them, and with what autograd keeps."""

import dataclasses
import json
import random
import re
import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.commands.cli import main
from experiments.registry import sizing
from experiments.registry.shapes import GB, GPU_SPECS, MODELS, Dimensions, known_model
from experiments.registry.sizing import Adapters, Run, Training
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.models.lora import LoRA, counts
from lightning_modules.models.projection import BLOCK
from tests.lightning_modules.helpers import fit, make_trajectory

PUBLISHED = {  # safetensors' count on each model's page of the Hugging Face hub
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen2.5-0.5b": 494_032_768, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "llama-3.1-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160,
    "vocab_size": 96, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip


def tiny(kind, layers=2, **changes):
    return {"model_type": kind, "num_hidden_layers": layers, **TINY, **changes}


def model_of(config, dtype=torch.float32, attention="sdpa"):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype, attn_implementation=attention)


def test_published_parameter_counts():
    assert {name: Dimensions.of(config).parameters for name, config in MODELS.items()} == PUBLISHED


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_transformers(kind, tied):
    config = tiny(kind, tie_word_embeddings=tied)
    model = model_of(config)
    dimensions = Dimensions.of(config)
    assert dimensions.parameters == sum(p.numel() for p in model.parameters())
    assert dimensions.body == sum(p.numel() for p in model.base_model.parameters()) + dimensions.hidden + 1


def kept_for_backward(config, dtype, tokens=48, checkpointing=False):
    """Bytes of the tensors that autograd keeps of the body's forward pass, parameters left out."""
    model = model_of(config, dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    del output
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_activations_are_those_that_autograd_keeps(kind):
    """Of a layer: the difference between four layers and two."""
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        two, four = (kept_for_backward(tiny(kind, n), dtype) for n in (2, 4))
        measured = (four - two) / 2 / 48
        assert Dimensions.of(tiny(kind)).layer_bytes(precision) == pytest.approx(measured, rel=0.02), precision
        two, four = (kept_for_backward(tiny(kind, n), dtype, checkpointing=True) for n in (2, 4))
        assert (four - two) / 2 / 48 == Dimensions.of(tiny(kind)).residual_bytes(precision)


class Alive(TorchDispatchMode):
    """Bytes of all storages that operations have met and that still live, and the most there were."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.met = 0, 0, {}

    def meet(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.met:
            self.met[key] = weakref.ref(storage, partial(self.leave, key, size))
            self.now += size
            self.most = max(self.most, self.now)

    def leave(self, key, size, _):
        del self.met[key]
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self.meet(tensor)
        return result


@pytest.mark.parametrize(
    ("kind", "precision", "checkpointing", "rank"),
    [
        ("qwen3", "float32", False, None),
        pytest.param("llama", "autocast", False, None, marks=pytest.mark.slow),
        pytest.param("qwen3", "bfloat16", True, 8, marks=pytest.mark.slow),
    ],
)
def test_the_sum_is_what_lives_at_the_peak_of_a_step(
    kind, precision, checkpointing, rank, tmp_path, model_dir, monkeypatch
):
    """Two iterations of GRPO, each of three micro-batches: the second has gradients and moments beside activations."""
    config = tiny(kind, layers=4, vocab_size=4096, tie_word_embeddings=kind != "llama")
    model_of(config).save_pretrained(tmp_path)
    for file in model_dir.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    rng = random.Random(0)
    batch = [make_trajectory(rng, i, float(i % 2), [120]).replace(group=str(i // 4), index=i % 4) for i in range(16)]
    learner = GRPO(
        policy=str(tmp_path),
        dtype="bfloat16" if precision == "bfloat16" else "float32",
        gradient_checkpointing=checkpointing,
        max_tokens_per_micro_batch=1024,
        logits_chunk=512,
        num_mini_batches=1,
        lora=None if rank is None else LoRA(rank, 8.0),
    )
    with Alive() as alive:
        fit(learner, [batch, batch], precision="32-true" if precision == "float32" else "bf16-mixed")
    monkeypatch.setattr(sizing, "BLOCK", BLOCK["cpu"])
    adapters = None if rank is None else Adapters(rank)
    training = Training(
        policy=Dimensions.of(config),
        precision=precision,
        adapters=adapters,
        checkpointing=checkpointing,
        max_tokens_per_micro_batch=1024,
        logits_chunk=512,
    )
    parts = sizing.memory(training, GPU_SPECS["h100"])
    assert sum(parts.values()) - parts["overhead"] == pytest.approx(alive.most, rel=0.15), parts


def test_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    config, tokens = tiny("qwen3"), 32
    model = model_of(config, attention="eager")  # torch does not count SDPA's kernel on CPU
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    # torch counts every pair of tokens, masked ones too: as if each had looked back on all of them
    assert Dimensions.of(config).forward_flops(tokens) * tokens == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_shards_by_hand():
    """A policy alone, bfloat16 with float32 masters, over four GPUs."""
    d = Dimensions.of(MODELS["qwen3-0.6b"])
    n = d.parameters
    parts = {}
    for name in ("zero2", "zero3", "ddp"):
        training = Training(policy=d, strategy=name, gpus=4, precision="autocast")
        parts[name] = sizing.memory(training, GPU_SPECS["h100"])
    assert [parts[name]["weights"] for name in ("zero3", "zero2", "ddp")] == [2 * n / 4, 2 * n, 4 * n]
    assert parts["zero2"]["optimizer"] == 8 * n / 4 and parts["ddp"]["optimizer"] == 8 * n
    assert parts["zero3"]["master weights"] == 4 * n / 4 and parts["ddp"]["master weights"] == 0
    assert [parts[name]["gradients"] for name in ("zero3", "zero2", "ddp")] == [n, n, 4 * n], "sums are float32"
    assert parts["ddp"]["autocast's copies"] > d.layers * 2 * d.layer_matrices
    again = sizing.memory(Training(policy=d, precision="autocast", checkpointing=True), GPU_SPECS["h100"])
    assert again["autocast's copies"] == 2 * d.vocabulary * d.hidden, "one matrix at a time"
    offload = Training(policy=d, strategy="zero3", gpus=4, precision="autocast", offload_optimizer=True)
    host = sizing.memory(offload, GPU_SPECS["h100"])
    assert [host[part] for part in ("gradients", "master weights", "optimizer")] == [0, 0, 0]
    assert sizing.cache_tokens(Training(policy=d, engine_share=0.5), GPU_SPECS["h100"]) == int(
        (40 * GB - 2 * n - sizing.ENGINE_WORK) // (28 * 2 * 8 * 128 * 2)
    )


def test_sharded_float32_has_masters_and_few_parameters_are_gathered():
    d = Dimensions.of(MODELS["qwen3-0.6b"])
    parts = sizing.memory(Training(policy=d, strategy="zero3", gpus=2, live_parameters=2e8), GPU_SPECS["h100"])
    assert parts["master weights"] == parts["weights"] == 4 * d.parameters / 2
    assert parts["gathered parameters"] == 8e8
    fewer = sizing.memory(Training(policy=d, strategy="zero3", gpus=2, live_parameters=1e8), GPU_SPECS["h100"])
    assert fewer["gathered parameters"] == 4 * d.vocabulary * d.hidden, "no matrix is gathered in pieces"


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "mlp.up_proj"]])
def test_adapters_are_those_of_peft(target):
    from experiments.commands.size import adapters_of

    config = tiny("qwen3", tie_word_embeddings=False)
    model, d = model_of(config), Dimensions.of(config)
    LoRA(4, 8.0, target).attach(model)
    adapters = adapters_of({"rank": 4, "alpha": 8.0, "target": target})
    assert (adapters.of(d), d.parameters + adapters.of(d)) == counts(model)
    assert adapters.inputs(d) == (6 * 64 + 160 if target == "all-linear" else 2 * 64)


def test_adapters_by_hand():
    """Policy and critic: base in two bytes, what is trained in float32, but for DeepSpeed's engine in bfloat16."""
    d, low_rank = Dimensions.of(MODELS["qwen2.5-7b"]), Adapters(16)
    both = {"policy": d, "critic": d, "adapters": low_rank, "precision": "bfloat16"}
    trained = 2 * low_rank.of(d) + d.hidden + 1
    base = d.parameters + d.body - d.hidden - 1
    assert (Training(**both).frozen_base, Training(**both).trained) == (base, trained)
    one = sizing.memory(Training(**both, checkpointing=True), GPU_SPECS["h100"])
    assert one["weights"] == 2 * base + 4 * trained and one["optimizer"] == 8 * trained
    assert one["master weights"] == 0 and "autocast's copies" not in one
    layers = [
        sizing.recomputed_activations(Training(**both | {"adapters": a}, checkpointing=True)) for a in (low_rank, None)
    ]
    assert layers[0] - layers[1] == 16384 * 2 * low_rank.inputs(d), "inputs, cast by peft"
    eight = sizing.memory(Training(**both, strategy="zero3", gpus=8), GPU_SPECS["h100"])
    assert eight["weights"] == 2 * (base + trained) / 8 and eight["master weights"] == 4 * trained / 8


def test_policy_and_critic_keep_what_they_need_at_once():
    d = Dimensions.of(MODELS["qwen2.5-0.5b"])
    alone, both = (sizing.activations(Training(policy=d, critic=c, checkpointing=True)) for c in (None, d))
    assert both - alone == 16384 * d.layers * d.residual_bytes("float32")


def test_names_of_folders():
    assert known_model("SearchR1-ppo-qwen2.5-3b-instruct") is MODELS["qwen2.5-3b"]
    assert known_model("Qwen3-1.7B") is MODELS["qwen3-1.7b"]
    assert known_model("SOD-GRPO_teacher-4B") is MODELS["qwen3-4b"]
    assert known_model("Qwen3-1.7B.5") is None and known_model("my-model") is None


def test_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path))
    assert main(["size", "sdar_qwen2.5_7b_alfworld", "--gpus", "1,8"]) == 0
    out = capsys.readouterr().out
    assert "policy 7.62 B, reference 7.62 B" in out and "TOO MUCH: docs/scaling.md" in out
    words = ["--trainer.strategy", "auto", "--model.lora.rank", "16", "--model.dtype", "bfloat16"]
    words += ["--data.rollouts.engine.gpu_memory_utilization", "0.5"]
    assert main(["size", "sdar_qwen2.5_7b_alfworld", "--gpus", "1", *words]) == 0
    out = capsys.readouterr().out
    assert "policy 7.62 B, adapters 40.37 M; single, bfloat16" in out, "the reference is the base"
    assert "TOO MUCH" not in out
    words = ["--model.teacher_weights", "ema", "--model.kl_coef", "0", "--model.reference_kl_estimator", "null"]
    assert main(["size", "sdar_qwen2.5_7b_alfworld", "--gpus", "1", *words]) == 0
    assert "policy 7.62 B, moving average 7.62 B; " in capsys.readouterr().out, "no reference, but an average"
    assert main(["size", "dgpo_qwen2.5_0.5b", "--gpus", "1", "--model.kl_coef", "0"]) == 0
    assert "policy 0.49 B, critic" in capsys.readouterr().out, "no teacher"
    for words, message in (
        (["sdar_tiny", "--gpu", "h10"], "no GPU 'h10' is known; did you mean 'h100'"),
        (["sdar_tiny", "--gpus", "0"], "--gpus 0: expected numbers"),
        (["untrained_tiny"], "of kind test: it trains nothing"),
        (["sdar_tiny"], "unknown model"),
    ):
        assert main(["size", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_model_folder_of_another_type_is_one_message(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_text", "num_attention_heads": 8}')
    assert main(["size", "my_grpo", "--gpu", "4090", "--paths.model", str(tmp_path), "--paths.tools", "none"]) == 2
    said = capsys.readouterr().err
    assert "model_type is 'qwen3_5_text'; sizes are known of qwen2, qwen3 and llama. Give a model of these" in said


def test_a_run_on_this_machines_cores(capsys, monkeypatch, tmp_path):
    """Of a model that no stage has made yet. Without a GPU there is one column, and no sleeping engine."""
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path))
    assert main(["size", "smollm2_grpo", "--gpu", "cpu"]) == 0
    rows = dict(re.findall(r"^  (\S.*?)   *(\S.*)$", capsys.readouterr().out, re.MULTILINE))
    assert rows["machines"] == "1" and "asleep" not in str(rows)
    assert float(rows["engine"]) > 2 and 0 < float(rows["minutes per iteration"])
    assert float(rows["hours, at 0.6 of it"]) == pytest.approx(float(rows["minutes per iteration"]) * 24 / 60, rel=0.1)
    engine = {"class_path": "rollout.engines.vllm_engine.VLLMEngine", "init_args": {"model": "Qwen/Qwen3-0.6B"}}
    guide = json.dumps({"engine": engine, "share": 0.5})
    assert main(["size", "smollm2_grpo", "--gpu", "cpu", "--data.rollouts.guide", guide]) == 0
    guided = re.search(r"^  guide +(\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert guided and float(guided[1]) == pytest.approx(0.596 * 4 + 0.268 + 1, abs=0.06), "weights, cache, work"


def test_options_that_are_not_given_are_the_classes_defaults(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path))
    servers = {"class_path": "rollout.engines.vllm_servers.engine.VLLMServers", "init_args": {"urls": ["http://a:1"]}}
    shown = {}
    for name, engine in {"own": None, "servers": servers}.items():
        words = ["--data.rollouts.sleep_mode", "false"]
        words += [] if engine is None else ["--data.rollouts.engine", json.dumps(engine)]
        assert main(["size", "smollm2_grpo", "--gpu", "4090", "--gpus", "1", *words]) == 0
        shown[name] = re.search(r"^  engine +(\S+)", capsys.readouterr().out, re.MULTILINE)
    assert shown["own"] and float(shown["own"][1]) == pytest.approx(0.5 * GPU_SPECS["4090"].memory / GB, rel=0.01)
    assert shown["servers"] is None or float(shown["servers"][1]) == 0, "they are on other GPUs"


def test_a_sleeping_engine_takes_turns_with_the_trainer():
    policy, chip = Dimensions.of(MODELS["qwen3-0.6b"]), GPU_SPECS["h100"]
    asleep = Training(policy=policy, engine_share=0.85, sleep_mode=True)
    assert sizing.memory(asleep, chip)["engine"] == sizing.ENGINE_ASLEEP
    assert set(sizing.sampling_memory(asleep, chip)) == {"weights", "master weights", "engine", "overhead"}
    assert sizing.peak(asleep, chip) == sum(sizing.sampling_memory(asleep, chip).values())


def test_hours_are_arithmetic():
    policy, chip = Dimensions.of(MODELS["qwen3-0.6b"]), GPU_SPECS["4090"]
    training, run = Training(policy=policy, engine_share=0.5, max_length=4000), Run(10, 64, sampled=1500.0)
    forward = policy.forward_flops(2000)
    step = (2 * policy.parameters + 32 * 2000 * policy.kv_bytes()) / chip.bandwidth
    seconds = 64 * 1500 / 32 * step + 64 * 2000 * (1 + 4) * forward / chip.flops
    assert sizing.hours(training, chip, run, 32) == pytest.approx(10 * seconds / chip.efficiency / 3600)
    unscored = dataclasses.replace(training, scores=False)
    assert sizing.training_flops(unscored, 2000.0) == pytest.approx(0.75 * sizing.training_flops(training, 2000.0))


def test_a_model_that_is_there_is_read(tmp_path):
    from experiments.commands.size import dimensions_of

    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(tiny("llama")))
    assert dimensions_of("Qwen3-8B", None, tmp_path) == Dimensions.of(tiny("llama"))
    with pytest.raises(ValueError, match="model_type is 'gpt2'"):
        Dimensions.of({"model_type": "gpt2"})
