"""Low-rank adapters: the base untouched, merged weights plain, the same learning as a merged parametrisation."""

import json
import random

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning import LightningModule
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from lightning_modules.algorithms.dgpo import DGPO
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.algorithms.sdar import SDAR
from lightning_modules.algorithms.sft import SFT
from lightning_modules.batch import collate
from lightning_modules.models import lora as adapters
from lightning_modules.models.lora import InitialPolicy, LoRA
from lightning_modules.models.policy import load_causal_lm, named_weights, token_logprobs
from tests.conftest import make_model_dir
from tests.lightning_modules.algorithms.episode_helpers import EpisodeData, episodes, skills
from tests.lightning_modules.helpers import fit, make_group, make_trajectories

SEVEN = 7  # linear modules of a layer


@pytest.fixture(scope="module")
def batch():
    return collate(make_trajectories(5))


SETTINGS = LoRA(4, 8.0)


def adapted(folder, lora=SETTINGS, trained=True, **options):
    """A model with adapters, as far from the base as a training would take it."""
    model = load_causal_lm(str(folder), **options)
    torch.manual_seed(1)
    lora.attach(model)
    if trained:
        for _, layer in adapters.layers(model):
            nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    return model


def rows():
    rng = random.Random(4)
    return [t for name, rewards in (("a", [1, 0, 0, 1]), ("b", [0.5, 0, 1, 0])) for t in make_group(rng, name, rewards)]


# -- the model ---------------------------------------------------------------------------------------------------------


def test_untrained_adapters_are_the_base_bit_for_bit(model_dir, batch):
    plain, model = load_causal_lm(str(model_dir)), adapted(model_dir, trained=False)
    ids = batch.input_ids
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert torch.equal(token_logprobs(model, batch, chunk=4).logprobs, token_logprobs(plain, batch, chunk=4).logprobs)
    assert type(model) is type(plain) and type(model.get_output_embeddings()) is type(plain.get_output_embeddings())
    assert all(torch.equal(w, dict(named_weights(plain))[n]) for n, w in adapters.merged_weights(model))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * SEVEN * 2 and all("lora_" in n for n in trained)
    a = next(p for n, p in model.named_parameters() if "lora_A" in n)
    assert 0 < a.abs().max() <= 1 / 32**0.5


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_merged_weights_are_a_plain_model_that_says_the_same(tmp_path, batch, tie):
    folder = make_model_dir(tmp_path / "m", tie=tie)
    model, plain = adapted(folder), AutoModelForCausalLM.from_pretrained(folder)
    before = {n: p.clone() for n, p in model.named_parameters()}
    merged = dict(adapters.merged_weights(model, bucket_elements=500))
    assert list(merged) == [n for n, _ in plain.named_parameters()]
    plain.load_state_dict(merged, strict=tie is False)
    got, want = plain(input_ids=batch.input_ids).logits, model(input_ids=batch.input_ids).logits
    base = AutoModelForCausalLM.from_pretrained(folder)(input_ids=batch.input_ids).logits
    assert torch.allclose(got, want, atol=2e-5) and (want - base).abs().max() > 0.1
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_adapters_are_drawn_in_host_memory_and_in_float32(model_dir, monkeypatch):
    """ZeRO-3 makes what names no device on the GPU, where the generator is not, and in the type of the weights."""
    drawn = dict(adapters.adapter_weights(adapted(model_dir, trained=False)))
    model, empty = load_causal_lm(str(model_dir)), torch.empty

    def within_zero3(*size, **options):
        made = empty(*size, **({"device": "meta"} | options))
        return made if "dtype" in options else made.to(torch.bfloat16)

    torch.manual_seed(1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", within_zero3)
        LoRA(4, 8.0).attach(model)
    assert all(torch.equal(weights, drawn[name]) for name, weights in adapters.adapter_weights(model))


def test_a_teacher_that_is_the_base_with_adapters_off(model_dir, batch):
    plain, model = load_causal_lm(str(model_dir)), adapted(model_dir)
    teacher = InitialPolicy(model)
    with torch.no_grad():
        expected = token_logprobs(plain, batch, chunk=4)
    said = token_logprobs(teacher, batch, chunk=4)
    assert torch.equal(said.logprobs, expected.logprobs) and not said.logprobs.requires_grad
    assert torch.equal(teacher(input_ids=batch.input_ids).logits, plain(input_ids=batch.input_ids).logits)
    after = token_logprobs(model, batch, chunk=4).logprobs
    assert (after - expected.logprobs).abs().max() > 0.1 and after.requires_grad
    assert not list(teacher.parameters())
    packed = token_logprobs(InitialPolicy(adapted(model_dir, attention="packed")), batch, chunk=4)
    assert torch.allclose(packed.logprobs, expected.logprobs, atol=1e-5)


class LowRank(nn.Module):
    def __init__(self, a, b, scale):
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a.clone()), nn.Parameter(b.clone()), scale

    def forward(self, weight):
        return weight + self.scale * (self.b @ self.a)


def merged_parametrisation(folder, model):
    """The plain model whose weights are computed as W + s B A at every use; the factors by the adapters' names."""
    plain, factors = load_causal_lm(str(folder)).requires_grad_(False), {}
    for name, layer in adapters.layers(model):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        low_rank = LowRank(a.detach(), b.detach(), layer.scaling["default"])
        parametrize.register_parametrization(plain.get_submodule(name), "weight", low_rank)
        factors |= {f"{name}.lora_A.default.weight": low_rank.a, f"{name}.lora_B.default.weight": low_rank.b}
    return plain, factors


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_a_merged_parametrisation(model_dir, batch, checkpointing):
    model = adapted(model_dir, gradient_checkpointing=checkpointing)
    plain, factors = merged_parametrisation(model_dir, model)
    for one in (model, plain):
        stats = token_logprobs(one, batch, chunk=4)
        ((stats.logprobs * torch.linspace(-1, 1, batch.mask.shape[1])).sum() + stats.entropy.sum()).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(parameter.grad, factors[name].grad, rtol=1e-3, atol=1e-4), name
            assert parameter.grad.abs().max() > 1e-2
        else:
            assert parameter.grad is None


# -- training ----------------------------------------------------------------------------------------------------------


def test_only_adapters_are_trained_kept_and_counted(model_dir, tmp_path, caplog):
    from lightning.pytorch.loggers import CSVLogger

    torch.manual_seed(2)
    module = DGPO(str(model_dir), str(model_dir), lora=LoRA(2, 4.0, ["q_proj", "down_proj"]), num_mini_batches=1)
    with caplog.at_level("INFO", logger="lightning_modules.training.policy_module"):
        trainer = fit(module, [make_trajectories(4)], logger=CSVLogger(tmp_path))
    plain = dict(AutoModelForCausalLM.from_pretrained(model_dir).named_parameters())
    assert isinstance(module.reference, InitialPolicy)  # the teacher is the folder the policy started from
    for part in (module.policy, module.critic.body):
        bases = {n.replace(".base_layer", ""): p for n, p in part.named_parameters() if "lora_" not in n}
        assert len(bases) == len(plain), "the output matrix is tied"
        assert all(torch.equal(p, plain.get(n, plain.get(f"model.{n}"))) for n, p in bases.items())
    assert module.critic.head.weight.abs().max() > 0, "the head is trained whole"
    [optimizer] = trainer.optimizers
    trained = [p for p in module.parameters() if p.requires_grad]
    names = {n for n, p in module.named_parameters() if p.requires_grad}
    low_rank = {n for n in names if "lora_" in n}
    assert len(low_rank) == 2 * 2 * 2 * 2, "A and B of two modules of two layers of two models"
    assert names - low_rank == {"critic.head.weight", "critic.head.bias"}
    held = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim())
    assert held == 2 * sum(p.numel() for p in trained), "two moments of every trained parameter, and no more"
    count = sum(p.numel() for p in trained)
    assert f"{count:,} of" in caplog.text and "lr is 1e-06" in caplog.text
    assert f"\n{count},0" in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    checkpoint = tmp_path / "run.ckpt"
    trainer.save_checkpoint(checkpoint)
    content = torch.load(checkpoint, weights_only=True)
    assert content["state_dict"].keys() == names
    assert content["lora"] == {"rank": 2, "alpha": 4.0, "target": ["q_proj", "down_proj"], "dtype": "float32"}


def test_a_base_in_bfloat16_is_trained_by_float32_adapters(model_dir):
    torch.manual_seed(2)
    options = {"lora": LoRA(2, 4.0), "num_mini_batches": 2, "lr": 1e-3, "dtype": "bfloat16", "packing": True}
    module = DGPO(str(model_dir), str(model_dir), gradient_checkpointing=True, **options)
    with pytest.raises(ValueError, match="float32 master weights"):
        fit(module, [make_trajectories(4)], precision="bf16-true")
    fit(module, [make_trajectories(4)], precision="bf16-mixed")
    kinds = {(p.dtype, p.requires_grad) for p in (*module.policy.parameters(), *module.critic.parameters())}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}, "the critic's head, too"
    assert module.critic.head.weight.abs().max() > 0
    assert max(float(layer.lora_B["default"].weight.abs().max()) for _, layer in adapters.layers(module.policy)) > 0
    values = module.critic(collate(make_trajectories(2)))
    assert values.dtype == torch.float32 and values.abs().max() > 0, "outside autocast as well"


def test_resume_is_exact_and_refuses_other_settings(model_dir, tmp_path):
    def train(steps, settings=SETTINGS, **options):
        torch.manual_seed(3)
        module = SFT(str(model_dir), lr=1e-2, schedule="constant", lora=settings)
        trainer = fit(module, [make_trajectories(4, seed=i) for i in range(4)], max_steps=steps, **options)
        return trainer, dict(adapters.adapter_weights(module.policy))

    _, straight = train(4)
    trainer, half = train(2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    # Batches are given anew from the first: the last two are what the first run saw third and fourth.
    torch.manual_seed(99)
    module = SFT(str(model_dir), lr=1e-2, schedule="constant", lora=LoRA(4, 8.0))
    fit(module, [make_trajectories(4, seed=i) for i in (2, 3)] * 2, max_steps=4, ckpt_path=tmp_path / "half.ckpt")
    resumed = dict(adapters.adapter_weights(module.policy))
    assert all(torch.equal(resumed[n], straight[n]) for n in straight)
    assert not all(torch.equal(half[n], straight[n]) for n in straight)
    for other in (LoRA(4, 16.0), None):
        with pytest.raises(ValueError, match="the checkpoint was written with lora .*'alpha': 8.0"):
            train(4, other, ckpt_path=tmp_path / "half.ckpt")


@pytest.mark.parametrize("which", ["fixed", "ema"])
def test_what_teaches_is_a_whole_model(model_dir, which):
    """The fixed teacher is the base; the average is that of merged weights, here of two iterations at decay 0.5."""
    torch.manual_seed(4)
    merged = []

    class Watched(SDAR):
        def update(self, *args):
            super().update(*args)
            merged.append({n: w.clone() for n, w in self.policy_weights()})

    decay = {"ema_decay": 0.5} if which == "ema" else {}
    options = {"teacher_weights": which, **decay, "lr": 1e-2, "num_mini_batches": 1, "lora": LoRA(4, 8.0)}
    module = Watched(str(model_dir), skills=skills(), **options)
    whole, protocol = episodes(model_dir, None)
    fit(module, EpisodeData(whole, protocol, 2))
    plain, batch = load_causal_lm(str(model_dir)), collate(make_trajectories(3))
    start = dict(named_weights(plain))
    if which == "ema":
        expected = {n: 0.25 * w + 0.25 * merged[0][n] + 0.5 * merged[1][n] for n, w in start.items()}
        assert max(float((expected[n] - w).abs().max()) for n, w in start.items()) > 1e-3
        found = dict(module.average.named_parameters())
        assert all(torch.allclose(found[n], w, atol=1e-6) for n, w in expected.items())
        assert {n for n in module._trained(module.state_dict()) if n.startswith("average.")}, "kept in checkpoints"
        return
    with torch.no_grad():
        assert torch.equal(token_logprobs(module.self_teacher, batch).logprobs, token_logprobs(plain, batch).logprobs)
    assert any(not torch.equal(merged[1][n], w) for n, w in start.items())


# -- configuration -----------------------------------------------------------------------------------------------------


def parse(*words):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    return parser.instantiate_classes(parser.parse_args(list(words))).model


@pytest.mark.parametrize("name", ["sft.SFT", "sdar.SDAR"])
def test_every_module_takes_it_from_the_command_line(name):
    words = [f"--model=lightning_modules.algorithms.{name}", "--model.policy=p", "--model.lora.rank=8"]
    words += ["--model.reference=p"] if name == "ppo.PPO" else []
    words += ["--model.skills_coef=0"] if name == "sdar.SDAR" else []
    module = parse(*words, "--model.lora.alpha=4", "--model.lora.target=[q_proj, v_proj]")
    assert module.lora == LoRA(8, 4.0, ["q_proj", "v_proj"])
    assert json.loads(json.dumps(dict(module.hparams["lora"])))["rank"] == 8  # plain types, for the checkpoint


def test_mistakes_are_named_before_a_model_is_loaded(model_dir):
    with pytest.raises(ValueError, match="lora.target is"):
        LoRA(target=[])
    there = "expected one of: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    for target in (["q_proj", "query"], "lm_head", "proj", "embed_tokens"):
        with pytest.raises(ValueError, match=there):
            PPO(str(model_dir), str(model_dir), lora=LoRA(target=target))
    LoRA(target="mlp.up_proj").check(str(model_dir))
