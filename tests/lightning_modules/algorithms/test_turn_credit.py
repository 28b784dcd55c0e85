"""IGPO, AT2PO and ATOD as advantage transforms: what a token is worth, from the models' own log-probs."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.schedules import Schedule
from lightning_modules.advantage_transforms.attribution import OutcomeScale
from lightning_modules.advantage_transforms.distillation import Distillation, UncertainTurns
from lightning_modules.advantage_transforms.information_gain import InformationGain
from lightning_modules.advantage_transforms.tree_advantages import TreeAdvantages, tree_paths
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.batch import LogprobBatch, collate
from lightning_modules.maths.turn_advantages import information_gain_advantages
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.trajectory import Fork
from tests.lightning_modules.algorithms.test_opsd import Data, groups, train
from tests.lightning_modules.helpers import fit, judged_scores, make_group


@pytest.fixture
def protocol(model_dir):
    return SearchR1Protocol(str(model_dir), template="short")


def per_turn(advantages, batch, rows):
    """The advantage of each turn, the same on all of its tokens; 0 elsewhere."""
    found = []
    for i, t in enumerate(rows):
        start = len(t.prompt_ids)
        spans = [advantages[i, start + turn.start : start + turn.end] for turn in t.turns]
        assert all((span == span[0]).all() for span in spans)
        found.append([float(span[0]) for span in spans])
    assert not advantages[batch.mask == 0].any()
    return found


# ---------------------------------------------------------------------- IGPO
@pytest.mark.parametrize("gain", ["log_prob", "prob"])
def test_a_turn_s_gain_is_that_of_the_gold_answer(model_dir, protocol, gain):
    """Every beginning of a trajectory, then the gold answer: log-probs from the model itself, one text at a time."""
    transform = InformationGain(gain, gamma=0.9, opening="<answer>", closing="</answer>")
    module = GRPO(str(model_dir), advantage_transforms=[transform], lr=1e-3, max_tokens_per_micro_batch=60)
    data = Data(protocol)
    figures = train(module, data)
    rows = groups(protocol)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), protocol.tokenizer
    values = []
    for t in rows:
        gold = t.task.golden_answers[0]
        ids = tokenizer(f"<answer>{gold}</answer>", add_special_tokens=False)["input_ids"]
        before, after = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in ("<answer>", "</answer>"))
        assert ids[: len(before)] == before and ids[-len(after) :] == after, "tags are tokens of their own here"
        own = range(len(before), len(ids) - len(after))
        found = []
        for end in (0, *(turn.observation_end for turn in t.turns[:-1])):
            read = [*t.prompt_ids, *t.response_ids[:end]]
            with torch.no_grad():
                logprobs = model(torch.tensor([[*read, *ids]])).logits[0].log_softmax(-1)
            found.append(sum(logprobs[len(read) + j - 1, ids[j]].item() for j in own) / len(own))
        values.append(found)
    shown = values if gain == "log_prob" else [[float(torch.tensor(v).exp()) for v in row] for row in values]
    gains = [[b - a for a, b in zip(row, row[1:], strict=False)] for row in shown]
    expected = information_gain_advantages(gains, [t.reward.total for t in rows], [t.group for t in rows], 0.9)
    batch = collate(rows)
    module_values = {(t.group, t.index): page["advantages"] for t, page in module.last_token_values}
    for t, by_turn in zip(rows, expected, strict=True):
        page = module_values[t.group, t.index]
        for turn, value in zip(t.turns, by_turn, strict=True):
            assert page[turn.start : turn.end] == pytest.approx([value] * (turn.end - turn.start), abs=2e-3)
    assert figures["train/gold_logprob/turn0"] == pytest.approx(sum(row[0] for row in values) / len(values), abs=1e-4)
    mean = sum(map(sum, gains)) / sum(map(len, gains))
    assert figures["train/information_gain"] == pytest.approx(mean, abs=1e-4) and batch.mask.any()


@pytest.mark.parametrize("pool", ["separate", "joint"])
def test_without_a_gold_answer_the_outcome_alone_counts(model_dir, protocol, pool):
    data = Data(protocol)
    data.rows = [t.replace(task=dataclasses.replace(t.task, golden_answers=())) for t in data.rows]
    module = GRPO(str(model_dir), advantage_transforms=[InformationGain(pool=pool)], lr=1e-3)
    train(module, data)
    for t, page in module.last_token_values:
        found = {round(page["advantages"][turn.start], 4) for turn in t.turns}
        assert len(found) == 1 and (found.pop() > 0) == (t.reward.total == 1)
    data.training_questions = tuple(t.task for t in data.rows)
    with pytest.raises(ValueError, match="no training question has a golden answer"):
        train(GRPO(str(model_dir), advantage_transforms=[InformationGain()]), data)


def test_a_conversation_in_rows_has_no_gains(model_dir):
    for rollouts, message in (
        (SimpleNamespace(protocol=SimpleNamespace(per_turn_prompts=True)), "every turn or conversation has its own"),
        (SimpleNamespace(protocol=None), "InformationGain needs the tokenizer of a rollout system"),
    ):
        with pytest.raises(ValueError, match=message):
            InformationGain().check_data(None, SimpleNamespace(rollouts=rollouts))


# ---------------------------------------------------------------------- AT2PO
def tree():
    """0 and 3 begin at the prompt; 1 goes on after 0's first turn, 2 after 1's second."""
    return make_group(random.Random(0), "g", [1, 0, 0, 1], {1: (0, 1), 2: (1, 2)})


def test_turns_that_trajectories_share_have_one_value(model_dir):
    rows = tree()
    paths, _ = tree_paths(rows, rows)
    assert paths == [
        [("g", 0, 0), ("g", 0, 1), ("g", 0, 2)],
        [("g", 0, 0), ("g", 1, 1), ("g", 1, 2), ("g", 1, 3)],
        [("g", 0, 0), ("g", 1, 1), ("g", 2, 2), ("g", 2, 3), ("g", 2, 4)],
        [("g", 3, 0), ("g", 3, 1), ("g", 3, 2)],
    ]
    batch = collate(rows)
    module = GRPO("p", advantage_transforms=[TreeAdvantages("equal")])
    inputs = module.compute_advantages(rows, batch, LogprobBatch(torch.zeros_like(batch.mask)))
    one = pytest.approx(1, rel=1e-4)
    half, none = pytest.approx(0, abs=1e-6), pytest.approx(-1, rel=1e-4)
    assert per_turn(inputs.advantages, batch, rows) == [
        [half, one, one], [half, *[none] * 3], [half, *[none] * 4], [one, one, one]
    ]  # fmt: skip
    metrics = module.metrics.reduce()
    assert metrics["train/shared_turns"] == pytest.approx(5 / 15)
    order = [2, 0, 3, 1]
    moved = collate([rows[i] for i in order])
    scores = LogprobBatch(torch.zeros_like(moved.mask))
    again = GRPO("p", advantage_transforms=[TreeAdvantages("equal")]).compute_advantages(
        [rows[i] for i in order], moved, scores
    )
    assert torch.equal(again.advantages, inputs.advantages[order])


def test_a_parent_that_failed_still_names_the_shared_turn():
    rows = tree()
    kept = rows[1:]
    module = GRPO("p", advantage_transforms=[TreeAdvantages()])
    module.rolled_out = rows
    batch = collate(kept)
    inputs = module.compute_advantages(kept, batch, LogprobBatch(torch.zeros_like(batch.mask)))
    by_turn = per_turn(inputs.advantages, batch, kept)
    assert by_turn[0][:2] == by_turn[1][:2], "1 and 2 share two turns, one of them sampled by 0"
    assert rows[1].fork == Fork(0, rows[1].fork.at)


# ---------------------------------------------------------------------- ATOD
def test_the_teacher_s_share_falls_while_the_outcome_s_rises(model_dir, teacher_dir):
    """Eq. 8: kappa w (T - S) + rho A, at iteration 1 of 4."""
    rows = make_group(random.Random(0), "a", [1, 0, 0]) + make_group(random.Random(1), "b", [0, 1, 1])
    transforms = [
        OutcomeScale(Schedule(1.0, 2.0, 4)),
        Distillation("t", weights=[UncertainTurns()], coef=Schedule(1.0, 0.1, 4)),
    ]
    module = GRPO("p", advantage_transforms=transforms)
    module._trainer = SimpleNamespace(global_step=1)
    batch = collate(rows)
    generator = torch.Generator().manual_seed(0)
    student, teacher = (-2 * torch.rand(batch.mask.shape, generator=generator) * batch.mask for _ in range(2))
    scores = judged_scores(student, teacher)
    scores = dataclasses.replace(scores, judged=(None, *scores.judged))
    found = module.compute_advantages(rows, batch, scores).advantages
    outcome = GRPO("p").compute_advantages(rows, batch, scores).advantages
    for i, t in enumerate(rows):
        start = len(t.prompt_ids)
        spans = [slice(start + turn.start, start + turn.end) for turn in t.turns]
        d = [(student - teacher)[i, s].abs().mean().item() for s in spans]
        h = [-student[i, s].mean().item() for s in spans]
        d, h = ([(x - min(v)) / (max(v) - min(v)) for x in v] for v in (d, h))
        for s, a, b in zip(spans, d, h, strict=True):
            signal = 0.775 * (1 - (1 - a) * (1 - b)) * (teacher - student)[i, s]
            assert torch.allclose(found[i, s], 1.25 * outcome[i, s] + signal, atol=1e-5)
    metrics = module.metrics.reduce()
    assert metrics["train/outcome_scale"] == 1.25 and metrics["train/opd_coef"] == pytest.approx(0.775)


@pytest.mark.parametrize("transform", [InformationGain, TreeAdvantages])
def test_options_that_would_have_no_effect_are_refused(transform):
    name = transform.__name__
    with pytest.raises(ValueError, match=f"advantage is centred and singleton_advantage zero, but {name} computes"):
        GRPO("p", advantage="centred", advantage_transforms=[transform()])
    with pytest.raises(ValueError, match=f"{name} changes the outcome's advantages, which use_grpo: false takes away"):
        GRPO("p", use_grpo=False, advantage_transforms=[transform(), Distillation("t")])


def test_a_trajectory_beyond_the_model_s_positions_has_no_gains(model_dir, protocol):
    data = Data(protocol)
    module = GRPO(str(model_dir), advantage_transforms=[InformationGain()], lr=1e-3)
    module._trainer = SimpleNamespace(strategy=None, datamodule=data)
    module.build_models()
    transform = module.advantage_transforms[0]
    answers = [transform._answer(protocol.tokenizer, t.task.golden_answers[0])[0] for t in data.rows]
    pairs = zip(data.rows, answers, strict=True)
    lengths = [len(t.prompt_ids) + t.turns[-2].observation_end + len(answer) for t, answer in pairs]
    module.policy.config.max_position_embeddings = max(lengths) - 1
    found = transform.gold_logprobs(module, data.rows, torch.device("cpu"))
    assert [len(values) for values in found] == [3 * (length < max(lengths)) for length in lengths]


def test_a_scale_of_the_outcome_needs_one():
    with pytest.raises(ValueError, match="which use_grpo: false takes away"):
        GRPO("p", use_grpo=False, advantage_transforms=[Distillation("t"), OutcomeScale(2.0)])
    with pytest.raises(ValueError, match="coef is 0, so that rewards have no effect; take use_grpo: false"):
        OutcomeScale(0.0)


def test_all_of_them_train(model_dir, teacher_dir):
    rows = tree()
    for transforms in (
        [TreeAdvantages()],
        [OutcomeScale(0.5), Distillation(str(teacher_dir), weights=[UncertainTurns()])],
    ):
        trainer = fit(GRPO(str(model_dir), advantage_transforms=transforms, ratio_level="turn", lr=1e-3), [rows] * 2)
        assert float(trainer.callback_metrics["train/advantage_abs"]) > 0
