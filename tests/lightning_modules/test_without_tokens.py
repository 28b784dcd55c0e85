"""Trajectories without sampled tokens: no model reads them, and they change no weight, in every algorithm."""

import random

import pytest
import transformers

from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.episode_grpo import EpisodeGRPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.algorithms.sft import SFT
from lightning_modules.algorithms.sod import SOD
from lightning_modules.models.policy import load_causal_lm, named_weights
from rollout.trajectory import Action, ActionKind, StopReason, Turn, split_turns
from tests.lightning_modules.helpers import VOCABULARY, fit, largest_difference, make_group, make_trajectory

LONG = 300


def without_tokens():
    """By kind, a trajectory of a prompt of LONG tokens of which nothing was sampled."""
    rng = random.Random(1)
    empty, observed = (make_trajectory(rng, 0, 0.0, spans, StopReason.LENGTH) for spans in ([], [0, 5]))
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(LONG))
    turn = Turn(0, 0, Action(ActionKind.INVALID), "length", 0, 0, prompt_ids=prompt)
    kinds = {
        "no turn": empty,
        "a turn with its own prompt": empty.replace(turns=(turn,)),
        "an observation only": observed,
        "failed": empty.replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None),
    }
    return {
        kind: t.replace(prompt_ids=prompt, group="long", index=index) for index, (kind, t) in enumerate(kinds.items())
    }


@pytest.fixture
def longest_read(monkeypatch):
    """The lengths of the rows that any model reads."""
    read = []
    forward = transformers.Qwen3Model.forward

    def recorded(self, input_ids=None, **rest):
        read.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **rest)

    monkeypatch.setattr(transformers.Qwen3Model, "forward", recorded)
    return read


ALGORITHMS = {
    "grpo": lambda d: GRPO(d),
    "grpo with one step": lambda d: GRPO(d, reference=d, kl_coef=0.1, num_mini_batches=1),
    "global": lambda d: GRPO(d, advantage="global"),
    "turns": lambda d: EpisodeGRPO(d),
    "ppo": lambda d: PPO(d, reference=d, as_released=True),
    "sod": lambda d: SOD(d, teacher=d),
    "sft": lambda d: SFT(d),
    "kd": lambda d: ColdStartKD(d, d),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_model_reads_a_trajectory_without_tokens(model_dir, longest_read, algorithm):
    good = make_group(random.Random(0), "good", [1, 0, 0, 1])

    def trained(batch):
        module = ALGORITHMS[algorithm](str(model_dir))
        fit(module, [batch])
        return {name: weight.clone() for name, weight in module.policy_weights()}

    alone = trained(good)
    beside = trained([*good, *without_tokens().values()])
    assert largest_difference(alone, beside) == 0.0
    assert longest_read and max(longest_read) < LONG


@pytest.mark.parametrize("algorithm", ["grpo with one step", "turns", "ppo", "kd"])
def test_a_batch_without_any_token_moves_nothing(model_dir, longest_read, algorithm):
    module = ALGORITHMS[algorithm](str(model_dir))
    fit(module, [list(without_tokens().values())])
    start = dict(named_weights(load_causal_lm(str(model_dir))))
    assert largest_difference(start, dict(module.policy_weights())) == 0.0
    assert max(longest_read, default=0) < LONG


def test_what_has_no_token_has_no_rows():
    for kind, trajectory in without_tokens().items():
        assert split_turns(trajectory) == [] and not trajectory.trainable, kind
    (sampled,) = make_group(random.Random(0), "good", [1])
    assert split_turns(sampled) == [sampled] and sampled.trainable
    assert not sampled.replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None).trainable
