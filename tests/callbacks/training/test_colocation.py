"""``rollouts.sleep_mode: true``: the engine sleeps while the trainer trains, and the other way round."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from callbacks.training.weight_sync import WeightSync
from data_modules.datasets.questions import write_tasks
from data_modules.loading.decoding import Decoding
from data_modules.loading.mixing import OnPolicyShare
from data_modules.mixed_data_module import MixedDataModule
from data_modules.rollout_data_module import RolloutDataModule
from experiments.commands.cli import main
from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.grpo import GRPO
from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.storage import save_trajectories
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from rollout.trajectory import Reward
from tests.callbacks.helpers import make_learner, policy_state, same_weights
from tests.data_modules.toys import make_task
from tests.processes import run_ranks
from tests.rollout.engines.plain_backend import SleepingEngine
from tests.rollout.scripted import ToyRetriever

WORKER = Path(__file__).with_name("offload_worker.py")


class Parity:
    """A reward that differs within groups, now and then."""

    def score(self, trajectory):
        return Reward(float(sum(trajectory.response_ids) % 2), {})


def system(engine, model_dir, **options):
    tools = {"search": SearchTool(ToyRetriever())}
    protocol = SearchR1Protocol(str(model_dir), template="short")
    budgets = {"max_turns": 1, "max_turn_tokens": 8, "final_turn": False}
    return RolloutSystem(engine, protocol, QuestionAnswering(tools), Parity(), **budgets, **options)


def test_the_engine_is_awake_from_push_to_batch_and_the_numbers_are_the_same(trainer_for, model_dir, tmp_path):
    questions = str(tmp_path / "questions.parquet")
    write_tasks(Path(questions), [make_task(i) for i in range(4)])
    ends = []
    for sleep_mode in (False, True):
        log = tmp_path / f"log-{sleep_mode}"
        rollouts = system(SleepingEngine(str(model_dir), log=str(log)), model_dir, sleep_mode=sleep_mode)
        data = RolloutDataModule(
            rollouts, [questions], prompts_per_iteration=2, group_size=2, iterations=2, dynamic_sampling=1, seed=1,
            val_files=[questions], train_sampling=Decoding(temperature=1.0), eval_batch=2,
        )  # fmt: skip
        module = GRPO(policy=str(model_dir), lr=1e-3, num_mini_batches=1)
        torch.manual_seed(0)
        trainer_for([WeightSync()], max_epochs=1, val_check_interval=1).fit(module, datamodule=data)
        generated = rollouts.rollout([make_task(9)], sampling=SamplingParams(8), seed=3)
        ends.append((policy_state(module.policy), [t.response_ids for t in generated]))
        rollouts.sleep()
        rollouts.close()
    (shared, before), (slept, after) = ends
    assert same_weights(shared, slept) and before == after
    calls = [name for name, _ in itertools.groupby((tmp_path / "log-True").read_text().split("\n")[:-1])]
    push = ["wake weights", "load", "wake kv_cache"]
    # Rounds of dynamic sampling, and validations, are among what is generated between two pushes.
    assert calls == ["sleep", *(push + ["generate", "sleep"]) * 2, *push, "generate", "sleep"]
    assert "sleep" not in (tmp_path / "log-False").read_text()


@pytest.mark.slow
def test_a_supervised_stage_wakes_the_engine_for_its_validations_alone(trainer_for, model_dir, tmp_path):
    rollouts = system(SleepingEngine(str(model_dir), log=str(tmp_path / "log")), model_dir, sleep_mode=True)
    module, data = make_learner(model_dir, ["grey harbor"] * 2, rollouts=rollouts)
    trainer_for([WeightSync(during_training=False)], max_epochs=1, val_check_interval=2).fit(module, datamodule=data)
    rollouts.close()
    calls = (tmp_path / "log").read_text().split("\n")[:-1]
    assert calls == ["sleep", *["wake weights", "load", "wake kv_cache", "sleep"] * 2]


@pytest.mark.slow
def test_the_engine_sleeps_where_a_mixed_run_trains_on_saved_batches(trainer_for, model_dir, tmp_path):
    questions, log = str(tmp_path / "questions.parquet"), tmp_path / "log"
    write_tasks(Path(questions), [make_task(i) for i in range(4)])
    rollouts = system(SleepingEngine(str(model_dir), log=str(log)), model_dir, sleep_mode=True)
    rollouts.start()
    asked = rollouts.rollout([make_task(i) for i in range(8)], sampling=SamplingParams(8), seed=3)
    save_trajectories(tmp_path / "saved.parquet", asked)
    rollouts.sleep()
    log.write_text("")
    saved = [str(tmp_path / "saved.parquet")]
    data = MixedDataModule(saved, rollouts, OnPolicyShare(0.0), batch_size=2, val_files=[questions], append_eos=False)
    module = ColdStartKD(str(model_dir), str(model_dir), ce_coef=0.0)
    trainer_for([WeightSync()], max_epochs=1, val_check_interval=2).fit(module, datamodule=data)
    rollouts.close()
    calls = [name for name, _ in itertools.groupby(log.read_text().split("\n")[:-1])]
    assert calls == ["wake weights", "load", "wake kv_cache", "generate", "sleep"] * 2


def test_what_would_end_the_engine_is_refused_before_it_is_asked(model_dir, tmp_path):
    async def run():
        engine = SleepingEngine(str(model_dir), log=str(tmp_path / "log"))
        engine.allow_sleep()
        await engine.start()
        try:
            one = asyncio.create_task(engine.generate([5, 6], SamplingParams(64)))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match=r"told to sleep with 1 requests in flight; expected none"):
                await engine.sleep()
            await one
            said = await engine.generate([5, 6], SamplingParams(8, temperature=0))
            await engine.sleep()
            with pytest.raises(
                RuntimeError, match=r"asleep \(not on the device: weights, kv_cache\); expected .* push"
            ):
                await engine.generate([5, 6], SamplingParams(8))
            await engine.wake_up()
            assert await engine.generate([5, 6], SamplingParams(8, temperature=0)) == said
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--data.max_off_policy_iterations=1",
            "data.max_off_policy_iterations is 1: the engine generates while the trainer trains",
        ),
        ("--data.rollouts.in_flight_updates=true", "in_flight_updates is true: the engine generates while"),
    ],
)
def test_the_dry_run_refuses_them(option, message, capsys):
    words = ["dry-run", "dgpo_tiny", "--data.rollouts.sleep_mode=true"]
    assert main([*words, option]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_optimiser_states_move_to_the_host_and_back(model_dir):
    """In a process of its own, on a pretended device that refuses a step with states of the host."""
    run_ranks(WORKER, model_dir)
