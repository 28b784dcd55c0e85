"""Advantages of turns on real episodes: by hand, the same in both ways of training, GRPO where nothing differs."""

import statistics

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_modules.advantage_transforms.distillation import MaskAfterError
from lightning_modules.advantage_transforms.turns import turn_numbers, turns_by_row
from lightning_modules.algorithms.arpo import ARPO
from lightning_modules.algorithms.episode_grpo import EpisodeGRPO, GiGPO
from lightning_modules.algorithms.opsd import OPSD
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.algorithms.sod import SOD
from lightning_modules.batch import LogprobBatch, collate
from rollout.trajectory import split_turns
from tests.lightning_modules.algorithms.episode_helpers import EpisodeData, episodes
from tests.lightning_modules.helpers import fit

WINDOWS = [None, 2]


def rows_of(folder, window, **options):
    whole, _ = episodes(folder, window, **options)
    return whole, [row for t in whole for row in split_turns(t)]


def advantages(module, rows):
    batch = collate(rows)
    return module.outcome_advantages(rows, batch, LogprobBatch(torch.zeros_like(batch.mask))), batch


def by_turn(values, rows, batch):
    """{(group, index, turn): its one advantage}."""
    found = {}
    numbers = turn_numbers(rows, batch)
    for i, t in enumerate(rows):
        for number in numbers[i].unique().tolist():
            if number:
                [value] = set(values[i][numbers[i] == number].tolist())
                found[t.group, t.index, number - 1] = value
    return found


def slow(whole, coefficient, how):
    """Score by turn, compared with all turns of the group, or with its trajectories."""
    result = {}
    for group in {t.group for t in whole}:
        scores = {
            (t.group, t.index, k): t.reward.total - coefficient * (not turn.action.well_formed)
            for t in whole if t.group == group for k, turn in enumerate(t.turns)
        }  # fmt: skip
        if how == "rows":
            mean, std = statistics.mean(scores.values()), statistics.stdev(scores.values())
        else:
            by = [[v for (_, i, _), v in scores.items() if i == t.index] for t in whole if t.group == group]
            mean = statistics.mean(map(statistics.mean, by))
            variance = statistics.mean(statistics.mean((v - mean) ** 2 for v in one) for one in by)
            std = (variance * len(by) / (len(by) - 1)) ** 0.5
        constant = len(set(scores.values())) == 1
        result |= {key: 0.0 if constant else (v - mean) / (std + 1e-6) for key, v in scores.items()}
    return result


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("how", ["rows", "trajectories"])
def test_turns_are_compared_with_those_of_their_group(model_dir, window, how):
    whole, rows = rows_of(model_dir, window)
    flags = [turn.action.well_formed for t in whole for turn in t.turns]
    assert 0 < sum(flags) < len(flags) and len({t.reward.total for t in whole}) == 2, "nothing to tell apart"
    values, batch = advantages(EpisodeGRPO("p", group_statistics=how, invalid_coef=0.3), rows)
    assert by_turn(values, rows, batch) == pytest.approx(slow(whole, 0.3, how), abs=1e-5)
    assert not (values * (1 - batch.mask)).any()


def test_both_ways_of_training_give_a_turn_the_same_advantage(model_dir):
    found = []
    for window in WINDOWS:
        _, rows = rows_of(model_dir, window)
        values, batch = advantages(GiGPO("p", invalid_coef=0.1), rows)
        found.append(by_turn(values, rows, batch))
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_a_turn_knows_its_state_and_what_it_brought(model_dir):
    whole, rows = rows_of(model_dir, 1)
    for turn in turns_by_row(rows):
        episode = turn.episode
        last = turn.number == len(episode.turns) - 1
        assert turn.reward == (episode.reward.total if last else 0.0)
        before = episode.task.question if turn.number == 0 else episode.calls[turn.number - 1].result.text
        assert turn.anchor == before
    assert [t.task.question for t in whole[:1]] == ["You are in room 0. Your task is to: reach room 3 (t0)."]


def test_it_trains_on_both_and_says_how_many_actions_were_invalid(model_dir):
    for window in WINDOWS:
        whole, protocol = episodes(model_dir, window)
        module = EpisodeGRPO(str(model_dir), invalid_coef=0.1, lr=1e-3, num_mini_batches=2)
        trainer = fit(module, EpisodeData(whole, protocol))
        figures = trainer.callback_metrics
        flags = [not turn.action.well_formed for t in whole for turn in t.turns]
        assert float(figures["train/invalid_actions"]) == pytest.approx(sum(flags) / len(flags))
        sampled = sum(sum(t.loss_mask) for t in whole)
        assert float(figures["train/response_tokens"]) == pytest.approx(sampled / len(whole))
        assert float(figures["train/grad_norm"]) > 0


def test_the_last_batch_can_be_read_episode_by_episode(model_dir):
    """Whole, with each turn's advantage at its tokens, whether turns were rows or not."""
    for window in WINDOWS:
        whole, protocol = episodes(model_dir, window)
        module = EpisodeGRPO(str(model_dir), invalid_coef=0.1, num_mini_batches=1)
        fit(module, EpisodeData(whole, protocol))
        rows, batch, _, inputs, _ = module._last
        expected = by_turn(inputs.advantages, rows, batch)
        computed = module.last_token_values
        assert [t for t, _ in computed] == whole
        for t, figures in computed:
            assert next(iter(figures)) == "advantages"
            assert all(len(values) == len(t.response_ids) for values in figures.values())
            for k, turn in enumerate(t.turns):
                shown = figures["advantages"][turn.start : turn.end]
                assert shown == pytest.approx([expected[t.group, t.index, k]] * len(shown))


@pytest.mark.parametrize("budget", [60])
def test_micro_batches_do_not_matter(model_dir, budget):
    whole, protocol = episodes(model_dir, 2)
    module = EpisodeGRPO(
        str(model_dir), invalid_coef=0.1, lr=1e-3, max_tokens_per_micro_batch=budget, num_mini_batches=1
    )
    figures = fit(module, EpisodeData(whole, protocol)).callback_metrics
    reference = EpisodeGRPO(
        str(model_dir), invalid_coef=0.1, lr=1e-3, max_tokens_per_micro_batch=300, num_mini_batches=1
    )
    expected = fit(reference, EpisodeData(whole[::-1], protocol)).callback_metrics
    for name in ("train/grad_norm", "train/loss_policy", "train/entropy"):
        assert float(figures[name]) == pytest.approx(float(expected[name]), rel=1e-4, abs=1e-6), name


def test_divergence_by_turn_is_that_of_the_prompts_that_were_read(model_dir, teacher_dir):
    whole, _ = episodes(model_dir, 1)
    module = EpisodeGRPO(str(model_dir))
    fit(module, EpisodeData(whole, None))
    found = module.turn_divergences(whole, str(teacher_dir), temperature=1.0)
    models = [AutoModelForCausalLM.from_pretrained(teacher_dir), module.policy]
    for t, figures in zip(whole, found, strict=True):
        assert len(figures["divergence"]) == len(t.turns)
        for turn, divergence in zip(t.turns, figures["divergence"], strict=True):
            prompt, said = turn.prompt_ids, t.response_ids[turn.start : turn.end]
            with torch.no_grad():
                logits = [m(torch.tensor([[*prompt, *said]])).logits[0].log_softmax(-1) for m in models]
            places = range(len(prompt) - 1, len(prompt) - 1 + len(said))
            gaps = [abs(logits[0][p, i] - logits[1][p, i]).item() for p, i in zip(places, said, strict=True)]
            assert divergence == pytest.approx(sum(gaps) / len(gaps), abs=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SOD("p", "t"),
        lambda: ARPO("p", "hard"),
        lambda: PPO("p", "r", kl_weights=[MaskAfterError()]),
    ],
)
def test_what_compares_turns_is_refused_before_models_load(model_dir, make):
    make().check_data(EpisodeData(*episodes(model_dir, None)))
    with pytest.raises(ValueError, match="is a row; take window: null"):
        make().check_data(EpisodeData(*episodes(model_dir, 1)))
    with pytest.raises(ValueError, match="PrivilegedPrompts does not render; take window: null"):
        OPSD("p").check_data(EpisodeData(*episodes(model_dir, 1)))


WRONG = [
    ({"group_statistics": "turns"}, "group_statistics"),
    ({"advantage": "centred"}, "compared by std"),
]


@pytest.mark.parametrize("options, message", WRONG)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        EpisodeGRPO("p", **options)
    with pytest.raises(ValueError, match="turn_norm"):
        GiGPO("p", turn_norm="max")
