"""``make export`` from finished stages, interrupted ones and checkpoints that lie elsewhere."""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForCausalLM

from callbacks.model_export.exporter import Export
from callbacks.training.resume import IterationCheckpoint
from experiments.commands.command import make_graph
from experiments.commands.export import export
from experiments.registry.errors import ExperimentError
from experiments.registry.project import Project
from experiments.stages.context import RunContext
from experiments.stages.store import StageFolder
from tests.callbacks.helpers import make_learner, policy_state, same_weights
from tests.experiments.hub import serve

FIT = """
experiment: {{kind: fit, algorithm: GRPO, data: invented world}}
model: {{class_path: m.A, init_args: {{policy: "{policy}"}}}}
data: {{class_path: d.A}}
"""


@pytest.fixture
def trained(workshop, model_dir):
    """A context for an experiment whose stage was trained, but is not done; its store and its module."""
    workshop.write("sft", FIT.format(policy=model_dir))
    project = Project(root=workshop.folder, experiment_dirs=(workshop.files,), outputs=workshop.folder / "outputs")
    context = RunContext(project, "sft", (), None)
    stage = make_graph(context).target()
    store = StageFolder(stage.folder)
    store.prepare(stage, {"name": "sft"}, keep=False)
    module, data = make_learner(model_dir)
    trainer = L.Trainer(
        default_root_dir=stage.folder, callbacks=[IterationCheckpoint(), Export()], max_epochs=1, accelerator="cpu",
        devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return context, store, policy_state(module.policy)


def run(context, to, checkpoint=None, dtype=None):
    export(SimpleNamespace(to=str(to), checkpoint=checkpoint, trust=False, dtype=dtype, public=False), context)
    return AutoModelForCausalLM.from_pretrained(to, dtype="auto")


def test_the_last_checkpoint_of_an_interrupted_run(trained, tmp_path, capsys):
    context, store, weights = trained
    shutil.rmtree(store.path / "model")
    with pytest.raises(ExperimentError, match="'sft' is not finished; .* make export EXP=sft CKPT=last"):
        run(context, tmp_path / "a")
    assert same_weights(policy_state(run(context, tmp_path / "b", "last")), weights)
    assert "checkpoints/iteration-00000004.ckpt to" in capsys.readouterr().out
    half = policy_state(run(context, tmp_path / "c", "last", "bfloat16"))
    assert same_weights(half, {name: weight.to(torch.bfloat16) for name, weight in weights.items()})
    assert "(iteration-00000004.ckpt) were not tested" in (tmp_path / "c" / "README.md").read_text()
    card = yaml.safe_load((tmp_path / "c" / "provenance.yaml").read_text())
    assert card["weights"].endswith("iteration-00000004.ckpt") and card["dtype"] == "bfloat16"
    with pytest.raises(ExperimentError, match="'sft' has no best checkpoint"):
        run(context, tmp_path / "d", "best")
    with pytest.raises(ExperimentError, match="b exists and is not empty"):
        run(context, tmp_path / "b", "last")


def test_a_finished_run_and_its_model_in_another_type(trained, tmp_path):
    context, store, weights = trained
    store.finish({"commit": "abc", "seconds": 1.0, "command": "make train EXP=sft"})
    em = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 40}
    (store.path / "evaluation.json").write_text(json.dumps({"test": {"em": em}}))
    (store.path / "model" / "model.safetensors").chmod(0o600)  # of an earlier version
    assert same_weights(policy_state(run(context, tmp_path / "a")), weights)
    assert len({path.stat().st_mode for path in (tmp_path / "a").iterdir()}) == 1
    assert yaml.safe_load((tmp_path / "a" / "provenance.yaml").read_text())["commit"] == "abc"
    card = ModelCard.load(tmp_path / "a" / "README.md")
    assert card.data.library_name == "transformers" and "GRPO" in card.data.tags
    for said in ("# sft\n", "| algorithm | GRPO |", "| data | invented world |", "| EM | 0.500 [0.250, 0.750] |"):
        assert said in card.text, said
    assert "40 questions" in card.text and "`abc`" in card.text and "make train EXP=sft" in card.text
    half = run(context, tmp_path / "b", dtype="float16")
    assert "Tested before the weights were rounded to float16." in (tmp_path / "b" / "README.md").read_text()
    assert half.dtype == torch.float16
    assert same_weights(policy_state(half), {name: weight.half() for name, weight in weights.items()})


def test_a_checkpoint_that_lies_elsewhere(trained, tmp_path, workshop):
    context, store, weights = trained
    shutil.copy(store.checkpoint, tmp_path / "copy.ckpt")
    assert same_weights(policy_state(run(context, tmp_path / "a", str(tmp_path / "copy.ckpt"))), weights)
    (tmp_path / "copy.ckpt").write_bytes(b"cut")
    with pytest.raises(ExperimentError, match="copy.ckpt is not a checkpoint, or is incomplete"):
        run(context, tmp_path / "b", str(tmp_path / "copy.ckpt"))
    with pytest.raises(ExperimentError, match="no checkpoint at /nowhere"):
        run(context, tmp_path / "b", "/nowhere")
    workshop.task("note")
    with pytest.raises(ExperimentError, match="'note' has no model.policy"):
        run(dataclasses.replace(context, target="note"), tmp_path / "b", str(tmp_path / "copy.ckpt"))


def test_what_was_altered_since_it_was_written_is_not_exported(trained, tmp_path):
    context, store, _ = trained
    store.finish({"seconds": 1})
    for path in (store.path / "model" / "model.safetensors", store.checkpoint.resolve()):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(ExperimentError, match=r"model\.safetensors has SHA-256 .* was altered or cut off"):
        run(context, tmp_path / "model")
    with pytest.raises(ExperimentError, match=r"iteration-00000004\.ckpt has SHA-256"):
        run(context, tmp_path / "last", "last")
    assert list(tmp_path.glob("model/*")) == list(tmp_path.glob("last/*")) == []


def test_to_the_hub(trained, tmp_path, monkeypatch, capsys):
    """Private unless asked otherwise, with the card and without paths of this machine."""
    context, _, weights = trained
    with serve("hf_right") as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_right")

        def push(to, public=False):
            export(SimpleNamespace(to=to, checkpoint="last", trust=False, dtype=None, public=public), context)

        push("hub:lab/agent")
        earlier = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "rollout_template.jinja")
        found.files["lab/agent"] |= dict.fromkeys((*earlier, "notes.md"), b"of an earlier export")
        push("hub:lab/agent")  # once more: another commit
        assert not set(earlier) & found.files["lab/agent"].keys(), "vLLM would load the earlier weights"
        assert found.files["lab/agent"].pop("notes.md"), "what an export does not write stays"
        push("hub:lab/open", public=True)
        assert found.private == {"lab/agent": True, "lab/open": False}
        assert "uploaded to lab/agent (private)" in capsys.readouterr().out
        files = found.files["lab/agent"]
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
        assert "provenance.yaml" not in files and str(context.project.root) not in files["README.md"].decode()
        assert "vllm serve lab/agent" in files["README.md"].decode(), "as it is called on the hub"
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        assert same_weights(policy_state(AutoModelForCausalLM.from_pretrained(tmp_path)), weights)
        assert not list(context.project.root.glob("tmp*")), "nothing is left here"
        for to, token, said in (
            ("hub:agent", "hf_right", "hub:agent: expected hub:owner/name"),
            ("hub:a/b/c", "hf_right", "expected hub:owner/name"),
            ("hub:lab/other", "hf_wrong", "the hub does not take it: .*Invalid credentials"),
            ("hub:lab/other", "", "found no token of the hub; run `hf auth login`, or set HF_TOKEN"),
        ):
            monkeypatch.setenv("HF_TOKEN", token)
            monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
            with pytest.raises(ExperimentError, match=said) as caught:
                push(to)
            assert "\n" not in str(caught.value)
    monkeypatch.setattr("experiments.commands.export.export_folder", None)  # known before anything is merged
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    with pytest.raises(ExperimentError, match="hub:lab/other: the hub does not take it: .*"):  # it has gone
        push("hub:lab/other")
    with pytest.raises(ExperimentError, match="--public is for the hub"):
        push(str(tmp_path / "folder"), public=True)
