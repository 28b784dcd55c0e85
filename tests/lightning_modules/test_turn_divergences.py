"""``PolicyModule.turn_divergences``: from the models' own words, for any module, and what it must leave alone."""

import random

import pytest
import torch
from transformers import AutoTokenizer

from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.sft import SFT
from lightning_modules.algorithms.sod import SOD
from lightning_modules.batch import collate
from lightning_modules.models.policy import load_causal_lm, token_logprobs
from lightning_modules.training.policy_module import EvaluateOnly
from tests.conftest import make_model_dir
from tests.lightning_modules.helpers import fit, make_group, make_trajectory


def trajectories():
    rng = random.Random(0)
    one = make_trajectory(rng, 9, spans=[5])
    nothing = make_trajectory(rng, 10, spans=[])
    return [*make_group(rng, "q", [1, 0, 0]), one, nothing]


def evaluated(folder):
    module = EvaluateOnly(str(folder))
    module.build_models()
    return module


def by_hand(rows, model_dir, teacher_dir, temperature=1.0):
    batch = collate(rows)
    with torch.no_grad():
        models = (load_causal_lm(str(folder)) for folder in (model_dir, teacher_dir))
        s, t = (token_logprobs(model, batch, temperature=temperature) for model in models)
    made = []
    for i, row in enumerate(rows):
        spans = [slice(len(row.prompt_ids) + turn.start, len(row.prompt_ids) + turn.end) for turn in row.turns]
        gaps = [(t.logprobs - s.logprobs)[i, span] for span in spans]
        d = [gap.abs().mean().item() for gap in gaps]
        made.append({
            "divergence": d,
            "weight": [min((d[0] + 1e-6) / (x + 1e-6), 1.2) if k else 1.0 for k, x in enumerate(d)],
            "signed": [gap.mean().item() for gap in gaps],
            "teacher_entropy": [t.entropy[i, span].mean().item() for span in spans],
        })  # fmt: skip
    return made


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"max_tokens_per_micro_batch": 1, "logits_chunk": 3}])
def test_figures_by_hand(model_dir, teacher_dir, options):
    rows = trajectories()
    found = evaluated(model_dir).turn_divergences(rows, str(teacher_dir), **options)
    same(found, by_hand(rows, model_dir, teacher_dir, options.get("temperature", 1.0)))
    assert [len(f["weight"]) for f in found] == [3, 3, 3, 1, 0]


@pytest.mark.parametrize("make", [SFT, GRPO])
def test_of_a_policy_that_was_trained(model_dir, teacher_dir, make, tmp_path):
    """It is the current policy that is judged, no checkpoint holds the judge, and training goes on as without it."""
    rows = trajectories()[:3]
    judged, plain = (make(str(model_dir), lr=1e-2, warmup_steps=0) for _ in range(2))
    fit(judged, [rows])
    figures = judged.turn_divergences(rows, str(teacher_dir))
    judged.policy.save_pretrained(tmp_path / "now")
    same(figures, by_hand(rows, tmp_path / "now", teacher_dir))
    assert figures[0]["divergence"] != pytest.approx(by_hand(rows, model_dir, teacher_dir)[0]["divergence"], rel=1e-3)
    fit(plain, [rows])
    assert judged.state_dict().keys() == plain.state_dict().keys()
    assert sum(p.numel() for p in judged.parameters()) == sum(p.numel() for p in plain.parameters())
    for module in (judged, plain):
        fit(module, [rows])
    assert all(torch.equal(a, b) for a, b in zip(judged.policy.parameters(), plain.policy.parameters(), strict=True))


def test_the_modules_own_teacher_is_not_loaded_twice(model_dir, teacher_dir):
    module = SOD(str(model_dir), str(teacher_dir))
    fit(module, [trajectories()[:3]])
    module.turn_divergences(trajectories(), str(teacher_dir))
    assert module._judges == {}
    module.turn_divergences(trajectories(), str(model_dir))
    assert list(module._judges) == [str(model_dir)]


def test_a_judge_has_the_type_of_a_teacher(model_dir, teacher_dir):
    module = GRPO(str(model_dir), teacher_dtype="bfloat16")
    fit(module, [trajectories()[:3]])
    module.turn_divergences(trajectories(), str(teacher_dir))
    assert {p.dtype for p in module._judges[str(teacher_dir)].parameters()} == {torch.bfloat16}
    assert {p.dtype for p in module.policy.parameters()} == {torch.float32}


def test_one_judge_at_a_time_and_it_is_kept(model_dir, teacher_dir):
    module, rows = evaluated(model_dir), trajectories()
    first = module.turn_divergences(rows, str(teacher_dir))
    kept = module._judges[str(teacher_dir)]
    with torch.inference_mode():  # as in a test of Lightning's
        same(module.turn_divergences(rows, str(teacher_dir)), first)
    assert module._judges[str(teacher_dir)] is kept
    module.turn_divergences(rows, str(model_dir))
    assert list(module._judges) == [str(model_dir)]


def test_refusals(model_dir, tmp_path):
    module = evaluated(model_dir)
    with pytest.raises(ValueError, match="temperature is 0"):
        module.turn_divergences([], str(model_dir), temperature=0.0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens(["Oslo"])
    other = make_model_dir(tmp_path / "other")
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match="another tokenizer than the student"):
        module.turn_divergences([], str(other))
