from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks.evaluation.evaluation import Evaluation
from callbacks.model_export.exporter import Export, load_policy, write_folder
from callbacks.training.resume import IterationCheckpoint, find_checkpoint
from rollout.files import DiskFullError
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


def test_best_without_validation_warns_and_exports_the_last(trainer_for, tmp_path, model_dir, caplog):
    module, data = make_learner(model_dir)
    trainer_for([Export(choose="best")], max_epochs=1).fit(module, datamodule=data)
    assert "no validation logged val/em" in caplog.text
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
