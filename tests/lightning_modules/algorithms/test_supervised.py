"""SFT and cold-start distillation as trained by Lightning."""

import math

import pytest
import torch

from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.sft import SFT
from lightning_modules.models.policy import load_causal_lm, named_weights
from rollout.trajectory import StopReason
from tests.lightning_modules.helpers import fit, largest_difference, make_trajectories


def train(module, batches=None, **options):
    trainer = fit(module, batches or [make_trajectories(6)], **options)
    weights = {k: v.clone() for k, v in module.policy_weights()}
    return weights, {k: float(v) for k, v in trainer.callback_metrics.items()}, trainer


def plain_figures(model_dir, teacher_dir, rows):
    """CE, forward KL and accuracy over all sampled tokens, one trajectory at a time, from the models' own logits."""
    student, teacher = (load_causal_lm(str(d)) for d in (model_dir, teacher_dir))
    ce, kl, right = [], [], []
    for t in rows:
        ids = torch.tensor([[*t.prompt_ids, *t.response_ids]])
        with torch.no_grad():
            log_p, log_q = (m(input_ids=ids).logits[0].log_softmax(-1) for m in (student, teacher))
        for offset, on in enumerate(t.loss_mask):
            if on:
                at = len(t.prompt_ids) + offset
                ce.append(-log_p[at - 1, ids[0, at]])
                kl.append((log_q[at - 1].exp() * (log_q[at - 1] - log_p[at - 1])).sum())
                right.append(log_p[at - 1].argmax() == ids[0, at])
    return [float(torch.stack(x).float().mean()) for x in (ce, kl, right)]


def test_logged_figures_against_a_plain_loop(model_dir, teacher_dir):
    rows = make_trajectories(6)
    ce, kl, right = plain_figures(model_dir, teacher_dir, rows)
    _, figures, trainer = train(ColdStartKD(str(model_dir), str(teacher_dir), ce_coef=0.5, kl_coef=2.0), [rows])
    assert figures["train/ce"] == pytest.approx(ce, rel=1e-4)
    assert figures["train/kl"] == pytest.approx(kl, rel=1e-3)
    assert figures["train/token_accuracy"] == pytest.approx(right)
    assert figures["train/loss"] == pytest.approx(0.5 * ce + 2.0 * kl, rel=1e-4)
    assert figures["train/tokens"] == sum(sum(t.loss_mask) for t in rows)
    assert trainer.global_step == 1


@pytest.mark.parametrize("algorithm", ["sft", "kd"])
def test_micro_batches_chunks_and_order_change_nothing(model_dir, teacher_dir, algorithm):
    def make(**options):  # float64: Adam turns float32's rounding of a gradient near 0 into a part of a whole step
        common = {"schedule": "constant", "lr": 1e-3, "max_grad_norm": 0.1, "dtype": "float64", **options}
        if algorithm == "sft":
            return SFT(str(model_dir), **common)
        return ColdStartKD(str(model_dir), str(teacher_dir), teacher_dtype="float64", **common)

    rows = make_trajectories(6)
    whole, figures, _ = train(make(), [rows, rows])
    split, split_figures, _ = train(make(max_tokens_per_micro_batch=1, logits_chunk=3), [rows[::-1], rows])
    assert largest_difference(whole, split) < 5e-6, "0.01 % more weight for one micro-batch would be 3e-4"
    assert figures["train/loss"] == pytest.approx(split_figures["train/loss"], rel=1e-4)


def test_sft_is_kd_without_divergence(model_dir, teacher_dir):
    sft, *_ = train(SFT(str(model_dir)))
    kd, *_ = train(ColdStartKD(str(model_dir), str(teacher_dir), kl_coef=0.0))
    assert largest_difference(sft, kd) < 1e-6


def test_a_batch_of_failures_moves_nothing(model_dir):
    rows = [t.replace(stop_reason=StopReason.INFRASTRUCTURE) for t in make_trajectories(2)]
    weights, *_ = train(SFT(str(model_dir), weight_decay=0.0), [rows])
    start = dict(named_weights(load_causal_lm(str(model_dir))))
    assert largest_difference(weights, start) == 0.0


def test_taid_by_hand(model_dir, teacher_dir):
    options = {"ce_coef": 0.0, "schedule": "constant", "lr": 1e-3, "taid_t_start": 0.2, "taid_alpha": 0.9}
    module = ColdStartKD(str(model_dir), str(teacher_dir), divergence="taid", taid_beta=0.5, **options)
    rows, seen = make_trajectories(4), []
    module.log_dict = lambda figures, **_: seen.append(figures)
    fit(module, [rows] * 4)
    loss = [figures["train/divergence"] for figures in seen]
    assert loss[0] == pytest.approx(plain_taid(model_dir, teacher_dir, rows, t=0.2), rel=1e-4)
    assert [figures["train/loss"] for figures in seen] == pytest.approx(loss)
    t, momentum, expected = 0.2, 0.0, [0.2, 0.2]  # the first loss is only remembered
    for step in (1, 2):
        momentum = 0.5 * momentum + 0.5 * (loss[step - 1] - loss[step]) / loss[step - 1]
        t = max(0.2 + 0.8 * step / 4, t + 0.9 / (1 + math.exp(-momentum)) * (1 - t))
        expected.append(t)
    assert [figures["train/taid_t"] for figures in seen] == pytest.approx(expected)
    assert expected[2] > 0.5  # above the linear floor: the adaptive part has its say


def plain_taid(model_dir, teacher_dir, rows, t):
    """The loss over all sampled tokens, one trajectory at a time."""
    student, teacher = (load_causal_lm(str(d)) for d in (model_dir, teacher_dir))
    losses = []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        with torch.no_grad():
            z_s, z_t = (m(input_ids=ids).logits[0] for m in (student, teacher))
        token_losses = -(((1 - t) * z_s + t * z_t).softmax(-1) * z_s.log_softmax(-1)).sum(-1)
        at = [len(row.prompt_ids) + offset - 1 for offset, on in enumerate(row.loss_mask) if on]
        losses += token_losses[at].tolist()
    return sum(losses) / len(losses)


def test_only_matrices_decay(model_dir):
    module = SFT(str(model_dir), schedule="constant", lr=0.1, weight_decay=0.5)
    module.token_losses = lambda batch: {"loss": sum(p.sum() for p in module.policy.parameters())[None] * 0}
    weights, *_ = train(module)
    start = dict(named_weights(load_causal_lm(str(model_dir))))
    for name, before in start.items():
        assert torch.allclose(weights[name], before * (0.95 if before.dim() >= 2 else 1.0)), name
    assert {w.dim() for w in start.values()} == {1, 2}


def test_cosine_goes_down_to_zero_over_the_run(model_dir):
    module, seen = SFT(str(model_dir), lr=1.0, warmup_steps=2), []
    module.log_dict = lambda figures, **_: seen.append(figures["train/lr"])
    module.token_losses = lambda batch: {"loss": next(module.policy.parameters()).sum()[None] * 0}
    fit(module, [make_trajectories(1)] * 6)
    assert seen == pytest.approx([0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464], abs=1e-4)


class Rows(torch.utils.data.IterableDataset):
    """All batches of an epoch, of which the first ``done`` were trained before the interruption."""

    def __init__(self, batches, done=0):
        self.batches, self.done = batches, done

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches[self.done :])


@pytest.mark.parametrize("divergence", ["forward_kl", "taid"])
def test_checkpoint_has_no_teacher_and_resumes_exactly(model_dir, teacher_dir, tmp_path, divergence):
    rows = [make_trajectories(4, seed=s) for s in range(4)]

    def make():  # alpha: so large that t is above its linear floor, which needs no state
        taid = {"taid_alpha": 0.9} if divergence == "taid" else {}
        return ColdStartKD(str(model_dir), str(teacher_dir), warmup_steps=2, divergence=divergence, **taid)

    whole, *_ = train(make(), rows)
    first, path = make(), tmp_path / "half.ckpt"

    def stop_half_way(outputs, batch, batch_idx):
        if batch_idx == 1:
            first.trainer.save_checkpoint(path)
            first.trainer.should_stop = True

    first.on_train_batch_end = stop_half_way
    fit(first, rows)
    saved = torch.load(path, weights_only=False)
    assert saved["global_step"] == 2
    assert not any(k.startswith("teacher") for k in saved["state_dict"])
    second = make()
    trainer = fit(second, Rows(rows, done=2), max_steps=4, ckpt_path=path)
    assert trainer.global_step == 4
    assert largest_difference(whole, dict(second.policy_weights())) == 0.0


def test_a_checkpoint_of_another_model_is_refused(model_dir, teacher_dir, tmp_path):
    trainer = fit(SFT(str(teacher_dir)), [make_trajectories(2)])
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="not from this model: 0 missing, 0 unknown, .* of another shape"):
        fit(SFT(str(model_dir)), [make_trajectories(2)], ckpt_path=tmp_path / "other.ckpt")
