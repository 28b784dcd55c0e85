from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks.evaluation.evaluation import Evaluation
from callbacks.model_export.adapters import A, B
from callbacks.model_export.checkpoints import read_generation_config, skeleton
from callbacks.model_export.exporter import Adapter, Export, load_policy, write_folder
from callbacks.training.resume import IterationCheckpoint, find_checkpoint
from common.files import DiskFullError
from tests.callbacks.helpers import make_learner, policy_state, same_weights
from tests.conftest import make_model_dir

RIGHT, WRONG = "grey harbor", "elsewhere"


class Remember(Export):
    """Keeps a copy of the weights after each validation."""

    def on_validation_end(self, trainer, pl_module):
        super().on_validation_end(trainer, pl_module)
        self.states = [*getattr(self, "states", []), policy_state(pl_module.policy)]


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_last_weights_are_what_transformers_loads(trainer_for, tmp_path, tie):
    source = make_model_dir(tmp_path / "start", tie=tie)
    module, data = make_learner(source)
    trainer_for([Export()], max_epochs=1).fit(module, datamodule=data)
    folder = tmp_path / "stage" / "model"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert same_weights(policy_state(loaded), policy_state(module.policy))
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr() or not tie
    before = AutoModelForCausalLM.from_pretrained(source)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(ids).logits, module.policy.eval()(input_ids=ids).logits)
    assert not torch.equal(loaded(ids).logits, before(ids).logits)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    text = "<search> Mira Voss </search>"
    tokenizers = [AutoTokenizer.from_pretrained(p) for p in (source, folder)]
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids
    assert tokenizers[1].chat_template == tokenizers[0].chat_template
    assert sorted(p.name for p in folder.parent.iterdir() if p.name.startswith(".")) == []


LOADED_BUT_NOT_SAVED = [
    {"temperature": 0.6},
    {"do_sample": False, "top_p": 0.9, "top_k": 20},
    {"min_p": 0.1, "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1},
    {"early_stopping": True},
    {"length_penalty": 2.0},
    {"pad_token_id": -1},
    {"output_scores": True},
    {"use_cache": False, "cache_implementation": "static"},
    {"temperature": "hot"},
    {"num_return_sequences": 4, "do_sample": True, "early_stopping": "never"},
]


def test_a_generation_config_is_written_as_it_came(tmp_path, model_dir):
    source = shutil.copytree(model_dir, tmp_path / "source")
    policy = AutoModelForCausalLM.from_pretrained(model_dir)
    for found in LOADED_BUT_NOT_SAVED:
        (source / "generation_config.json").write_text(json.dumps(found))
        policy.generation_config = read_generation_config(str(source))
        with pytest.raises(ValueError):
            policy.generation_config.save_pretrained(tmp_path)
        write_folder(policy, policy_state(policy), tmp_path / "model", str(source))
        written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
        assert {name: written.get(name) for name in found} == found
        assert read_generation_config(str(tmp_path / "model")) == policy.generation_config
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


NOT_LOADED = ['{"num_return_sequences": 4}', '{"max_new_tokens": 0}', '"text"', "null", "{", '{"streamer": 1}']


def test_a_generation_config_that_is_not_loaded_is_named_in_one_line(tmp_path, model_dir):
    source = shutil.copytree(model_dir, tmp_path / "source")
    for found in NOT_LOADED:
        (source / "generation_config.json").write_text(found)
        with pytest.raises(
            ValueError, match=r"generation_config.json: transformers refuses it \(.*mend the file"
        ) as told:
            skeleton(str(source))
        assert "\n" not in str(told.value)
    (source / "generation_config.json").unlink()
    assert read_generation_config(str(source)) is None


def test_settings_that_cannot_be_written_end_a_run_before_its_first_step(trainer_for, tmp_path, model_dir):
    module, data = make_learner(model_dir)
    trainer = trainer_for([Export(tokenizer=str(tmp_path / "nowhere"))], max_epochs=1)
    with pytest.raises((OSError, ValueError), match="nowhere"):
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == 0


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_of_an_export_obey_the_umask(tmp_path, model_dir, umask, mode):
    policy = AutoModelForCausalLM.from_pretrained(model_dir)
    before = os.umask(umask)
    try:
        adapter = Adapter(
            {"model.layers.0.self_attn.q_proj" + end: torch.ones(2, 2) for end in (A, B)}, {"rank": 2, "alpha": 4}, "x"
        )
        write_folder(policy, policy_state(policy), tmp_path / "model", str(model_dir), "50KB", adapter)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".safetensors"]) > 2
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_no_room_says_so_and_leaves_the_previous_export(tmp_path, model_dir, file_limit):
    policy = AutoModelForCausalLM.from_pretrained(model_dir)
    write_folder(policy, policy_state(policy), tmp_path / "model", str(model_dir))
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    file_limit(2000)  # less than the weights
    with pytest.raises(DiskFullError, match="no room to write .*earlier export there is intact"):
        write_folder(policy, policy_state(policy), tmp_path / "model", str(model_dir))
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_that_are_not_finite_leave_the_previous_export(tmp_path, model_dir):
    policy = AutoModelForCausalLM.from_pretrained(model_dir)
    write_folder(policy, policy_state(policy), tmp_path / "model", str(model_dir))
    with torch.no_grad():
        policy.model.embed_tokens.weight[3, 1] = float("nan")  # of a token in no batch: no loss shows it
    with pytest.raises(ValueError, match="not finite: 1 of 12800 numbers of model.embed_tokens.weight"):
        write_folder(policy, policy_state(policy), tmp_path / "model", str(model_dir))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.embed_tokens.weight.isfinite().all()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_best_weights_are_exported_and_the_last_checkpoint_keeps_the_last(trainer_for, tmp_path, model_dir):
    evaluations = [[WRONG, WRONG], [RIGHT, RIGHT], [RIGHT, WRONG], [RIGHT, RIGHT]]  # the second is best: ties lose
    module, data = make_learner(model_dir, evaluations)
    export = Remember(choose="best")
    callbacks = [Evaluation(), export, IterationCheckpoint()]
    trainer = trainer_for(callbacks, max_epochs=1, val_check_interval=1)
    trainer.fit(module, datamodule=data)
    assert export.best_score == 1.0
    exported = policy_state(AutoModelForCausalLM.from_pretrained(tmp_path / "stage" / "model"))
    assert same_weights(exported, export.states[1]) and not same_weights(exported, export.states[3])
    assert same_weights(policy_state(module.policy), exported)
    checkpoint = torch.load(find_checkpoint(tmp_path / "stage"), weights_only=True)["state_dict"]
    last = {k.removeprefix("policy."): v for k, v in checkpoint.items()}
    assert all(torch.equal(last[name], value) for name, value in export.states[3].items())


def test_a_best_score_of_another_metric_is_not_compared_with():
    again = Export(choose="best")
    again.load_state_dict({"best_score": 0.9, "monitor": ("val/em", "max")})
    assert again.best_score is None
    again.load_state_dict({"best_score": 0.9, "monitor": ("val/acc", "max")})
    assert again.best_score == 0.9


def test_best_without_validation_warns_and_exports_the_last(trainer_for, tmp_path, model_dir, caplog):
    module, data = make_learner(model_dir)
    trainer_for([Export(choose="best")], max_epochs=1).fit(module, datamodule=data)
    assert "no validation logged val/acc" in caplog.text
    assert same_weights(
        policy_state(AutoModelForCausalLM.from_pretrained(tmp_path / "stage" / "model")), policy_state(module.policy)
    )


def test_dtype_and_shards(tmp_path, model_dir):
    from callbacks.model_export.exporter import export_policy

    policy = AutoModelForCausalLM.from_pretrained(model_dir)

    class Module:
        def __init__(self):
            self.policy = policy

        def policy_weights(self):
            return iter(policy.named_parameters())

    export_policy(Module(), tmp_path / "half", dtype=torch.bfloat16, max_shard_size="50KB")
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    expected = {k: v.to(torch.bfloat16) for k, v in policy_state(policy).items()}
    assert same_weights(policy_state(loaded), expected)
    target = AutoModelForCausalLM.from_pretrained(model_dir)
    load_policy(target, tmp_path / "half")
    assert same_weights(policy_state(target), {k: v.float() for k, v in expected.items()})


def test_loading_from_an_incomplete_folder_is_an_error(tmp_path, model_dir):
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "model.safetensors")
    policy = AutoModelForCausalLM.from_pretrained(model_dir)
    with pytest.raises(ValueError, match="lacks .* parameters of the policy"):
        load_policy(policy, tmp_path)
    with pytest.raises(FileNotFoundError, match="no .safetensors"):
        load_policy(policy, tmp_path / "nowhere")
