"""SDAR, Skill-SD and RLSD as modules: what the self-teacher reads, the gradient, and where nothing is left but GRPO."""

import dataclasses
import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM

from data_modules.datasets.questions import write_tasks
from data_modules.rollout_data_module import RolloutDataModule
from lightning_modules.advantage_transforms.skill_teacher import SkillInputs
from lightning_modules.algorithms.episode_grpo import EpisodeGRPO
from lightning_modules.algorithms.grpo import LossInputs
from lightning_modules.algorithms.sdar import RLSD, SDAR, SkillSD
from lightning_modules.batch import LogprobBatch, PolicyOutputs, collate
from lightning_modules.metrics import StepMetrics
from rollout.protocols.episodes import EpisodeProtocol
from rollout.skills.bandit import UCB
from rollout.skills.retrieval import TaskType
from rollout.system import RolloutSystem
from tests.lightning_modules.algorithms.episode_helpers import TASKS, TYPES, EpisodeData, Rooms, episodes, say, skills
from tests.lightning_modules.helpers import fit
from tests.rollout.scripted import TextEngine
from tests.rollout.skills.skill_examples import NoSkills

WINDOWS = [None, 1]
EXACT = {"lr": 1e-3, "num_mini_batches": 1}


def train(module, folder, window, batches=1, **options):
    whole, protocol = episodes(folder, window)
    trainer = fit(module, EpisodeData(whole, protocol, batches), **options)
    return {k: float(v) for k, v in trainer.callback_metrics.items()}


def weights(module):
    return {k: v.clone() for k, v in module.policy.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_teacher_reads_the_skills_and_scores_the_same_tokens(model_dir, window):
    module = SDAR(str(model_dir), skills=skills(), max_tokens_per_micro_batch=400, **EXACT)
    figures = train(module, model_dir, window)
    assert figures["train/skills_tokens"] > 10 and abs(figures["train/gap"]) > 1e-4
    protocol = module.trainer.datamodule.rollouts.protocol
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    rows, batch, scores, inputs, _ = module._last
    teacher, own = module.advantage_transforms[1], inputs.transforms[1]
    for i in (0, len(rows) - 1):
        t = rows[i]
        told = teacher.skills.inject(t.task, t.task.question, teacher._count).text
        assert ("microwave" if "heat" in t.task.data_source else "move it there") in told
        prompt = teacher.prompt_with_skills(module, t, told)
        text, plain = protocol.decode(prompt), protocol.decode(t.prompt_ids)
        assert text == plain.replace("<|im_start|>user\n", f"<|im_start|>user\n{told}\n\n", 1)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *t.response_ids]])).logits[0].log_softmax(-1)
        expected = [
            logits[len(prompt) + j - 1, token].item() * m
            for j, (token, m) in enumerate(zip(t.response_ids, t.loss_mask, strict=True))
        ]
        start = len(t.prompt_ids)
        found = own.skill_teacher_logprobs[i, start : start + len(t.response_ids)].tolist()
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", [SDAR, RLSD])
def test_without_weight_it_is_episode_grpo_bit_for_bit(model_dir, kind):
    ours, plain = kind(str(model_dir), skills=skills(), skills_coef=0.0, **EXACT), EpisodeGRPO(str(model_dir), **EXACT)
    figures = [train(module, model_dir, 1) for module in (ours, plain)]
    assert same(weights(ours), weights(plain)) and figures[0] == figures[1]
    start = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    assert not same(start, weights(ours))
    taught = kind(str(model_dir), skills=skills(), skills_coef=0.5, **EXACT)
    train(taught, model_dir, 1)
    assert not same(weights(taught), weights(plain)), "the teacher has an effect"


def test_empty_skills_leave_no_gap_and_half_a_gate(model_dir):
    figures = train(SDAR(str(model_dir), skills=skills(NoSkills()), **EXACT), model_dir, 1)
    assert figures["train/gap"] == pytest.approx(0.0, abs=1e-6)
    assert figures["train/gate"] == pytest.approx(0.5, abs=1e-6)


def inputs_and_outputs(batch, seed=0, **fields):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return -3 * torch.rand(batch.mask.shape, generator=generator) * batch.mask

    logprobs = draw().requires_grad_()
    own = SkillInputs(draw(), batch.mask.long())
    inputs = LossInputs(torch.zeros_like(batch.mask), logprobs.detach(), transforms=(None, own))
    return dataclasses.replace(inputs, **fields), PolicyOutputs(logprobs, draw().neg(), None)


def gradient(module, batch, inputs, outputs):
    module.metrics = StepMetrics()
    sums = module.loss(outputs, batch, inputs, module.token_weights(batch, LogprobBatch(inputs.old_logprobs)))
    (grad,) = torch.autograd.grad(sums["policy"], outputs.logprobs)
    return grad


def expected_gates(kind, gap, entropy, beta=5.0):
    x = gap if kind == "gap" else entropy if kind == "entropy" else 1 - (1 - entropy) * (1 - gap)
    return 1 / (1 + torch.exp(-beta * x))


@pytest.mark.parametrize("kind", ["gap", "entropy", "soft_or"])
def test_gradient_is_the_gate_and_nothing_else(model_dir, kind):
    whole, _ = episodes(model_dir, None)
    batch = collate(whole)
    module = SDAR("p", skills=skills(), gate=kind, skills_coef=0.25)
    inputs, outputs = inputs_and_outputs(batch)
    gap = inputs.transforms[1].skill_teacher_logprobs - outputs.logprobs.detach()
    expected = -0.25 * expected_gates(kind, gap, outputs.entropy) * batch.mask
    assert torch.allclose(gradient(module, batch, inputs, outputs), expected, atol=1e-5)


@pytest.mark.parametrize("signal", ["gate", "reverse_kl"])
def test_a_clamp_bounds_what_is_learnt_from_and_not_what_is_logged(model_dir, signal):
    batch = collate(episodes(model_dir, None)[0])
    module = SDAR("p", skills=skills(), signal=signal, gap_clamp=0.5, skills_coef=1.0)
    inputs, outputs = inputs_and_outputs(batch)
    gap = inputs.transforms[1].skill_teacher_logprobs - outputs.logprobs.detach()
    bounded = gap.clamp(-0.5, 0.5)
    weight = expected_gates("gap", bounded, None) * (bounded if signal == "reverse_kl" else 1)
    assert torch.allclose(gradient(module, batch, inputs, outputs), -weight * batch.mask, atol=1e-5)
    mean = (gap * batch.mask).sum() / batch.mask.sum()
    assert module.metrics.reduce()["train/gap"] == pytest.approx(mean.item(), abs=1e-5)


SIGNALS = {
    "reverse_kl": lambda gap: gap,
    "forward_kl": lambda gap: gap.exp().clamp(max=10.0) - 1,
    "jsd": lambda gap: 0.7 * torch.log(0.3 * gap.exp() + 0.7),
}


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("clip", [False, True])
def test_signals_of_divergences_without_a_gate(model_dir, signal, clip):
    """True OPSD is reverse_kl without a gate: -sg(Delta) log pi."""
    batch = collate(episodes(model_dir, None)[0])
    jsd = {"jsd_beta": 0.3} if signal == "jsd" else {}
    module = SDAR("p", skills=skills(), gate="none", signal=signal, skills_coef=1.0, clip_signal=clip, **jsd)
    inputs, outputs = inputs_and_outputs(batch)
    gap = inputs.transforms[1].skill_teacher_logprobs - outputs.logprobs.detach()
    expected = -SIGNALS[signal](gap) * batch.mask
    assert torch.allclose(gradient(module, batch, inputs, outputs), expected, atol=1e-4)


def test_a_centred_gate_pushes_nothing_on_the_whole(model_dir):
    whole, protocol = episodes(model_dir, 1)
    module = SDAR(str(model_dir), skills=skills(), centred=True, use_grpo=False, **EXACT)
    train(module, model_dir, 1)
    rows, batch, scores, inputs, _ = module._last
    own = inputs.transforms[1]
    gates = torch.sigmoid(5 * (own.skill_teacher_logprobs - scores.old_logprobs))
    mean = (gates * batch.mask).sum() / batch.mask.sum()
    assert own.gate_mean.tolist() == pytest.approx([float(mean)] * len(rows), abs=1e-5)


def test_clip_stops_a_token_that_has_moved_enough(model_dir):
    batch = collate(episodes(model_dir, None)[0])
    inputs, outputs = inputs_and_outputs(batch)
    moved = dataclasses.replace(inputs, old_logprobs=outputs.logprobs.detach() - math.log(1.5) * batch.mask)
    module = SDAR("p", skills=skills(), clip_signal=True, skills_coef=1.0)
    assert not gradient(module, batch, moved, outputs).any()
    free = SDAR("p", skills=skills(), skills_coef=1.0)
    assert gradient(free, batch, moved, outputs).any()


def test_distillation_alone_has_no_reward_in_it(model_dir):
    module = SDAR(str(model_dir), skills=skills(), use_grpo=False, signal="reverse_kl", gate="none", **EXACT)
    train(module, model_dir, None)
    assert not module._last[3].advantages.any()
    assert module.compares is False


@pytest.mark.parametrize("budget", [80])
def test_micro_batches_and_order_do_not_matter(model_dir, budget):
    found = []
    for turned, tokens in ((False, 500), (True, budget)):
        whole, protocol = episodes(model_dir, 1)
        options = EXACT | {"centred": True, "skills_coef": 0.5, "max_tokens_per_micro_batch": tokens}
        module = SDAR(str(model_dir), skills=skills(), **options)
        trainer = fit(module, EpisodeData(whole[::-1] if turned else whole, protocol))
        found.append({k: float(v) for k, v in trainer.callback_metrics.items()})
    for name in ("train/grad_norm", "train/loss_policy", "train/gate", "train/gap", "train/loss_skills"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4, abs=1e-6), name
    assert any(name.startswith("train/gate/turn") for name in found[0])


def test_whose_weights_teach(model_dir):
    gaps = {}
    for which in ("current", "ema", "fixed"):
        decay = {"ema_decay": 0.5} if which == "ema" else {}
        module = SDAR(str(model_dir), skills=skills(NoSkills()), teacher_weights=which, **decay, **EXACT)
        gaps[which] = train(module, model_dir, None, batches=3)["train/gap"]
        module_keys = module.state_dict().keys()
        assert any(k.startswith("average.") for k in module_keys) == (which == "ema")
    assert gaps["current"] == pytest.approx(0.0, abs=1e-6), "without skills the teacher is the student"
    assert abs(gaps["fixed"]) > abs(gaps["ema"]) > 1e-6, "the average lags, the fixed one stays behind"


def test_rlsd_shares_out_the_advantage_and_less_so_from_step_to_step(model_dir):
    """The released trainer counts iterations from 1, so that the second has the share 0.5 (1 - 2 / 4)."""
    module = RLSD(str(model_dir), skills=skills(), decay_iterations=4, **EXACT)
    figures = train(module, model_dir, 1, batches=2)
    assert figures["train/rlsd_share"] == pytest.approx(0.5 * 2 / 4)
    rows, batch, scores, inputs, _ = module._last
    base = EpisodeGRPO("p").outcome_advantages(rows, batch, scores)
    factor = (inputs.advantages / base)[base != 0]
    assert factor.min() >= 1 - 0.25 * 0.2 - 1e-5 and factor.max() <= 1 + 0.25 * 0.2 + 1e-5
    assert factor.std() > 1e-4


def test_skill_sd_adds_its_k3(model_dir):
    batch = collate(episodes(model_dir, None)[0])
    inputs, outputs = inputs_and_outputs(batch)
    d = outputs.logprobs.detach() - inputs.transforms[1].skill_teacher_logprobs
    k3 = torch.exp(-d) - 1 + d
    expected = 0.5 * (k3 + 1 - torch.exp(-d)) * batch.mask  # rho = 1: d(rho k3) = k3 d(rho) + d(k3)
    module = SkillSD("p", skills=skills(), skills_coef=0.5)
    assert torch.allclose(gradient(module, batch, inputs, outputs), expected, atol=1e-4)


def test_retrieval_learns_from_success_and_survives_a_checkpoint(model_dir, tmp_path):
    module = SDAR(str(model_dir), skills=skills(UCB()), **EXACT)
    train(module, model_dir, 1)
    state = module.advantage_transforms[1].skills.retriever.state_dict()
    assert sum(count for count, _ in state["arms"].values()) == 12, "a reward for every episode, not for every turn"
    assert 0 < sum(total for _, total in state["arms"].values()) <= 12, "success, not the reward of 10"
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = SDAR(str(model_dir), skills=skills(UCB()), **EXACT)
    whole, protocol = episodes(model_dir, 1)
    fit(other, EpisodeData(whole, protocol), ckpt_path=str(tmp_path / "a.ckpt"))
    assert other.advantage_transforms[1].skills.retriever.state_dict() == state, (
        "resumed at its end: nothing further was seen"
    )


def test_a_teacher_that_would_read_too_much_stops_the_run(model_dir):
    from rollout.skills.retrieval import Full

    with pytest.raises(ValueError, match="max_tokens"):
        train(SDAR(str(model_dir), skills=skills(max_tokens=20), **EXACT), model_dir, None)
    long = SDAR(str(model_dir), skills=skills(Full(), max_tokens=100_000), **EXACT)
    long.advantage_transforms[1].skills.header = "word " * 600
    with pytest.raises(ValueError, match="positions for 1024"):
        train(long, model_dir, None)


def test_prompts_of_another_protocol_are_refused(model_dir):
    whole, protocol = episodes(model_dir, 1)
    other = [t.replace(task=dataclasses.replace(t.task, question="Another. Your task is to: x")) for t in whole]
    with pytest.raises(ValueError, match="otherwise than the protocol renders it"):
        fit(SDAR(str(model_dir), skills=skills(), **EXACT), EpisodeData(other, protocol))


WRONG = [
    (SDAR, {"gate": "door"}, "gate is 'door'"),
    (SDAR, {"gate": "none"}, "has no effect"),
    (SDAR, {"centred": True, "signal": "jsd"}, "centred concerns"),
    (SDAR, {"gap_clamp": 1.0, "gate": "entropy"}, "reads no gap"),
    (SDAR, {"teacher_weights": "mean"}, "teacher_weights"),
]


@pytest.mark.parametrize("kind, options, message", WRONG)
def test_wrong_options(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind("p", **{"skills": skills(), **options})


def test_what_stops_before_a_policy_is_loaded(model_dir):
    """Kinds of tasks that the retriever does not know; an average where DeepSpeed would lose it."""
    from lightning.pytorch.strategies import DeepSpeedStrategy

    whole, protocol = episodes(model_dir, 1)
    data = EpisodeData(whole, protocol)
    data.training_questions = (dataclasses.replace(whole[0].task, data_source="juggling"),)
    module = SDAR(str(model_dir), skills=skills(), **EXACT)
    with pytest.raises(ValueError, match="juggling"):
        fit(module, data)
    assert module.policy is None
    module = SDAR(str(model_dir), skills=skills(), teacher_weights="ema", **EXACT)
    module._trainer = SimpleNamespace(
        datamodule=EpisodeData(whole, protocol),
        strategy=object.__new__(DeepSpeedStrategy),
        precision_plugin=SimpleNamespace(),
    )
    with pytest.raises(ValueError, match="without DeepSpeed"):
        module.setup("fit")


@pytest.mark.parametrize(
    "options, source, message",
    [({}, "juggling", "no category for data source 'juggling'"), ({"max_tokens": 20}, TYPES[0], "max_tokens is 20")],
)
def test_what_stops_before_an_engine_loads(model_dir, tmp_path, options, source, message):
    """Kinds of tasks that the retriever does not know, skills that their budget has no room for."""
    protocol = EpisodeProtocol(str(model_dir), texts="short", window=1, require_thinking=False)
    system = RolloutSystem(TextEngine(protocol, say), protocol, Rooms, final_turn=False)
    path = tmp_path / "questions.parquet"
    write_tasks(path, [dataclasses.replace(task, data_source=source, golden_answers=("-",)) for task in TASKS])
    data = RolloutDataModule(system, [str(path)], prompts_per_iteration=3, group_size=4)
    module = SDAR(str(model_dir), skills=skills(**options), **EXACT)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer(accelerator="cpu", max_steps=1, **quiet)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, datamodule=data)
    assert not system.running and module.policy is None, "neither engine nor policy"


def test_skills_are_chosen_once_a_group(model_dir):
    class Counting(TaskType):
        asked = 0

        def select(self, task, text):
            Counting.asked += 1
            return super().select(task, text)

    module = SDAR(str(model_dir), skills=skills(Counting()), **EXACT)
    train(module, model_dir, 1)
    assert Counting.asked == 3, "three groups, many rows"


def test_as_released_skills_stand_before_the_template_and_are_cut_first(model_dir):
    module = SDAR(str(model_dir), skills=skills(place="before_template", header="[Skills]"), **EXACT)
    assert train(module, model_dir, 1)["train/skills_tokens"] > 10
    teacher, rows, protocol = (
        module.advantage_transforms[1],
        module._last[0],
        module.trainer.datamodule.rollouts.protocol,
    )
    t = rows[-1]
    told = teacher.skills.inject(t.task, t.task.question, teacher._count).text
    prompt = teacher.prompt_with_skills(module, t, told)
    assert prompt[-len(t.prompt_ids) :] == list(t.prompt_ids)
    assert protocol.decode(prompt[: -len(t.prompt_ids)]) == f"{told}\n\n" and told.startswith("[Skills]")
    budgets = module.trainer.datamodule.rollouts.budgets
    limit = len(t.prompt_ids) + 5
    budgets = dataclasses.replace(budgets, max_length=limit + budgets.max_turn_tokens)
    module.trainer.datamodule.rollouts.budgets = budgets
    assert teacher.prompt_with_skills(module, t, told) == prompt[-limit:]


def test_as_released_skills_are_chosen_for_every_turn_by_its_prompt(model_dir):
    class Reading(TaskType):
        read: list = []

        def select(self, task, text):
            Reading.read.append(text)
            return super().select(task, text)

    module = SDAR(str(model_dir), skills=skills(Reading(), every_turn=True), **EXACT)
    train(module, model_dir, 1)
    rows, protocol = module._last[0], module.trainer.datamodule.rollouts.protocol
    assert Reading.read == [protocol.decode(list(t.prompt_ids)) for t in rows]
    with pytest.raises(ValueError, match="UCB learns from episodes, but every_turn chooses for turns"):
        skills(UCB(), every_turn=True)
