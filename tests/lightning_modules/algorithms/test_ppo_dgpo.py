"""PPO and DGPO: rewards, masks, switches, and the shared module's invariances (docs/algorithms/dgpo.md)."""

import random
import shutil

import lightning as L
import pytest
import torch

from lightning_modules.advantage_transforms.distillation import weigh_turns
from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.dgpo import DGPO
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.batch import LogprobBatch, collate
from lightning_modules.models.policy import load_causal_lm, named_weights, token_logprobs
from lightning_modules.training import optimisation
from rollout.trajectory import Reward, StopReason
from tests.lightning_modules.helpers import fit, largest_difference, make_trajectories, make_trajectory


def dgpo(model_dir, teacher_dir, **options):
    return DGPO(str(model_dir), str(teacher_dir), **{"lr": 1e-3, "critic_lr": 1e-3, **options})


def train(module, batches=None, **options):
    trainer = fit(module, batches or [make_trajectories(6)], **options)
    weights = {k: v.clone() for k, v in named_weights(module) if not k.startswith("reference.")}
    return weights, {k: float(v) for k, v in trainer.callback_metrics.items()}, trainer


def random_scores(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old, teacher = (-torch.rand(batch.mask.shape, generator=generator) * batch.mask for _ in range(2))
    return LogprobBatch(old, None, teacher, torch.randn(batch.mask.shape, generator=generator))


def rewards_of(module, rows, scores):
    """Token rewards as GAE sees them."""
    seen = {}
    original = module.token_rewards
    module.token_rewards = lambda *args: seen.setdefault("r", original(*args))
    inputs = module.compute_advantages(rows, collate(rows), scores)
    return seen["r"], inputs


# ---------------------------------------------------------------------- acceptance test 1
@pytest.mark.parametrize("as_released", [False, True])
def test_only_wrong_rows_pay_the_teacher(as_released):
    rows = make_trajectories(2, em=[1.0, 0.0])
    batch = collate(rows)
    scores = random_scores(batch)
    rewards, _ = rewards_of(DGPO("p", "t", kl_coef=0.5, as_released=as_released), rows, scores)
    kl = scores.old_logprobs - scores.reference_logprobs
    assert rewards[0].nonzero()[:, 0].tolist() == [int(batch.lengths[0]) - 1]  # EM on the last token, nothing else
    assert rewards[0].sum() == 1.0
    assert torch.allclose(rewards[1], -0.5 * kl[1] * batch.mask[1])
    assert (kl[1] < 0).any() and (kl[1] > 0).any()  # k1 may have either sign, and is not clamped


def test_a_batch_of_right_rows_is_no_nan(model_dir, teacher_dir):
    rows = make_trajectories(4, em=[1.0] * 4)
    rewards, inputs = rewards_of(DGPO("p", "t", kl_coef=0.5), rows, random_scores(collate(rows)))
    assert rewards.sum() == 4.0
    assert torch.isfinite(inputs.advantages).all()
    weights, figures, _ = train(dgpo(model_dir, teacher_dir), [rows])
    assert all(torch.isfinite(v).all() for v in weights.values())
    assert "train/kl_paid" not in figures  # no wrong row: no figure, rather than 0
    assert figures["train/em"] == 1.0


def test_uniform_kl_and_no_teacher_are_switches():
    rows = make_trajectories(2, em=[1.0, 0.0])
    batch = collate(rows)
    scores = random_scores(batch)
    kl = (scores.old_logprobs - scores.reference_logprobs) * batch.mask
    uniform, _ = rewards_of(DGPO("p", "t", kl_coef=0.5, selective=False), rows, scores)
    none, _ = rewards_of(DGPO("p", "t", kl_coef=0.0), rows, scores)
    assert torch.allclose(none - uniform, 0.5 * kl)
    k3, _ = rewards_of(DGPO("p", "t", kl_coef=0.5, selective=False, kl_estimator="k3"), rows, scores)
    assert torch.allclose(none - k3, 0.5 * ((-kl).exp() - 1 + kl) * batch.mask, atol=1e-6)


def test_right_is_judged_by_exact_match_not_by_the_total():
    rows = make_trajectories(2)
    rows = [rows[0].replace(reward=Reward(0.0, {"em": 1.0})), rows[1].replace(reward=Reward(0.8, {"em": 0.0}))]
    assert kl_rows(rows) == [0.0, 1.0]
    assert kl_rows([rows[1].replace(reward=Reward(0.09)), rows[1].replace(reward=Reward(0.1))]) == [1, 0]


def kl_rows(rows):
    """What the KL of each row weighs: the same on all of its sampled tokens."""
    batch = collate(rows)
    scores = random_scores(batch)
    models = (scores.old_logprobs, scores.reference_logprobs)
    weights = weigh_turns(DGPO("p", "t").kl_weights, rows, batch, *models).weights_BT
    [*found] = [set(row[on == 1].tolist()) for row, on in zip(weights, batch.mask, strict=True)]
    return [value for (value,) in found]


def test_without_a_kl_no_teacher_is_looked_for_and_it_is_ppo(model_dir):
    options = {"lr": 1e-3, "num_mini_batches": 1}
    plain, figures, _ = train(PPO(str(model_dir), **options))
    module = DGPO(str(model_dir), "/nowhere/at/all", kl_coef=0.0, **options)
    same, other, _ = train(module)
    assert largest_difference(plain, same) == 0.0 and figures == other and module.reference is None


# ---------------------------------------------------------------------- acceptance test 2
def test_at_gamma_lambda_one_only_whitening_sees_the_observations():
    rows = make_trajectories(4)
    batch = collate(rows)
    scores = random_scores(batch)
    ours, released = (
        DGPO("p", "t", as_released=flag).compute_advantages(rows, batch, scores) for flag in (False, True)
    )
    mask = batch.mask
    assert torch.allclose(ours.returns, released.returns * mask, atol=1e-5)
    assert ours.advantages[mask == 1].mean().abs() < 1e-6
    assert ours.advantages[mask == 1].std() == pytest.approx(1.0, abs=1e-4)
    response = batch.response_mask == 1
    assert released.advantages[response].mean().abs() < 1e-6
    assert released.advantages[response].std() == pytest.approx(1.0, abs=1e-4)
    assert not torch.allclose(ours.advantages, released.advantages * mask, atol=1e-2)
    assert torch.equal(ours.value_mask, mask) and torch.equal(released.value_mask, batch.response_mask)


def test_outcome_is_not_lost_when_the_last_token_is_an_observation():
    row = make_trajectory(random.Random(0), 0, em=1.0, spans=[3, 4])
    rewards, _ = rewards_of(DGPO("p", "t"), [row], random_scores(collate([row])))
    assert rewards[0].nonzero()[:, 0].tolist() == [len(row.prompt_ids) + 2]


# ---------------------------------------------------------------------- acceptance test 3
def test_teacher_equal_to_the_student_is_plain_ppo(model_dir):
    same, figures, _ = train(DGPO(str(model_dir), str(model_dir), kl_coef=10.0, lr=1e-3))
    plain, *_ = train(PPO(str(model_dir), lr=1e-3))
    strip = {k: v for k, v in same.items() if not k.startswith("reference.")}
    assert figures["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert largest_difference(strip, plain) < 1e-6


# ---------------------------------------------------------------------- the shared module
@pytest.mark.parametrize("kl", [{"kl_in": "loss", "kl_estimator": "k3"}, {"as_released": True}])
def test_micro_batches_chunks_and_order_change_nothing(model_dir, teacher_dir, kl):
    rows = make_trajectories(7)
    common = {"num_mini_batches": 1, "epochs": 2, "kl_coef": 0.1, **kl}
    whole, figures, _ = train(dgpo(model_dir, teacher_dir, **common), [rows])
    split, split_figures, _ = train(
        dgpo(model_dir, teacher_dir, max_tokens_per_micro_batch=1, logits_chunk=3, **common), [rows[::-1]]
    )
    assert largest_difference(whole, split) < 5e-5
    for name, value in figures.items():
        assert split_figures[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_loss_is_a_token_mean_over_the_mini_batch(model_dir):
    """Against the definition, on the first step, where every ratio is 1 and every value 0."""
    rows = make_trajectories(5)
    module = PPO(str(model_dir), num_mini_batches=1, entropy_coef=0.25, max_tokens_per_micro_batch=30)
    _, figures, _ = train(module, [rows])
    tokens = [t.reward.total for t in rows for _ in range(sum(t.loss_mask))]  # V = 0: A_t = EM before whitening
    assert figures["train/loss_value"] == pytest.approx(0.5 * sum(x * x for x in tokens) / len(tokens), rel=1e-5)
    batch, start = collate(rows), load_causal_lm(str(model_dir))
    entropy = float(token_logprobs(start, batch).entropy.sum().detach() / batch.mask.sum())
    assert figures["train/entropy"] == pytest.approx(entropy, rel=1e-4)
    assert figures["train/loss_policy"] == pytest.approx(-0.25 * entropy, rel=1e-3)  # whitened A sums to 0
    assert figures["train/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert figures["train/clip_fraction"] == 0.0


def test_global_step_counts_iterations_not_optimiser_steps(model_dir, teacher_dir):
    module, steps = dgpo(model_dir, teacher_dir, num_mini_batches=3, epochs=2), []
    module.on_before_zero_grad = lambda optimizer: steps.append(module.trainer.global_step)
    _, _, trainer = train(module, [make_trajectories(6)] * 4, max_steps=3)
    assert trainer.global_step == 3
    assert module.optimizers().state[next(module.policy.parameters())]["step"] == 18


def test_failed_trajectories_are_in_no_figure_and_no_gradient(model_dir, teacher_dir):
    rows = make_trajectories(6)
    broken = rows[-1].replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None)
    a, figures_a, _ = train(dgpo(model_dir, teacher_dir), [[*rows[:-1], broken]])
    b, figures_b, _ = train(dgpo(model_dir, teacher_dir), [rows[:-1]])
    assert largest_difference(a, b) == 0.0
    assert figures_a == figures_b


def test_logged_figures(model_dir, teacher_dir):
    rows = make_trajectories(6)
    rows[0] = rows[0].replace(stop_reason=StopReason.LENGTH)
    _, figures, _ = train(dgpo(model_dir, teacher_dir), [rows])
    assert figures["train/reward"] == figures["train/em"] == 0.5
    assert figures["train/response_tokens"] == pytest.approx(sum(sum(t.loss_mask) for t in rows) / 6)
    assert figures["train/stop/length"] == pytest.approx(1 / 6)
    assert figures["train/stop/answer"] == pytest.approx(5 / 6)
    batch = collate(rows)
    student, teacher = (token_logprobs(load_causal_lm(str(d)), batch).logprobs for d in (model_dir, teacher_dir))
    gap = (student - batch.sampler_logprobs).abs()[batch.mask == 1]
    assert figures["train/logprob_gap"] == pytest.approx(gap.mean().item(), rel=1e-4)
    assert figures["train/logprob_gap_max"] == pytest.approx(gap.max().item(), rel=1e-4)
    wrong = batch.mask * torch.tensor([[1 - t.reward.total] for t in rows])
    kl = float((((student - teacher) * wrong).sum() / wrong.sum()).detach())
    assert figures["train/kl_paid"] == pytest.approx(kl, rel=1e-3)
    everywhere = float((((student - teacher) * batch.mask).sum() / batch.mask.sum()).detach())
    assert figures["train/kl"] == pytest.approx(everywhere, rel=1e-3)
    for name in ("grad_norm", "grad_norm_critic", "explained_variance", "lr", "lr_critic"):
        assert f"train/{name}" in figures


def test_policy_and_critic_are_clipped_apart(model_dir, monkeypatch):
    module, after = PPO(str(model_dir), max_grad_norm=0.01, num_mini_batches=1), {}
    clip = optimisation.clip_gradients

    def clip_and_measure(*args):
        norms = clip(*args)
        for name, part in module.trained_parts().items():
            after[name] = float(torch.stack([p.grad.norm() for p in part.parameters()]).norm())
        return norms

    monkeypatch.setattr(optimisation, "clip_gradients", clip_and_measure)
    _, figures, _ = train(module)
    assert figures["train/grad_norm"] > 0.01 and figures["train/grad_norm_critic"] > 0.01
    assert after == pytest.approx({"policy": 0.01, "critic": 0.01}, rel=1e-3)


def test_separate_learning_rates_and_warmups(model_dir):
    module, seen = PPO(str(model_dir), lr=1e-6, warmup_steps=4, critic_lr=2e-6, critic_warmup_steps=2), []
    module.log_dict = lambda figures, **_: seen.extend(
        [(figures["train/lr"] * 1e6, figures["train/lr_critic"] * 1e6)] if "train/lr" in figures else []
    )
    fit(module, [make_trajectories(2)] * 5)
    expected = [(0.25, 1.0), (0.5, 2.0), (0.75, 2.0), (1.0, 2.0), (1.0, 2.0)]
    assert [rate for pair in seen for rate in pair] == pytest.approx([rate for pair in expected for rate in pair])


def test_refusals(model_dir):
    with pytest.raises(ValueError, match="k1 has a gradient of zero mean"):
        DGPO("p", "t", kl_in="loss")
    with pytest.raises(ValueError, match="0/0 has no reward"):
        train(PPO(str(model_dir)), [[make_trajectories(1)[0].replace(reward=None)]])


def test_the_last_batch_can_be_read_token_by_token(model_dir, teacher_dir):
    trajectories = make_trajectories(3, em=[1.0, 0.0, 0.0])
    module = DGPO(policy=str(model_dir), teacher=str(teacher_dir))
    assert module.last_token_values == []
    fit(module, [trajectories])
    computed = module.last_token_values
    assert [t for t, _ in computed] == trajectories
    for t, figures in computed:
        assert next(iter(figures)) == "advantages", "what the page underlines by"
        assert {
            "rewards",
            "advantages",
            "returns",
            "old_logprobs",
            "old_values",
            "reference_logprobs",
            "kl",
        } <= figures.keys()
        assert all(len(values) == len(t.response_ids) for values in figures.values())
        sampled = [i for i, m in enumerate(t.loss_mask) if m]
        hidden = [i for i, m in enumerate(t.loss_mask) if not m]
        assert all(figures["old_logprobs"][i] < 0 for i in sampled)
        assert all(figures[name][i] == 0 for i in hidden for name in ("kl", "advantages", "old_logprobs"))
        difference = figures["old_logprobs"][sampled[0]] - figures["reference_logprobs"][sampled[0]]
        assert figures["kl"][sampled[0]] == pytest.approx(difference, abs=1e-6)
        paid = sum(figures["kl"]) if t.reward.total == 0 else 0.0  # DGPO: wrong rows pay for their distance
        assert sum(figures["rewards"]) == pytest.approx(t.reward.total - module.kl_coef * paid, abs=1e-5)


def test_an_iteration_of_failures_moves_nothing_even_with_momentum_and_decay(model_dir, teacher_dir):
    good = make_trajectories(4)
    failed = [t.replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None) for t in good]
    options = {"weight_decay": 0.1, "lr": 1e-3, "warmup_steps": 5}
    once, *_ = train(dgpo(model_dir, teacher_dir, **options), [good])
    twice, _, trainer = train(dgpo(model_dir, teacher_dir, **options), [good, failed])
    assert largest_difference(once, twice) == 0.0
    assert trainer.global_step == 2


def test_a_failure_moves_no_other_trajectory_to_another_step(model_dir, teacher_dir):
    """Rows 0, 2 make the first step and 1, 3 the second; without row 0 the first step is row 2 alone."""
    rows = make_trajectories(4)
    failed = rows[0].replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None)
    seen = []
    module = dgpo(model_dir, teacher_dir, num_mini_batches=2)
    step = module._mini_batch
    module._mini_batch = lambda batch, inputs, weights, index: seen.append(index) or step(batch, inputs, weights, index)
    fit(module, [[failed, *rows[1:]]])
    assert seen == [[1], [0, 2]]  # rows of the batch that is left: 1, 2, 3


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 0.7}, "sampled at temperature 0.7"),
        ({"repetition_penalty": 1.1}, "repetition_penalty 1.1"),
    ],
)
def test_a_sampler_with_another_distribution_is_refused(model_dir, teacher_dir, sampling, message):
    from data_modules.loading.decoding import Decoding

    module = dgpo(model_dir, teacher_dir)
    data = type("Data", (L.LightningDataModule,), {"__len__": lambda self: 1, "train_dataloader": lambda self: [[]]})()
    data.train_sampling = Decoding(**sampling)
    with pytest.raises(ValueError, match=message):
        fit(module, data)
    assert module.policy is None, "refused before a model is loaded"


def test_a_teacher_with_another_tokenizer_is_refused(model_dir, tmp_path):
    from transformers import AutoTokenizer

    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens(["<stranger>"])
    tokenizer.save_pretrained(other)
    message = "another tokenizer.*'<stranger>' is .* there, missing here"
    for module in (DGPO(str(model_dir), str(other)), ColdStartKD(str(model_dir), str(other))):
        with pytest.raises(ValueError, match=message):
            module.accept_data(None)  # before the engine starts
        module.accept_data = lambda data: None
        with pytest.raises(ValueError, match=message):
            fit(module, [make_trajectories(2)])


def test_dropout_is_off_in_policy_and_critic(model_dir):
    from lightning_modules.models.policy import ValueModel, disable_dropout

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    model[0].attention_dropout = 0.3
    disable_dropout(model)
    assert model[1].p == 0.0 and model[0].attention_dropout == 0.0
    parts = [load_causal_lm(str(model_dir)), ValueModel(str(model_dir))]
    assert all(getattr(m, "attention_dropout", 0.0) == 0.0 for part in parts for m in part.modules())
