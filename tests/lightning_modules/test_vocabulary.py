"""Models that have no embedding for a token id are refused before a training, and never raise an IndexError in it."""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks.evaluation.turn_divergence import TurnDivergence
from data_modules.supervised_data_module import SupervisedDataModule
from experiments.registry.errors import ExperimentError
from experiments.stages.validate import check_data_options
from lightning_modules.advantage_transforms.distillation import Distillation
from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.dgpo import DGPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.algorithms.sft import SFT
from lightning_modules.algorithms.sod import SOD
from lightning_modules.models.policy import embedding_rows, require_rows
from rollout.storage import save_trajectories
from tests.lightning_modules.helpers import fit, make_group, make_trajectories

TOKENS = 358  # of the fixtures' tokenizer; their models have 400 rows


def resized(source, folder, rows):
    """The model of a folder with another number of embedding rows, and the same tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def padded(teacher_dir, tmp_path_factory):
    """Knows all tokens of the tokenizer, but fewer rows than the student."""
    return resized(teacher_dir, tmp_path_factory.mktemp("padded"), TOKENS + 2)


@pytest.fixture(scope="module")
def short(teacher_dir, tmp_path_factory):
    """Lacks the tokenizer's last tokens, as a model whose embeddings were not enlarged for added tokens."""
    return resized(teacher_dir, tmp_path_factory.mktemp("short"), TOKENS - 10)


SAMPLING = {
    "sod": lambda student, other: SOD(student, other),
    "opd": lambda student, other: SOD(student, other, opd_mode="uniform", use_grpo=False),
    "dgpo": lambda student, other: DGPO(student, other),
    "grpo_reference": lambda student, other: GRPO(student, reference=other, kl_coef=0.1),
    "ppo_reference": lambda student, other: PPO(student, reference=other),
    "ppo_transform": lambda student, other: PPO(student, advantage_transforms=[Distillation(other)]),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_who_reads_what_a_student_samples_needs_its_rows(name, model_dir, padded):
    message = rf"the model at '{padded}' has 360 embedding rows, but the policy at '.*' has token ids up to 399; take"
    module = SAMPLING[name](str(model_dir), padded)
    with pytest.raises(ValueError, match=message):
        module.check_rows()
    with pytest.raises(ExperimentError, match=f"^the dry run: {message}"):
        check_data_options(module, SimpleNamespace(config={}), "the dry run")
    SAMPLING[name](padded, str(model_dir)).check_rows()  # more rows than the student


class WithCritic(PPO):
    """An algorithm of one's own whose critic does not start from the policy."""

    def __init__(self, policy, critic):
        super().__init__(policy)
        self.critic_path = critic


def test_a_critic_with_a_folder_of_its_own_needs_the_student_s_rows(model_dir, padded, monkeypatch):
    WithCritic(padded, str(model_dir)).check_rows()
    monkeypatch.setattr("lightning_modules.training.policy_module.load_causal_lm", None)
    with pytest.raises(ValueError, match=f"the model at '{padded}' has 360 embedding rows"):
        fit(WithCritic(str(model_dir), padded), [make_group(random.Random(0), "q", [1, 0])])


def test_a_judge_of_a_test_is_checked_before_a_model_loads(model_dir, padded, monkeypatch):
    monkeypatch.setattr("lightning_modules.training.policy_module.load_causal_lm", None)
    with pytest.raises(ValueError, match="has 360 embedding rows"):
        fit(SFT(str(model_dir)), [make_trajectories(2)], callbacks=[TurnDivergence(padded)])


def test_what_is_made_later_is_checked_before_a_model_loads(model_dir, padded, tmp_path, monkeypatch):
    """A teacher of an earlier stage has no folder when the module is constructed."""
    later = tmp_path / "later"
    module = SOD(str(model_dir), str(later))
    shutil.copytree(padded, later)
    monkeypatch.setattr("lightning_modules.training.policy_module.load_causal_lm", None)
    with pytest.raises(ValueError, match="has 360 embedding rows"):
        fit(module, [make_group(random.Random(0), "q", [1, 0])])


def test_a_teacher_of_given_trajectories_needs_the_tokenizers_ids(model_dir, padded, short):
    ColdStartKD(str(model_dir), padded)
    with pytest.raises(
        ValueError, match="has 348 embedding rows, but the policy at '.*' has token ids up to 357; take"
    ):
        ColdStartKD(str(model_dir), short)


def test_rows_beyond_the_tokenizer_are_trained_as_before(model_dir, padded):
    """Public families pad their rows differently: Qwen2.5 has 151,936 or 152,064 for 151,665 tokens."""
    rows = [t.replace(response_ids=tuple(i % TOKENS for i in t.response_ids)) for t in make_trajectories(2)]
    rows = [t.replace(prompt_ids=tuple(i % TOKENS for i in t.prompt_ids)) for t in rows]
    trainer = fit(ColdStartKD(str(model_dir), padded), [rows])
    assert trainer.global_step == 1


class OneBatch(SupervisedDataModule):
    def __len__(self):
        return 1


@pytest.mark.parametrize("kind", ["sft", "kd"])
def test_tokens_of_the_data_that_a_model_does_not_know(kind, model_dir, padded, tmp_path, monkeypatch):
    """Known before a model loads where the data module holds the rows; else named instead of an IndexError."""
    rows = make_trajectories(3)
    rows[1] = rows[1].replace(prompt_ids=(*rows[1].prompt_ids[:-1], 399))
    make = {"sft": lambda: SFT(padded), "kd": lambda: ColdStartKD(str(model_dir), padded)}[kind]
    model = {"sft": "policy", "kd": "teacher"}[kind]
    message = rf"trajectory \d/0 has token \d+, but the {model} at '{padded}' has 360 embedding rows; expected"
    with pytest.raises(ValueError, match=message):
        fit(make(), [rows])
    save_trajectories(tmp_path / "t.parquet", rows)
    data = OneBatch([str(tmp_path / "t.parquet")], batch_size=3, append_eos=False)
    monkeypatch.setattr("lightning_modules.training.policy_module.load_causal_lm", None)
    with pytest.raises(ValueError, match=message):
        fit(make(), data)


def test_rows_are_read_from_any_configuration(tmp_path):
    for number, (content, rows) in enumerate(
        [({"vocab_size": 7}, 7), ({"text_config": {"vocab_size": 8}, "vocab_size": 3}, 8), ({}, None), ("torn", None)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
        assert embedding_rows(str(folder)) == rows
    assert embedding_rows(str(tmp_path / "none")) is None
    assert embedding_rows("nobody-of-this-name/no-model") is None
    require_rows("nobody-of-this-name/no-model", str(tmp_path / "0"))
