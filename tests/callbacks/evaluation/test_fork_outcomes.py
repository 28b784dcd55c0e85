"""Forks at tool results: by hand, and over rollouts of a model that is unsure where it may go wrong."""

import dataclasses
import json
import math

import pytest

from callbacks.evaluation.evaluation import Evaluation
from callbacks.evaluation.fork_outcomes import ForkOutcomes, fork_metrics, rise
from data_modules.datasets.questions import write_tasks
from data_modules.evaluation_data import EvaluationData
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.system import RolloutSystem
from rollout.tools.limits import ToolLimits
from rollout.tools.search import SearchTool
from rollout.trajectory import ActionKind, Task
from tests.callbacks.helpers import Hands, make_trajectory
from tests.rollout.scripted import ToyRetriever
from tests.rollout.scripted_engine import ScriptedEngine


def test_metrics_by_hand():
    # dH 1, 0, 0, 1; p (1 - p) is 1/4, 0, 0, 0: of centred products 1/8, 1/4 * 4 and 3/64 the correlation is 1 / sqrt(3)
    found = fork_metrics([("a", 1.0, 0.5), ("b", 0.0, 1.0), ("c", 0.0, 0.0), ("d", 1.0, 1.0)])
    assert found["forks/open"].mean == 0.25 and found["forks/open"].n == 4
    assert found["forks/correlation"].mean == pytest.approx(1 / math.sqrt(3))
    assert set(fork_metrics([("a", 1.0, 1.0), ("b", 0.0, 0.0)])) == {"forks/open"}, "outcomes are alike"
    assert fork_metrics([]) == {}


def test_dh_is_against_the_trajectorys_own_first_turn():
    trajectory = make_trajectory(kinds=(ActionKind.CALL, ActionKind.ANSWER))
    assert rise(trajectory, 1) is None
    first, second = (dataclasses.replace(t, entropy=e) for t, e in zip(trajectory.turns, (0.5, 2.0), strict=True))
    assert rise(trajectory.replace(turns=(first, second)), 1) == 1.5


@pytest.mark.parametrize("first", [0, 1])
def test_forks_go_on_from_tool_results_alone(trainer_for, tmp_path, model_dir, first):
    """After the result the model is unsure of odd questions, and then right in half of the cases."""
    protocol = SearchR1Protocol(str(model_dir), template="short")

    def number(ids):
        return int(protocol.decode(ids).split("number ")[1].split()[0])

    def read(ids):
        return "birthplace of" in protocol.decode(ids)

    def reply(ids, sampling):
        if not read(ids):
            return "<search> mira </search>"
        right = number(ids) % 2 == 0 or sampling.seed % 2
        return f"<answer> {'Grey Harbor' if right else 'Oldfield'} </answer>"

    def top(ids):
        likely = 4 if read(ids) and number(ids) % 2 else 1
        return {token: -math.log(likely) for token in range(likely)}

    engine = ScriptedEngine(reply, protocol.tokenizer, top=top)
    environment = QuestionAnswering({"search": SearchTool(ToyRetriever())}, ToolLimits(retries=0))
    rollouts = RolloutSystem(engine, protocol, environment, None, entropy_tokens=4)
    asked = [Task(f"q{i}", f"Where was Mira Voss number {i} born?", ("Grey Harbor",), "toy") for i in range(8)]
    write_tasks(tmp_path / "test.parquet", asked)
    data = EvaluationData(rollouts, test_files=[str(tmp_path / "test.parquet")])
    callbacks = [Evaluation(200), ForkOutcomes(forks=12)]
    trainer_for([callbacks[first], callbacks[1 - first]]).test(Hands(), datamodule=data, verbose=False)
    found = json.loads((tmp_path / "stage" / "evaluation.json").read_text())["test"]
    assert (found["forks/open"]["mean"], found["forks/open"]["n"]) == (0.5, 8)
    assert found["forks/correlation"]["mean"] > 0.9
    assert sum(not read(request.token_ids) for request in engine.requests) == 8, "searches are not sampled anew"
