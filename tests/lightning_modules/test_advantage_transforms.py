"""Advantage transforms from a YAML, combined: the gradient against a slow form; how deep the shipped classes stand."""

import copy
import random
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from jsonargparse import ArgumentParser

from experiments.registry.project import ROOT
from lightning_modules.advantage_transforms import signals
from lightning_modules.advantage_transforms.attribution import EntropyScaling, HardAttribution
from lightning_modules.advantage_transforms.base import AdvantageTransform
from lightning_modules.advantage_transforms.distillation import (
    AdvantageGate,
    Distillation,
    IncorrectOnly,
    TurnWeighting,
)
from lightning_modules.advantage_transforms.skill_signals import GatedSkills, SkillImportanceKL, SkillLoss, SkillShares
from lightning_modules.advantage_transforms.skill_teacher import SkillTeacher
from lightning_modules.advantage_transforms.teachers import TaughtTransform
from lightning_modules.advantage_transforms.turns import StateAdvantages, TurnAdvantages
from lightning_modules.algorithms import aepo, arpo, cold_start_kd, dgpo, episode_grpo, grpo, opsd, ppo, sdar, sft, sod
from lightning_modules.batch import collate
from lightning_modules.models.policy import load_causal_lm, token_logprobs
from lightning_modules.training import optimisation
from lightning_modules.training.policy_module import EvaluateOnly
from tests.lightning_modules.algorithms.episode_helpers import EpisodeData, episodes, skills
from tests.lightning_modules.helpers import fit, make_group

HERE = "lightning_modules.advantage_transforms"


def parse(model):
    """A module as the command line makes it from a YAML's ``model``."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(L.LightningModule, "model")
    return parser.instantiate_classes(parser.parse_object({"model": model})).model


def combination(policy, teacher, **options):
    """SOD's turn weights on a teacher that is asked about wrong trajectories only (DGPO), ARPO's hard attribution."""
    weights = [{"class_path": f"{HERE}.distillation.{name}"} for name in ("DivergenceRatio", "IncorrectOnly")]
    distillation = {"teacher": str(teacher), "weights": weights, "coef": 0.5}
    transforms = [
        {"class_path": f"{HERE}.attribution.HardAttribution"},
        {"class_path": f"{HERE}.distillation.Distillation", "init_args": distillation},
    ]
    arguments = {
        "policy": str(policy),
        "advantage_transforms": transforms,
        "lr": 1e-3,
        "num_mini_batches": 1,
        **options,
    }
    return parse({"class_path": "lightning_modules.algorithms.grpo.GRPO", "init_args": arguments})


def branched(seed=0):
    """Two groups; 1 branches off 0 and 2 off 1, 5 off 3."""
    rng = random.Random(seed)
    return make_group(rng, "a", [1, 0, 0], {1: (0, 1), 2: (1, 2)}) + make_group(rng, "b", [0, 1, 1], {2: (0, 1)})


def slow_advantages(rows, student, teacher):
    """By row and response token, from the formulas of the papers; log-probs are [B, T]."""
    found = []
    outcome = {}
    for t in rows:
        rewards = torch.tensor([float(o.reward.total) for o in rows if o.group == t.group])
        outcome[t.group, t.index] = float((t.reward.total - rewards.mean()) / (rewards.std() + 1e-6))

    def sampled_by(t, j):
        """Which trajectory first sampled response token j of t."""
        while t.fork is not None and j < t.fork.at:
            t = next(o for o in rows if o.group == t.group and o.index == t.fork.parent)
        return t.group, t.index, j

    for i, t in enumerate(rows):
        start = len(t.prompt_ids)
        gap = (teacher - student)[i, start : start + len(t.response_ids)].tolist()
        d = [sum(abs(x) for x in gap[turn.start : turn.end]) / (turn.end - turn.start) for turn in t.turns]
        values = [0.0] * len(gap)
        for k, turn in enumerate(t.turns):
            weight = 1.0 if k == 0 else min((d[0] + 1e-6) / (d[k] + 1e-6), 1.2)
            for j in range(turn.start, turn.end):
                here = sampled_by(t, j)
                shared = [
                    outcome[o.group, o.index] for o in rows if j < len(o.response_ids) and sampled_by(o, j) == here
                ]
                wrong = t.reward.parts["em"] < 0.1
                values[j] = sum(shared) / len(shared) + 0.5 * weight * wrong * gap[j]
        found.append(values)
    return found


def test_the_combination_has_the_gradient_of_its_slow_form(model_dir, teacher_dir, monkeypatch):
    rows, seen, clip = branched(), [], optimisation.clip_gradients

    def record(module, *args):
        gradient = torch.cat([p.grad.flatten().clone() for p in module.policy.parameters()])
        seen.append((copy.deepcopy(module.policy.state_dict()), gradient))
        return clip(module, *args)

    monkeypatch.setattr(optimisation, "clip_gradients", record)
    fit(combination(model_dir, teacher_dir, max_tokens_per_micro_batch=60), [rows] * 3)
    batch, teacher = collate(rows), load_causal_lm(str(teacher_dir))
    with torch.no_grad():
        judged = token_logprobs(teacher, batch).logprobs
    for state, gradient in seen:
        student = load_causal_lm(str(model_dir))
        student.load_state_dict(state)
        logprobs = token_logprobs(student, batch).logprobs
        total, count = 0.0, 0
        for i, (t, values) in enumerate(zip(rows, slow_advantages(rows, logprobs.detach(), judged), strict=True)):
            for j, sampled in enumerate(t.loss_mask):
                total = total - sampled * values[j] * logprobs[i, len(t.prompt_ids) + j]  # every ratio is 1
                count += sampled
        (total / count).backward()
        expected = torch.cat([p.grad.flatten() for p in student.parameters()])
        assert expected.abs().max() > 1e-3 and (gradient - expected).abs().max() < 2e-5
    assert len(seen) == 3 and not torch.equal(seen[0][1], seen[2][1])


def test_a_kl_to_a_reference_beside_a_teacher(model_dir, teacher_dir):
    """Two frozen models, neither in a checkpoint; gradients of both parts."""
    rows = branched()
    module = combination(model_dir, teacher_dir, reference=str(model_dir), kl_coef=0.1)
    trainer = fit(module, [rows] * 2)
    assert module.teacher is not None and module.reference is not None and module.teacher is not module.reference
    assert not any(name.startswith(("teacher.", "reference.")) for name in module._trained(module.state_dict()))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["train/kl"] > 0 and metrics["train/opd_advantage_abs"] > 0
    assert {"teacher_logprobs", "reference_logprobs", "opd_weights"} <= module.last_token_values[0][1].keys()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_teacher_and_a_fixed_self_teacher_are_two_models(model_dir, teacher_dir, turned, kl_coef):
    distillation, gated = Distillation(str(teacher_dir)), GatedSkills(skills(), "fixed")
    transforms = [gated, distillation] if turned else [distillation, gated]
    module = grpo.GRPO(
        str(model_dir), str(model_dir), kl_coef, advantage_transforms=transforms
    )  # or the reference is both
    module._trainer = SimpleNamespace(strategy=None)
    module.build_models()
    batch = collate(branched())
    for folder, found in ((teacher_dir, distillation.judge(module, branched(), batch).logprobs),
                          (model_dir, module.logprobs_of(gated.self_teacher.model(module), batch))):  # fmt: skip
        assert torch.equal(found, module.logprobs_of(load_causal_lm(str(folder)), batch))
    assert {name.split(".")[0] for name in module._trained(module.state_dict())} == {"policy"}
    both, loaded = (str(model_dir), "float32"), {"teacher": (str(teacher_dir), "float32")}
    assert module.frozen_models() == loaded | {"reference" if kl_coef else "self_teacher": both}


WITHOUT_EFFECT = {
    r"2 have teachers, with the names \[None, None\]": lambda: [Distillation("t"), Distillation("other")],
    "2 are a SkillTeacher": lambda: [GatedSkills(skills(), "ema"), SkillImportanceKL(skills(), "ema")],
    "TurnAdvantages replaces the advantages of HardAttribution": lambda: [HardAttribution(), TurnAdvantages()],
    "StateAdvantages replaces the advantages of EntropyScaling": lambda: [EntropyScaling(), StateAdvantages()],
}


@pytest.mark.parametrize("message", WITHOUT_EFFECT)
def test_transforms_that_would_lose_their_effect_are_refused(message):
    with pytest.raises(ValueError, match=message):
        grpo.GRPO("p", advantage_transforms=WITHOUT_EFFECT[message]())


@pytest.mark.parametrize("changes", [EntropyScaling, HardAttribution, lambda: SkillShares(skills())])
def test_what_changes_the_outcome_is_refused_without_it(changes):
    with pytest.raises(ValueError, match="which use_grpo: false takes away"):
        grpo.GRPO("p", use_grpo=False, advantage_transforms=[Distillation("t"), changes()])


def test_ppo_takes_turn_weights_on_its_kl(model_dir, teacher_dir):
    """r_t = outcome - kl_coef w_k k1: by hand from the models' log-probs."""
    weights = [{"class_path": f"{HERE}.distillation.{name}"} for name in ("DivergenceRatio", "IncorrectOnly")]
    arguments = {"policy": str(model_dir), "reference": str(teacher_dir), "kl_coef": 0.5, "kl_weights": weights}
    module = parse({"class_path": "lightning_modules.algorithms.ppo.PPO", "init_args": arguments})
    rows = branched()
    module._trainer = SimpleNamespace(strategy=None)
    module.build_models()
    batch = collate(rows)
    scores = module.score(rows, batch)
    rewards = module.compute_advantages(rows, batch, scores).rewards
    for i, t in enumerate(rows):
        gap = (scores.old_logprobs - scores.reference_logprobs)[i, len(t.prompt_ids) :].tolist()
        d = [sum(abs(x) for x in gap[turn.start : turn.end]) / (turn.end - turn.start) for turn in t.turns]
        paid = [0.0] * len(t.response_ids)
        for k, turn in enumerate(t.turns):
            weight = (t.reward.total == 0) * (1.0 if k == 0 else min((d[0] + 1e-6) / (d[k] + 1e-6), 1.2))
            paid[turn.start : turn.end] = [-0.5 * weight * x for x in gap[turn.start : turn.end]]
        paid[t.turns[-1].end - 1] += t.reward.total
        found = rewards[i, len(t.prompt_ids) : int(batch.lengths[i])].tolist()
        assert found == pytest.approx(paid, abs=1e-5)
    with pytest.raises(ValueError, match="read no advantages"):
        ppo.PPO("p", "r", kl_weights=[AdvantageGate()])
    with pytest.raises(ValueError, match="and a reference"):
        ppo.PPO("p", kl_weights=[IncorrectOnly()])
    with pytest.raises(ValueError, match="a kl_coef above 0"):
        ppo.PPO("p", "r", kl_coef=0.0, kl_weights=[IncorrectOnly()])


def ppo_with(model_dir, transforms, **options):
    arguments = {"policy": str(model_dir), "lr": 1e-3, "advantage_transforms": transforms, **options}
    return parse({"class_path": "lightning_modules.algorithms.ppo.PPO", "init_args": arguments})


def test_ppo_takes_a_teacher_of_wrong_trajectories_and_a_loss(model_dir, teacher_dir):
    """What Distillation adds to the whitened advantages, by hand; the loss of skills comes on top of the policy's."""
    weights = [{"class_path": f"{HERE}.distillation.IncorrectOnly"}]
    teacher = {"teacher": str(teacher_dir), "weights": weights, "coef": 0.5}
    distillation = {"class_path": f"{HERE}.distillation.Distillation", "init_args": teacher}
    rows, plain = branched(), ppo_with(model_dir, [])
    taught = ppo_with(model_dir, [distillation])
    for module in (plain, taught):
        module._trainer = SimpleNamespace(strategy=None)
        module.build_models()
    batch = collate(rows)
    scores = taught.score(rows, batch)
    wrong = torch.tensor([[float(t.reward.total == 0)] for t in rows])
    added = 0.5 * wrong * (scores.teacher_logprobs - scores.old_logprobs) * batch.mask
    base, found = (module.compute_advantages(rows, batch, scores).advantages for module in (plain, taught))
    assert torch.allclose(found, base + added, atol=1e-6) and added.abs().max() > 1e-3
    trainer = fit(ppo_with(model_dir, [distillation], max_tokens_per_micro_batch=60), [rows] * 2)
    assert float(trainer.callback_metrics["train/opd_advantage_abs"]) > 0
    episode_rows, protocol = episodes(model_dir, 1)
    gated = ppo.PPO(str(model_dir), advantage_transforms=[GatedSkills(skills(), skills_coef=0.5)], num_mini_batches=1)
    trainer = fit(gated, EpisodeData(episode_rows, protocol))
    assert float(trainer.callback_metrics["train/loss_skills"]) != 0


@pytest.mark.parametrize("compares", [HardAttribution, TurnAdvantages, StateAdvantages])
def test_ppo_refuses_what_compares_the_trajectories_of_a_group(compares):
    for host in (ppo.PPO, lambda *args, **options: dgpo.DGPO(*args, "t", **options)):
        with pytest.raises(ValueError, match=f"{compares.__name__} compares the trajectories of a group, .* does not"):
            host("p", advantage_transforms=[compares()])


def test_aepos_clip_goes_with_other_transforms(model_dir, teacher_dir):
    """GRPO with the parts of AEPO from a YAML is AEPO, bit for bit."""
    options = {"lr": 1e-2, "epochs": 2, "clip_low": 0.05, "clip_high": 0.05}
    parts = [EntropyScaling(0.2)]
    found = {}
    for name, module in {
        "aepo": aepo.AEPO(str(model_dir), **options),
        "parts": grpo.GRPO(str(model_dir), clip_balanced=True, advantage_transforms=parts, **options),
        "ordinary": grpo.GRPO(str(model_dir), advantage_transforms=parts, **options),
    }.items():
        fit(module, [branched()])
        found[name] = torch.cat([p.detach().flatten() for p in module.policy.parameters()])
    assert torch.equal(found["aepo"], found["parts"]) and not torch.equal(found["parts"], found["ordinary"])
    assert combination(model_dir, teacher_dir, clip_balanced=True).clip_balanced


SHIPPED = [
    sft.SFT, cold_start_kd.ColdStartKD, ppo.PPO, dgpo.DGPO, grpo.GRPO, arpo.ARPO, aepo.AEPO, sod.SOD, opsd.OPSD,
    episode_grpo.EpisodeGRPO, episode_grpo.GiGPO, sdar.SDAR, sdar.SkillSD, sdar.RLSD, EvaluateOnly,
]  # fmt: skip


def test_the_table_of_signals_is_complete_and_on_the_page():
    listed = {signal.added_by for signal in signals.SIGNALS.values()}
    abstract = {AdvantageTransform, TurnWeighting, SkillTeacher, SkillLoss, TaughtTransform}
    found, kinds = set(), [AdvantageTransform, TurnWeighting]
    while kinds:
        kinds += [c for c in kinds.pop().__subclasses__() if c.__module__.startswith("lightning_modules.")]
        found |= {*kinds}
    assert found - abstract == listed
    assert signals.table() in (ROOT / "docs" / "new_algorithm.md").read_text()


def test_no_algorithm_stands_on_more_than_four_classes_of_ours():
    for algorithm in SHIPPED:
        ours = [c.__name__ for c in algorithm.__mro__ if c.__module__.startswith("lightning_modules.")]
        assert len(ours) <= 4, ours
    modules = (sft, cold_start_kd, ppo, dgpo, grpo, arpo, aepo, sod, opsd, episode_grpo, sdar)
    here = {c for m in modules for c in vars(m).values() if isinstance(c, type) and issubclass(c, L.LightningModule)}
    shipped = {c for c in here if c.__module__.startswith("lightning_modules.algorithms.")}
    assert shipped == {*SHIPPED} - {EvaluateOnly}
